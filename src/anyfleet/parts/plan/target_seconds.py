"""A target time for every order, which a chooser on the device can hold itself to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, Ints, join
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.messages import Conditions, Hyperparameters, Plans, SubModelSize
from anyfleet.core.slots import Plan, State
from anyfleet.core.time_and_energy import transfer_seconds
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.formulas.whale import whale_target_seconds
from anyfleet.parts.plan.widths import WidthMenu

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
class TargetSeconds(Plan):
    """Another plan, and a target: the median time for the smallest network in round 0 (§1.10).

    Half of the devices are then not late at first. Download, training and upload count, by what
    devices report before the first round.
    """

    inner: Plan = field(default_factory=WidthMenu)
    provides: ClassVar[frozenset[str]] = frozenset({"target"})

    def init(self, view: View) -> _Kept:
        some = sample_of(view)
        return _Kept(self.inner.init(view), some, view.conditions(some))

    def learn(
        self, state: _Kept, updates: Updates | None, diagnostics: Mapping[str, Any], view: View
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(state.inner, updates, diagnostics, view))

    def diagnostics(self, state: _Kept) -> Mapping[str, Any]:
        return self.inner.diagnostics(state.inner)

    def __call__(self, plans: Plans, view: View, state: _Kept, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state.inner, key)
        if not len(plans):
            return plans
        smallest = min(
            (want for menu in plans.menus for want in menu), key=_size, default=SubModelSize()
        )
        numbers = plans.hyperparameters
        target = whale_target_seconds(_seconds(smallest, numbers.take([0]), view, state))
        return replace(
            plans, hyperparameters=replace(numbers, target_seconds=np.full(len(plans), target))
        )


def _size(want: SubModelSize) -> tuple[float, int]:
    """Narrow before wide; of the same width, few trained layers before many."""
    return want.width, -want.first_trained_layer


def _seconds(want: SubModelSize, numbers: Hyperparameters, view: View, state: _Kept) -> Floats:
    """What each of the first devices needs for an order of this size."""
    slice_, batch = want.prefix(view.blueprint), int(numbers.batch_size[0])
    efforts = []
    for samples in view.devices.samples[state.devices].tolist():
        (steps,) = local_steps(numbers, [samples])
        amount = samples_processed(steps, samples, batch), steps
        efforts.append(view.training_cost(slice_, batch, *amount).effort)
    frequency = np.full(len(efforts), np.nan)
    down, up, *_ = view.message_bits(slice_, float(numbers.sent_fraction[0]))
    crossing = transfer_seconds(down, state.first.bit_rate_down) + transfer_seconds(
        up, state.first.bit_rate_up
    )
    seconds: Floats = join(efforts).seconds(state.first, frequency) + crossing
    return seconds
