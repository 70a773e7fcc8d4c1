"""The slowest processor frequency that is in time, and so the one that costs least energy."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, join
from anyfleet.config.number_values import Unbounded
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.messages import SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.signals import Frequency, Signal
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.time_and_energy import IN_TIME, Effort, transfer_seconds
from anyfleet.core.view import View
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
        count = len(plans)
        if not count:
            return plans
        own, sent_fractions = (
            view.conditions(plans.device),
            plans.hyperparameters.sent_fraction.tolist(),
        )
        largest = [max(plans.options_of(row), key=lambda size: size.widest) for row in range(count)]
        effort = join([_effort(plans, row, largest[row], view) for row in range(count)])
        bits = [
            view.message_bits(size.prefix(view.blueprint), sent_fraction)
            for size, sent_fraction in zip(largest, sent_fractions, strict=True)
        ]
        down, up = (np.array([getattr(each, way) for each in bits]) for way in ("down", "up"))
        left = (
            IN_TIME * self.seconds
            - transfer_seconds(down, own.bit_rate_down)
            - transfer_seconds(up, own.bit_rate_up)
        )
        with np.errstate(divide="ignore"):
            needed: Floats = effort.cycles(own) * own.load / left
        frequency = np.where((left > 0) & (needed <= own.fastest), needed, np.nan)
        return plans.with_hyperparameters(frequency=np.maximum(frequency, own.slowest))


def _effort(plans: Plans, row: int, size: SubModelSize, view: View) -> Effort:
    """Return the effort of the device of a row with a sub-model of this size; a batch of one."""
    own = plans.hyperparameters.take([row])
    samples, batch = int(view.devices.samples[plans.device[row]]), int(own.batch_size[0])
    (steps,) = local_steps(own, [samples])
    processed = samples_processed(steps, samples, batch)
    return view.training_cost(size.prefix(view.blueprint), batch, processed, steps).effort
