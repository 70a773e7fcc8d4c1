"""Orders and replies as no server and no device would make them."""

from dataclasses import replace
from typing import Any

import numpy as np

from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import Slice


def with_slices(orders: Cohort, *slices: Slice) -> Cohort:
    """Return the orders with the slice of each of them."""
    return replace(orders, slices=slices, slice_index=np.arange(len(orders)))


def with_contents(reply: Replies, **contents: Any) -> Replies:
    """Return a single reply with other `trees`, `symbols`, `masks`, `kept` or `report`."""
    before: dict[str, Any] = {
        "trees": reply.trees_of(0),
        "symbols": reply.symbols_of(0),
        "masks": reply.masks_of(0),
        "kept": reply.kept_of(0),
        "report": reply.report_of(0),
    }
    stack, first = Stack.of_one(**{**before, **contents}), np.zeros(1, dtype=np.int64)
    return replace(reply, stacks=(stack,), stack_index=first, place=first)
