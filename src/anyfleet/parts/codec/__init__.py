"""The slots `uplink` and `downlink`: how tensors travel, with exact sizes and as bytes.

A codec of your own derives from `Quantiser` if it sends whole numbers, else from the slot `Codec`
(docs/codecs.md).
"""

from anyfleet.parts.codec.error_feedback import ErrorFeedback
from anyfleet.parts.codec.fgc import Fgc
from anyfleet.parts.codec.hq import Hq
from anyfleet.parts.codec.qsgd import Qsgd
from anyfleet.parts.codec.quantiser import Quantiser
from anyfleet.parts.codec.raw import Nothing, Raw
from anyfleet.parts.codec.stc import Stc
from anyfleet.parts.codec.topk import Plain, TopK
from anyfleet.parts.codec.uveq import Uveq

__all__ = [
    "ErrorFeedback",
    "Fgc",
    "Hq",
    "Nothing",
    "Plain",
    "Qsgd",
    "Quantiser",
    "Raw",
    "Stc",
    "TopK",
    "Uveq",
]
