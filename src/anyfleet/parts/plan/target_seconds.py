"""A target time for every order, with which a chooser on the device can compare its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Conditions, Hyperparameters, SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.signals import Signal, TargetTime
from anyfleet.core.slots import Plan, State
from anyfleet.core.time_and_energy import TrainingAmounts, transfer_seconds
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.formulas.whale import whale_target_seconds
from anyfleet.parts.plan.slice_costs import efforts
from anyfleet.parts.plan.widths import WidthMenu

_ASKED = 1024  # devices that stand for all: no fleet needs more


class _Kept(NamedTuple):
    inner: State
    devices: Ints
    first: Conditions  # as these devices reported before the first round


def sample_of(view: View) -> Ints:
    """Return some devices, evenly over the fleet: its groups are shuffled among the numbers."""
    count = len(view.devices)
    return np.unique(np.linspace(0, count - 1, min(count, _ASKED)).astype(np.int64))


@dataclass(frozen=True)
class TargetSeconds(Plan):
    """Another plan, and a target time: the median time of the smallest sub-model in round 0.

    WHALE-FL, specification §1.10. Half of the devices are then not late at first. Download,
    training and upload count, by what devices report before the first round.
    """

    inner: Plan = field(default_factory=WidthMenu)  # plans the sub-model sizes
    provides: ClassVar[frozenset[Signal]] = frozenset({TargetTime()})

    def init(self, view: View) -> _Kept:
        some = sample_of(view)
        return _Kept(self.inner.init(view), some, view.conditions(some))

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: _Kept
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(updates, diagnostics, view, state.inner))

    def diagnostics(self, state: _Kept) -> Mapping[str, Any]:
        return self.inner.diagnostics(state.inner)

    def __call__(self, plans: Plans, view: View, state: _Kept, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state.inner, key)
        if not len(plans):
            return plans
        used = np.unique(plans.menu_index[plans.menu_index >= 0])
        offered = (size for number in used for size in plans.menus[number])
        smallest = min(offered, key=_smallness, default=SubModelSize())
        seconds = _seconds(smallest, plans.hyperparameters.take([0]), view, state)
        return plans.with_hyperparameters(target_seconds=whale_target_seconds(seconds))


def _smallness(size: SubModelSize) -> tuple[float, int]:
    """Return a key that puts narrow before wide, and of one width few trained layers first."""
    return size.width, -size.first_trained_layer


def _seconds(size: SubModelSize, given: Hyperparameters, view: View, state: _Kept) -> Floats:
    """Return the seconds that each of the first devices needs for an order of this size."""
    slice_ = size.prefix(view.blueprint)
    alike = given.take(np.zeros(len(state.devices), dtype=np.int64))
    amounts = TrainingAmounts.of(alike, view.devices.samples[state.devices])
    effort = efforts([slice_], np.zeros(len(amounts), dtype=np.int64), amounts, view)
    frequency = np.full(len(amounts), np.nan)
    down, up, *_ = view.message_bits(slice_, float(given.sent_fraction[0]))
    transfer = transfer_seconds(down, state.first.bit_rate_down) + transfer_seconds(
        up, state.first.bit_rate_up
    )
    seconds: Floats = effort.seconds(state.first, frequency) + transfer
    return seconds
