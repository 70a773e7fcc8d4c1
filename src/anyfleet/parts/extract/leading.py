"""Nested sub-models: the leading channels."""

from dataclasses import dataclass

from torch import Tensor

from anyfleet.core.messages import Want
from anyfleet.core.slots import Extract, State
from anyfleet.core.view import View
from anyfleet.elastic import Slice


@dataclass(frozen=True)
class Leading(Extract):
    """The first channels of every hidden layer (HeteroFL, METHODS §1.5)."""

    def __call__(self, want: Want, view: View, state: State, key: Tensor) -> Slice:
        return want.prefix(view.blueprint)
