"""The slowest processor frequency that is in time, and so the one that costs least energy."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.config.number_values import Unbounded
from anyfleet.core.plans import Plans
from anyfleet.core.signals import Frequency, Signal
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.time_and_energy import IN_TIME, TrainingAmounts, transfer_seconds
from anyfleet.core.view import View
from anyfleet.parts.plan.slice_costs import bits_down_and_up, different_options, efforts
from anyfleet.parts.plan.widths import WholeModel


@dataclass(frozen=True)
class JustInTime(Wrapper, Plan):
    """The slowest frequency at which each device still finishes within `seconds`.

    Download, training and upload count, by what devices report. A device that is late anyway runs
    as fast as it can. `inner` plans the sizes; where it offers a menu, the largest entry is in
    time.
    """

    seconds: Unbounded
    inner: Plan = field(default_factory=WholeModel)

    decides: ClassVar[frozenset[Signal]] = frozenset({Frequency()})

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"JustInTime.seconds must be positive, got {self.seconds}.")

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        if not len(plans):
            return plans
        own, given = view.conditions(plans.device), plans.hyperparameters
        options, index = different_options(plans)
        largest = [max(sizes, key=lambda size: size.widest) for sizes in options]
        slices = [size.prefix(view.blueprint) for size in largest]
        amounts = TrainingAmounts.of(given, view.devices.samples[plans.device])
        effort = efforts(slices, index, amounts, view)
        down, up = bits_down_and_up(slices, index, given.sent_fraction, view)
        left = (
            IN_TIME * self.seconds
            - transfer_seconds(down, own.bit_rate_down)
            - transfer_seconds(up, own.bit_rate_up)
        )
        with np.errstate(divide="ignore"):
            needed: Floats = effort.cycles(own) * own.load / left
        frequency = np.where((left > 0) & (needed <= own.fastest), needed, np.nan)
        return plans.with_hyperparameters(frequency=np.maximum(frequency, own.slowest))
