"""Choices that the server makes for the devices, by what they report."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.check_in import Offer, Own
from anyfleet.core.local_training import limits, processed
from anyfleet.core.messages import Memory, Numbers, Plans, Want
from anyfleet.core.slots import Around, Asked, Choose, Plan, State
from anyfleet.core.view import View
from anyfleet.elastic import alpha


@dataclass(frozen=True)
class Assigned(Around, Plan):
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
    def needs(self) -> Mapping[str, str]:
        return self.choose.needs

    @property
    def gives(self) -> frozenset[str]:
        """What is chosen here and by nobody else."""
        return frozenset({"chosen menu", *(f"chosen {what}" for what in self.choose.decides)})

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state, key)
        if not any(plans.menus):
            return plans
        told = view.conditions(plans.device).rows()
        samples = view.devices.samples[plans.device].tolist()
        owns = [Own(*known, Memory()) for known in zip(told, samples, strict=True)]
        held = [_holdable(*pair, view) for pair in zip(plans.rows(), owns, strict=True)]
        rows = [row for row, entries in enumerate(held) if entries]
        asked = [_asked(held[row], owns[row], plans.numbers.take([row]), view) for row in rows]
        found = self.choose.together(asked).rows() if asked else []
        # As with every plan: one that cannot even hold the smallest is not asked for it.
        wants = [_smallest(plan, view) for plan in plans.rows()]
        reasons, numbers = list(plans.declined), plans.numbers.rows()
        for row, choice in zip(rows, found, strict=True):
            wants[row] = held[row][int(choice.entry[0])]
            numbers[row], reasons[row] = choice.numbers, choice.declined[0]
        return replace(
            plans,
            wants=tuple(wants),
            numbers=join(numbers),
            menus=((),) * len(plans),
            declined=tuple(reasons),
        )


def _smallest(plan: Plans, view: View) -> Want:
    """What takes least memory of a device's menu; without one, what is planned."""
    (menu,), (want,), batch = plan.menus, plan.wants, int(plan.numbers.batch[0])
    return min(menu or (want,), key=lambda entry: view.memory(entry.prefix(view.blueprint), batch))


def _holdable(plan: Plans, own: Own, view: View) -> list[Want]:
    """What of its menu a device can hold; nothing where the plan declines it already."""
    (menu,), (reason,), batch = plan.menus, plan.declined, int(plan.numbers.batch[0])
    room = float(own.conditions.memory[0])
    return [
        entry
        for entry in (menu if not reason else ())
        if view.memory(entry.prefix(view.blueprint), batch) <= room
    ]


def _asked(entries: list[Want], own: Own, numbers: Numbers, view: View) -> Asked:
    return Asked([_offer(entry, own, numbers, view) for entry in entries], own, numbers)


def _learns(choose: Choose) -> bool:
    return bool(choose.keeps) or type(choose).learn is not Choose.learn


def _offer(entry: Want, own: Own, numbers: Numbers, view: View) -> Offer:
    """What a device would find on its menu, without the bits of the menu."""
    slice_, batch = entry.prefix(view.blueprint), int(numbers.batch[0])
    (steps,) = limits(numbers, [own.samples])
    count = processed(steps, own.samples, batch)
    return Offer(
        demand=view.training(slice_, batch, count, steps),
        traffic=view.traffic(slice_, float(numbers.rate[0])),
        first=entry.first,
        alpha=alpha(slice_, view.blueprint),
    )
