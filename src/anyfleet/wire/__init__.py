"""Orders and replies as bytes: a header, then the tensors, column by column (docs/wire.md).

Check-ins and choices are headers alone.

What is charged are tensors, statistics, index sets, masks and requested numbers (`Cohort.bits`,
`Replies.bits`). Around them a message has a header of names and numbers, and frames: HEADER_SLACK
bytes at most per 100 tensors.
"""

from anyfleet.wire.check_in import (
    CheckInReport,
    decode_check_in,
    decode_choice,
    encode_check_in,
    encode_choice,
    encode_offer,
)
from anyfleet.wire.frames import VERSION, cut_message
from anyfleet.wire.headers import HEADER_SLACK
from anyfleet.wire.jobs import misfits
from anyfleet.wire.orders import decode_order, encode_order
from anyfleet.wire.replies import ReplyMessage, accepted, decode_reply, encode_reply, read_reply

__all__ = [
    "HEADER_SLACK",
    "VERSION",
    "CheckInReport",
    "ReplyMessage",
    "accepted",
    "cut_message",
    "decode_check_in",
    "decode_choice",
    "decode_order",
    "decode_reply",
    "encode_check_in",
    "encode_choice",
    "encode_offer",
    "encode_order",
    "encode_reply",
    "misfits",
    "read_reply",
]
