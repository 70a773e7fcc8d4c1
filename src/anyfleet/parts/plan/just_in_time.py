"""The slowest processor frequency that is in time, and so the one that costs least energy."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, join
from anyfleet.config.number_values import Unbounded
from anyfleet.core.local_training import limits, processed
from anyfleet.core.messages import Plans, Want
from anyfleet.core.slots import Around, Plan, State
from anyfleet.core.time_and_energy import IN_TIME, Effort, crossing_seconds
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import Whole


@dataclass(frozen=True)
class JustInTime(Around, Plan):
    """Every device as slowly as it can be and still finish within `seconds`.

    Download, training and upload count, by what devices report; one that is late anyway runs as
    fast as it can. `inner` plans the sizes; where it offers a menu, its largest entry is in time.
    """

    seconds: Unbounded
    inner: Plan = field(default_factory=Whole)

    gives: ClassVar[frozenset[str]] = frozenset({"frequency"})

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"JustInTime.seconds must be positive, got {self.seconds}.")

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state, key)
        if not len(plans):
            return plans
        own = view.conditions(plans.device)
        largest = [
            max(menu, key=lambda entry: entry.widest) if menu else want
            for menu, want in zip(plans.menus, plans.wants, strict=True)
        ]
        rows = list(zip(plans.rows(), largest, strict=True))
        effort = join([_effort(plan, want, view) for plan, want in rows])
        traffic = [
            view.traffic(want.prefix(view.blueprint), float(plan.numbers.rate[0]))
            for plan, want in rows
        ]
        down, up = (np.array([getattr(each, way) for each in traffic]) for way in ("down", "up"))
        left = (
            IN_TIME * self.seconds - crossing_seconds(down, own.down) - crossing_seconds(up, own.up)
        )
        with np.errstate(divide="ignore"):
            needed: Floats = effort.cycles(own) * own.load / left
        frequency = np.where((left > 0) & (needed <= own.fastest), needed, np.nan)
        numbers = replace(plans.numbers, frequency=np.maximum(frequency, own.slowest))
        return replace(plans, numbers=numbers)


def _effort(plan: Plans, want: Want, view: View) -> Effort:
    samples, batch = int(view.devices.samples[plan.device[0]]), int(plan.numbers.batch[0])
    (steps,) = limits(plan.numbers, [samples])
    count = processed(steps, samples, batch)
    return view.training(want.prefix(view.blueprint), batch, count, steps).effort
