"""Serving a fleet: the SuperLink, the gate, Flower's run, and the fleet as the loop sees it."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from anyfleet.core.limits import Limits
from anyfleet.core.objectives import Task
from anyfleet.deployment.enrolment import Enrolment
from anyfleet.deployment.fleet_folder import FleetFolder
from anyfleet.deployment.gate import Gate, GateLimits
from anyfleet.deployment.metrics import served as metrics_served
from anyfleet.deployment.status import Status, status_of, write_status
from anyfleet.deployment.superlink import SuperLink
from anyfleet.device.bundle import bundle_of, read_bundle
from anyfleet.elastic.cost.operations import Counting
from anyfleet.errors import ConfigError, Problem, StoreError
from anyfleet.runtime.flower.fleet import FlowerFleet, Patience
from anyfleet.runtime.flower.fleet_state import FleetState
from anyfleet.runtime.flower.hosting import HostedRun, stop_open_runs
from anyfleet.runtime.replayed import Arrived
from anyfleet.store.disk import DiskError, told, write

FILE = "fleet.json"  # in the folder of a run: which fleet it is played on
ARRIVALS = "arrivals.jsonl"  # what came in, round by round, so that it can be replayed
_SECOND = 1.0  # between two writings of the status
_GATHER = 0.2  # seconds between two looks who is there
_FAREWELL = 0.7  # seconds in which devices hear that a run has ended, before its messages go
_ASIDE = 1 << 16  # bytes of a letter beside its message


class Service(msgspec.Struct, frozen=True):
    """How a fleet is served for a run; kept with the run, so that it can be resumed."""

    fleet: str  # the folder of the fleet
    run: str  # the name under which devices know the run, also after a restart of the server
    wait_for: int = 0  # devices that must have checked in before the run begins; 0: all enrolled
    metrics: int = 0  # port on loopback; 0: the system picks one, -1: none
    order_patience: float = Patience.order
    absence: float = Patience.absence
    offer_patience: float = Patience.offer

    @property
    def patience(self) -> Patience:
        """How long the server waits."""
        return Patience(order=self.order_patience, absence=self.absence, offer=self.offer_patience)


def keep(folder: Path, service: Service) -> None:
    """Write into the folder of a run how its fleet is served."""
    write(folder / FILE, msgspec.json.encode(service))


def kept(folder: Path) -> Service | None:
    """Return how the fleet of a run is served; None for a simulated run."""
    file = folder / FILE
    if not file.is_file() or file.is_symlink():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Service)
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{file} cannot be read: {error}.") from error


@dataclass(eq=False)
class Served:
    """A fleet that is served for a run, and what people are told of it."""

    folder: FleetFolder
    fleet: FlowerFleet
    link: "Linked"
    enrolment: Enrolment
    run: Path
    rounds: int
    metrics: int = -1  # port
    doing: str = "starting"
    _stopped: threading.Event = field(default_factory=threading.Event)

    def status(self) -> Status:
        """Return the status now; may be called from any thread."""
        return status_of(
            self.fleet.status(),
            run=self.run,
            doing="; ".join(filter(None, (self.doing, self.enrolment.trouble))),
            rounds=self.rounds,
            gate=dict(self.link.gate.counts()),
            restarts=self.link.superlink.restarts,
        )

    def gather(self, count: int, patience: float = math.inf) -> Iterator[int]:
        """Yield how many devices are ready, again and again, until they are enough.

        A count of 0 means all that are enrolled, and at least one. Once one is ready, the others
        have `patience` seconds to come; then those that are ready are enough.
        """
        until = math.inf
        while True:
            there = self.fleet.ready()
            until = min(until, time.monotonic() + patience) if there else math.inf
            enrolled = sum(not each.revoked for each in self.enrolment.enrolled())
            wanted = count or max(1, enrolled)
            self.doing = f"waiting for devices: {there} of {wanted}"
            if not enrolled:
                self.doing += f"; none is enrolled: anyfleet fleet add {self.folder.path} NAME"
            yield there
            if there >= wanted or time.monotonic() >= until:
                self.doing = "playing"
                self.fleet.start_clock()
                return
            time.sleep(_GATHER)

    def keep_arrivals(self, round_index: int) -> None:
        """Add what came in during a round to the file of the run."""
        line = msgspec.json.encode({"round": round_index, "arrived": self.fleet.arrivals()})
        file = self.run / ARRIVALS
        with told(file), file.open("ab") as out:
            out.write(line + b"\n")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Write the status every second, until the block ends."""
        thread = threading.Thread(target=self._write, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()
            with suppress(DiskError):
                write_status(self.folder.path, self.status())

    def _write(self) -> None:
        while not self._stopped.wait(_SECOND):
            with suppress(DiskError):  # a status that is missing is no reason to stop a run
                write_status(self.folder.path, self.status())


class _Line(msgspec.Struct):
    round: int
    arrived: tuple[Arrived, ...]


def read_arrivals(run: Path) -> tuple[Arrived, ...]:
    """Return what came in during a run; of a round that was played again, the last time counts."""
    rounds: dict[int, tuple[Arrived, ...]] = {}
    for text in (run / ARRIVALS).read_bytes().splitlines():
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.MsgspecError:  # a server that was killed within it: the round is there again
            continue
        rounds = {n: came for n, came in rounds.items() if n < line.round}
        rounds[line.round] = line.arrived
    return tuple(each for number in sorted(rounds) for each in rounds[number])


@dataclass(frozen=True, eq=False)
class Work:
    """What a fleet is served for: a task, its limits, and the folder of a run."""

    task: Task
    limits: Limits
    counting: Counting
    run: Path
    rounds: int
    state: FleetState | None = None  # of the run that is resumed
    done: int = 0  # rounds of it


class Linked(NamedTuple):
    """The SuperLink of a fleet, and the gate before it, through which devices come."""

    superlink: SuperLink
    gate: Gate


@contextmanager
def serving(folder: FleetFolder, service: Service, work: Work) -> Iterator[Served]:
    """Serve a fleet for a run. However the block ends, everything that was started is stopped."""
    fitting_bundle(folder, work.task)
    with linked(folder, work) as link, hosting(folder, service, work, link) as found:
        yield found


@contextmanager
def linked(folder: FleetFolder, work: Work) -> Iterator[Linked]:
    """Let devices connect while the block runs, with messages as large as the work needs."""
    limits = GateLimits.for_message(_most(work))
    with SuperLink(folder) as link:
        # A device that comes before its key is known would be refused, and wait for a while.
        Enrolment(folder.roster, link.address, folder.authority.read_bytes()).enrolled()
        with Gate(folder, link.address, limits=limits) as gate:
            yield Linked(link, gate)


@contextmanager
def hosting(folder: FleetFolder, service: Service, work: Work, link: Linked) -> Iterator[Served]:
    """Serve a run to devices that connect over a link; other runs may come before and after."""
    bundle, authority = fitting_bundle(folder, work.task), folder.authority.read_bytes()
    state, address = work.state, link.superlink.address
    with ExitStack() as stack:
        stop_open_runs(address, ca=authority)  # devices may wait for what is left of them
        post = HostedRun(
            address,
            ca=authority,
            secret=folder.secret.read_bytes(),
            replaces=None if state is None else state.run_id,
            most=_most(work) + _ASIDE,
            sent=link.gate.ring,
        )
        closing = stack.enter_context(_closing(post))
        enrolment = Enrolment(folder.roster, address, authority)
        fleet = FlowerFleet(
            post,
            work.task,
            enrolment,
            run=service.run,
            bundle=bundle,
            counting=work.counting,
            limits=work.limits,
            patience=service.patience,
            void=0 if state is None else state.next_order,
            round_index=work.done,
        )
        found = Served(folder, fleet, link, enrolment, work.run, work.rounds)
        if service.metrics >= 0:
            found.metrics = stack.enter_context(metrics_served(found, service.metrics))
        stack.enter_context(found.watched())
        yield found
        closing.append(True)
        fleet.say_done()
        time.sleep(_FAREWELL)
        found.doing = "done"


def _most(work: Work) -> int:
    """Return the most bytes of a message."""
    return work.limits.for_model(work.task.blueprint).message


@contextmanager
def _closing(post: HostedRun) -> Iterator[list[bool]]:
    """Close the run of Flower at the end: as finished if somebody says so in the list."""
    finished: list[bool] = []
    try:
        yield finished
    finally:
        with suppress(Exception):  # the SuperLink may be gone, and ends with us anyway
            post.close(failed=not finished)


def fitting_bundle(folder: FleetFolder, task: Task) -> str:
    """Return the digest of the bundle that devices have; raise ConfigError unless it is the task's.

    Devices that have another model could do nothing with this run's orders.
    """
    allow = folder.device_file().allow
    there, wanted = read_bundle(folder.bundle, allow).digest, bundle_of(task, allow).digest
    if there != wanted:
        told = (
            f"was made for another model than this run has ({there[:12]}, not {wanted[:12]}). "
            f"Write it anew with `anyfleet fleet bundle {folder.path} RUN.toml`, and hand it to "
            "the devices."
        )
        raise ConfigError([Problem(str(folder.bundle), told)])
    return there
