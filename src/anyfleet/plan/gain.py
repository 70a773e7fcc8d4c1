"""AnycostFL's choice on the device: width, compression and frequency, within time and energy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from anyfleet.columns import Floats, join
from anyfleet.errors import refuse
from anyfleet.formulas.cohorts import Budgets, best_sending
from anyfleet.formulas.theory import local_gain
from anyfleet.method import Choose
from anyfleet.papers import ANYCOST, Paper
from anyfleet.plan.choices import NEEDS_MENU
from anyfleet.timing import crossing_seconds
from anyfleet.types import Choices, Numbers, Offer, Own


@dataclass(frozen=True)
class MostGain(Choose):
    """The entry of the menu that teaches most within a device's time and energy (METHODS §3).

    Learning gain is alpha^4 × rate. For each entry, the best rate of the upload, from `least` to
    `most`, and the slowest frequency that is in time with it follow from what the entry really
    costs: its cycles, and all that crosses the link both ways. A codec that has one rate only is
    taken with that. If no entry fits, the device declines.

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
        budgets = self._budgets(menu, own)
        fixed = np.array([np.nan if o.traffic.adapts else o.traffic.rate for o in menu])
        least, most = (np.where(np.isnan(fixed), b, fixed) for b in (self.least, self.most))
        rates, frequencies = best_sending(budgets, least, most)
        gains = local_gain(np.array([offer.alpha for offer in menu]), rates)
        if np.isnan(gains).all():
            return self._declined(len(menu) - 1, own, numbers)
        best = int(np.nanargmax(gains))
        planned = replace(
            numbers,
            rate=rates[[best]] if menu[best].traffic.adapts else numbers.rate,
            frequency=frequencies[[best]],
        )
        return Choices(np.array([best]), planned, gains[[best]], ("",))

    def _budgets(self, menu: Sequence[Offer], own: Own) -> Budgets:
        """What is left for training and for the update, entry by entry, and what they take."""
        known = own.conditions
        down = crossing_seconds(_column([offer.down for offer in menu]), known.down)
        aside = crossing_seconds(
            _column([offer.traffic.aside + offer.answer for offer in menu]), known.up
        )
        with np.errstate(invalid="ignore"):  # crossing a link that carries nothing takes for ever
            energy = self._joules(own) - known.receive * down - known.power * aside
        return Budgets(
            energy=energy,
            seconds=self.seconds - down - aside,
            power=known.power,
            rate=known.up,
            bits=_column([offer.traffic.update for offer in menu]),
            # Other work makes cycles take longer, and no more joules.
            epsilon=known.coefficient / known.load,
            cycles=join([offer.demand.effort for offer in menu]).cycles(known) * known.load,
            slowest=known.slowest,
            fastest=known.fastest,
        )

    def _joules(self, own: Own) -> float:
        known = own.conditions
        return min(self.joules, float(known.budget[0]), float(known.battery[0]))

    def _declined(self, entry: int, own: Own, numbers: Numbers) -> Choices:
        reason = f"over budget: no size fits {self.seconds:g} s and {self._joules(own):.3g} J"
        return Choices(np.array([entry]), numbers, np.array([np.nan]), (reason,))


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
