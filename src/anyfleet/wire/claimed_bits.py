"""What a message may say of its own size: ledger and clock follow it, so it is not just believed.

Bytes that came have to be there for what is said: exactly, but for the slack that a codec states.
"""

import math
from collections.abc import Sequence

from anyfleet.core.slots import Slack
from anyfleet.errors import BadMessage
from anyfleet.wire.bodies import Parcel, Unpacked
from anyfleet.wire.headers import OrderHeader, ReplyHeader

_CLOSE = 1e-9  # sums of the same bits in another order


def model_bits(
    header: OrderHeader | ReplyHeader, found: Unpacked, given: Parcel, beside: float
) -> float:
    """Bits of the model in the leading columns that came, of which the whole has `beside` more."""
    if not header.trees and header.bits != beside:
        raise BadMessage(f"{header.bits} bits where {beside} are sent", "numbers")
    said = [header.bits - beside]
    if given.columns > 1:
        said = _columns(header, given, beside, whole=len(found.lengths) == given.columns)
    _check_columns(said, found.lengths, given)
    return math.fsum(said[: len(found.lengths)])


def _columns(
    header: OrderHeader | ReplyHeader, given: Parcel, beside: float, *, whole: bool
) -> list[float]:
    said = header.sizes
    if len(said) != given.columns:
        raise BadMessage(f"sizes of {len(said)} columns instead of {given.columns}", "numbers")
    total = math.fsum(said) + beside
    if whole and not math.isclose(header.bits, total, rel_tol=_CLOSE):
        raise BadMessage(f"{header.bits} bits in columns of {total}", "numbers")
    return said


def _check_columns(said: Sequence[float], lengths: Sequence[int], given: Parcel) -> None:
    slack = given.codec.slack if given.model else Slack()
    lanes = given.around(given.model).tensors.values()
    for column, length in enumerate(lengths):
        entries = sum(lane.ends[column] - lane.begins(column) for lane in lanes)
        more = slack.column + slack.share * said[column] + slack.entry * entries
        if not 8 * length <= said[column] <= 8 * length + more:
            told = f"{said[column]} bits in column {column}, which has {length} bytes"
            raise BadMessage(told, "numbers")
