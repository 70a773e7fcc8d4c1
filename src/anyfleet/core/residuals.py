"""Residuals: the part of a device's updates that no reply has brought to the server yet.

Codecs with error feedback add it to the next update. It is kept in the coordinates of the whole
model, since the next order may ask for another sub-model. A device learns with its next order
whether its reply was counted (`Cohort.acknowledged`); until then it keeps what it sent, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from anyfleet.core.codec_calls import compress
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Params
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, uplink
from anyfleet.core.return_checks import Caller
from anyfleet.core.slots import Compressed
from anyfleet.elastic import cut, paste

SENT = "sent"  # names what the last reply brought of a residual, in the state of a device


class SplitUpdate(NamedTuple):
    """The two parts of one update of a sub-model: what is left to send, and what was sent."""

    left: Params
    sent: Params


def compress_updates(
    cohort: Cohort, states: tuple[DeviceState, ...], update: Params, mask: Params, task: Task
) -> Compressed:
    """Return the updates of devices that were trained together, compressed with their residuals."""
    codec, blueprint = cohort.job.uplink, task.blueprint
    tree, trained = (
        each if len(cohort) > 1 else {n: v.unsqueeze(0) for n, v in each.items()}
        for each in (update, mask)
    )
    like = next(iter(task.params.values()))
    layout = uplink(cohort, blueprint, tuple(tree), like.dtype)
    # What was not trained does not count, so it must neither be sent nor taken for sent.
    tree = {n: v * trained[n].to(v) if n in trained else v for n, v in tree.items()}
    sent_fraction = torch.from_numpy(cohort.hyperparameters.sent_fraction).to(like.device)
    layout = replace(layout, key=layout.key.to(like.device))
    caller = Caller("uplink", codec, cohort.round_index)
    if not codec.state_name:
        return compress(tree, {}, sent_fraction, layout, caller)
    orders = zip(states, cohort.rows(), strict=True)
    known = [_residual_of_slice(state, order, task) for state, order in orders]
    left = {
        n: torch.stack([each.get(n, torch.zeros_like(v[0])) for each in known])
        for n, v in tree.items()
    }
    meant = {n: v * trained[n].to(v) if n in trained else v for n, v in left.items()}
    found = compress(tree, meant, sent_fraction, layout, caller)
    # A codec may restore 0 as noise: what was not trained stays as it was.
    still = {
        n: found.state[n] * trained[n].to(left[n]) + (left[n] - meant[n])
        for n in trained
        if n in left
    }
    return replace(found, state={**found.state, **still})


def _residual_of_slice(state: DeviceState, order: Cohort, task: Task) -> dict[str, Tensor]:
    """Return the residual of the sub-model that an order asks for."""
    slice_, (acknowledged,), job = order.slice_of(0), order.acknowledged, order.job
    known = residual_of(state, job.uplink.state_name, int(acknowledged))
    own = job.norm.own_names(task.blueprint, slice_)
    mine = {n: known[own.get(n, n)] for n in task.blueprint.params if own.get(n, n) in known}
    return cut(mine, slice_, task.blueprint)


def residual_of(state: DeviceState, name: str, acknowledged: int) -> dict[str, Tensor]:
    """Return the residual of the whole model; all of a reply that never arrived is part of it."""
    left = dict(state.tensors.get(name, {}))
    if state.last_sent_order == acknowledged:
        return left
    unacknowledged = state.tensors.get(SENT, {})
    both = {n: left[n] + value for n, value in unacknowledged.items() if n in left}
    return {**unacknowledged, **left, **both}


def after_sending(
    state: DeviceState, name: str, update: SplitUpdate, order: Cohort, task: Task
) -> DeviceState:
    """Return the state of a device when it sends this update in reply to an order."""
    slice_, (acknowledged,), blueprint = order.slice_of(0), order.acknowledged, task.blueprint
    before = residual_of(state, name, int(acknowledged))
    own = order.job.norm.own_names(blueprint, slice_)
    zeros = _zeros(update.left, task)
    onto = {name: before.get(own.get(name, name), zero) for name, zero in zeros.items()}
    left = _renamed(paste(update.left, onto, slice_, blueprint), own)
    sent = paste(update.sent, _zeros(update.sent, task), slice_, blueprint)
    tensors: Mapping[str, Params] = {
        **state.tensors,
        name: {**before, **left},
        SENT: _renamed(sent, own),
    }
    return replace(state, tensors=tensors, last_sent_order=int(order.id[0]))


def _renamed(tree: Params, own: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tree under the names of a width's own normalisation.

    Its residual is its own, and not another width's.
    """
    return {own.get(name, name): value for name, value in tree.items()}


def _zeros(tree: Params, task: Task) -> dict[str, Tensor]:
    return {name: torch.zeros_like(task.params[name]) for name in tree}
