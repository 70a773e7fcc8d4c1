"""AnycostFL's choice on the device: width, compression and frequency, within time and energy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from anyfleet.arrays import Floats, join
from anyfleet.core.check_in import Choices, Offer, Own
from anyfleet.core.messages import UNCUT, Conditions, Numbers
from anyfleet.core.slots import Asked, Choose
from anyfleet.core.time_and_energy import IN_TIME, crossing_seconds
from anyfleet.errors import refuse
from anyfleet.formulas.cohorts import Budgets, Sending, best_sending
from anyfleet.formulas.theory import local_gain
from anyfleet.papers import ANYCOST, Paper
from anyfleet.parts.choose.in_time import NEEDS_MENU


@dataclass(frozen=True)
class MostGain(Choose):
    """The entry of the menu that teaches most within a device's time and energy (METHODS §3).

    Learning gain is alpha^4 × rate. For each entry, the best rate of the upload, from `least` to
    `most`, and the slowest frequency that is in time with it follow from what the entry really
    costs: its cycles, and all that crosses the link both ways. A codec that has one rate only is
    taken with that, and one that cannot go so low with its lowest. If no entry fits, the device
    declines. A result that waits to be fetched (`TwoPhase`) is sent in time of its own.

    `seconds` for an order; `joules`, unless a device names fewer itself (`Group.budget`) or has
    fewer left. Hardware that cannot set its frequency has a slowest that is its fastest.
    """

    seconds: float = 10.0
    joules: float = np.inf
    least: float = 1e-3
    most: float = 1 / 15

    needs: ClassVar[Mapping[str, str]] = NEEDS_MENU
    decides: ClassVar[frozenset[str]] = frozenset({"rate", "frequency"})
    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("seconds", "joules"):
            if not getattr(self, name) > 0:
                yield f"MostGain.{name} must be positive, got {getattr(self, name)}."
        if not 0 <= self.least <= self.most <= 1 or not self.most > 0:
            yield (
                "MostGain.least and .most are rates, 0 <= least <= most <= 1 and most above 0; "
                f"got {self.least} and {self.most}."
            )

    def __call__(self, menu: Sequence[Offer], own: Own, numbers: Numbers) -> Choices:
        return self.together([Asked(menu, own, numbers)])

    def together(self, asked: Sequence[Asked]) -> Choices:
        sizes = [len(each.menu) for each in asked]
        offers = [offer for each in asked for offer in each.menu]
        known = join([each.own.conditions for each in asked])
        rates, frequencies = self._sending(offers, known.take(np.repeat(range(len(asked)), sizes)))
        gains = local_gain(_column([offer.alpha for offer in offers]), rates)
        useful, ends = np.nan_to_num(gains, nan=-1.0), np.cumsum(sizes)
        entries = np.array([part.argmax() for part in np.split(useful, ends[:-1])])
        best = ends - sizes + entries
        numbers, fits = join([each.numbers for each in asked]), useful[best] >= 0
        adapts = fits & np.array([offers[row].traffic.adapts for row in best])
        planned = replace(
            numbers,
            rate=np.where(adapts, rates[best], numbers.rate),
            frequency=np.where(fits, frequencies[best], numbers.frequency),
        )
        pairs = zip(fits, self._joules(known), strict=True)
        reasons = tuple("" if fit else self._reason(joules) for fit, joules in pairs)
        return Choices(entries, planned, gains[best], reasons)

    def _reason(self, joules: float) -> str:
        energy = f" and {joules:.3g} J" if np.isfinite(joules) else ""
        return f"over budget: no size fits {self.seconds:g} s{energy}"

    def _sending(self, offers: Sequence[Offer], known: Conditions) -> Sending:
        """The best rate and frequency of each offer, made to a device that knows this of itself."""
        adapts = np.array([offer.traffic.adapts for offer in offers])
        own = _column([offer.traffic.rate for offer in offers])
        low, high = (_column([getattr(o.traffic, n) for o in offers]) for n in ("least", "most"))
        # What a codec can do may lie beside what is wanted: then it is what it can do.
        least, most = (
            np.where(adapts, np.clip(bound, low, np.maximum(low, high)), own)
            for bound in (self.least, min(self.most, UNCUT))
        )
        return best_sending(self._budgets(offers, known), least, most)

    def _budgets(self, offers: Sequence[Offer], known: Conditions) -> Budgets:
        """What is left for training and for the update, offer by offer, and what they take."""
        down = crossing_seconds(_column([offer.down for offer in offers]), known.down)
        besides = _column([offer.traffic.aside + offer.answer for offer in offers])
        aside = crossing_seconds(besides, known.up)
        with np.errstate(invalid="ignore"):  # crossing a link that carries nothing takes for ever
            energy = IN_TIME * self._joules(known) - known.receive * down - known.power * aside
        return Budgets(
            energy=energy,
            seconds=IN_TIME * self.seconds - down - aside,
            power=known.power,
            rate=known.up,
            bits=_column([offer.traffic.update for offer in offers]),
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
