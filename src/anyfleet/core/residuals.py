"""What a device owes: the part of its updates that no message has brought to the server yet.

Kept in the coordinates of the whole model, since the next order may ask for another part of it.
Whether a message arrived, its device learns with its next order (`Cohort.heard`): until then it
remembers what it sent, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from anyfleet.core.compression import compress
from anyfleet.core.messages import DeviceState, Params
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, uplink
from anyfleet.core.return_checks import Caller
from anyfleet.core.slots import Compressed
from anyfleet.elastic import cut, paste

SENT = "sent"  # the memory slot with the last message that used a codec's slot


class Left(NamedTuple):
    """Of one update, on the small model: what is left of it, and what was sent of it."""

    left: Params
    sent: Params


def squeeze(
    orders: Cohort, memories: tuple[DeviceState, ...], update: Params, mask: Params, task: Task
) -> Compressed:
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
    rate = torch.from_numpy(orders.hyperparameters.sent_fraction).to(like.device)
    around = replace(around, key=around.key.to(like.device))
    caller = Caller("uplink", codec, orders.round_index)
    if not codec.state_name:
        return compress(tree, {}, rate, around, caller)
    known = [_owed(memories[row], order, task) for row, order in enumerate(orders.rows())]
    left = {
        n: torch.stack([each.get(n, torch.zeros_like(v[0])) for each in known])
        for n, v in tree.items()
    }
    meant = {n: v * trained[n].to(v) if n in trained else v for n, v in left.items()}
    found = compress(tree, meant, rate, around, caller)
    # A codec may answer 0 with noise: what was not trained is as it was.
    still = {
        n: found.state[n] * trained[n].to(left[n]) + (left[n] - meant[n])
        for n in trained
        if n in left
    }
    return replace(found, state={**found.state, **still})


def _owed(memory: DeviceState, order: Cohort, task: Task) -> dict[str, Tensor]:
    """What is left over on the small model of an order."""
    (slice_,), (heard,), job = order.slices, order.acknowledged, order.job
    known = recalled(memory, job.uplink.state_name, int(heard))
    own = job.norm.own_names(task.blueprint, slice_)
    mine = {n: known[own.get(n, n)] for n in task.blueprint.params if own.get(n, n) in known}
    return cut(mine, slice_, task.blueprint)


def recalled(memory: DeviceState, slot: str, heard: int) -> dict[str, Tensor]:
    """What is left over on the whole model, with all of a message that never arrived."""
    left = dict(memory.tensors.get(slot, {}))
    if memory.last_sent_order == heard:
        return left
    lost = memory.tensors.get(SENT, {})
    return {**lost, **left, **{name: left[name] + lost[name] for name in lost if name in left}}


def sending(memory: DeviceState, slot: str, update: Left, order: Cohort, task: Task) -> DeviceState:
    """What a device remembers when it sends an answer to this order."""
    (slice_,), (heard,), blueprint = order.slices, order.acknowledged, task.blueprint
    before = recalled(memory, slot, int(heard))
    own = order.job.norm.own_names(blueprint, slice_)
    zeros = _zeros(update.left, task)
    onto = {name: before.get(own.get(name, name), zero) for name, zero in zeros.items()}
    left = _called(paste(update.left, onto, slice_, blueprint), own)
    sent = paste(update.sent, _zeros(update.sent, task), slice_, blueprint)
    slots: Mapping[str, Params] = {
        **memory.tensors,
        slot: {**before, **left},
        SENT: _called(sent, own),
    }
    return replace(memory, tensors=slots, last_sent_order=int(order.id[0]))


def _called(tree: Params, own: Mapping[str, str]) -> dict[str, Tensor]:
    # A width with a normalisation of its own owes to that, and not to another width's.
    return {own.get(name, name): value for name, value in tree.items()}


def _zeros(tree: Params, task: Task) -> dict[str, Tensor]:
    return {name: torch.zeros_like(task.params[name]) for name in tree}
