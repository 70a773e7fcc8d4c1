"""What a device owes: the part of its updates that no message has brought to the server yet.

Kept in the coordinates of the whole model, since the next order may ask for another part of it.
Whether a message arrived, its device learns with its next order (`Orders.heard`): until then it
remembers what it sent, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from anyfleet.elastic import paste
from anyfleet.types import Memory, Orders, Params, Task

SENT = "sent"  # the memory slot with the last message that used a codec's slot


class Left(NamedTuple):
    """Of one update, on the small model: what is left of it, and what was sent of it."""

    left: Params
    sent: Params


def recalled(memory: Memory, slot: str, heard: int) -> dict[str, Tensor]:
    """What is left over on the whole model, with all of a message that never arrived."""
    left = dict(memory.slots.get(slot, {}))
    if memory.sent == heard:
        return left
    lost = memory.slots.get(SENT, {})
    return {**lost, **left, **{name: left[name] + lost[name] for name in lost if name in left}}


def sending(memory: Memory, slot: str, update: Left, order: Orders, task: Task) -> Memory:
    """What a device remembers when it sends an answer to this order."""
    (slice_,), (heard,), blueprint = order.slices, order.heard, task.blueprint
    before = recalled(memory, slot, int(heard))
    left = paste(update.left, {**_zeros(update.left, task), **before}, slice_, blueprint)
    sent = paste(update.sent, _zeros(update.sent, task), slice_, blueprint)
    slots: Mapping[str, Params] = {**memory.slots, slot: left, SENT: sent}
    return replace(memory, slots=slots, sent=int(order.id[0]))


def _zeros(tree: Params, task: Task) -> dict[str, Tensor]:
    return {name: torch.zeros_like(task.params[name]) for name in tree}
