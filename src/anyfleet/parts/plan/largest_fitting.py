"""Sizes by memory: the largest model that a device can hold."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from anyfleet.core.messages import Plans, Want
from anyfleet.core.slots import Around, Plan, State
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import Whole, check_shares


@dataclass(frozen=True)
class LargestFitting(Around, Plan):
    """The largest of the `shares` whose training fits into the memory that a device reports.

    `inner` plans first, and no device gets more than it says. One that cannot even hold the
    smallest is not asked, as with every planner.
    """

    shares: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    inner: Plan = field(default_factory=Whole)

    def __post_init__(self) -> None:
        check_shares("LargestFitting", self.shares)

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state, key)
        room = view.conditions(plans.device).memory
        wants = tuple(
            self._largest(want, float(room[row]), int(plans.numbers.batch[row]), view)
            for row, want in enumerate(plans.wants)
        )
        return replace(plans, wants=wants)

    def _largest(self, want: Want, room: float, batch: int, view: View) -> Want:
        smaller = sorted((s for s in self.shares if s < want.share), reverse=True)
        sizes = [want, *(replace(want, share=share) for share in smaller)]
        needs = (view.memory(size.prefix(view.blueprint), batch) for size in sizes)
        fitting = (size for size, need in zip(sizes, needs, strict=True) if need <= room)
        return next(fitting, sizes[-1])
