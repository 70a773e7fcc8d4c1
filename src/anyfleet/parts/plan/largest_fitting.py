"""Sizes by memory: the largest model that a device can hold."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from anyfleet.core.messages import Plans, SubModelSize
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import WholeModel, check_widths


@dataclass(frozen=True)
class LargestFitting(Wrapper, Plan):
    """The largest of the `shares` whose training fits into the memory that a device reports.

    `inner` plans first, and no device gets more than it says. One that cannot even hold the
    smallest is not asked, as with every planner.
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    inner: Plan = field(default_factory=WholeModel)

    def __post_init__(self) -> None:
        check_widths("LargestFitting", self.widths)

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        room = view.conditions(plans.device).memory
        wants = tuple(
            self._largest(want, float(room[row]), int(plans.hyperparameters.batch_size[row]), view)
            for row, want in enumerate(plans.sub_model_sizes)
        )
        return replace(plans, sub_model_sizes=wants)

    def _largest(self, want: SubModelSize, room: float, batch: int, view: View) -> SubModelSize:
        smaller = sorted((s for s in self.widths if s < want.width), reverse=True)
        sizes = [want, *(replace(want, width=share) for share in smaller)]
        needs = (view.memory(size.prefix(view.blueprint), batch) for size in sizes)
        fitting = (size for size, need in zip(sizes, needs, strict=True) if need <= room)
        return next(fitting, sizes[-1])
