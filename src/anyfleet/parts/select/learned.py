"""Selection by learned probabilities: devices that were labelled are asked less often (FedPNS)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Devices
from anyfleet.core.signals import Diagnostic, Signal
from anyfleet.core.slots import Select
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.errors import refuse
from anyfleet.formulas.contribution import fedpns_lowered, selection_entropy, weighted_draw
from anyfleet.papers import FEDPNS, THESIS, Paper
from anyfleet.parts.select.uniform import drawn, more_than_all, wanted

_AHEAD = 8  # times as many devices are drawn as are wanted, since not all are free


class Chances(NamedTuple):
    """The state of `Learned`: arrays with one entry for each device of the fleet."""

    probability: Floats  # of being drawn; they add up to 1
    selected: Ints  # how often the device was asked
    labelled: Ints  # how often it was labelled


@dataclass(frozen=True)
class Learned(Select):
    """`count` devices, drawn without replacement by learned probabilities (specification §1.19).

    All probabilities start equal, so that the first cohort is that of `Uniform(count)`. A device
    that the aggregator labels loses the share `min((x + beta) ** alpha, 1)` of its probability,
    where x is the fraction of its orders after which it was labelled; all others gain equally.
    When fewer than `count` devices have a probability above 0, all of those are asked, and a
    uniform draw of the rest. A device that was asked counts as selected even if its update never
    arrived.
    """

    count: int  # devices that are asked in each round
    alpha: float = 2.0  # exponent: lower punishes more
    beta: float = 0.7  # added to the fraction: higher punishes more

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
        count, state = wanted(view, self.count), _grown(state, len(view.devices))
        if np.ptp(state.probability) == 0:
            return drawn(view, count, key)
        luck = _luck(key, len(view.devices))
        reach = _AHEAD * count
        while True:
            # The first free ones in the order of a draw of all: few have to be looked at.
            order = weighted_draw(state.probability, reach, luck)
            found = order[view.free(order)][:count]
            if len(found) == count or reach >= len(luck):
                return np.sort(found)
            reach *= _AHEAD

    def excess(self, devices: Devices) -> str:
        return more_than_all("Learned.count", self.count, len(devices))

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: Chances
    ) -> Chances:
        state = _grown(state, len(view.devices))
        labels = np.array(diagnostics.get("labelled", ()), dtype=np.int64)
        selected, labelled = state.selected.copy(), state.labelled.copy()
        failed = view.failed.of_round(view.round_index).training.device
        arrived = failed[:0] if updates is None else updates.device
        np.add.at(selected, np.concatenate([arrived, failed]), 1)
        np.add.at(labelled, labels, 1)
        probability = fedpns_lowered(
            state.probability, labels, labelled, selected, alpha=self.alpha, beta=self.beta
        )
        return Chances(probability, selected, labelled)

    def diagnostics(self, state: Chances) -> Mapping[str, Any]:
        """Return the entropy of the probabilities in nats, the highest, and how many are 0."""
        return {
            "selection_entropy": selection_entropy(state.probability),
            "selection_highest": float(state.probability.max()),
            "selection_impossible": int((state.probability == 0).sum()),
        }


def _grown(state: Chances, size: int) -> Chances:
    """Return the chances in a fleet that has grown, of which new devices have an equal share."""
    before = len(state.probability)
    if before == size:
        return state
    never = np.zeros(size - before, dtype=np.int64)
    equal = np.full(size, 1 / size)
    # What all had in common stays the same number for all, without rounding.
    old = equal[:before] if np.ptp(state.probability) == 0 else state.probability * (before / size)
    return Chances(
        np.concatenate([old, equal[before:]]),
        np.concatenate([state.selected, never]),
        np.concatenate([state.labelled, never]),
    )


def _luck(key: Tensor, size: int) -> Floats:
    """Return a number in [0, 1) for each device; a small fleet has the order of `Uniform`."""
    # `rng.draws` sorts signed numbers; so the sign counts here, too.
    luck: Floats = ((rng.bits(key, size) >> 11) + (1 << 52)).numpy() * 2.0**-53
    return luck
