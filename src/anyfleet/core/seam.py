"""The two seams of the loop: the runtime below it, and what it hands to its caller."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.events import Events, Failures
from anyfleet.core.ledger import Ledger
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Devices, Kind, Params, Report, SubModelSize
from anyfleet.core.orders import Cohort, IssuedOrders
from anyfleet.core.planning import PlannedCohort
from anyfleet.core.replies import RepliedOrders
from anyfleet.core.screening import UpdateSizes
from anyfleet.elastic import Slice


class Runtime(Protocol):
    """The fleet as the loop knows it: the only place where simulation and reality differ.

    Whatever a runtime does not know is NaN: conditions that a device does not report, seconds and
    joules that nobody measured. docs/architecture.md says what follows from that.
    """

    @property
    def limits(self) -> Limits:
        """The limits above which the runtime refuses messages, and the server updates."""

    def now(self) -> float:
        """Return the seconds since the start of the run."""

    def begin_round(self, round_index: int) -> None:
        """Begin a round: what changes from round to round changes now."""

    def devices(self) -> Devices:
        """Return what the devices of the fleet declare, one row for each that ever enrolled.

        The roster is read as a round begins, and when `wait` has found devices that are free.
        Devices that join are appended, so that the row of a device stays its number; one that has
        left is never free again.
        """

    def free(self, devices: Ints) -> Flags:
        """Return which of these devices are online and can take an order.

        Only this says who is free: a device whose order was cancelled may be busy for a while.
        """

    def conditions(self, devices: Ints) -> Conditions:
        """Return what these devices would report if all checked in now; NaN where one does not."""

    def free_memory(self, devices: Ints) -> Floats:
        """Return the memory of `conditions`, which needs no number that somebody computes now."""

    def offer(self, orders: Cohort) -> None:
        """Let devices choose from the menus of orders; `wait` returns their choices."""

    def submit(self, orders: Cohort) -> None:
        """Send orders to their devices, with what these chose if they had a menu."""

    def wait(self, until: float | None, enough: int) -> Events:
        """Return the next `enough` replies and failures; fewer, or none, at the time `until`.

        Choices are returned as soon as there are any, and do not count. Where nothing is under way
        because no device was free, real fleets return as soon as one is, and say so.
        """

    def cancel(self, orders: Ints, reason: str) -> Failures:
        """Cancel orders that are offered or under way, and return what was spent on each.

        A reply that comes in all the same is ignored.
        """

    def save(self) -> Any:
        """Return the state of the runtime, for a checkpoint."""

    def restore(self, saved: Any) -> None:
        """Go on from a state that `save` returned."""


@dataclass(frozen=True, eq=False)
class Reply:
    """What a device replied to an order that was not about training."""

    device: int
    kind: Kind
    report: Report
    trees: Mapping[str, Params]
    samples: int


@dataclass(frozen=True, eq=False)
class Round:
    """The state of a run after a round."""

    index: int  # of this round
    time: float  # when it ended, in seconds since the start of the run
    params: Params
    buffers: Params
    diagnostics: Mapping[str, Any]
    ledger: Ledger  # the orders that this round closed
    replies: tuple[Reply, ...]  # those that are not about training
    sub_model: Callable[[SubModelSize], Slice]  # as the method's extraction cuts this model now
    snapshot: "Snapshot"
    fleet: Any  # the state of the runtime as the round ended


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the loop knows between two rounds; with the runtime's state it resumes a run."""

    params: Params
    buffers: Params
    states: Mapping[str, Any]  # of the parts that have one, by slot
    diagnostics: Mapping[str, Any]
    round_index: int  # of the next round
    started: float  # seconds since the start of the run
    issued: int  # orders so far
    visits: Ints  # of every device: how often it was ordered to train
    acknowledged: Ints  # of every device: its last order whose result counted, or -1
    under_way: IssuedOrders  # with those that are offered
    offered: tuple[PlannedCohort, ...]  # from whose menus devices have not chosen yet
    holding: IssuedOrders  # whose results wait on their devices
    waiting: RepliedOrders  # replies that came in, left to a later round
    update_sizes: Mapping[str, UpdateSizes]  # of updates that counted: "params" and "buffers"
