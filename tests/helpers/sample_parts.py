"""Parts for the tests of naming and config: every kind of field a real part may have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypedDict, Unpack

from anyfleet.errors import CompositionError
from anyfleet.names import Factory

__all__ = ["All", "Few", "Fleet", "Method", "Wrapper", "fleet_method", "plain_method"]


class Select(Protocol):
    reports: ClassVar[frozenset[str]]

    def __call__(self, idle: int) -> int: ...


class Train:
    """A base class whose parts are told apart by `use`."""


@dataclass(frozen=True)
class All:
    reports: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, idle: int) -> int:
        return idle


@dataclass(frozen=True)
class Few:
    count: int
    fraction: float = 1.0
    reports: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Few.count must be at least 1, got {self.count}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Few.fraction must lie in (0, 1], got {self.fraction}.")

    def __call__(self, idle: int) -> int:
        return min(self.count, idle)


@dataclass(frozen=True)
class Wrapper:
    inner: Select
    times: int = 2
    reports: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, idle: int) -> int:
        return self.times * self.inner(idle)


@dataclass(frozen=True)
class Sgd(Train):
    lr: float = 0.1
    momentum: float = 0.0
    steps: int | None = None
    epochs: int | None = 1
    lowest: int = 0
    highest: int = 10

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"Sgd.lr must be positive, got {self.lr}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Sgd.momentum must lie in [0, 1), got {self.momentum}.")
        if self.lowest > self.highest:
            raise ValueError(f"lowest must not exceed highest, got {self.lowest}, {self.highest}.")


@dataclass(frozen=True)
class Method:
    select: Select
    train: Train
    send: Literal["delta", "weights"] = "delta"

    def __post_init__(self) -> None:
        if self.send == "weights" and isinstance(self.select, All):
            raise CompositionError("weights do not go with All.", "choose Few instead.")


def plain_method(*, lr: float = 0.5, count: int = 3) -> Method:
    return Method(Few(count), Sgd(lr=lr))


class SgdOptions(TypedDict, total=False):
    lr: float
    count: int


def fleet_method(*, shares: tuple[float, ...] = (1.0, 0.5), **sgd: Unpack[SgdOptions]) -> Method:
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares must lie in (0, 1], got {shares}.")
    return replace(plain_method(**sgd), send="delta")


def vague_method(**anything: Any) -> Method:
    return plain_method(**anything)


def rated_method(**rates: float) -> Method:
    return plain_method(lr=sum(rates.values()))


def make_net(width: int, *, depth: int = 2, norm: str | None = None) -> str:
    return f"{width}x{depth}/{norm}"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Fleet:
    """One field of every kind."""

    name: str
    model: Factory
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    groups: tuple[Few, ...] = ()
    ratios: float | Mapping[str, float] = 1.0
    table: Mapping[str, Few] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    colour: Colour = Colour.RED
    folder: Path = Path("data")
    metric: Callable[..., Any] | None = None
    nested: tuple[tuple[str, tuple[float, ...]], ...] = ()
    select: Select = All()
    train: Train = Sgd()
    limit: float | None = 3.0
    flag: bool = False
    anything: Any = None
    derived: int = field(default=0, init=False)


@dataclass(frozen=True)
class Run:
    method: Method
    fleet: Fleet
    seed: int = 0
