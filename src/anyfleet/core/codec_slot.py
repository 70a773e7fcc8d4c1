"""How trees travel: the protocol of codecs, and what they make of a tree."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from anyfleet.arguments import Part
from anyfleet.core.layout import Envelope, Symbols
from anyfleet.core.messages import Params


@dataclass(frozen=True, eq=False)
class Squeezed:
    """Trees after compression, as the receiver will see them; stacked, one row per device."""

    tree: Params
    kept: Params  # 1 where an entry was sent, 0 where not; a name that is absent came whole
    symbols: Symbols  # what is packed
    bits: Tensor  # of every row and column
    memory: Params  # what the device keeps for its next message
    distortion: Tensor  # of every row, squared error over squared norm


class Slack(NamedTuple):
    """By how much `Codec.bits` may be above what `pack` makes of a column; nothing: exact."""

    column: float = 0.0  # bits
    share: float = 0.0  # of the column
    entry: float = 0.0  # bits for every entry of the column


class Codec(Part, Protocol):
    """One definition, two faces: tensors (`squeeze`, `restore`) and bytes (`pack`, `unpack`).

    `restore(unpack(pack(s.symbols)))` equals `s.tree` and `s.kept` bit for bit. `bits` are an upper
    bound of the packed bits, within the `slack` that the codec states. Every reduction over numbers
    happens in `squeeze`, once; all but `pack` and `unpack` work on stacks of devices. Defaults are
    those of a codec that sends everything and remembers nothing.
    """

    slot: ClassVar[str] = ""  # the device memory it keeps, or ""

    @property
    def drops(self) -> bool:
        """Whether it leaves entries out: changes can bear that, weights cannot."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether it follows the rate that an order asks for."""
        return False

    @property
    def slack(self) -> Slack:
        """How far `bits` lie above the packed bits at most; receivers refuse what is beyond."""
        return Slack()

    @abstractmethod
    def squeeze(
        self, tree: Params, memory: Params, rate: Tensor, envelope: Envelope
    ) -> Squeezed: ...

    @abstractmethod
    def bits(self, symbols: Symbols, envelope: Envelope) -> Tensor:
        """Of every row and column."""

    @abstractmethod
    def pack(self, symbols: Symbols, envelope: Envelope) -> tuple[bytes, ...]:
        """One row as bytes, column by column."""

    @abstractmethod
    def unpack(self, columns: Sequence[bytes], envelope: Envelope) -> Symbols:
        """The row that the leading columns of a message hold; `BadMessage` if they cannot."""

    @abstractmethod
    def restore(self, symbols: Symbols, envelope: Envelope) -> tuple[Params, Params]:
        """Trees and what was kept of them; zero where a column is missing."""

    @property
    def calibrates(self) -> bool:
        """Whether it wants a look at an update before a run (`calibrated`)."""
        return False

    def calibrated(self, update: Params, envelope: Envelope) -> "Codec":
        """The codec after a look at an update such as devices will send, on the server."""
        return self

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one
