"""Who was labelled is asked less often (FedPNS)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Devices, Kind
from anyfleet.core.signals import Diagnostic, Signal
from anyfleet.core.slots import Select
from anyfleet.core.view import View
from anyfleet.errors import refuse
from anyfleet.formulas.contribution import fedpns_lowered, selection_entropy, weighted_draw
from anyfleet.papers import FEDPNS, THESIS, Paper
from anyfleet.parts.select.uniform import drawn, more_than_all

if TYPE_CHECKING:
    from anyfleet.core.updates import Updates

_AHEAD = 8  # how many times more are drawn than wanted, since not all are free


class Chances(NamedTuple):
    """What is known of every device of the fleet."""

    probability: Floats
    selected: Ints  # how often it was asked
    labelled: Ints  # in how many of them it was labelled


@dataclass(frozen=True)
class Learned(Select):
    """`count` devices, drawn without replacement by learned probabilities (specification §1.19).

    All start equal, so that the first cohort is that of `Uniform(count)`. A device that the
    aggregator labels loses the share `min((x + beta) ** alpha, 1)` of its probability, x being how
    often it was labelled when it was asked; all others gain equally. When fewer than `count` have
    a chance, all of those and a uniform draw of the rest. Whoever was asked counts as selected,
    also when its update never came.
    """

    count: int
    alpha: float = 2.0
    beta: float = 0.7

    papers: ClassVar[tuple[Paper, ...]] = (FEDPNS, THESIS)
    requires: ClassVar[frozenset[Signal]] = frozenset(
        {Diagnostic("labelled", provider="an aggregator that labels devices: aggregate=Subset()")}
    )

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.count < 1:
            yield f"Learned.count must be at least 1, got {self.count}."
        if not self.alpha > 0:
            yield f"Learned.alpha must be positive, got {self.alpha}."
        if not 0 <= self.beta <= 1:
            yield f"Learned.beta must lie in [0, 1], got {self.beta}."

    def init(self, view: View) -> Chances:
        size = len(view.devices)
        never = np.zeros(size, dtype=np.int64)
        return Chances(np.full(size, 1 / size), never, never)

    def __call__(self, view: View, state: Chances, key: Tensor) -> Ints:
        wanted = self.count if view.most_devices is None else min(self.count, view.most_devices)
        if np.ptp(state.probability) == 0:
            return drawn(view, wanted, key)
        luck = _luck(key, len(view.devices))
        reach = _AHEAD * wanted
        while True:
            # The first free ones in the order of a draw of all: few have to be looked at.
            order = weighted_draw(state.probability, reach, luck)
            found = order[view.free(order)][:wanted]
            if len(found) == wanted or reach >= len(luck):
                chosen: Ints = np.sort(found)
                return chosen
            reach *= _AHEAD

    def excess(self, devices: Devices) -> str:
        return more_than_all("Learned.count", self.count, len(devices))

    def learn(
        self, state: Chances, updates: "Updates | None", diagnostics: Mapping[str, Any], view: View
    ) -> Chances:
        labels = np.array(diagnostics.get("labelled", ()), dtype=np.int64)
        selected, labelled = state.selected.copy(), state.labelled.copy()
        lost = [
            f.device for f in view.of_this_round(view.failed) if f.kind in (Kind.TRAIN, Kind.HOLD)
        ]
        arrived = [] if updates is None else updates.device.tolist()
        np.add.at(selected, np.array([*arrived, *lost], dtype=np.int64), 1)
        np.add.at(labelled, labels, 1)
        rates = {"alpha": self.alpha, "beta": self.beta}
        probability = fedpns_lowered(state.probability, labels, labelled, selected, **rates)
        return Chances(probability, selected, labelled)

    def diagnostics(self, state: Chances) -> Mapping[str, Any]:
        """The entropy of the probabilities in nats, and how they are spread."""
        return {
            "selection_entropy": selection_entropy(state.probability),
            "selection_highest": float(state.probability.max()),
            "selection_impossible": int((state.probability == 0).sum()),
        }


def _luck(key: Tensor, size: int) -> Floats:
    """A number in [0, 1) for each device; in a small fleet their order is that of `Uniform`."""
    # `rng.draws` sorts signed numbers; so the sign counts here, too.
    luck: Floats = ((rng.bits(key, size) >> 11) + (1 << 52)).numpy() * 2.0**-53
    return luck
