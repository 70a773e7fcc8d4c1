"""What a failing link leaves of a message: the leading columns of the model (specification §1.9).

What a cut removes from the model it removes from the bits. What is asked, the index sets and the
menu, always comes through: a device that knows nothing of an order cannot miss any of it.
"""

from dataclasses import replace

import numpy as np
from torch import dtype, float32

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Kind, Params, Replies, Report, Trees
from anyfleet.core.method import Job
from anyfleet.core.orders import Cohort, downlink, grid, uplink
from anyfleet.core.packing import dense, index_bits, mask_bits
from anyfleet.core.reports import reply_bits
from anyfleet.core.slots import Codec
from anyfleet.elastic import Blueprint, Slice, within


def unpadded(job: Job) -> str:
    """Why links that lose columns are none for a method; empty if it can live with them.

    What a link lost of a download comes from the device's own earlier model (specification §1.8).
    """
    if job.send == "weights" and job.cache:
        return ""
    return (
        "links of this fleet lose columns, and padding a cut download needs a device that keeps "
        'its model and sends all of it; add send = "weights" and cache = true.'
    )


def cut_order(order: Cohort, width: float, blueprint: Blueprint) -> Cohort:
    """One order as it reaches its device when columns up to `width` of the model come through."""
    columns = columns_of(order, width)
    if columns == grid(order)[0] or "model" not in order.trees[0]:
        return order
    (slice_,), asked = order.slices, asked_bits(order, blueprint)
    if not columns:
        trees, symbols, bits = _nothing(order.trees[0]), None, 0.0
    else:
        local, sub = blueprint.local(slice_), within(slice_, width, blueprint)
        around = downlink(order, blueprint, *_sort(order.trees[0]["model"]))
        symbols, bits = _part(order.symbols[0], order.job.downlink, around, columns)
        trees = _leading(order.trees[0], sub, local)
        bits += statistics_bits(trees)
    return replace(
        order,
        trees=(trees,),
        symbols=(symbols,),
        bits=np.array([asked + bits]),
        delivered_width=np.array([width]),
    )


def cut_reply(reply: Replies, order: Cohort, width: float, blueprint: Blueprint) -> Replies:
    """One answer as it reaches the server when columns up to `width` come through."""
    columns = columns_of(order, width)
    if columns == grid(order)[0] or order.job.send not in reply.trees[0]:
        return reply
    if not columns:
        bare = replace(reply, trees=({},), symbols=(None,), masks=({},), kept=({},))
        return replace(bare, bits=np.zeros(1), delivered_width=np.zeros(1))
    (slice_,) = order.slices
    local, sub = blueprint.local(slice_), within(slice_, width, blueprint)
    around = uplink(order, blueprint, *_sort(reply.trees[0][order.job.send]))
    symbols, bits = _part(reply.symbols[0], order.job.uplink, around, columns)
    trees = _leading(reply.trees[0], sub, local)
    mask, kept = (dense(tree[0], sub, local) for tree in (reply.masks, reply.kept))
    bits += beside_bits(trees, mask, reply.report[0], order)
    return replace(
        reply,
        trees=(trees,),
        symbols=(symbols,),
        masks=(mask,),
        kept=(kept,),
        bits=np.array([bits]),
        delivered_width=np.array([width]),
    )


def asked_bits(order: Cohort, blueprint: Blueprint) -> float:
    """Of what comes through whatever a link loses: which slice, and the menu."""
    (slice_,), (menu,) = order.slices, order.menus
    return float(sum(index_bits(each, blueprint) for each in (slice_, *menu)))


def beside_bits(trees: Trees, mask: Params, report: Report, order: Cohort) -> float:
    """Of all that an answer has besides its model, when a link has cut it."""
    bits = statistics_bits(trees) + mask_bits(mask)
    if order.kind == Kind.TRAIN:
        # It goes ahead of the columns. With results that wait on the device, it went long ago.
        bits += reply_bits(report, order)
    return bits


def statistics_bits(trees: Trees) -> float:
    """Of the normalisation statistics that travel beside a model."""
    told = trees.get("buffers", {}).values()
    return float(sum(8 * value.element_size() * value.numel() for value in told))


def columns_of(order: Cohort, width: float) -> int:
    """How many columns of its message make up this width of the model."""
    count, column = grid(order)
    return count if width >= 1 else min(count, round(width / column))


def width_of(order: Cohort, columns: int) -> float:
    """The width of the model that so many leading columns have; 1 is all that was ordered."""
    count, column = grid(order)
    return 1.0 if columns >= count else columns * column


def _part(
    symbols: Symbols, codec: Codec, around: MessageLayout, columns: int
) -> tuple[Symbols, float]:
    part = symbols.leading(columns)
    return part, float(codec.bits(part, around)[0, :columns].sum())


def _sort(tree: Params) -> tuple[tuple[str, ...], dtype]:
    """Which tensors there are, and of what numbers."""
    return tuple(tree), next((value.dtype for value in tree.values()), float32)


def _leading(trees: Trees, sub: Slice, local: Blueprint) -> dict[str, Params]:
    return {tree: dense(values, sub, local) for tree, values in trees.items()}


def _nothing(trees: Trees) -> dict[str, Params]:
    return {tree: {} for tree in trees}
