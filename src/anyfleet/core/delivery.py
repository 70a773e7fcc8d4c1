"""What a failing link lets through of a message: the leading columns (specification §1.9).

What a cut removes from the model it also removes from the bits. The request of an order (its index
sets and its menu) always comes through: a device that knows nothing of an order cannot miss it.
"""

from dataclasses import replace

import numpy as np
from torch import dtype, float32

from anyfleet.core.layout import MessageLayout, Symbols, dense
from anyfleet.core.message_size import mask_bits, reply_extra_bits, request_bits, statistics_bits
from anyfleet.core.messages import Params, Trees
from anyfleet.core.method import Job
from anyfleet.core.orders import Cohort, Download, downlink, grid, uplink
from anyfleet.core.slots import Codec
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Blueprint, Slice, within


def unpadded(job: Job) -> str:
    """Return why the method cannot use links that lose columns, or "".

    What a link lost of a download comes from the device's own earlier model (specification §1.8).
    """
    if job.send == "weights" and job.cache:
        return ""
    return (
        "links of this fleet lose columns, and padding a cut download needs a device that keeps "
        'its model and sends all of it; add send = "weights" and cache = true.'
    )


def cut_order(order: Cohort, width: float, blueprint: Blueprint) -> Cohort:
    """Return a single order as it reaches its device through a link that lets `width` through."""
    columns = columns_of(order, width)
    if columns == grid(order)[0] or "model" not in order.trees_of(0):
        return order
    slice_, requested = order.slice_of(0), request_bits(order, blueprint)
    if not columns:
        trees, symbols, bits = _emptied(order.trees_of(0)), None, 0.0
    else:
        local, sub = blueprint.local(slice_), within(slice_, width, blueprint)
        layout = downlink(order, blueprint, *_names_and_type(order.trees_of(0)["model"]))
        symbols, bits = _leading(order.download_of(0).symbols, order.job.downlink, layout, columns)
        trees = _narrowed(order.trees_of(0), sub, local)
        bits += statistics_bits(trees)
    return replace(
        order.with_downloads(Download(trees, symbols, bits)),
        bits=np.array([requested + bits]),
        delivered_width=np.array([width]),
    )


def cut_reply(reply: Replies, order: Cohort, width: float, blueprint: Blueprint) -> Replies:
    """Return a single reply as it reaches the server through a link that lets `width` through."""
    columns = columns_of(order, width)
    if columns == grid(order)[0] or order.job.send not in reply.trees_of(0):
        return reply
    if not columns:
        bare = reply.with_contents(trees={}, symbols=None, masks={}, kept={})
        return replace(bare, bits=np.zeros(1), delivered_width=np.zeros(1))
    slice_ = order.slice_of(0)
    local, sub = blueprint.local(slice_), within(slice_, width, blueprint)
    layout = uplink(order, blueprint, *_names_and_type(reply.trees_of(0)[order.job.send]))
    symbols, bits = _leading(reply.symbols_of(0), order.job.uplink, layout, columns)
    trees = _narrowed(reply.trees_of(0), sub, local)
    mask, kept = (dense(tree, sub, local) for tree in (reply.masks_of(0), reply.kept_of(0)))
    bits += reply_extra_bits(trees, mask_bits(mask), reply.report_of(0), order)
    came = reply.with_contents(trees=trees, symbols=symbols, masks=mask, kept=kept)
    return replace(came, bits=np.array([bits]), delivered_width=np.array([width]))


def columns_of(order: Cohort, width: float) -> int:
    """Return how many leading columns of a single order's messages make up this width."""
    count, column_width = grid(order)
    return count if width >= 1 else min(count, round(width / column_width))


def width_of(order: Cohort, columns: int) -> float:
    """Return the width that so many leading columns have; 1 for all that was ordered."""
    count, column_width = grid(order)
    return 1.0 if columns >= count else columns * column_width


def _leading(
    symbols: Symbols | None, codec: Codec, layout: MessageLayout, columns: int
) -> tuple[Symbols, float]:
    """Return the symbols of the leading columns, and their bits."""
    if symbols is None:
        raise ValueError("A message without symbols cannot be cut: it has been received already.")
    part = symbols.leading(columns)
    return part, float(codec.bits(part, layout)[0, :columns].sum())


def _names_and_type(tree: Params) -> tuple[tuple[str, ...], dtype]:
    return tuple(tree), next((value.dtype for value in tree.values()), float32)


def _narrowed(trees: Trees, sub: Slice, local: Blueprint) -> dict[str, Params]:
    return {tree: dense(values, sub, local) for tree, values in trees.items()}


def _emptied(trees: Trees) -> dict[str, Params]:
    return {tree: {} for tree in trees}
