"""AnycostFL's elastic model shrinking: the strongest channels."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """The channels with the largest incoming weights in the server's newest model.

    They are the leading channels of the model sorted by norm, without sorting it (EMS of AnycostFL,
    specification §1.12.1). There is one order for each axis, found once after every round, so that
    whatever is added together keeps the same channels. They are in ascending order, so that width 1
    is the whole model. A smaller entry of a menu lies inside a larger one. An evaluation takes the
    strongest channels too.
    """

    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)

    def init(self, view: View) -> _Orders:
        return tuple(channel_order(view.model, view.blueprint).items())

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: _Orders
    ) -> _Orders:
        return state if updates is None else self.init(view)

    def __call__(
        self, size: SubModelSize, view: View, state: _Orders, key: Tensor, device: int | None
    ) -> Slice:
        return _strongest(size, state, view.blueprint)


@lru_cache(maxsize=256)
def _strongest(size: SubModelSize, orders: _Orders, blueprint: Blueprint) -> Slice:
    # The same value for every call: its hash is computed once.
    order = dict(orders)
    keep = {axis: sorted(order[axis][:n]) for axis, n in size.counts(blueprint).items()}
    return Slice.of(keep, blueprint, size.first_trained_layer)
