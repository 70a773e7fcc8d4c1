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

from anyfleet.elastic import cut, paste
from anyfleet.envelope import uplink
from anyfleet.method import Squeezed
from anyfleet.types import Memory, Orders, Params, Task

SENT = "sent"  # the memory slot with the last message that used a codec's slot


class Left(NamedTuple):
    """Of one update, on the small model: what is left of it, and what was sent of it."""

    left: Params
    sent: Params


def squeeze(
    orders: Orders, memories: tuple[Memory, ...], update: Params, mask: Params, task: Task
) -> Squeezed:
    """Compresses the uploads of a stack, all of them at once."""
    codec, blueprint = orders.job.uplink, task.blueprint
    tree, trained = (
        each if len(orders) > 1 else {n: v.unsqueeze(0) for n, v in each.items()}
        for each in (update, mask)
    )
    like = next(iter(task.params.values()))
    around = uplink(orders, blueprint, tuple(tree), like.dtype)
    # What was not trained does not count, so it must neither be sent nor taken for sent.
    tree = {n: v * trained[n].to(v) if n in trained else v for n, v in tree.items()}
    rate = torch.from_numpy(orders.numbers.rate).to(like.device)
    around = replace(around, key=around.key.to(like.device))
    if not codec.slot:
        return codec.squeeze(tree, {}, rate, around)
    known = [
        cut(recalled(memory, codec.slot, int(heard)), slice_, blueprint)
        for memory, heard, slice_ in zip(memories, orders.heard, orders.slices, strict=True)
    ]
    left = {
        n: torch.stack([each.get(n, torch.zeros_like(v[0])) for each in known])
        for n, v in tree.items()
    }
    meant = {n: v * trained[n].to(v) if n in trained else v for n, v in left.items()}
    squeezed = codec.squeeze(tree, meant, rate, around)
    # A codec may answer 0 with noise: what was not trained is as it was.
    still = {
        n: squeezed.memory[n] * trained[n].to(left[n]) + (left[n] - meant[n])
        for n in trained
        if n in left
    }
    return replace(squeezed, memory={**squeezed.memory, **still})


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
