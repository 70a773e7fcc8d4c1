"""The headers of messages: all of an order or a reply but its tensors."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from anyfleet.core.limits import Limits
from anyfleet.core.messages import EVERYTHING, Hyperparameters, Kind
from anyfleet.errors import BadMessage

# The most bytes of a header for 100 tensors, without the longer lists of a job: what a message has
# beside what is charged.
HEADER_SLACK = 8192

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Mask = tuple[list[Count], bytes]  # its shape, then one bit an entry

# In both headers, `bits` are those of the whole message as they are charged. `sizes` are those of
# each column of the model, so that what is left of a cut message can be charged, too. `trees` name
# the tensors in the order in which they travel.


class HyperparametersHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hyperparameters of an order."""

    lr: float
    epochs: Whole
    batch_size: Whole
    local_steps: Whole
    sent_fraction: float
    frequency: float
    target_seconds: float


class OrderHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an order but its tensors."""

    id: Count
    device: Count
    visit: Count
    key: Whole
    slice: bytes
    width: float
    menu: list[bytes]
    choice: Whole
    utility: float
    hyperparameters: HyperparametersHeader
    bits: float
    sizes: list[float]
    column_width: float
    acknowledged: Whole
    held_order: Whole
    kind: Kind
    round_index: Count
    cohort_key: Whole
    job: bytes
    trees: dict[str, list[str]]


class ReplyHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a reply but its tensors."""

    order: Count
    device: Count
    key: Whole  # of the order: a reply to another one, renamed, does not have it
    samples: Count
    bits: float
    sizes: list[float]
    report: dict[str, float | list[float]]
    trees: dict[str, list[str]]
    masks: dict[str, Mask]


H = TypeVar("H", bound=msgspec.Struct)


def read_header(data: bytes, kind: type[H]) -> H:
    """Return a header as it was written; raise BadMessage if it cannot be read."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{kind.__name__} cannot be read: {error}", "header") from error


def check_sizes(header: OrderHeader | ReplyHeader, most: float) -> None:
    """Raise BadMessage unless all claimed bits lie between 0 and `most`."""
    if not all(0 <= bits <= most for bits in (header.bits, *header.sizes)):
        raise BadMessage(f"a message of {header.bits} bits; at most {most}", "numbers")


def pack_hyperparameters(own: Hyperparameters) -> HyperparametersHeader:
    """Return the hyperparameters of a single device as they travel."""
    return HyperparametersHeader(
        **{f.name: getattr(own, f.name)[0].item() for f in fields(Hyperparameters)}
    )


def unpack_hyperparameters(header: HyperparametersHeader) -> Hyperparameters:
    """Return the hyperparameters that `pack_hyperparameters` packed."""
    return Hyperparameters(
        **{f.name: np.array([getattr(header, f.name)]) for f in fields(Hyperparameters)}
    )


def check_order(header: OrderHeader, limits: Limits) -> None:
    """Raise BadMessage for an order with numbers that no order has."""
    for fault in _size_faults(header, limits):
        raise BadMessage(fault, "numbers")
    check_hyperparameters(header.hyperparameters, limits)


def check_hyperparameters(header: HyperparametersHeader, limits: Limits) -> None:
    """Raise BadMessage for hyperparameters that no order has."""
    for fault in _faults(header, limits):
        raise BadMessage(fault, "numbers")


def _size_faults(header: OrderHeader, limits: Limits) -> Iterator[str]:
    if not 0 < header.width <= 1 or not 0 < header.column_width <= 1:
        yield f"a width of {header.width} in columns of {header.column_width}"
    elif header.width > limits.columns * header.column_width:
        yield f"columns of {header.column_width}; at most {limits.columns} are read"
    if len(header.menu) > limits.menu or not -1 <= header.choice <= limits.menu:
        yield f"a menu of {len(header.menu)} with choice {header.choice}; at most {limits.menu}"
    if math.isinf(header.utility):
        yield f"a utility of {header.utility}"


def _faults(header: HyperparametersHeader, limits: Limits) -> Iterator[str]:
    bounds = (
        ("epochs", EVERYTHING, limits.epochs),
        ("local_steps", EVERYTHING, limits.local_steps),
        ("batch_size", 1, limits.batch_size),
    )
    for name, least, most in bounds:
        if not least <= getattr(header, name) <= most:
            yield f"{name} of {getattr(header, name)}, outside {least} … {most}"
    if header.epochs == header.local_steps == EVERYTHING:
        yield "training without an end"
    if not 0 <= header.lr < math.inf:
        yield f"lr of {header.lr}"
    # NaN: not asked.
    if header.sent_fraction < 0 or header.sent_fraction > 1:
        yield f"sent_fraction of {header.sent_fraction}"
    for name, value in (("frequency", header.frequency), ("target_seconds", header.target_seconds)):
        if value < 0:
            yield f"{name} of {value}"
