"""Replies as bytes and back."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from anyfleet.core.delivery import width_of
from anyfleet.core.index_sets import pack_mask, unpack_mask
from anyfleet.core.layout import dense
from anyfleet.core.limits import Limits, MessageLimits
from anyfleet.core.message_size import mask_bits, reply_extra_bits
from anyfleet.core.messages import Kind, Params, Report
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.screening import MOST_NAMES
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import within
from anyfleet.errors import BadMessage
from anyfleet.wire.bodies import (
    STATISTICS,
    Body,
    body_of,
    pack_body,
    statistics,
    trained,
    unpack_body,
)
from anyfleet.wire.claimed_bits import claimed_model_bits
from anyfleet.wire.frames import OpenMessage, join_message, open_message, read_columns
from anyfleet.wire.headers import ReplyHeader, check_sizes, read_header

CHANNELS = "channels"  # the only measure with several numbers


class ReplyMessage(NamedTuple):
    """A reply whose header can be read; what its columns hold depends on its order."""

    header: ReplyHeader
    message: OpenMessage


def encode_reply(reply: Replies, order: Cohort, task: Task) -> bytes:
    """Return a single reply as the device sends it: whole, whatever its link leaves of it."""
    trees = reply.trees_of(0)
    names = {tree: list(values) for tree, values in trees.items()}
    packed = pack_body(trees, reply.symbols_of(0), body_of(order, task, names, up=True))
    header = ReplyHeader(
        order=int(reply.order[0]),
        device=int(reply.device[0]),
        key=int(order.key[0]),
        samples=int(reply.samples[0]),
        bits=float(reply.bits[0]),
        sizes=packed.sizes,
        report={name: _plain(value) for name, value in reply.report_of(0).items()},
        trees=names,
        masks={name: pack_mask(mask) for name, mask in reply.masks_of(0).items()},
    )
    return join_message("r", msgspec.msgpack.encode(header), packed.columns)


def decode_reply(data: bytes, order: Cohort, task: Task, limits: Limits | None = None) -> Replies:
    """Return a single reply as the server reads it: with the leading columns that came through.

    Raise BadMessage for bytes that no device sends in reply to this order.
    """
    return accepted(read_reply(data, task, limits or Limits()), order, task)


def read_reply(data: bytes, task: Task, limits: Limits) -> ReplyMessage:
    """Return a reply as far as it can be read without knowing its order."""
    most = limits.for_model(task.blueprint)
    message = open_message(data, "r", most)
    header = read_header(message.header, ReplyHeader)
    check_sizes(header, 8.0 * most.message)
    _check_report(header, most)
    return ReplyMessage(header, message)


def accepted(message: ReplyMessage, order: Cohort, task: Task) -> Replies:
    """Return the reply to this order; raise BadMessage if the message is not one."""
    header, blueprint = message.header, task.blueprint
    _check_sender(header, order)
    _check_trees(header, order, task)
    local = blueprint.local(order.slice_of(0))
    masks: Params = {n: unpack_mask(n, each, local) for n, each in header.masks.items()}
    body = body_of(order, task, header.trees, up=True)
    columns = read_columns(message.message, body.columns if header.trees else 0)
    report = _report(header)
    whole = not header.trees or len(columns) == body.columns
    width = 1.0 if whole else _width(columns, body, header)
    found = unpack_body(columns, header.trees, body)
    trees = found.trees
    if not columns and not whole:
        bits, trees, masks = 0.0, {}, {}
    else:
        masked = 8.0 * sum(len(packed) for _, packed in header.masks.values())
        extra = reply_extra_bits(trees, masked, report, order)
        model = claimed_model_bits(header, found, body, extra)
        if not whole:
            masks = dense(masks, within(order.slice_of(0), width, blueprint), local)
            extra = reply_extra_bits(trees, mask_bits(masks), report, order)
        bits = model + extra
    return Replies.of_one(
        Stack.of_one(trees, masks=masks, kept=found.kept, report=report),
        order=header.order,
        device=header.device,
        samples=header.samples,
        bits=bits,
        delivered_width=width,
    )


def _report(header: ReplyHeader) -> Report:
    items = header.report.items()
    return {name: tuple(value) if isinstance(value, list) else value for name, value in items}


def _width(columns: Sequence[bytes], body: Body, header: ReplyHeader) -> float:
    """Return the width that came.

    Raise BadMessage where a part does not do: a codec with a state counts on all or nothing.
    """
    if body.order.job.send not in header.trees or body.codec.state_name:
        raise BadMessage(f"{len(columns)} of {body.columns} columns, which do not do", "cut")
    return width_of(body.order, len(columns))


def _check_sender(header: ReplyHeader, order: Cohort) -> None:
    if header.order != order.id[0]:
        raise BadMessage(f"a reply to order {header.order}, not {order.id[0]}", "unknown order")
    if header.device != order.device[0]:
        raise BadMessage(f"device {header.device} replies for {order.device[0]}", "wrong device")
    if header.key != int(order.key[0]):
        raise BadMessage("a reply that was made for another order", "replayed")


def _check_trees(header: ReplyHeader, order: Cohort, task: Task) -> None:
    needed, allowed = _expected(order, header.report)
    if not needed <= header.trees.keys() <= allowed:
        raise BadMessage(f"a reply to {order.kind} with other trees", "tensors")
    # Their order counts, too: the layout of a message is cached for every order of names.
    ordered, measured = list(trained(order, task)), statistics(order, task)
    for tree, names in header.trees.items():
        # A codec may send no tensors at all: its own code decides that. Without data there are no
        # statistics.
        whole = measured if tree == STATISTICS else ordered
        if names and list(names) != whole:
            raise BadMessage("other tensors than were ordered", "tensors")
    if not set(header.masks) <= set(ordered):
        raise BadMessage("masks of tensors that were not ordered", "mask")


def _expected(order: Cohort, report: Mapping[str, object]) -> tuple[set[str], set[str]]:
    """Return which trees a reply must have, and which it may have."""
    if order.kind == Kind.STATISTICS:
        return {STATISTICS}, {STATISTICS}
    if order.kind not in (Kind.TRAIN, Kind.FETCH):
        return set(), set()
    if "missing" not in report and "distortion" not in report:
        raise BadMessage("a result without its distortion", "report")
    model: set[str] = {order.job.send}
    # A result that was to be fetched may be gone, and its device says so.
    gone = order.kind == Kind.FETCH and "missing" in report
    return set() if gone else model, model | {STATISTICS}


def _check_report(header: ReplyHeader, most: MessageLimits) -> None:
    report = header.report
    if any(isinstance(value, list) for name, value in report.items() if name != CHANNELS):
        raise BadMessage("several numbers where one is reported", "report")
    count = sum(len(v) if isinstance(v, list) else 1 for v in report.values())
    if len(report) > MOST_NAMES or count > most.report:
        raise BadMessage(f"a report of {count} numbers; at most {most.report}", "too large")


def _plain(value: float | Sequence[float]) -> float | list[float]:
    """Return a reported number, or several as a list."""
    return list(value) if isinstance(value, Sequence) else float(value)
