"""Answers as bytes, and back."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from anyfleet.core.delivery import width_of
from anyfleet.core.index_sets import pack_mask, unpack_mask
from anyfleet.core.layout import dense
from anyfleet.core.limits import Limits, MessageLimits
from anyfleet.core.message_size import mask_bits, reply_extra_bits
from anyfleet.core.messages import Kind, Params, Replies, Report
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.screening import MOST_NAMES
from anyfleet.elastic import within
from anyfleet.errors import BadMessage
from anyfleet.wire.bodies import STATISTICS, Parcel, packed, parcel, statistics, trained, unpacked
from anyfleet.wire.claimed_bits import model_bits
from anyfleet.wire.headers import ReplyHeader, check_sizes, read_header
from anyfleet.wire.sealing import Opened, columns_of, opened, sealed

CHANNELS = "channels"  # the only measure with several numbers


class ReplyMessage(NamedTuple):
    """An answer whose header can be read; what it has in columns depends on its order."""

    header: ReplyHeader
    message: Opened


def encode_reply(update: Replies, order: Cohort, task: Task) -> bytes:
    """One answer as the device sends it: whole, whatever its link will leave of it."""
    (trees,) = update.trees
    names = {tree: list(values) for tree, values in trees.items()}
    body = packed(trees, update.symbols[0], parcel(order, task, names, up=True))
    header = ReplyHeader(
        order=int(update.order[0]),
        device=int(update.device[0]),
        key=int(order.key[0]),
        samples=int(update.samples[0]),
        bits=float(update.bits[0]),
        sizes=body.sizes,
        report={name: _plain(value) for name, value in update.report[0].items()},
        trees=names,
        masks={name: pack_mask(mask) for name, mask in update.masks[0].items()},
    )
    return sealed("u", msgspec.msgpack.encode(header), body.columns)


def decode_reply(data: bytes, order: Cohort, task: Task, limits: Limits | None = None) -> Replies:
    """One answer as the server reads it: with the leading columns that came through."""
    return accepted(read_reply(data, task, limits or Limits()), order, task)


def read_reply(data: bytes, task: Task, limits: Limits) -> ReplyMessage:
    """An answer as far as it can be read by somebody who does not know to what."""
    most = limits.for_model(task.blueprint)
    message = opened(data, "u", most)
    header = read_header(message.header, ReplyHeader)
    check_sizes(header, 8.0 * most.message)
    _check_report(header, most)
    return ReplyMessage(header, message)


def accepted(letter: ReplyMessage, order: Cohort, task: Task) -> Replies:
    """The answer to this order."""
    header, blueprint = letter.header, task.blueprint
    _check_sender(header, order)
    _check_trees(header, order, task)
    local = blueprint.local(order.slices[0])
    masks: Params = {n: unpack_mask(n, each, local) for n, each in header.masks.items()}
    given = parcel(order, task, header.trees, up=True)
    columns = columns_of(letter.message, given.columns if header.trees else 0)
    report = _report(header)
    whole = not header.trees or len(columns) == given.columns
    width = 1.0 if whole else _width(columns, given, header)
    found = unpacked(columns, header.trees, given)
    trees = found.trees
    if not columns and not whole:
        bits, trees, masks = 0.0, {}, {}
    else:
        masked = 8.0 * sum(len(packed) for _, packed in header.masks.values())
        beside = reply_extra_bits(trees, masked, report, order)
        model = model_bits(header, found, given, beside)
        if not whole:
            masks = dense(masks, within(order.slices[0], width, blueprint), local)
            beside = reply_extra_bits(trees, mask_bits(masks), report, order)
        bits = model + beside
    return Replies(
        order=np.array([header.order]),
        device=np.array([header.device]),
        samples=np.array([header.samples]),
        trees=(trees,),
        symbols=(None,),
        masks=(masks,),
        kept=(found.kept,),
        bits=np.array([bits]),
        delivered_width=np.array([width]),
        report=(report,),
    )


def _report(header: ReplyHeader) -> Report:
    told = header.report.items()
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told}


def _width(columns: Sequence[bytes], given: Parcel, header: ReplyHeader) -> float:
    """The width that came; a device that counts on all of it having arrived sends it again."""
    if given.order.job.send not in header.trees or given.codec.state_name:
        raise BadMessage(f"{len(columns)} of {given.columns} columns, which do not do", "cut")
    return width_of(given.order, len(columns))


def _check_sender(header: ReplyHeader, order: Cohort) -> None:
    if header.order != order.id[0]:
        raise BadMessage(f"an answer to order {header.order}, not {order.id[0]}", "unknown order")
    if header.device != order.device[0]:
        raise BadMessage(f"device {header.device} answers for {order.device[0]}", "wrong device")
    if header.key != int(order.key[0]):
        raise BadMessage("an answer that was made for another order", "replayed")


def _check_trees(header: ReplyHeader, order: Cohort, task: Task) -> None:
    needed, allowed = _expected(order, header.report)
    if not needed <= header.trees.keys() <= allowed:
        raise BadMessage(f"an answer to {order.kind} with other trees", "tensors")
    # In their very order, too: where each lies in a stream is remembered for every order there is.
    ordered, measured = list(trained(order, task)), statistics(order, task)
    for tree, names in header.trees.items():
        # Nothing at all is what a codec may have left of a model: its own code decides. Without
        # data there are no statistics.
        whole = measured if tree == STATISTICS else ordered
        if names and list(names) != whole:
            raise BadMessage("other tensors than were ordered", "tensors")
    if not set(header.masks) <= set(ordered):
        raise BadMessage("masks of tensors that were not ordered", "mask")


def _expected(order: Cohort, report: Mapping[str, object]) -> tuple[set[str], set[str]]:
    """Which trees an answer must have, and which it may have."""
    if order.kind == Kind.STATISTICS:
        return {STATISTICS}, {STATISTICS}
    if order.kind not in (Kind.TRAIN, Kind.FETCH):
        return set(), set()
    if "missing" not in report and "distortion" not in report:
        raise BadMessage("a result without its distortion", "report")
    model: set[str] = {order.job.send}
    # What was to be fetched may be gone, and its device says so.
    gone = order.kind == Kind.FETCH and "missing" in report
    return set() if gone else model, model | {STATISTICS}


def _check_report(header: ReplyHeader, most: MessageLimits) -> None:
    told = header.report
    if any(isinstance(value, list) for name, value in told.items() if name != CHANNELS):
        raise BadMessage("several numbers where one is reported", "report")
    count = sum(len(v) if isinstance(v, list) else 1 for v in told.values())
    if len(told) > MOST_NAMES or count > most.report:
        raise BadMessage(f"a report of {count} numbers; at most {most.report}", "too large")


def _plain(value: float | Sequence[float]) -> float | list[float]:
    """A reported number, or several."""
    return list(value) if isinstance(value, Sequence) else float(value)
