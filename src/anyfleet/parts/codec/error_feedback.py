"""Error feedback: what a message leaves out goes into the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.signals import Signal
from anyfleet.core.slots import Codec, Compressed, Slack
from anyfleet.papers import STC, Paper
from anyfleet.parts.codec.ranking import joined, split
from anyfleet.parts.codec.stc import Stc


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """`inner` of the update plus all that earlier messages left out (specification §1.13).

    The device keeps what is left as its state "residual", also that of messages which never
    arrived. The distortion is that of update and residual together.
    """

    inner: Codec = field(default_factory=Stc)
    state_name: ClassVar[str] = "residual"
    papers: ClassVar[tuple[Paper, ...]] = (STC,)

    def __post_init__(self) -> None:
        if self.inner.state_name:
            raise ValueError(
                f"ErrorFeedback.inner={self.inner!r} keeps what it leaves out itself; "
                "use it without ErrorFeedback."
            )

    @property
    def drops(self) -> bool:
        return True

    @property
    def provides(self) -> frozenset[Signal]:
        return self.inner.provides

    @property
    def slack(self) -> Slack:
        return self.inner.slack

    @property
    def unavailable(self) -> str:
        return self.inner.unavailable

    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
    ) -> Compressed:
        total = {**rows, **_added({name: v for name, v in rows.items() if name in state}, state)}
        compressed = self.inner.compress(total, sent_fraction, layout, {})
        sent = compressed.received
        left = {name: v - sent[name] if name in sent else v for name, v in total.items()}
        return replace(compressed, state=left)

    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        return self.inner.bits(symbols, layout)

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        return self.inner.pack(symbols, layout)

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        return self.inner.unpack(columns, layout)

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        return self.inner.restore(symbols, layout)

    @property
    def calibrates(self) -> bool:
        return self.inner.calibrates

    def calibrated(self, update: Params, layout: MessageLayout) -> Codec:
        return replace(self, inner=self.inner.calibrated(update, layout))


def _added(rows: Params, state: Params) -> dict[str, Tensor]:
    """Return rows plus what is left of earlier ones, side by side: most codecs need them so."""
    if not rows:
        return {}
    # A NaN would stay for ever: one bad round must not silence a device.
    known = joined({name: state[name] for name in rows}).nan_to_num(0.0, 0.0, 0.0)
    return split(known.add_(joined(rows)), rows)
