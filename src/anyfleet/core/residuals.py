"""Residuals: the part of a device's updates that no reply has brought to the server yet.

Codecs with error feedback add it to the next update; `core.device_states` keeps it.
"""

from dataclasses import replace

import torch

from anyfleet.core.codec_calls import compress
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.messages import Params
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, uplink
from anyfleet.core.return_checks import Caller
from anyfleet.core.slots import Compressed


def compress_updates(
    cohort: Cohort, states: DeviceStates, update: Params, mask: Params, task: Task
) -> Compressed:
    """Return the updates [devices, …] of a stack, compressed with the residuals of its devices."""
    codec = cohort.job.uplink
    like = next(iter(task.params.values()))
    layout = uplink(cohort, task.blueprint, tuple(update), like.dtype)
    # What was not trained does not count, so it must neither be sent nor taken for sent.
    tree = {n: v * mask[n].to(v) if n in mask else v for n, v in update.items()}
    asked = torch.from_numpy(cohort.hyperparameters.sent_fraction)
    # Nobody need wait until they are there: the driver copies such memory before it returns.
    sent_fraction = asked.to(like.device, non_blocking=True)
    layout = replace(layout, key=layout.key.to(like.device, non_blocking=True))
    caller = Caller("uplink", codec, cohort.round_index)
    if not codec.state_name:
        return compress(tree, {}, sent_fraction, layout, caller)
    known = states.residual(cohort, tuple(tree))
    left = {n: known[n] if n in known else torch.zeros_like(v) for n, v in tree.items()}
    meant = {n: v * mask[n].to(v) if n in mask else v for n, v in left.items()}
    found = compress(tree, meant, sent_fraction, layout, caller)
    # A codec may restore 0 as noise: what was not trained stays as it was.
    still = {
        n: found.state[n] * mask[n].to(left[n]) + (left[n] - meant[n]) for n in mask if n in left
    }
    return replace(found, state={**found.state, **still})
