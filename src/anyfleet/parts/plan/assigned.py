"""Choices from menus that the server makes for the devices, by what they report."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from anyfleet.arrays import Ints, alike
from anyfleet.core.check_in import CheckIns, MenuEntry
from anyfleet.core.messages import Conditions, SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.signals import ServerChoice, Signal
from anyfleet.core.slots import Choose, Plan, State, Wrapper
from anyfleet.core.time_and_energy import TrainingAmounts
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
        if not any(plans.menus[number] for number in np.unique(plans.menu_index) if number >= 0):
            return plans
        offers = _Offers.of(plans, view)
        # As with every plan: a device that cannot even hold the smallest is not asked for it.
        numbers, reasons = offers.smallest.copy(), list(plans.declined)
        asked = np.flatnonzero((offers.entry_index >= 0).any(axis=0))
        hyperparameters = plans.hyperparameters
        if len(asked):
            found = self.choose(offers.check_ins(asked))
            numbers[asked] = offers.entry_index[found.entry, asked]
            hyperparameters = hyperparameters.put(asked, found.hyperparameters)
            for row, reason in zip(asked.tolist(), found.declined, strict=True):
                reasons[row] = reason
        return replace(
            plans.with_sizes([offers.sizes[number] for number in numbers]).without_menus(),
            hyperparameters=hyperparameters,
            declined=tuple(reasons),
        )


def _learns(choose: Choose) -> bool:
    return bool(choose.learns_from) or type(choose).learn is not Choose.learn


@dataclass(frozen=True, eq=False)
class _Offers:
    """The menus of a cohort as devices would find them, without the bits of the menus."""

    plans: Plans
    view: View
    conditions: Conditions
    sizes: list[SubModelSize]  # the different entries: devices with as many samples share them
    entries: list[MenuEntry]  # one for each of the sizes
    entry_index: Ints  # [entries, devices]: what each device can hold of its menu; -1: no more
    smallest: Ints  # the number of the size that takes least memory of all, for each device

    @classmethod
    def of(cls, plans: Plans, view: View) -> "_Offers":
        """Return what devices can hold of their menus; nothing where the plan declines them."""
        given, conditions = plans.hyperparameters, view.conditions(plans.device)
        amounts = TrainingAmounts.of(given, view.devices.samples[plans.device])
        wanted = np.array([not reason for reason in plans.declined])
        smallest = np.empty(len(plans), dtype=np.int64)
        entry_index = np.full((max(map(len, plans.menus)), len(plans)), -1)
        sizes: list[SubModelSize] = []
        entries: list[MenuEntry] = []
        for rows in alike(
            plans.size_index,
            plans.menu_index,
            amounts.batch_size,
            amounts.processed,
            amounts.local_steps,
            given.sent_fraction,
        ):
            first, options = int(rows[0]), plans.options_of(int(rows[0]))
            sent_fraction = float(given.sent_fraction[first])
            own = [_entry(size, amounts.take([first]), sent_fraction, view) for size in options]
            needs = np.array(
                [
                    view.memory(size.prefix(view.blueprint), int(amounts.batch_size[first]))
                    for size in options
                ]
            )
            smallest[rows] = len(sizes) + needs.argmin()
            if plans.menu_of(first):
                left_out = ~((needs[:, None] <= conditions.memory[rows]) & wanted[rows])
                # What a device cannot hold is not on its menu: the others move up.
                order = np.argsort(left_out, axis=0, kind="stable")
                kept = ~np.take_along_axis(left_out, order, axis=0)
                entry_index[: len(options), rows] = np.where(kept, len(sizes) + order, -1)
            sizes += options
            entries += own
        return cls(plans, view, conditions, sizes, entries, entry_index, smallest)

    def check_ins(self, rows: Ints) -> CheckIns:
        """Return the check-ins of the devices of these rows."""
        index = self.entry_index[:, rows]
        return CheckIns(
            device=self.plans.device[rows],
            entries=tuple(self.entries),
            entry_index=index[(index >= 0).any(axis=1)],
            conditions=self.conditions.take(rows),
            samples=self.view.devices.samples[self.plans.device[rows]],
            hyperparameters=self.plans.hyperparameters.take(rows),
            states=({},) * len(rows),
        )


def _entry(
    size: SubModelSize, amount: TrainingAmounts, sent_fraction: float, view: View
) -> MenuEntry:
    """Return what a size would cost a device, given a single amount of training."""
    slice_ = size.prefix(view.blueprint)
    batch, processed, steps = (
        int(each[0]) for each in (amount.batch_size, amount.processed, amount.local_steps)
    )
    return MenuEntry(
        demand=view.training_cost(slice_, batch, processed, steps),
        bits=view.message_bits(slice_, sent_fraction),
        first_trained_layer=size.first_trained_layer,
        channel_share=channel_share(slice_, view.blueprint),
        trained_share=trained_share(slice_, view.blueprint),
    )
