"""The slowest processor frequency that is in time, and so the one that costs least energy."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, join
from anyfleet.config.number_values import Unbounded
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.messages import Plans, SubModelSize
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.time_and_energy import IN_TIME, Effort, transfer_seconds
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import WholeModel


@dataclass(frozen=True)
class JustInTime(Wrapper, Plan):
    """Every device as slowly as it can be and still finish within `seconds`.

    Download, training and upload count, by what devices report; one that is late anyway runs as
    fast as it can. `inner` plans the sizes; where it offers a menu, its largest entry is in time.
    """

    seconds: Unbounded
    inner: Plan = field(default_factory=WholeModel)

    provides: ClassVar[frozenset[str]] = frozenset({"frequency"})

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"JustInTime.seconds must be positive, got {self.seconds}.")

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        if not len(plans):
            return plans
        own = view.conditions(plans.device)
        largest = [
            max(menu, key=lambda entry: entry.widest) if menu else want
            for menu, want in zip(plans.menus, plans.sub_model_sizes, strict=True)
        ]
        rows = list(zip(plans.rows(), largest, strict=True))
        effort = join([_effort(plan, want, view) for plan, want in rows])
        traffic = [
            view.message_bits(
                want.prefix(view.blueprint), float(plan.hyperparameters.sent_fraction[0])
            )
            for plan, want in rows
        ]
        down, up = (np.array([getattr(each, way) for each in traffic]) for way in ("down", "up"))
        left = (
            IN_TIME * self.seconds
            - transfer_seconds(down, own.bit_rate_down)
            - transfer_seconds(up, own.bit_rate_up)
        )
        with np.errstate(divide="ignore"):
            needed: Floats = effort.cycles(own) * own.load / left
        frequency = np.where((left > 0) & (needed <= own.fastest), needed, np.nan)
        numbers = replace(plans.hyperparameters, frequency=np.maximum(frequency, own.slowest))
        return replace(plans, hyperparameters=numbers)


def _effort(plan: Plans, want: SubModelSize, view: View) -> Effort:
    samples, batch = (
        int(view.devices.samples[plan.device[0]]),
        int(plan.hyperparameters.batch_size[0]),
    )
    (steps,) = local_steps(plan.hyperparameters, [samples])
    count = samples_processed(steps, samples, batch)
    return view.training_cost(want.prefix(view.blueprint), batch, count, steps).effort
