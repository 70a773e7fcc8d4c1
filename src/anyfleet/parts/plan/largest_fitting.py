"""Widths by memory: the largest model that a device can hold."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from anyfleet.core.messages import SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import WholeModel, check_widths


@dataclass(frozen=True)
class LargestFitting(Wrapper, Plan):
    """The largest of the `widths` whose training fits into the memory that a device reports.

    `inner` plans first, and no device gets more than it says. A device that cannot even hold the
    smallest is not asked, as with every planner.
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    inner: Plan = field(default_factory=WholeModel)

    def __post_init__(self) -> None:
        check_widths("LargestFitting", self.widths)

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        room = view.conditions(plans.device).memory.tolist()
        batches = plans.hyperparameters.batch_size.tolist()
        return plans.with_sizes(
            [
                self._largest(plans.size_of(row), room[row], batches[row], view)
                for row in range(len(plans))
            ]
        )

    def _largest(self, planned: SubModelSize, room: float, batch: int, view: View) -> SubModelSize:
        """Return the largest size up to the planned one that fits into `room` bytes."""
        narrower = sorted((w for w in self.widths if w < planned.width), reverse=True)
        sizes = [planned, *(replace(planned, width=width) for width in narrower)]
        needs = (view.memory(size.prefix(view.blueprint), batch) for size in sizes)
        fitting = (size for size, need in zip(sizes, needs, strict=True) if need <= room)
        return next(fitting, sizes[-1])
