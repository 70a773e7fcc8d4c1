"""Classes of our own, and the way of a value through a document."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from anyfleet.store import Document, decode, encode

HERE = __name__.partition(".")[0]


class Colour(Enum):
    RED = 1
    BLUE = "b"


class Pair(NamedTuple):
    left: Any
    right: Any = None


@dataclass(frozen=True, eq=False)
class Holder:
    value: Any
    extra: int = field(default=0, init=False)

    class Inner(NamedTuple):
        number: int


@dataclass(frozen=True)
class Halved:
    """Its construction changes what it is given."""

    number: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number / 2)


def through(value: Any, **known: Any) -> Any:
    """Written as text and flat blocks, and read again."""
    document = encode(value, {name: type(thing) for name, thing in known.items()})
    root = msgspec.json.decode(msgspec.json.encode(document.root))
    blocks = {name: block.reshape(-1).clone() for name, block in document.blocks.items()}
    return decode(Document(root, blocks), known, allow=[HERE])
