"""The seam to the world, and what the loop hands to its caller."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from anyfleet.arrays import Flags, Ints
from anyfleet.core.check_in import Choices
from anyfleet.core.incoming import Answer, Answered
from anyfleet.core.ledger import Entries
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Devices, Events, Lost, Params, Want
from anyfleet.core.orders import Orders
from anyfleet.core.planning import Held
from anyfleet.core.screening import Sizes
from anyfleet.elastic import Slice


class Runtime(Protocol):
    """The only place where simulation and reality differ."""

    @property
    def limits(self) -> Limits:
        """What it refuses of messages, and the server of what they bring."""

    def now(self) -> float: ...
    def begin(self, step: int) -> None:
        """A server step has begun: what changes from round to round changes now."""

    def devices(self) -> Devices: ...
    def free(self, devices: Ints) -> Flags:
        """Which of these devices are online and have nothing to do."""

    def conditions(self, devices: Ints) -> Conditions:
        """What these devices would report, were all of them asked now."""

    def offer(self, orders: Orders) -> Choices:
        """What devices choose from their menus, at check-in."""

    def submit(self, orders: Orders) -> None: ...
    def wait(self, until: float | None, enough: int) -> Events:
        """Up to `enough` outcomes; fewer, or none, when time `until` comes first."""

    def cancel(self, orders: tuple[int, ...], reason: str) -> tuple[Lost, ...]: ...
    def save(self) -> Any: ...
    def restore(self, saved: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class Step:
    """The state of a run after a server step."""

    index: int
    time: float  # seconds
    params: Params
    buffers: Params
    notes: Mapping[str, Any]
    ledger: Entries  # what became of the orders that this step closes
    answers: tuple[Answer, ...]
    sub_model: Callable[[Want], Slice]  # of this model, as the method's extraction cuts it now
    snapshot: "Snapshot"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the loop knows between two steps; with the runtime's own it resumes a run."""

    params: Params
    buffers: Params
    states: Mapping[str, Any]
    notes: Mapping[str, Any]
    step: int
    started: float
    issued: int
    visits: Ints
    heard: Ints
    flying: Mapping[int, Orders]
    holding: Mapping[int, Held]
    waiting: tuple[Answered, ...]  # answers that came in, left to a later step
    sizes: Mapping[str, Sizes]  # of updates that counted, by what changed
