"""Nested sub-models: the leading channels."""

from dataclasses import dataclass

from torch import Tensor

from anyfleet.core.messages import SubModelSize
from anyfleet.core.slots import Extract, State
from anyfleet.core.view import View
from anyfleet.elastic import Slice


@dataclass(frozen=True)
class Leading(Extract):
    """The first channels of every hidden layer (HeteroFL, specification §1.5)."""

    def __call__(
        self, size: SubModelSize, view: View, state: State, key: Tensor, device: int | None
    ) -> Slice:
        return size.prefix(view.blueprint)
