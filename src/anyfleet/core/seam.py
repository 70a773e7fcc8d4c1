"""The seam to the world, and what the loop hands to its caller."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from anyfleet.arrays import Flags, Ints
from anyfleet.core.check_in import Choices
from anyfleet.core.incoming import RepliedOrder, Reply
from anyfleet.core.ledger import Ledger
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Devices, Events, Failure, Params, SubModelSize
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import HeldResult
from anyfleet.core.screening import Sizes
from anyfleet.elastic import Slice


class Runtime(Protocol):
    """The only place where simulation and reality differ."""

    @property
    def limits(self) -> Limits:
        """What it refuses of messages, and the server of what they bring."""

    def now(self) -> float: ...
    def begin_round(self, round_index: int) -> None:
        """A server step has begun: what changes from round to round changes now."""

    def devices(self) -> Devices: ...
    def free(self, devices: Ints) -> Flags:
        """Which of these devices are online and have nothing to do."""

    def conditions(self, devices: Ints) -> Conditions:
        """What these devices would report, were all of them asked now."""

    def check_in(self, orders: Cohort) -> Choices:
        """What devices choose from their menus, at check-in."""

    def submit(self, orders: Cohort) -> None: ...
    def wait(self, until: float | None, enough: int) -> Events:
        """Up to `enough` outcomes; fewer, or none, when time `until` comes first."""

    def cancel(self, orders: tuple[int, ...], reason: str) -> tuple[Failure, ...]: ...
    def save(self) -> Any: ...
    def restore(self, saved: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class Round:
    """The state of a run after a server step."""

    index: int
    time: float  # seconds
    params: Params
    buffers: Params
    diagnostics: Mapping[str, Any]
    ledger: Ledger  # what became of the orders that this step closes
    replies: tuple[Reply, ...]
    sub_model: Callable[
        [SubModelSize], Slice
    ]  # of this model, as the method's extraction cuts it now
    snapshot: "Snapshot"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the loop knows between two steps; with the runtime's own it resumes a run."""

    params: Params
    buffers: Params
    states: Mapping[str, Any]
    diagnostics: Mapping[str, Any]
    round_index: int
    started: float
    issued: int
    visits: Ints
    acknowledged: Ints
    under_way: Mapping[int, Cohort]
    holding: Mapping[int, HeldResult]
    waiting: tuple[RepliedOrder, ...]  # answers that came in, left to a later step
    sizes: Mapping[str, Sizes]  # of updates that counted, by what changed
