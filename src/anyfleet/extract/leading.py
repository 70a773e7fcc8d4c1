"""Nested sub-models: the leading channels."""

from dataclasses import dataclass

from torch import Tensor

from anyfleet.elastic import Slice
from anyfleet.method import Extract, State
from anyfleet.types import Want
from anyfleet.view import View


@dataclass(frozen=True)
class Leading(Extract):
    """The first channels of every hidden layer (HeteroFL, METHODS §1.5)."""

    def __call__(self, want: Want, view: View, state: State, key: Tensor) -> Slice:
        return want.prefix(view.blueprint)
