"""How trees travel: as tensors with an exact size, and as bytes of that size."""

from anyfleet.codec.feedback import ErrorFeedback
from anyfleet.codec.fgc import Fgc
from anyfleet.codec.hq import Hq
from anyfleet.codec.qsgd import Qsgd
from anyfleet.codec.raw import Nothing, Raw
from anyfleet.codec.stc import Stc
from anyfleet.codec.topk import Plain, TopK
from anyfleet.codec.uveq import Uveq

__all__ = ["ErrorFeedback", "Fgc", "Hq", "Nothing", "Plain", "Qsgd", "Raw", "Stc", "TopK", "Uveq"]
