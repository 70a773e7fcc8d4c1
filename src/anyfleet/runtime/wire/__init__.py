"""Orders and updates as bytes: a header, then the trees, column by column (docs/wire.md).

What counts as traffic are the trees, statistics, index sets, masks and asked-for numbers
(`Orders.bits`, `Updates.bits`). Around them a message has a header of names and numbers, and
frames: HEADER_SLACK bytes at most per 100 tensors.
"""

from anyfleet.runtime.wire.headers import HEADER_SLACK
from anyfleet.runtime.wire.jobs import misfits
from anyfleet.runtime.wire.layout import VERSION, shortened
from anyfleet.runtime.wire.orders import decode_order, encode_order
from anyfleet.runtime.wire.updates import (
    Letter,
    accepted,
    decode_update,
    encode_update,
    read_letter,
)

__all__ = [
    "HEADER_SLACK",
    "VERSION",
    "Letter",
    "accepted",
    "decode_order",
    "decode_update",
    "encode_order",
    "encode_update",
    "misfits",
    "read_letter",
    "shortened",
]
