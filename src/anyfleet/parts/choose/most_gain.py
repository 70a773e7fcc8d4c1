"""AnycostFL's choice on the device: width, compression and frequency, within time and energy."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.core.check_in import CheckIns, Choices
from anyfleet.core.messages import Conditions
from anyfleet.core.signals import Frequency, Menu, SentFraction, Signal
from anyfleet.core.slots import Choose
from anyfleet.core.time_and_energy import IN_TIME, transfer_joules, transfer_seconds
from anyfleet.errors import refuse
from anyfleet.formulas.anycost import (
    AnycostBudgets,
    AnycostSending,
    anycost_alpha,
    anycost_best_sending,
    anycost_gain,
)
from anyfleet.papers import ANYCOST, Paper


@dataclass(frozen=True)
class MostGain(Choose):
    """The entry of the menu that teaches most within a device's time and energy.

    The gain of an entry is alpha^4 × sent fraction (specification §3). For each entry, the best
    sent fraction of the upload, from `least_fraction` to `most_fraction`, and the slowest frequency
    that is in time with it follow from what the entry really costs: its cycles, and all that
    crosses the link both ways. A codec that does not follow sent fractions keeps its own sent
    fraction. A codec that cannot go as low as the best one uses its lowest. If no entry fits, the
    device declines. A result that waits to be fetched (`HoldAndFetch`) is sent in time of its own.

    `seconds` and `joules` limit an order. A device that is willing to spend less (`Group.budget`),
    or has less in its battery, spends less. Hardware that cannot set its frequency has a slowest
    that is its fastest.
    """

    seconds: float = 10.0
    joules: float = np.inf
    least_fraction: float = 1e-3
    most_fraction: float = 1 / 15

    requires: ClassVar[frozenset[Signal]] = frozenset({Menu()})
    decides: ClassVar[frozenset[Signal]] = frozenset({SentFraction(), Frequency()})
    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("seconds", "joules"):
            if not getattr(self, name) > 0:
                yield f"MostGain.{name} must be positive, got {getattr(self, name)}."
        if not 0 <= self.least_fraction <= self.most_fraction <= 1 or not self.most_fraction > 0:
            yield (
                "MostGain.least_fraction and .most_fraction must satisfy 0 <= least <= most <= 1 "
                f"and most > 0; got {self.least_fraction} and {self.most_fraction}."
            )

    def __call__(self, check_ins: CheckIns) -> Choices:
        sent_fractions, frequencies = self._sending(check_ins)
        alpha = check_ins.pair_array(lambda e: anycost_alpha(e.channel_share, e.trained_share))
        gains = check_ins.placed(anycost_gain(alpha, sent_fractions), np.nan)
        useful = np.where(check_ins.offered, np.nan_to_num(gains, nan=-1.0), -2.0)
        entry, own = useful.argmax(axis=0), check_ins.hyperparameters
        best = entry, np.arange(len(check_ins))
        fits = useful[best] >= 0
        follows = fits & (check_ins.array(attrgetter("bits.follows"), missing=0.0)[best] > 0)
        pairs = zip(fits, self._joules(check_ins.conditions), strict=True)
        return check_ins.choices(
            entry,
            utility=gains[best],
            declined=["" if fit else self._reason(joules) for fit, joules in pairs],
            sent_fraction=np.where(
                follows, check_ins.placed(sent_fractions)[best], own.sent_fraction
            ),
            frequency=np.where(fits, check_ins.placed(frequencies)[best], own.frequency),
        )

    def _reason(self, joules: float) -> str:
        """Return why a device that may spend so much declines."""
        energy = f" and {joules:.3g} J" if np.isfinite(joules) else ""
        return f"over budget: no size fits {self.seconds:g} s{energy}"

    def _sending(self, check_ins: CheckIns) -> AnycostSending:
        """Return the best sent fraction and frequency of every entry that is offered."""
        follows = check_ins.pair_array(attrgetter("bits.follows")) > 0
        own = check_ins.pair_array(attrgetter("bits.sent_fraction"))
        low = check_ins.pair_array(attrgetter("bits.least_fraction"))
        high = check_ins.pair_array(attrgetter("bits.most_fraction"))
        # What a codec can do may lie beside what is wanted: then it is what it can do.
        least, most = (
            np.where(follows, np.clip(bound, low, np.maximum(low, high)), own)
            for bound in (self.least_fraction, self.most_fraction)
        )
        return anycost_best_sending(self._budgets(check_ins), least, most)

    def _budgets(self, check_ins: CheckIns) -> AnycostBudgets:
        """Return what every entry leaves for training and for the update, and what they take."""
        known = check_ins.pair_conditions
        down = transfer_seconds(check_ins.bits_down[check_ins.pairs], known.bit_rate_down)
        beside = check_ins.pair_array(lambda e: e.bits.aside + e.choice_bits)
        up = transfer_seconds(beside, known.bit_rate_up)
        receiving = transfer_joules(down, known.receive_power)
        sending = transfer_joules(up, known.send_power)
        return AnycostBudgets(
            energy=IN_TIME * self._joules(known) - receiving - sending,
            seconds=IN_TIME * self.seconds - down - up,
            power=known.send_power,
            bit_rate=known.bit_rate_up,
            bits=check_ins.pair_array(attrgetter("bits.update")),
            # Other work makes cycles take longer, and no more joules.
            epsilon=known.coefficient / known.load,
            cycles=check_ins.pair_effort.cycles(known) * known.load,
            slowest=known.slowest,
            fastest=known.fastest,
        )

    def _joules(self, known: Conditions) -> Floats:
        """Return what each device may spend: asked of it, willing to, left in its battery."""
        joules: Floats = np.minimum(np.minimum(self.joules, known.budget), known.battery)
        return joules
