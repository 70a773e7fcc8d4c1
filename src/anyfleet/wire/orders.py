"""Orders as bytes and back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from anyfleet.core.delivery import unpadded, width_of
from anyfleet.core.index_sets import pack_slice, unpack_slice
from anyfleet.core.limits import Limits
from anyfleet.core.message_size import order_extra_bits
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, Download
from anyfleet.elastic import Blueprint
from anyfleet.errors import BadMessage
from anyfleet.wire.bodies import STATISTICS, body_of, pack_body, unpack_body
from anyfleet.wire.claimed_bits import claimed_model_bits
from anyfleet.wire.frames import join_message, open_message, read_columns
from anyfleet.wire.headers import (
    OrderHeader,
    check_order,
    check_sizes,
    pack_hyperparameters,
    read_header,
    unpack_hyperparameters,
)
from anyfleet.wire.jobs import decode_job, encode_job


def encode_order(order: Cohort, task: Task) -> bytes:
    """Return a single order as the server sends it: whole, whatever its link leaves of it."""
    trees, blueprint = order.trees_of(0), task.blueprint
    names = {tree: list(values) for tree, values in trees.items()}
    packed = pack_body(trees, order.download_of(0).symbols, body_of(order, task, names, up=False))
    header = OrderHeader(
        id=int(order.id[0]),
        device=int(order.device[0]),
        visit=int(order.visit[0]),
        key=int(order.key[0]),
        slice=pack_slice(order.slice_of(0), blueprint),
        width=float(order.width[0]),
        menu=[pack_slice(entry, blueprint) for entry in order.menu_of(0)],
        choice=int(order.choice[0]),
        utility=float(order.utility[0]),
        hyperparameters=pack_hyperparameters(order.hyperparameters),
        bits=float(order.bits[0]),
        sizes=packed.sizes,
        column_width=float(order.column_width[0]),
        acknowledged=int(order.acknowledged[0]),
        held_order=int(order.held_order[0]),
        kind=order.kind,
        round_index=order.round_index,
        cohort_key=order.cohort_key,
        job=encode_job(order.job),
        trees=names,
    )
    return join_message("o", msgspec.msgpack.encode(header), packed.columns)


def decode_order(
    data: bytes, task: Task, allow: Sequence[str] = (), limits: Limits | None = None
) -> Cohort:
    """Return a single order as a device reads it: with the leading columns that came through.

    Raise BadMessage for bytes that no server sends, and for what a link left too little of.
    """
    bounds = limits or Limits()
    most = bounds.for_model(task.blueprint)
    message = open_message(data, "o", most)
    header = read_header(message.header, OrderHeader)
    check_order(header, bounds)
    check_sizes(header, 8.0 * most.message)
    _check_names(header.trees, task.blueprint)
    order = _bare(header, task.blueprint, tuple(allow), bounds)
    body = body_of(order, task, header.trees, up=False)
    columns = read_columns(message, body.columns if header.trees else 0)
    whole = not header.trees or len(columns) == body.columns
    if not whole and ("model" not in header.trees or unpadded(order.job)):
        raise BadMessage(f"{len(columns)} of {body.columns} columns, which do not do", "cut")
    found = unpack_body(columns, header.trees, body)
    extra = order_extra_bits(found.trees, order, task.blueprint)
    bits = extra + (claimed_model_bits(header, found, body, extra) if whole or columns else 0.0)
    width = 1.0 if whole else width_of(order, len(columns))
    order = order.with_downloads(Download(found.trees))
    return replace(order, bits=np.array([bits]), delivered_width=np.array([width]))


def _bare(
    header: OrderHeader, blueprint: Blueprint, allow: tuple[str, ...], limits: Limits
) -> Cohort:
    """Return the order without its tensors."""
    slice_ = unpack_slice(header.slice, blueprint)
    menu = tuple(unpack_slice(entry, blueprint) for entry in header.menu)
    if menu and slice_ not in menu:
        raise BadMessage("a slice that is not in its menu", "choice")
    return Cohort(
        id=np.array([header.id]),
        device=np.array([header.device]),
        visit=np.array([header.visit]),
        key=torch.tensor([header.key]),
        slice_index=np.zeros(1, dtype=np.int64),
        width=np.array([header.width]),
        menu_index=np.array([0 if menu else -1]),
        choice=np.array([header.choice]),
        utility=np.array([header.utility]),
        hyperparameters=unpack_hyperparameters(header.hyperparameters),
        download_index=np.array([-1]),
        bits=np.array([header.bits]),
        delivered_width=np.ones(1),
        column_width=np.array([header.column_width]),
        acknowledged=np.array([header.acknowledged]),
        held_order=np.array([header.held_order]),
        kind=header.kind,
        round_index=header.round_index,
        cohort_key=header.cohort_key,
        job=decode_job(header.job, allow, limits),
        slices=(slice_,),
        menus=(menu,) if menu else (),
        downloads=(),
    )


def _check_names(trees: Mapping[str, Sequence[str]], blueprint: Blueprint) -> None:
    known = {"model": blueprint.params, STATISTICS: blueprint.buffers}
    for tree, names in trees.items():
        if tree not in known or len(set(names)) < len(names) or not set(names) <= set(known[tree]):
            raise BadMessage("tensors that this model does not have, or twice", "tensors")
