"""How long messages are: expected before there are any, measured afterwards."""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.check_in import MessageBits
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.core.messages import UNCUT, Params, Replies
from anyfleet.core.method import Job
from anyfleet.core.orders import Cohort
from anyfleet.core.packing import FLOAT_BITS, model_bits, sent_names, traffic, update_bits
from anyfleet.core.slots import Codec, Slack
from anyfleet.elastic import Blueprint, Slice, narrowed

_NOTHING = 1e-6  # a rate at which a codec sends as little as it can
_MANY = 1 << 17  # entries from which on headers no longer matter
_SPARE = 1.04  # what depends on the content may be so much longer than expected
# Kernels of an update are unequally strong, by the deviation of the logarithm. The first is that of
# updates of real networks, by the length of their messages; with the second few hold most of it.
_USUAL, _HEAVY = 0.7, 1.5
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_USUAL_SHAPES: _Shapes = (("convolution", (64, 64, 3, 3)), ("linear", (128, 512)), ("bias", (64,)))

# --- before -----------------------------------------------------------------------------------


def expected_bits(
    slice_: Slice, job: Job, blueprint: Blueprint, sent_fraction: float = 1.0
) -> MessageBits:
    """What will travel for an order that asks for this rate (1: for none).

    Of codecs whose messages depend on the update, as of a made-up one with the shapes of the slice.
    """
    down, up = traffic(slice_, job.norm, blueprint, job.report, job.measures)
    model = model_bits(slice_, job.norm, blueprint)
    update, codec = update_bits(slice_, job.norm, blueprint), job.uplink
    shapes = _shapes(blueprint.local(slice_), sent_names(slice_, job.norm, blueprint))
    if codec.follows_sent_fraction:
        least, most = (_rate_of(codec, end, shapes) for end in (_NOTHING, UNCUT))
        own = (
            _rate_of(codec, 1.0, shapes)
            if sent_fraction >= 1
            else min(max(sent_fraction, least), most)
        )
    else:
        spare = 1.0 if codec.slack == Slack() else _SPARE
        own = least = most = spare * _rate_of(codec, 1.0, shapes)
    coming = _rate_of(job.downlink, 1.0, shapes)
    return MessageBits(
        down=down - model + coming * model,
        up=up - update + own * update,
        update=update,
        sent_fraction=own,
        follows=codec.follows_sent_fraction,
        least_fraction=least,
        most_fraction=most,
    )


@lru_cache(maxsize=4096)
def _shapes(local: Blueprint, names: tuple[str, ...]) -> _Shapes:
    return tuple((name, local.shape(name)) for name in names)


@lru_cache(maxsize=4096)
def _rate_of(codec: Codec, rate: float, shapes: _Shapes) -> float:
    """The share of the bits that a codec sends of such tensors: whichever channels they hold."""
    many = sum(prod(shape) for _, shape in shapes) > _MANY
    return typical_sent_fraction(codec, rate, _USUAL_SHAPES if many else shapes)


def typical_sent_fraction(
    codec: Codec, rate: float = 1.0, shapes: _Shapes = _USUAL_SHAPES
) -> float:
    """The share of its bits that a codec sends of a made-up update of some shapes."""
    laid, envelope = _made_up(shapes, _USUAL)
    if not laid:
        return 1.0
    asked = torch.tensor([rate], dtype=torch.float64)
    squeezed = codec.compress(envelope.unflattened(laid), {}, asked, envelope)
    return float(squeezed.bits.sum()) / (FLOAT_BITS * sum(prod(shape) for _, shape in shapes))


@lru_cache(maxsize=1)
def heavy_update() -> tuple[Params, MessageLayout]:
    """A made-up update of which few kernels hold most, laid out: look-ups begin with it."""
    laid, envelope = _made_up(_USUAL_SHAPES, _HEAVY)
    return {**laid, "bias": 10 * laid["bias"]}, envelope


def _made_up(shapes: _Shapes, deviation: float) -> tuple[Params, MessageLayout]:
    lanes = {name: TensorLayout(shape, (prod(shape),)) for name, shape in shapes}
    envelope = MessageLayout(lanes, torch.float32, rng.root(0, "look-up")[None])
    return {name: _drawn(name, lane, deviation) for name, lane in lanes.items()}, envelope


def _drawn(name: str, lane: TensorLayout, deviation: float) -> Tensor:
    key, kernels = rng.root(0, name), lane.entries // lane.unit
    strength = (deviation * rng.normal(rng.fold(key, "strength"), kernels)).exp()
    values = rng.normal(key, lane.entries) * strength.repeat_interleave(lane.unit)
    return values.float()[None]


# --- afterwards -------------------------------------------------------------------------------


def measured_sent_fraction(order: Cohort, update: Replies, blueprint: Blueprint) -> float:
    """The bits of an answer over those of an uncompressed one, 1 at most; batches of one.

    Of a message that a link cut, what came through over what that would have been.
    """
    held = narrowed(order.slices[0], float(update.delivered_width[0]), blueprint)
    job = order.job
    _, whole = traffic(held, job.norm, blueprint, job.report, job.measures)
    return min(1.0, float(update.bits[0]) / whole) if whole else 1.0
