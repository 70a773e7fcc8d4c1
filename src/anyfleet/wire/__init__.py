"""Orders and updates as bytes: a header, then the trees, column by column (docs/wire.md).

What counts as traffic are the trees, statistics, index sets, masks and asked-for numbers
(`Cohort.bits`, `Updates.bits`). Around them a message has a header of names and numbers, and
frames: HEADER_SLACK bytes at most per 100 tensors.
"""

from anyfleet.wire.headers import HEADER_SLACK
from anyfleet.wire.jobs import misfits
from anyfleet.wire.orders import decode_order, encode_order
from anyfleet.wire.replies import ReplyMessage, accepted, decode_reply, encode_reply, read_reply
from anyfleet.wire.sealing import VERSION, shortened

__all__ = [
    "HEADER_SLACK",
    "VERSION",
    "ReplyMessage",
    "accepted",
    "decode_order",
    "decode_reply",
    "encode_order",
    "encode_reply",
    "misfits",
    "read_reply",
    "shortened",
]
