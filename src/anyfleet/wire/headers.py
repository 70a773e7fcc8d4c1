"""Headers: all of a message but its tensors."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from anyfleet.core.limits import Limits
from anyfleet.core.messages import EVERYTHING, Kind, Numbers
from anyfleet.core.orders import Orders
from anyfleet.errors import BadMessage

# As many bytes as there are of a header at most, for 100 tensors and without a job's longer lists:
# what a message has besides what is charged.
HEADER_SLACK = 8192

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Mask = tuple[list[Count], bytes]  # its shape, then one bit an entry

# In both headers: `bits` are those of the whole message as they are charged, `sizes` what each
# column of the model has of them, so that what is left of a message can be charged, too. `trees`
# name the tensors in the order in which they travel.


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of an order."""

    lr: float
    epochs: Whole
    batch: Whole
    steps: Whole
    rate: float
    frequency: float
    target: float


class OrderHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an order but its trees."""

    id: Count
    device: Count
    visit: Count
    key: Whole
    slice: bytes
    share: float
    menu: list[bytes]
    choice: Whole
    utility: float
    numbers: Figures
    bits: float
    sizes: list[float]
    column: float
    heard: Whole
    of: Whole
    kind: Kind
    step: Count
    cohort: Whole
    job: bytes
    trees: dict[str, list[str]]


class UpdateHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an answer but its trees."""

    order: Count
    device: Count
    key: Whole  # of the order: an answer to another one, renamed, does not have it
    samples: Count
    bits: float
    sizes: list[float]
    report: dict[str, float | list[float]]
    trees: dict[str, list[str]]
    masks: dict[str, Mask]


H = TypeVar("H", OrderHeader, UpdateHeader)


def read_header(data: bytes, kind: type[H]) -> H:
    """A header as it was written, or `BadMessage`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{kind.__name__} cannot be read: {error}", "header") from error


def check_sizes(header: OrderHeader | UpdateHeader, most: float) -> None:
    """Refuses a header whose bits no message has."""
    if not all(0 <= bits <= most for bits in (header.bits, *header.sizes)):
        raise BadMessage(f"a message of {header.bits} bits; at most {most}", "numbers")


def figures(order: Orders) -> Figures:
    """The numbers of an order, as they travel."""
    return Figures(**{f.name: getattr(order.numbers, f.name)[0].item() for f in fields(Numbers)})


def numbers(told: Figures) -> Numbers:
    """The inverse of `figures`."""
    return Numbers(**{f.name: np.array([getattr(told, f.name)]) for f in fields(Numbers)})


def check_order(header: OrderHeader, limits: Limits) -> None:
    """Refuses an order with numbers that no order has."""
    for complaint in (*_sizes(header, limits), *_numbers(header.numbers, limits)):
        raise BadMessage(complaint, "numbers")


def _sizes(header: OrderHeader, limits: Limits) -> Iterator[str]:
    if not 0 < header.share <= 1 or not 0 < header.column <= 1:
        yield f"a share of {header.share} in columns of {header.column}"
    elif header.share > limits.columns * header.column:
        yield f"columns of {header.column}; at most {limits.columns} are read"
    if len(header.menu) > limits.menu or not -1 <= header.choice <= limits.menu:
        yield f"a menu of {len(header.menu)} with choice {header.choice}; at most {limits.menu}"
    if math.isinf(header.utility):
        yield f"a utility of {header.utility}"


def _numbers(told: Figures, limits: Limits) -> Iterator[str]:
    bounds = (
        ("epochs", EVERYTHING, limits.epochs),
        ("steps", EVERYTHING, limits.steps),
        ("batch", 1, limits.batch),
    )
    for name, least, most in bounds:
        if not least <= getattr(told, name) <= most:
            yield f"{name} of {getattr(told, name)}, outside {least} … {most}"
    if told.epochs == told.steps == EVERYTHING:
        yield "training without an end"
    for name, value in (("lr", told.lr), ("rate", told.rate)):
        if not 0 <= value < math.inf:
            yield f"{name} of {value}"
    # Not a number: as the device likes.
    for name, value in (("frequency", told.frequency), ("target", told.target)):
        if value < 0:
            yield f"{name} of {value}"
