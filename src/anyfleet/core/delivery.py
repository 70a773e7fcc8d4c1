"""What a failing link lets through of a message: the leading columns (specification §1.9).

What a cut removes from the model it also removes from the bits. The request of an order (its index
sets and its menu) always comes through: a device that knows nothing of an order cannot miss it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, dtype, float32

from anyfleet.arrays import Flags, Floats, Ints, alike
from anyfleet.core.layout import MessageLayout, Symbols, dense
from anyfleet.core.message_size import (
    mask_variation,
    request_bits,
    stack_extra_bits,
    stacked_mask_bits,
    statistics_bits,
)
from anyfleet.core.messages import Params
from anyfleet.core.method import Job
from anyfleet.core.orders import Cohort, Download, downlink, grid, uplink
from anyfleet.core.slots import Codec
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import Blueprint, cut_stack, within


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


def cut_orders(orders: Cohort, widths: Floats, blueprint: Blueprint) -> Cohort:
    """Return orders as they reach their devices through links that let these widths through."""
    columns = columns_of(orders, widths)
    with_model = np.array([*("model" in each.trees for each in orders.downloads), False])
    cut = (columns < _whole(orders)) & with_model[orders.download_index]
    if not cut.any():
        return orders
    downloads, index = list(orders.downloads), orders.download_index.copy()
    bits = orders.bits.copy()
    for rows in _same_message(cut, orders, widths, orders.download_index, orders.menu_index):
        order, first = orders.take(rows[:1]), rows[0]
        part = _cut_download(order, int(columns[first]), float(widths[first]), blueprint)
        bits[rows] = request_bits(order, blueprint) + part.bits
        index[rows] = len(downloads)
        downloads.append(part)
    return replace(
        orders,
        downloads=tuple(downloads),
        download_index=index,
        bits=bits,
        delivered_width=np.where(cut, widths, orders.delivered_width),
    )


def _cut_download(order: Cohort, columns: int, width: float, blueprint: Blueprint) -> Download:
    """Return what is left of the download of a single order."""
    trees, slice_ = order.trees_of(0), order.slice_of(0)
    if not columns:
        return Download({tree: {} for tree in trees})
    sub = within(slice_, width, blueprint)
    layout = downlink(order, blueprint, *_names_and_type(trees["model"]))
    symbols, bits = _leading(order.download_of(0).symbols, order.job.downlink, layout, columns)
    local = blueprint.local(slice_)
    small = {tree: dense(values, sub, local) for tree, values in trees.items()}
    return Download(small, symbols, float(bits[0]) + statistics_bits(small))


def cut_replies(replies: Replies, orders: Cohort, widths: Floats, blueprint: Blueprint) -> Replies:
    """Return replies as they reach the server through links that let these widths through."""
    columns, send = columns_of(orders, widths), orders.job.send
    with_model = np.array([*(send in stack.trees for stack in replies.stacks), False])
    cut = (columns < _whole(orders)) & with_model[replies.stack_index]
    if not cut.any():
        return replies
    stacks, index, place = list(replies.stacks), replies.stack_index.copy(), replies.place.copy()
    bits = replies.bits.copy()
    for rows in _same_message(cut, orders, widths, replies.stack_index):
        stack = replies.stacks[int(replies.stack_index[rows[0]])].take(replies.place[rows])
        came = int(columns[rows[0]]), float(widths[rows[0]])
        part, bits[rows] = _cut_stack(stack, orders.take(rows), *came, blueprint)
        index[rows], place[rows] = len(stacks), np.arange(len(rows))
        stacks.append(part)
    return replace(
        replies,
        stacks=tuple(stacks),
        stack_index=index,
        place=place,
        bits=bits,
        delivered_width=np.where(cut, widths, replies.delivered_width),
    )


def _cut_stack(
    stack: Stack, orders: Cohort, columns: int, width: float, blueprint: Blueprint
) -> tuple[Stack, Floats]:
    """Return what is left of the replies of a stack to orders with one slice, and their bits."""
    if not columns:
        return Stack(report=stack.report), np.zeros(len(orders))
    slice_, job = orders.slice_of(0), orders.job
    local, sub = blueprint.local(slice_), within(slice_, width, blueprint)
    layout = uplink(orders, blueprint, *_names_and_type(stack.trees[job.send]))
    symbols, bits = _leading(stack.symbols, job.uplink, layout, columns)

    def narrowed(tree: Params) -> dict[str, Tensor]:
        return {n: part.contiguous() for n, part in cut_stack(tree, sub, local).items()}

    came = Stack(
        trees={tree: narrowed(values) for tree, values in stack.trees.items()},
        symbols=symbols,
        masks=narrowed(stack.masks),
        kept=narrowed(stack.kept),
        report=stack.report,
    )
    masked = np.zeros(len(orders))
    if came.masks:
        masked = stacked_mask_bits(came.masks, mask_variation(came.masks).cpu().numpy())
    return came, bits + stack_extra_bits(came, masked, orders)


def _same_message(cut: Flags, orders: Cohort, *keys: NDArray[Any]) -> list[Ints]:
    """Return the rows that a link cut, in groups of which the same is left."""
    rows = np.flatnonzero(cut)
    every = (orders.slice_index, orders.width, orders.column_width, *keys)
    return [rows[some] for some in alike(*(key[rows] for key in every))]


def columns_of(orders: Cohort, widths: Floats) -> Ints:
    """Return how many leading columns of the messages of orders make up these widths."""
    whole = _whole(orders)
    some = np.minimum(whole, np.rint(widths / orders.column_width))
    return np.where(widths >= 1, whole, some).astype(np.int64)


def _whole(orders: Cohort) -> Ints:
    """Return how many columns the messages of orders have (`grid`)."""
    sizes = orders.width, orders.column_width
    if not (orders.column_width < 1).any():
        return np.ones(len(orders), dtype=np.int64)
    whole = np.empty(len(orders), dtype=np.int64)
    for rows in alike(*sizes):
        whole[rows] = grid(orders.take(rows[:1]))[0]
    return whole


def width_of(order: Cohort, columns: int) -> float:
    """Return the width that so many leading columns have; 1 for all that was ordered."""
    count, column_width = grid(order)
    return 1.0 if columns >= count else columns * column_width


def _leading(
    symbols: Symbols | None, codec: Codec, layout: MessageLayout, columns: int
) -> tuple[Symbols, Floats]:
    """Return the symbols of the leading columns, and their bits, [devices]."""
    if symbols is None:
        raise ValueError("A message without symbols cannot be cut: it has been received already.")
    part = symbols.leading(columns)
    return part, codec.bits(part, layout)[:, :columns].double().sum(1).cpu().numpy()


def _names_and_type(tree: Params) -> tuple[tuple[str, ...], dtype]:
    return tuple(tree), next((value.dtype for value in tree.values()), float32)
