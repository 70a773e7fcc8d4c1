"""AnycostFL's choice on the device: width, compression and frequency, within time and energy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from anyfleet.arrays import Floats, join
from anyfleet.core.check_in import Choices, ChoosingDevice, MenuEntry
from anyfleet.core.messages import Conditions, Hyperparameters
from anyfleet.core.slots import CheckIn, Choose
from anyfleet.core.time_and_energy import IN_TIME, transfer_seconds
from anyfleet.errors import refuse
from anyfleet.formulas.anycost import (
    AnycostBudgets,
    AnycostSending,
    anycost_best_sending,
    anycost_gain,
)
from anyfleet.papers import ANYCOST, Paper
from anyfleet.parts.choose.in_time import NEEDS_MENU


@dataclass(frozen=True)
class MostGain(Choose):
    """The entry of the menu that teaches most within a device's time and energy (specification §3).

    Learning gain is alpha^4 × rate. For each entry, the best rate of the upload, from `least` to
    `most`, and the slowest frequency that is in time with it follow from what the entry really
    costs: its cycles, and all that crosses the link both ways. A codec that has one rate only is
    taken with that, and one that cannot go so low with its lowest. If no entry fits, the device
    declines. A result that waits to be fetched (`HoldAndFetch`) is sent in time of its own.

    `seconds` for an order; `joules`, unless a device names fewer itself (`Group.budget`) or has
    fewer left. Hardware that cannot set its frequency has a slowest that is its fastest.
    """

    seconds: float = 10.0
    joules: float = np.inf
    least_fraction: float = 1e-3
    most_fraction: float = 1 / 15

    requires: ClassVar[Mapping[str, str]] = NEEDS_MENU
    decides: ClassVar[frozenset[str]] = frozenset({"sent_fraction", "frequency"})
    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("seconds", "joules"):
            if not getattr(self, name) > 0:
                yield f"MostGain.{name} must be positive, got {getattr(self, name)}."
        if not 0 <= self.least_fraction <= self.most_fraction <= 1 or not self.most_fraction > 0:
            yield (
                "MostGain.least_fraction and .most_fraction must satisfy 0 <= least <= most <= 1 and "
                "most > 0; "
                f"got {self.least_fraction} and {self.most_fraction}."
            )

    def __call__(
        self, menu: Sequence[MenuEntry], device: ChoosingDevice, hyperparameters: Hyperparameters
    ) -> Choices:
        return self.together([CheckIn(menu, device, hyperparameters)])

    def together(self, check_ins: Sequence[CheckIn]) -> Choices:
        sizes = [len(each.menu) for each in check_ins]
        offers = [offer for each in check_ins for offer in each.menu]
        known = join([each.device.conditions for each in check_ins])
        rates, frequencies = self._sending(
            offers, known.take(np.repeat(range(len(check_ins)), sizes))
        )
        gains = anycost_gain(_column([offer.alpha for offer in offers]), rates)
        useful, ends = np.nan_to_num(gains, nan=-1.0), np.cumsum(sizes)
        entries = np.array([part.argmax() for part in np.split(useful, ends[:-1])])
        best = ends - sizes + entries
        numbers, fits = join([each.hyperparameters for each in check_ins]), useful[best] >= 0
        adapts = fits & np.array([offers[row].bits.follows for row in best])
        planned = replace(
            numbers,
            sent_fraction=np.where(adapts, rates[best], numbers.sent_fraction),
            frequency=np.where(fits, frequencies[best], numbers.frequency),
        )
        pairs = zip(fits, self._joules(known), strict=True)
        reasons = tuple("" if fit else self._reason(joules) for fit, joules in pairs)
        return Choices(entries, planned, gains[best], reasons)

    def _reason(self, joules: float) -> str:
        energy = f" and {joules:.3g} J" if np.isfinite(joules) else ""
        return f"over budget: no size fits {self.seconds:g} s{energy}"

    def _sending(self, offers: Sequence[MenuEntry], known: Conditions) -> AnycostSending:
        """The best rate and frequency of each offer, made to a device that knows this of itself."""
        adapts = np.array([offer.bits.follows for offer in offers])
        own = _column([offer.bits.sent_fraction for offer in offers])
        low, high = (
            _column([getattr(o.bits, n) for o in offers])
            for n in ("least_fraction", "most_fraction")
        )
        # What a codec can do may lie beside what is wanted: then it is what it can do.
        least, most = (
            np.where(adapts, np.clip(bound, low, np.maximum(low, high)), own)
            for bound in (self.least_fraction, self.most_fraction)
        )
        return anycost_best_sending(self._budgets(offers, known), least, most)

    def _budgets(self, offers: Sequence[MenuEntry], known: Conditions) -> AnycostBudgets:
        """What is left for training and for the update, offer by offer, and what they take."""
        down = transfer_seconds(_column([offer.down for offer in offers]), known.bit_rate_down)
        besides = _column([offer.bits.aside + offer.choice_bits for offer in offers])
        aside = transfer_seconds(besides, known.bit_rate_up)
        with np.errstate(invalid="ignore"):  # crossing a link that carries nothing takes for ever
            energy = (
                IN_TIME * self._joules(known)
                - known.receive_power * down
                - known.send_power * aside
            )
        return AnycostBudgets(
            energy=energy,
            seconds=IN_TIME * self.seconds - down - aside,
            power=known.send_power,
            bit_rate=known.bit_rate_up,
            bits=_column([offer.bits.update for offer in offers]),
            # Other work makes cycles take longer, and no more joules.
            epsilon=known.coefficient / known.load,
            cycles=join([offer.demand.effort for offer in offers]).cycles(known) * known.load,
            slowest=known.slowest,
            fastest=known.fastest,
        )

    def _joules(self, known: Conditions) -> Floats:
        """What devices may spend: as asked of them, as they are willing to, as they have."""
        joules: Floats = np.minimum(np.minimum(self.joules, known.budget), known.battery)
        return joules


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
