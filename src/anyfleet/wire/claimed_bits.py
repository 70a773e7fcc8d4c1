"""What a message may claim of its own size: ledger and clock follow it, so it is checked.

Claimed bits must be the bytes that came: exactly, but for the slack that a codec states.
"""

import math
from collections.abc import Sequence

from anyfleet.core.slots import Slack
from anyfleet.errors import BadMessage
from anyfleet.wire.bodies import Body, UnpackedBody
from anyfleet.wire.headers import OrderHeader, ReplyHeader

_CLOSE = 1e-9  # sums of the same bits in another order


def claimed_model_bits(
    header: OrderHeader | ReplyHeader, found: UnpackedBody, body: Body, extra: float
) -> float:
    """Return the bits of the model in the leading columns that came.

    The whole message has `extra` bits beside its model. Raise BadMessage when the header claims
    more or fewer bits than there are.
    """
    if not header.trees and header.bits != extra:
        raise BadMessage(f"{header.bits} bits where {extra} are sent", "numbers")
    claimed = [header.bits - extra]
    if body.columns > 1:
        claimed = _claimed(header, body, extra, whole=len(found.lengths) == body.columns)
    _check_columns(claimed, found.lengths, body)
    return math.fsum(claimed[: len(found.lengths)])


def _claimed(
    header: OrderHeader | ReplyHeader, body: Body, extra: float, *, whole: bool
) -> list[float]:
    claimed = header.sizes
    if len(claimed) != body.columns:
        raise BadMessage(f"sizes of {len(claimed)} columns instead of {body.columns}", "numbers")
    total = math.fsum(claimed) + extra
    if whole and not math.isclose(header.bits, total, rel_tol=_CLOSE):
        raise BadMessage(f"{header.bits} bits in columns of {total}", "numbers")
    return claimed


def _check_columns(claimed: Sequence[float], lengths: Sequence[int], body: Body) -> None:
    slack = body.codec.slack if body.model else Slack()
    tensors = body.layout(body.model).tensors.values()
    for column, length in enumerate(lengths):
        entries = sum(tensor.ends[column] - tensor.begins(column) for tensor in tensors)
        more = slack.column + slack.share * claimed[column] + slack.entry * entries
        if not 8 * length <= claimed[column] <= 8 * length + more:
            what = f"{claimed[column]} bits in column {column}, which has {length} bytes"
            raise BadMessage(what, "numbers")
