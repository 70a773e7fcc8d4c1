"""Headers: all of a message but its tensors."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from anyfleet.core.limits import Limits
from anyfleet.core.messages import EVERYTHING, Hyperparameters, Kind
from anyfleet.core.orders import Cohort
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


class HyperparametersHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of an order."""

    lr: float
    epochs: Whole
    batch_size: Whole
    local_steps: Whole
    sent_fraction: float
    frequency: float
    target_seconds: float


class OrderHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an order but its trees."""

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


H = TypeVar("H", OrderHeader, ReplyHeader)


def read_header(data: bytes, kind: type[H]) -> H:
    """A header as it was written, or `BadMessage`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{kind.__name__} cannot be read: {error}", "header") from error


def check_sizes(header: OrderHeader | ReplyHeader, most: float) -> None:
    """Refuses a header whose bits no message has."""
    if not all(0 <= bits <= most for bits in (header.bits, *header.sizes)):
        raise BadMessage(f"a message of {header.bits} bits; at most {most}", "numbers")


def figures(order: Cohort) -> HyperparametersHeader:
    """The numbers of an order, as they travel."""
    return HyperparametersHeader(
        **{
            f.name: getattr(order.hyperparameters, f.name)[0].item()
            for f in fields(Hyperparameters)
        }
    )


def numbers(told: HyperparametersHeader) -> Hyperparameters:
    """The inverse of `figures`."""
    return Hyperparameters(
        **{f.name: np.array([getattr(told, f.name)]) for f in fields(Hyperparameters)}
    )


def check_order(header: OrderHeader, limits: Limits) -> None:
    """Refuses an order with numbers that no order has."""
    for complaint in (*_sizes(header, limits), *_numbers(header.hyperparameters, limits)):
        raise BadMessage(complaint, "numbers")


def _sizes(header: OrderHeader, limits: Limits) -> Iterator[str]:
    if not 0 < header.width <= 1 or not 0 < header.column_width <= 1:
        yield f"a share of {header.width} in columns of {header.column_width}"
    elif header.width > limits.columns * header.column_width:
        yield f"columns of {header.column_width}; at most {limits.columns} are read"
    if len(header.menu) > limits.menu or not -1 <= header.choice <= limits.menu:
        yield f"a menu of {len(header.menu)} with choice {header.choice}; at most {limits.menu}"
    if math.isinf(header.utility):
        yield f"a utility of {header.utility}"


def _numbers(told: HyperparametersHeader, limits: Limits) -> Iterator[str]:
    bounds = (
        ("epochs", EVERYTHING, limits.epochs),
        ("local_steps", EVERYTHING, limits.local_steps),
        ("batch_size", 1, limits.batch_size),
    )
    for name, least, most in bounds:
        if not least <= getattr(told, name) <= most:
            yield f"{name} of {getattr(told, name)}, outside {least} … {most}"
    if told.epochs == told.local_steps == EVERYTHING:
        yield "training without an end"
    if not 0 <= told.lr < math.inf:
        yield f"lr of {told.lr}"
    # NaN: not asked.
    if told.sent_fraction < 0 or told.sent_fraction > 1:
        yield f"sent_fraction of {told.sent_fraction}"
    for name, value in (("frequency", told.frequency), ("target_seconds", told.target_seconds)):
        if value < 0:
            yield f"{name} of {value}"
