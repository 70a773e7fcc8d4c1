"""Choices that the server makes for the devices, by what they report."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.check_in import ChoosingDevice, MenuEntry
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.messages import DeviceState, Hyperparameters, Plans, SubModelSize
from anyfleet.core.slots import CheckIn, Choose, Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.elastic import alpha


@dataclass(frozen=True)
class Assigned(Wrapper, Plan):
    """`choose` picks from the menus of `inner` on the server instead of on the device.

    It sees what devices report: fresh and exact reports lead to the device's own decision, late or
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
    def requires(self) -> Mapping[str, str]:
        return self.choose.requires

    @property
    def provides(self) -> frozenset[str]:
        """What is chosen here and by nobody else."""
        return frozenset({"chosen menu", *(f"chosen {what}" for what in self.choose.decides)})

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        if not any(plans.menus):
            return plans
        told = view.conditions(plans.device).rows()
        samples = view.devices.samples[plans.device].tolist()
        owns = [ChoosingDevice(*known, DeviceState()) for known in zip(told, samples, strict=True)]
        held = [_holdable(*pair, view) for pair in zip(plans.rows(), owns, strict=True)]
        rows = [row for row, entries in enumerate(held) if entries]
        asked = [
            _asked(held[row], owns[row], plans.hyperparameters.take([row]), view) for row in rows
        ]
        found = self.choose.together(asked).rows() if asked else []
        # As with every plan: one that cannot even hold the smallest is not asked for it.
        wants = [_smallest(plan, view) for plan in plans.rows()]
        reasons, numbers = list(plans.declined), plans.hyperparameters.rows()
        for row, choice in zip(rows, found, strict=True):
            wants[row] = held[row][int(choice.entry[0])]
            numbers[row], reasons[row] = choice.hyperparameters, choice.declined[0]
        return replace(
            plans,
            sub_model_sizes=tuple(wants),
            hyperparameters=join(numbers),
            menus=((),) * len(plans),
            declined=tuple(reasons),
        )


def _smallest(plan: Plans, view: View) -> SubModelSize:
    """What takes least memory of a device's menu; without one, what is planned."""
    (menu,), (want,), batch = (
        plan.menus,
        plan.sub_model_sizes,
        int(plan.hyperparameters.batch_size[0]),
    )
    return min(menu or (want,), key=lambda entry: view.memory(entry.prefix(view.blueprint), batch))


def _holdable(plan: Plans, own: ChoosingDevice, view: View) -> list[SubModelSize]:
    """What of its menu a device can hold; nothing where the plan declines it already."""
    (menu,), (reason,), batch = plan.menus, plan.declined, int(plan.hyperparameters.batch_size[0])
    room = float(own.conditions.memory[0])
    return [
        entry
        for entry in (menu if not reason else ())
        if view.memory(entry.prefix(view.blueprint), batch) <= room
    ]


def _asked(
    entries: list[SubModelSize], own: ChoosingDevice, numbers: Hyperparameters, view: View
) -> CheckIn:
    return CheckIn([_offer(entry, own, numbers, view) for entry in entries], own, numbers)


def _learns(choose: Choose) -> bool:
    return bool(choose.learns_from) or type(choose).learn is not Choose.learn


def _offer(
    entry: SubModelSize, own: ChoosingDevice, numbers: Hyperparameters, view: View
) -> MenuEntry:
    """What a device would find on its menu, without the bits of the menu."""
    slice_, batch = entry.prefix(view.blueprint), int(numbers.batch_size[0])
    (steps,) = local_steps(numbers, [own.samples])
    count = samples_processed(steps, own.samples, batch)
    return MenuEntry(
        demand=view.training_cost(slice_, batch, count, steps),
        bits=view.message_bits(slice_, float(numbers.sent_fraction[0])),
        first_trained_layer=entry.first_trained_layer,
        alpha=alpha(slice_, view.blueprint),
    )
