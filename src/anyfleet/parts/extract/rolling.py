"""Sub-models whose channels move on with every round."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from anyfleet.core.messages import SubModelSize
from anyfleet.core.slots import Extract, State
from anyfleet.core.view import View
from anyfleet.elastic import Slice
from anyfleet.formulas.sub_models import fedrolex_window
from anyfleet.papers import FEDROLEX, Paper


@dataclass(frozen=True)
class Rolling(Extract):
    """A window of neighbouring channels that starts `shift` channels further every round.

    FedRolex, specification §1.6. The window starts at the same place for all devices and wraps
    around. Its channels stay in that order; an axis that is kept whole has its natural one. A
    negative shift rolls the other way, as the authors' own program does (-1). An evaluation takes
    the leading channels.
    """

    shift: int = 1

    papers: ClassVar[tuple[Paper, ...]] = (FEDROLEX,)

    def __post_init__(self) -> None:
        if not self.shift:
            raise ValueError(
                "Rolling.shift must not be 0: the window would never move. For the leading "
                "channels use Leading()."
            )

    def __call__(
        self, size: SubModelSize, view: View, state: State, key: Tensor, device: int | None
    ) -> Slice:
        blueprint = view.blueprint
        sizes = blueprint.sizes
        keep = {
            axis: fedrolex_window(sizes[axis], count, view.round_index, self.shift).tolist()
            for axis, count in size.counts(blueprint).items()
        }
        return Slice.of(keep, blueprint, size.first_trained_layer)

    def for_evaluation(self, size: SubModelSize, view: View, state: State, key: Tensor) -> Slice:
        return size.prefix(view.blueprint)
