"""A target time for every order, which a chooser on the device can hold itself to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, Ints, join
from anyfleet.core.local_training import limits, processed
from anyfleet.core.messages import Conditions, Numbers, Plans, Want
from anyfleet.core.slots import Plan, State
from anyfleet.core.time_and_energy import crossing_seconds
from anyfleet.core.updates import Arrivals
from anyfleet.core.view import View
from anyfleet.formulas.whale import target_seconds
from anyfleet.parts.plan.widths import Menu

_ASKED = 1024  # devices that stand for all: no fleet needs more


class _Kept(NamedTuple):
    inner: State
    devices: Ints
    first: Conditions  # as these devices reported before the first round


def sample_of(view: View) -> Ints:
    """Some devices, evenly over the fleet: its groups are shuffled among the numbers."""
    count = len(view.devices)
    return np.unique(np.linspace(0, count - 1, min(count, _ASKED)).astype(np.int64))


@dataclass(frozen=True)
class Paced(Plan):
    """Another plan, and a target: the median time for the smallest network in round 0 (§1.10).

    Half of the devices are then not late at first. Download, training and upload count, by what
    devices report before the first round.
    """

    inner: Plan = field(default_factory=Menu)
    gives: ClassVar[frozenset[str]] = frozenset({"target"})

    def init(self, view: View) -> _Kept:
        some = sample_of(view)
        return _Kept(self.inner.init(view), some, view.conditions(some))

    def learn(
        self, state: _Kept, arrivals: Arrivals | None, notes: Mapping[str, Any], view: View
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(state.inner, arrivals, notes, view))

    def tells(self, state: _Kept) -> Mapping[str, Any]:
        return self.inner.tells(state.inner)

    def __call__(self, drafts: Plans, view: View, state: _Kept, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state.inner, key)
        if not len(plans):
            return plans
        smallest = min((want for menu in plans.menus for want in menu), key=_size, default=Want())
        numbers = plans.numbers
        target = target_seconds(_seconds(smallest, numbers.take([0]), view, state))
        return replace(plans, numbers=replace(numbers, target=np.full(len(plans), target)))


def _size(want: Want) -> tuple[float, int]:
    """Narrow before wide; of the same width, few trained layers before many."""
    return want.share, -want.first


def _seconds(want: Want, numbers: Numbers, view: View, state: _Kept) -> Floats:
    """What each of the first devices needs for an order of this size."""
    slice_, batch = want.prefix(view.blueprint), int(numbers.batch[0])
    efforts = []
    for samples in view.devices.samples[state.devices].tolist():
        (steps,) = limits(numbers, [samples])
        amount = processed(steps, samples, batch), steps
        efforts.append(view.training(slice_, batch, *amount).effort)
    frequency = np.full(len(efforts), np.nan)
    down, up, *_ = view.traffic(slice_, float(numbers.rate[0]))
    crossing = crossing_seconds(down, state.first.down) + crossing_seconds(up, state.first.up)
    seconds: Floats = join(efforts).seconds(state.first, frequency) + crossing
    return seconds
