"""How long messages are: expected before there are any, measured afterwards."""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.coding import Codec
from anyfleet.elastic import Blueprint, Slice, narrowed
from anyfleet.envelope import Envelope, Lane
from anyfleet.method import Job
from anyfleet.offers import Traffic
from anyfleet.packing import FLOAT_BITS, model_bits, traffic, update_bits
from anyfleet.types import UNCUT, Orders, Params, Updates

_NOTHING = 1e-6  # a rate at which a codec sends as little as it can

# --- before -----------------------------------------------------------------------------------


def expected(slice_: Slice, job: Job, blueprint: Blueprint, rate: float = 1.0) -> Traffic:
    """What will travel for an order that asks for this rate (1: for none)."""
    down, up = traffic(slice_, job.norm, blueprint, job.report)
    model, update = (
        model_bits(slice_, job.norm, blueprint),
        update_bits(slice_, job.norm, blueprint),
    )
    share, codec = expected_rate(job.uplink, rate), job.uplink
    least, most = rates_of(codec) if codec.adapts else (share, share)
    return Traffic(
        down=down - model + expected_rate(job.downlink) * model,
        up=up - update + share * update,
        update=update,
        rate=share,
        adapts=codec.adapts,
        least=least,
        most=most,
    )


@lru_cache(maxsize=4096)
def expected_rate(codec: Codec, rate: float = 1.0) -> float:
    """The share of an update's bits that a codec sends: as asked for, or of a typical update."""
    if codec.adapts and rate < 1:
        least, most = rates_of(codec)
        return min(max(rate, least), most)
    return _typical_rate(codec, rate)


@lru_cache(maxsize=256)
def rates_of(codec: Codec) -> tuple[float, float]:
    """About the lowest and the highest rate that a codec makes use of.

    Positions and headers take their bits whatever is asked for, and no codec that leaves entries
    out sends all of them.
    """
    return _typical_rate(codec, _NOTHING), _typical_rate(codec, UNCUT)


def _typical_rate(codec: Codec, rate: float) -> float:
    laid, envelope = typical_update()
    squeezed = codec.squeeze(envelope.shaped(laid), {}, torch.tensor([rate]), envelope)
    entries = sum(lane.entries for lane in envelope.lanes.values())
    return float(squeezed.bits.sum()) / (FLOAT_BITS * entries)


@lru_cache(maxsize=1)
def typical_update() -> tuple[Params, Envelope]:
    """A made-up update like those of real networks, laid out: few kernels hold most of it."""
    shapes = {"convolution": (64, 64, 3, 3), "linear": (128, 512), "bias": (64,)}
    lanes = {name: Lane(shape, (prod(shape),)) for name, shape in shapes.items()}
    envelope = Envelope(lanes, torch.float32, rng.root(0, "look-up")[None])
    laid = {name: _heavy_tailed(name, lane) for name, lane in lanes.items()}
    return {**laid, "bias": 10 * laid["bias"]}, envelope


def _heavy_tailed(name: str, lane: Lane) -> Tensor:
    key = rng.root(0, name)
    strength = (1.5 * rng.normal(rng.fold(key, "strength"), lane.entries // lane.unit)).exp()
    values = rng.normal(key, lane.entries) * strength.repeat_interleave(lane.unit)
    return values.float()[None]


# --- afterwards -------------------------------------------------------------------------------


def measured_rate(order: Orders, update: Updates, blueprint: Blueprint) -> float:
    """The bits of an answer over those of an uncompressed one, 1 at most; batches of one.

    Of a message that a link cut, what came through over what that would have been.
    """
    held = narrowed(order.slices[0], float(update.delivered[0]), blueprint)
    _, whole = traffic(held, order.job.norm, blueprint, order.job.report)
    return min(1.0, float(update.bits[0]) / whole) if whole else 1.0
