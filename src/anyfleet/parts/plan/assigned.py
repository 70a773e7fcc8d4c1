"""Choices from menus that the server makes for the devices, by what they report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.check_in import CheckIn, CheckIns, MenuEntry
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.messages import Conditions, Hyperparameters, SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.signals import ServerChoice, Signal
from anyfleet.core.slots import Choose, Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.elastic import channel_share, trained_share


@dataclass(frozen=True)
class Assigned(Wrapper, Plan):
    """`choose` picks from the menus of `inner` on the server instead of on the device.

    It sees what devices report. Fresh and exact reports lead to the device's own decision, late or
    noisy ones may not. What a device says it cannot hold is not on its menu. Only the decision
    travels.
    """

    inner: Plan
    choose: Choose

    def __post_init__(self) -> None:
        if _learns(self.choose):
            raise ValueError(
                f"Assigned.choose={self.choose!r} decides by what devices learn, and that stays "
                "with them. Give it to the method as its own choose, and Assigned.inner as plan."
            )

    @property
    def requires(self) -> frozenset[Signal]:
        return self.choose.requires

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset({ServerChoice()})

    @property
    def decides(self) -> frozenset[Signal]:
        return self.choose.decides

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        count = len(plans)
        if not any(map(plans.menu_of, range(count))):
            return plans
        conditions = view.conditions(plans.device).rows()
        held = [_holdable(plans, row, conditions[row], view) for row in range(count)]
        rows = [row for row in range(count) if held[row]]
        # As with every plan: a device that cannot even hold the smallest is not asked for it.
        sizes = [_smallest(plans, row, view) for row in range(count)]
        reasons, hyperparameters = list(plans.declined), plans.hyperparameters.rows()
        if rows:
            server = _Menus(plans, view)
            check_ins = [server.check_in(row, conditions[row], held[row]) for row in rows]
            found = self.choose(CheckIns.of(check_ins)).rows()
            for row, choice in zip(rows, found, strict=True):
                sizes[row] = held[row][int(choice.entry[0])]
                hyperparameters[row], reasons[row] = choice.hyperparameters, choice.declined[0]
        return replace(
            plans.with_sizes(sizes).without_menus(),
            hyperparameters=join(hyperparameters),
            declined=tuple(reasons),
        )


def _smallest(plans: Plans, row: int, view: View) -> SubModelSize:
    """Return what takes least memory of all that a device may train."""
    batch = int(plans.hyperparameters.batch_size[row])
    return min(
        plans.options_of(row), key=lambda size: view.memory(size.prefix(view.blueprint), batch)
    )


def _holdable(plans: Plans, row: int, own: Conditions, view: View) -> list[SubModelSize]:
    """Return what of its menu a device can hold; [] where the plan declines it already."""
    if plans.declined[row]:
        return []
    batch, room = int(plans.hyperparameters.batch_size[row]), float(own.memory[0])
    return [
        size
        for size in plans.menu_of(row)
        if view.memory(size.prefix(view.blueprint), batch) <= room
    ]


def _learns(choose: Choose) -> bool:
    return bool(choose.learns_from) or type(choose).learn is not Choose.learn


class _Menus:
    """The menus of a cohort as devices would find them, without the bits of the menus."""

    def __init__(self, plans: Plans, view: View) -> None:
        self._plans, self._view = plans, view
        self._known: dict[Any, MenuEntry] = {}  # devices with as many samples share entries

    def check_in(self, row: int, own: Conditions, sizes: Sequence[SubModelSize]) -> CheckIn:
        """Return the check-in of the device of a row that can hold these sizes."""
        device = int(self._plans.device[row])
        samples = int(self._view.devices.samples[device])
        hyperparameters = self._plans.hyperparameters.take([row])
        return CheckIn(
            device=device,
            menu=tuple(self._entry(size, samples, hyperparameters) for size in sizes),
            conditions=own,
            samples=samples,
            hyperparameters=hyperparameters,
            state={},
        )

    def _entry(self, size: SubModelSize, samples: int, own: Hyperparameters) -> MenuEntry:
        batch, sent_fraction = int(own.batch_size[0]), float(own.sent_fraction[0])
        (steps,) = local_steps(own, [samples])
        # As text: NaN equals no other NaN.
        alike = size, batch, samples, steps, str(sent_fraction)
        if alike not in self._known:
            view, slice_ = self._view, size.prefix(self._view.blueprint)
            processed = samples_processed(steps, samples, batch)
            self._known[alike] = MenuEntry(
                demand=view.training_cost(slice_, batch, processed, steps),
                bits=view.message_bits(slice_, sent_fraction),
                first_trained_layer=size.first_trained_layer,
                channel_share=channel_share(slice_, view.blueprint),
                trained_share=trained_share(slice_, view.blueprint),
            )
        return self._known[alike]
