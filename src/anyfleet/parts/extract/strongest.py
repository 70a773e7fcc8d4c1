"""AnycostFL's elastic model shrinking: the strongest channels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from anyfleet.core.messages import SubModelSize
from anyfleet.core.slots import Extract
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint, Slice, channel_order
from anyfleet.papers import ANYCOST, Paper

_Orders = tuple[tuple[str, tuple[int, ...]], ...]  # by axis


@dataclass(frozen=True)
class Strongest(Extract):
    """The channels with the largest incoming weights, in the server's newest model.

    EMS of AnycostFL, specification §1.12.1: the leading channels of the model sorted by norm, without
    sorting it. One order for each axis, found once after every server step, so that whatever is
    added together keeps the same channels; in ascending order, so that share 1 is the whole model.
    A smaller entry of a menu lies inside a larger one. A test of some width takes the strongest
    channels too.
    """

    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)

    def init(self, view: View) -> _Orders:
        return tuple(channel_order(view.model, view.blueprint).items())

    def learn(
        self, state: _Orders, updates: Updates | None, diagnostics: Mapping[str, Any], view: View
    ) -> _Orders:
        return state if updates is None else self.init(view)

    def __call__(self, size: SubModelSize, view: View, state: _Orders, key: Tensor) -> Slice:
        return _strongest(replace(size, device=None), state, view.blueprint)


@lru_cache(maxsize=256)
def _strongest(want: SubModelSize, orders: _Orders, blueprint: Blueprint) -> Slice:
    # The same slice for all devices that want as much: made once, and hashed once.
    order = dict(orders)
    keep = {axis: sorted(order[axis][:n]) for axis, n in want.counts(blueprint).items()}
    return Slice.of(keep, blueprint, want.first_trained_layer)
