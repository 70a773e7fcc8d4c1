"""Choices that the server makes for the devices, by what they report."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from anyfleet.columns import join
from anyfleet.elastic import alpha
from anyfleet.local import limits, processed
from anyfleet.method import Around, Choose, Plan, State
from anyfleet.offers import Offer, Own
from anyfleet.types import Memory, Numbers, Plans, Want
from anyfleet.view import View


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
        owns = (Own(*known, Memory()) for known in zip(told, samples, strict=True))
        rows = zip(plans.rows(), owns, strict=True)
        found = [self._assigned(plan, own, view) for plan, own in rows]
        wants, numbers, reasons = zip(*found, strict=True)
        none = ((),) * len(plans)
        return replace(plans, wants=wants, numbers=join(numbers), menus=none, declined=reasons)

    def _assigned(self, plan: Plans, own: Own, view: View) -> tuple[Want, Numbers, str]:
        """What a device shall train, and how, or why it is not asked."""
        (menu,), (want,), (reason,), numbers = plan.menus, plan.wants, plan.declined, plan.numbers
        if not menu or reason:
            return want, numbers, reason
        batch, room = int(numbers.batch[0]), float(own.conditions.memory[0])
        needs = [view.memory(entry.prefix(view.blueprint), batch) for entry in menu]
        held = [entry for entry, need in zip(menu, needs, strict=True) if need <= room]
        if not held:
            # As with every plan: one that cannot even hold the smallest is not asked.
            return menu[needs.index(min(needs))], numbers, ""
        choices = self.choose([_offer(entry, own, numbers, view) for entry in held], own, numbers)
        return held[int(choices.entry[0])], choices.numbers, choices.declined[0]


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
