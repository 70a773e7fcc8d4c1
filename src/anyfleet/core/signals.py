"""Signals: what one part hands to another, and what several parts may want to decide.

A part names the signals that it `requires`, `provides` and `decides`. `Method` compares them when
it is made, so that parts which cannot work together are refused before anything runs.
"""

from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "Diagnostic",
    "FollowsSentFraction",
    "Frequency",
    "HeldResults",
    "Menu",
    "SentFraction",
    "ServerChoice",
    "ServerSamples",
    "Signal",
    "TargetTime",
    "diagnostics",
]


@dataclass(frozen=True)
class Signal:
    """What one part hands to another.

    `provider` says which part to use if no part of a method provides the signal. Two signals are
    equal whatever they say there.
    """

    usual_provider: ClassVar[str] = "another part"
    from_task: ClassVar[bool] = False  # the task provides it, not a part
    page: ClassVar[str] = "docs/mixing.md"  # where errors send the reader

    provider: str = field(default="", compare=False, repr=False, kw_only=True)

    @property
    def advice(self) -> str:
        """The part to use if no part of a method provides the signal."""
        return self.provider or self.usual_provider

    def met_by(self, provided: "Signal") -> bool:
        """Return whether a part that provides `provided` gives what is asked for here."""
        return provided == self

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Menu(Signal):
    """A plan's menu of sub-model sizes, from which somebody chooses."""

    entries: int | None = None  # how many; None: any number, or a number that the model decides
    usual_provider: ClassVar[str] = "plan=WidthMenu(...) or plan=TrainedLayersMenu(...)"

    def met_by(self, provided: Signal) -> bool:
        if not isinstance(provided, Menu):
            return False
        return self.entries is None or provided.entries == self.entries

    def __str__(self) -> str:
        return "a menu" if self.entries is None else f"a menu of {self.entries} sizes"


@dataclass(frozen=True)
class ServerChoice(Signal):
    """The server's choice from the menus of the plan: no menu is left for the devices."""

    usual_provider: ClassVar[str] = "plan=Assigned(...)"

    def __str__(self) -> str:
        return "a choice on the server"


@dataclass(frozen=True)
class TargetTime(Signal):
    """The seconds that an order should take, in the hyperparameters of each device."""

    usual_provider: ClassVar[str] = "plan=TargetSeconds(WidthMenu(...))"

    def __str__(self) -> str:
        return "a target time"


@dataclass(frozen=True)
class HeldResults(Signal):
    """Results that wait on their devices until the server fetches them."""

    usual_provider: ClassVar[str] = "schedule=HoldAndFetch()"

    def __str__(self) -> str:
        return "results that wait on the devices"


@dataclass(frozen=True)
class Diagnostic(Signal):
    """A value that an aggregator adds to the record of a round, under this name."""

    name: str
    usual_provider: ClassVar[str] = "an aggregator that records it"

    def __str__(self) -> str:
        return f"the diagnostic {self.name!r}"


@dataclass(frozen=True)
class FollowsSentFraction(Signal):
    """An uplink codec that compresses as far as each order asks."""

    usual_provider: ClassVar[str] = (
        "uplink=Fgc(), Hq() or Uveq(), or one of them inside TopK(...) or ErrorFeedback(...)"
    )
    page: ClassVar[str] = "docs/codecs.md"

    def __str__(self) -> str:
        return "an uplink codec that follows the sent fraction of an order"


@dataclass(frozen=True)
class ServerSamples(Signal):
    """Samples on the server, by whose loss it compares models; the task provides them."""

    usual_provider: ClassVar[str] = "a task that keeps some samples back for the server"
    from_task: ClassVar[bool] = True

    def __str__(self) -> str:
        return "samples on the server"


@dataclass(frozen=True)
class SentFraction(Signal):
    """How far a device compresses its upload, where a part decides it."""

    def __str__(self) -> str:
        return "the compression"


@dataclass(frozen=True)
class Frequency(Signal):
    """How fast a device runs its processor, where a part decides it."""

    def __str__(self) -> str:
        return "the processor frequency"


def diagnostics(*names: str) -> frozenset[Signal]:
    """Return the signals of an aggregator that records values under these names."""
    return frozenset(Diagnostic(name) for name in names)
