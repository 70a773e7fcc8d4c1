"""Error feedback: what a message leaves out goes into the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from anyfleet.core.layout import Envelope, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Slack, Squeezed
from anyfleet.papers import STC, Paper
from anyfleet.parts.codec.stc import Stc


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Sends `inner` of the update and of all that earlier messages left out (METHODS §1.13).

    The device keeps what is left of it, also of messages that never arrived. Distortion is that of
    update and rest together.
    """

    inner: Codec = field(default_factory=Stc)
    slot: ClassVar[str] = "residual"
    papers: ClassVar[tuple[Paper, ...]] = (STC,)

    def __post_init__(self) -> None:
        if self.inner.slot:
            raise ValueError(
                f"ErrorFeedback.inner={self.inner!r} keeps what it leaves out itself; "
                "use it without ErrorFeedback."
            )

    @property
    def drops(self) -> bool:
        return True

    @property
    def adapts(self) -> bool:
        return self.inner.adapts

    @property
    def slack(self) -> Slack:
        return self.inner.slack

    def squeeze(self, tree: Params, memory: Params, rate: Tensor, envelope: Envelope) -> Squeezed:
        # What is no number would stay so for ever: one bad round must not silence a device.
        known = {name: torch.where(left.isfinite(), left, 0.0) for name, left in memory.items()}
        whole = {name: v + known[name] if name in known else v for name, v in tree.items()}
        squeezed = self.inner.squeeze(whole, {}, rate, envelope)
        sent = squeezed.tree
        left = {name: v - sent[name] if name in sent else v for name, v in whole.items()}
        return replace(squeezed, memory=left)

    def bits(self, symbols: Symbols, envelope: Envelope) -> Tensor:
        return self.inner.bits(symbols, envelope)

    def pack(self, symbols: Symbols, envelope: Envelope) -> tuple[bytes, ...]:
        return self.inner.pack(symbols, envelope)

    def unpack(self, columns: Sequence[bytes], envelope: Envelope) -> Symbols:
        return self.inner.unpack(columns, envelope)

    def restore(self, symbols: Symbols, envelope: Envelope) -> tuple[Params, Params]:
        return self.inner.restore(symbols, envelope)

    @property
    def calibrates(self) -> bool:
        return self.inner.calibrates

    def calibrated(self, update: Params, envelope: Envelope) -> Codec:
        return replace(self, inner=self.inner.calibrated(update, envelope))
