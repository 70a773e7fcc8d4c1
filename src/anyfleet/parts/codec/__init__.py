"""How trees travel: as tensors with an exact size, and as bytes of that size."""

from anyfleet.parts.codec.error_feedback import ErrorFeedback
from anyfleet.parts.codec.fgc import Fgc
from anyfleet.parts.codec.hq import Hq
from anyfleet.parts.codec.qsgd import Qsgd
from anyfleet.parts.codec.raw import Nothing, Raw
from anyfleet.parts.codec.stc import Stc
from anyfleet.parts.codec.topk import Plain, TopK
from anyfleet.parts.codec.uveq import Uveq

__all__ = ["ErrorFeedback", "Fgc", "Hq", "Nothing", "Plain", "Qsgd", "Raw", "Stc", "TopK", "Uveq"]
