"""Check-ins, offers and choices as bytes: what is said before a device is given a model.

An offer is an order without tensors. The other two are a header without columns (docs/wire.md). A
condition that a device does not know is left out of its report: NaN never travels.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Annotated

import msgspec
import numpy as np

from anyfleet.core.check_in import Choices, OrderChoices
from anyfleet.core.limits import Limits, MessageLimits
from anyfleet.core.message_size import order_extra_bits
from anyfleet.core.messages import Conditions
from anyfleet.core.objectives import Task
from anyfleet.core.orders import NOTHING, Cohort
from anyfleet.errors import BadMessage
from anyfleet.wire.frames import MessageType, OpenMessage, join_message, open_message, read_columns
from anyfleet.wire.headers import (
    Count,
    HyperparametersHeader,
    Whole,
    check_hyperparameters,
    pack_hyperparameters,
    read_header,
    unpack_hyperparameters,
)
from anyfleet.wire.orders import encode_order

LONGEST_REASON = 500  # characters of why a device declines
MOST_LEVELS = 256  # capability classes that devices may declare
MOST_SAMPLES = 10**12  # samples that a device may declare
_MOST = MessageLimits(message=1 << 13, header=1 << 13, report=0)
_KNOWN = frozenset(f.name for f in fields(Conditions))
_POSITIVE = frozenset({"speed", "load", "bandwidth", "fastest"})  # what seconds are divided by
# Conditions that may be infinite: a device on mains, or one without such a limit.
_UNBOUNDED = frozenset(
    {"speed", "bit_rate_up", "bit_rate_down", "memory", "battery", "budget", "bandwidth"}
)

Samples = Annotated[int, msgspec.Meta(ge=0, le=MOST_SAMPLES)]
Level = Annotated[int, msgspec.Meta(ge=0, lt=MOST_LEVELS)]
Version = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Reason = Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]


class CheckInReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device says of itself when it checks in."""

    version: Version  # of Anyfleet
    bundle: Digest  # of the bundle that it has
    samples: Samples  # for training
    test_samples: Samples  # for its own test
    level: Level  # capability class, 0 the strongest
    column_width: float  # models cross its link in columns of this width; 1: in one piece
    conditions: dict[str, float]  # those fields of Conditions that it knows


class ChoiceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device chose from the menu of an order."""

    order: Count
    device: Count
    key: Whole  # of the order: a choice from the menu of another one does not have it
    entry: Whole
    hyperparameters: HyperparametersHeader
    utility: float
    declined: Reason


def encode_check_in(report: CheckInReport) -> bytes:
    """Return a report as a device sends it; a condition that is NaN is left out."""
    known = {name: value for name, value in report.conditions.items() if not math.isnan(value)}
    return _joined("i", msgspec.structs.replace(report, conditions=known))


def decode_check_in(data: bytes) -> CheckInReport:
    """Return the report of a device; raise BadMessage for bytes that no device sends."""
    report = read_header(_opened(data, "i").header, CheckInReport)
    if not 0 < report.column_width <= 1:
        raise BadMessage(f"columns of {report.column_width}", "numbers")
    for fault in condition_faults(report.conditions):
        raise BadMessage(fault, "numbers")
    return report


def condition_faults(conditions: Mapping[str, float]) -> Iterator[str]:
    """Yield what is wrong with conditions that a device reports, one text each."""
    for name, value in conditions.items():
        if name not in _KNOWN:
            yield f"{name[:40]!r} is not a condition"
        elif math.isnan(value):
            yield f"{name} of NaN; what is not known is left out"
        elif math.isinf(value) and name not in _UNBOUNDED:
            yield f"{name} of {value}"
        elif value < 0 and name != "loss":
            yield f"{name} of {value}, which is below 0"
        elif value == 0 and name in _POSITIVE:
            yield f"{name} of 0"
        elif value > 1 and name == "fixed":
            yield f"fixed of {value}, which is a share"


def encode_offer(order: Cohort, task: Task) -> bytes:
    """Return a single order as a device is offered it: its menu, and nothing of the model.

    `decode_order` reads it.
    """
    bare = order.with_downloads(NOTHING)
    bits = order_extra_bits({}, bare, task.blueprint)
    return encode_order(replace(bare, bits=np.array([bits])), task)


def encode_choice(choices: Choices, order: Cohort) -> bytes:
    """Return what the device of a single order chose, as it sends that."""
    header = ChoiceHeader(
        order=int(order.id[0]),
        device=int(order.device[0]),
        key=int(order.key[0]),
        entry=int(choices.entry[0]),
        hyperparameters=pack_hyperparameters(choices.hyperparameters),
        utility=float(choices.utility[0]),
        declined=choices.declined[0][:LONGEST_REASON],
    )
    return _joined("c", header)


def decode_choice(data: bytes, order: Cohort, limits: Limits | None = None) -> OrderChoices:
    """Return what a device chose from the menu of this single order.

    Raise BadMessage for bytes that no device sends about this order.
    """
    header = read_header(_opened(data, "c").header, ChoiceHeader)
    _check_sender(header, order)
    check_hyperparameters(header.hyperparameters, limits or Limits())
    menu = len(order.menu_of(0))
    # A device without a menu has no entry; one that declines need not name any.
    least = -1 if header.declined or not menu else 0
    if not least <= header.entry < menu:
        raise BadMessage(f"entry {header.entry} of a menu of {menu}", "choice")
    if math.isinf(header.utility):  # NaN: it chose otherwise
        raise BadMessage(f"a utility of {header.utility}", "numbers")
    choices = Choices(
        entry=np.array([header.entry]),
        hyperparameters=unpack_hyperparameters(header.hyperparameters),
        utility=np.array([header.utility]),
        declined=(header.declined,),
    )
    return OrderChoices(order=order.id, choices=choices)


def _check_sender(header: ChoiceHeader, order: Cohort) -> None:
    if header.order != order.id[0]:
        raise BadMessage(f"a choice for order {header.order}, not {order.id[0]}", "unknown order")
    if header.device != order.device[0]:
        raise BadMessage(f"device {header.device} chooses for {order.device[0]}", "wrong device")
    if header.key != int(order.key[0]):
        raise BadMessage("a choice that was made for another order", "replayed")


def _joined(kind: MessageType, header: msgspec.Struct) -> bytes:
    return join_message(kind, msgspec.msgpack.encode(header), ())


def _opened(data: bytes, kind: MessageType) -> OpenMessage:
    message = open_message(data, kind, _MOST)
    read_columns(message, 0)
    return message
