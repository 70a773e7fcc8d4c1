"""What a message costs: the bits of every order and every reply are counted here.

Bits are counted three times: what an order would cost uncompressed, what it is expected to cost
(planners and devices decide by that), and what a message that exists costs. The ledger holds the
last.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints, distinct, grouped
from anyfleet.core.arriving import example
from anyfleet.core.check_in import MessageBits
from anyfleet.core.index_sets import pack_mask, pack_slice
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.core.messages import Kind, Params, Report, Trees
from anyfleet.core.method import Job
from anyfleet.core.orders import Cohort, IssuedOrders
from anyfleet.core.signals import FollowsSentFraction
from anyfleet.core.slots import Codec, Measure, Norm, Slack
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import Blueprint, Slice, narrowed

NUMBER_BITS = 32  # of one uncompressed number: of a tensor, of a report, of a choice
FETCH_BITS = 64  # of the id of the order whose result is fetched

_SMALLEST = 1e-6  # a sent fraction at which a codec sends as little as it can
_MANY = 1 << 17  # entries from which on the headers of a codec no longer matter
_SPARE = 1.04  # how much longer a message may be that depends on its content
# Kernels of an update are unequally strong; these are deviations of the logarithm of their
# strength. The first gives messages as long as those of real networks. With the second, few
# kernels hold most of the update.
_USUAL, _HEAVY = 0.7, 1.5
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_USUAL_SHAPES: _Shapes = (("convolution", (64, 64, 3, 3)), ("linear", (128, 512)), ("bias", (64,)))

# --- uncompressed -----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def uncompressed_bits(
    slice_: Slice,
    norm: Norm,
    blueprint: Blueprint,
    report: tuple[str, ...] = (),
    measures: tuple[Measure, ...] = (),
) -> tuple[float, float]:
    """Return the bits down and up of a training order with this slice when nothing is compressed.

    Index sets count down, the numbers named in `report` count up.
    """
    home = norm.stays(blueprint) | set(blueprint.frozen)
    local, statistics = blueprint.local(slice_), norm.travels(blueprint)
    sent = set(slice_.sent(blueprint)) - home
    layers = (layer for layer in blueprint.layers if sent & set(layer.params))
    measured = {n for layer in layers for n in layer.buffers} & statistics
    down = local.numel([*(n for n in local.params if n not in home), *statistics])
    up = local.numel([*sent, *measured])
    trained = slice_.sent(blueprint)
    lengths = {n: each.length(n, local, trained) for each in measures for n in each.vectors}
    up += sum(lengths.get(name, 1) for name in report)
    return float(NUMBER_BITS * down + index_bits(slice_, blueprint)), float(NUMBER_BITS * up)


@lru_cache(maxsize=4096)
def model_bits(slice_: Slice, norm: Norm, blueprint: Blueprint) -> float:
    """Return the bits of an uncompressed sub-model as an order carries it, and nothing else."""
    home = norm.stays(blueprint) | set(blueprint.frozen)
    local = blueprint.local(slice_)
    return float(NUMBER_BITS * local.numel([name for name in local.params if name not in home]))


@lru_cache(maxsize=4096)
def update_bits(slice_: Slice, norm: Norm, blueprint: Blueprint) -> float:
    """Return the bits of an uncompressed update, without statistics and report."""
    sent = sent_names(slice_, norm, blueprint)
    return float(NUMBER_BITS * blueprint.local(slice_).numel(sent))


@lru_cache(maxsize=4096)
def sent_names(slice_: Slice, norm: Norm, blueprint: Blueprint) -> tuple[str, ...]:
    """Return the names of the parameters that a device with this slice sends."""
    home = norm.stays(blueprint) | set(blueprint.frozen)
    return tuple(name for name in slice_.sent(blueprint) if name not in home)


# --- expected ---------------------------------------------------------------------------------


def expected_bits(
    slice_: Slice, job: Job, blueprint: Blueprint, sent_fraction: float = math.nan
) -> MessageBits:
    """Return what will travel for an order that asks for this sent fraction (NaN: not asked).

    The message of a codec whose size depends on the update is taken to be that of a made-up update
    with the shapes of the slice.
    """
    down, up = uncompressed_bits(slice_, job.norm, blueprint, job.report, job.measures)
    model = model_bits(slice_, job.norm, blueprint)
    update, codec = update_bits(slice_, job.norm, blueprint), job.uplink
    shapes = _shapes(blueprint.local(slice_), sent_names(slice_, job.norm, blueprint))
    follows = FollowsSentFraction() in codec.provides
    if follows:
        least, most = (_typical(codec, end, shapes) for end in (_SMALLEST, 1.0))
        own = (
            _typical(codec, math.nan, shapes)
            if math.isnan(sent_fraction)
            else min(max(sent_fraction, least), most)
        )
    else:
        spare = 1.0 if codec.slack == Slack() else _SPARE
        own = least = most = spare * _typical(codec, math.nan, shapes)
    received = _typical(job.downlink, math.nan, shapes)
    return MessageBits(
        down=down - model + received * model,
        up=up - update + own * update,
        update=update,
        sent_fraction=own,
        follows=follows,
        least_fraction=least,
        most_fraction=most,
    )


@lru_cache(maxsize=4096)
def _shapes(local: Blueprint, names: tuple[str, ...]) -> _Shapes:
    return tuple((name, local.shape(name)) for name in names)


@lru_cache(maxsize=4096)
def _typical(codec: Codec, asked: float, shapes: _Shapes) -> float:
    """Return `typical_sent_fraction`, once for all slices with these shapes.

    "Not asked" must be `math.nan` itself: two NaN objects are two entries of the cache.
    """
    many = sum(prod(shape) for _, shape in shapes) > _MANY
    return typical_sent_fraction(codec, asked, _USUAL_SHAPES if many else shapes)


def typical_sent_fraction(
    codec: Codec, asked: float = math.nan, shapes: _Shapes = _USUAL_SHAPES
) -> float:
    """Return the fraction of its bits that a codec sends of a made-up update with these shapes.

    `asked` is the sent fraction that an order asks for (NaN: not asked). 1 without tensors.
    """
    rows, layout = _made_up(shapes, _USUAL)
    if not rows:
        return 1.0
    target = torch.tensor([asked], dtype=torch.float64)
    compressed = codec.compress(rows, target, layout, {})
    return float(compressed.bits.sum()) / (NUMBER_BITS * sum(prod(shape) for _, shape in shapes))


@lru_cache(maxsize=1)
def heavy_update() -> tuple[Params, MessageLayout]:
    """Return a made-up update, flattened, of which few kernels hold most, and its layout."""
    rows, layout = _made_up(_USUAL_SHAPES, _HEAVY)
    return {**rows, "bias": 10 * rows["bias"]}, layout


def _made_up(shapes: _Shapes, deviation: float) -> tuple[Params, MessageLayout]:
    tensors = {name: TensorLayout(shape, (prod(shape),)) for name, shape in shapes}
    layout = MessageLayout(tensors, torch.float32, rng.root(0, "look-up")[None])
    return {name: _drawn(name, tensor, deviation) for name, tensor in tensors.items()}, layout


def _drawn(name: str, tensor: TensorLayout, deviation: float) -> Tensor:
    key, kernels = rng.root(0, name), tensor.entries // tensor.unit
    strength = (deviation * rng.normal(rng.fold(key, "strength"), kernels)).exp()
    values = rng.normal(key, tensor.entries) * strength.repeat_interleave(tensor.unit)
    return values.float()[None]


# --- of messages that exist -------------------------------------------------------------------


def index_bits(slice_: Slice, blueprint: Blueprint) -> int:
    """Return the bits of the index sets of a slice; 0 for the whole model."""
    return 8 * len(pack_slice(slice_, blueprint))


def menu_bits(menu: Iterable[Slice], blueprint: Blueprint) -> int:
    """Return the bits of the index sets of a menu; 0 without one."""
    return sum(index_bits(entry, blueprint) for entry in menu)


def request_bits(order: Cohort, blueprint: Blueprint) -> float:
    """Return the bits of a single order that come through whatever its link loses.

    These are the index sets of its slice and of its menu.
    """
    slice_, menu = order.slice_of(0), order.menu_of(0)
    return float(index_bits(slice_, blueprint) + menu_bits(menu, blueprint))


def order_extra_bits(trees: Trees, order: Cohort, blueprint: Blueprint) -> float:
    """Return the bits of a single order with these trees, without its model."""
    if order.kind == Kind.FETCH:
        return fetch_bits(order.slice_of(0), blueprint)
    return request_bits(order, blueprint) + statistics_bits(trees)


def fetch_bits(slice_: Slice, blueprint: Blueprint) -> float:
    """Return the bits of an order that fetches a held result with this slice."""
    return float(FETCH_BITS + index_bits(slice_, blueprint))


def reply_extra_bits(trees: Trees, masked: float, report: Report, order: Cohort) -> float:
    """Return the bits of a reply with these trees, without its model.

    `masked` are the bits of its masks (`mask_bits`); `order` is the single order it replies to.
    """
    chosen = any(order.menu_of(0))
    return masked + _beside_model(trees, report, order.kind, order.job.report, chosen=chosen)


def _beside_model(
    trees: Trees, report: Report, kind: Kind, asked: tuple[str, ...], *, chosen: bool
) -> float:
    """Return the bits of a reply without model and masks; `asked` names what parts asked for."""
    if kind == Kind.STATISTICS:
        return float(NUMBER_BITS * sum(each.numel() for each in _statistics(trees)))
    told = report_bits(requested(report, asked)) + (NUMBER_BITS if chosen else 0)
    if kind == Kind.HOLD:
        # One number says that training is done, even if nobody asked for any.
        return told or NUMBER_BITS
    if not trees:  # an evaluation, a report, or the news that there is nothing to fetch
        return report_bits(report)
    # The report of a held result went ahead of it when training ended.
    return statistics_bits(trees) + (told if kind == Kind.TRAIN else 0.0)


def stack_extra_bits(
    stack: Stack, masked: Floats, orders: Cohort, kind: Kind | None = None
) -> Floats:
    """Return the bits of the replies of a stack to these orders, without their models.

    `masked` are the bits of their masks (`stacked_mask_bits`). A `kind` is that of the orders to
    which these would be the replies, if it is another one.
    """
    # Only statistics are counted here; the other trees need not be taken apart.
    trees = {name: _first(tree) if name == "buffers" else {} for name, tree in stack.trees.items()}
    # And how many numbers are reported, of which some may still be computed.
    like = Stack(report=example(stack.report)).report_of(0)
    own = trees, like, kind or orders.kind, orders.job.report
    bits = masked + _beside_model(*own, chosen=False)
    if not orders.menus:
        return bits
    # Replies of a stack have the same shapes: they differ in whether they name a choice.
    chosen = np.array([*map(any, orders.menus), False])[orders.menu_index]
    return np.where(chosen, masked + _beside_model(*own, chosen=True), bits)


def _first(tree: Params) -> Params:
    return {name: value[0] for name, value in tree.items()}


def statistics_bits(trees: Trees) -> float:
    """Return the bits of the normalisation statistics that travel beside a model; 0 without."""
    return float(sum(8 * each.element_size() * each.numel() for each in _statistics(trees)))


def _statistics(trees: Trees) -> Iterable[Tensor]:
    return trees.get("buffers", {}).values()


def mask_bits(masks: Params) -> float:
    """Return the bits that say which entries count; 0 without masks."""
    return float(sum(8 * len(pack_mask(mask)[1]) for mask in masks.values()))


def mask_variation(masks: Params) -> Tensor:
    """Return along which of their dimensions the masks of a stack vary: [devices, dimensions].

    Dimensions along which a mask is a view of a single entry are left out.
    """
    flags = [
        (mask != mask.narrow(dim, 0, 1)).flatten(1).any(1)
        for mask in map(_unexpanded, masks.values())
        for dim in _dimensions(mask)
    ]
    some = next(iter(masks.values()))
    if not flags:
        return some.new_empty(len(some), 0)
    # Of a mask that all devices share there is one row.
    return torch.stack([own.expand(len(some)) for own in flags], dim=1)


def stacked_mask_bits(masks: Params, variation: NDArray[Any]) -> Floats:
    """Return what `mask_bits` returns, of every device of a stack, [devices].

    `variation` says along which dimensions masks vary (`mask_variation`), as an array.
    """
    bits, flags = np.zeros(len(variation)), iter(variation.T)
    for mask in map(_unexpanded, masks.values()):
        sizes = [np.where(next(flags), mask.shape[dim], 1) for dim in _dimensions(mask)]
        bits += 8 * np.ceil(prod(sizes, start=np.ones(len(bits))) / 8)
    return bits


def _unexpanded(mask: Tensor) -> Tensor:
    """Return a stack of masks without the dimensions along which one entry stands for all.

    One device is left of those that share a mask.
    """
    for dim in range(mask.ndim):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _dimensions(mask: Tensor) -> list[int]:
    """Return the dimensions of a stack of masks along which they may vary."""
    return [dim for dim in range(1, mask.ndim) if mask.shape[dim] > 1]


def requested(report: Report, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of a report that some part of the method asked for: only that is charged."""
    return {name: report[name] for name in names if name in report}


def report_bits(report: Report) -> float:
    """Return the bits of all numbers of a report."""
    count = sum(len(v) if isinstance(v, tuple) else 1 for v in report.values())
    return float(NUMBER_BITS * count)


class Received(NamedTuple):
    """The sub-models that came in with replies: fewer columns than ordered when a link cut them."""

    slices: tuple[Slice, ...]  # the different ones
    slice_index: Ints  # the number of each reply's slice
    sent_fraction: Floats  # the bits of each reply over those of an uncompressed one, 1 at most


def received(orders: IssuedOrders, replies: Replies, job: Job, blueprint: Blueprint) -> Received:
    """Return what came in with the replies to these orders.

    Of a reply that a link cut, both kinds of bits count only the width that came through.
    """
    first, index = grouped(orders.slice_index, replies.delivered_width)
    slices, number = distinct(
        [
            narrowed(orders.slice_of(row), float(replies.delivered_width[row]), blueprint)
            for row in first
        ]
    )
    index = number[index]
    sizes = [
        uncompressed_bits(each, job.norm, blueprint, job.report, job.measures)[1] for each in slices
    ]
    whole = np.array(sizes, dtype=np.float64)[index]
    share = np.divide(replies.bits, whole, out=np.ones(len(whole)), where=whole > 0)
    return Received(slices, index, np.minimum(1.0, share))
