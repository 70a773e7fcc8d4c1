"""The fleet of real devices: the loop's orders and their replies travel through Flower.

A device is known by its number, which is its row in the roster, and reached by its node. It checks
in when it comes online, and again with every reply: what it said last are its conditions. Nothing
here waits for Flower's own notice that a node is gone: `Patience` says how long each thing may
take, after which a device counts as declining, or its order as failed.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import numpy as np

import anyfleet
from anyfleet.arguments import checked
from anyfleet.arrays import Flags, Floats, Ints, join
from anyfleet.core.check_in import Choices, OrderChoices
from anyfleet.core.choosing import decide
from anyfleet.core.events import Events, Failures
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Charges, Conditions, Devices, no_charges
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.elastic.cost.operations import Counting
from anyfleet.errors import BadMessage, StoreError, refuse
from anyfleet.runtime.flower.envelopes import Letter, Value, printable
from anyfleet.runtime.flower.fleet_state import FleetState
from anyfleet.runtime.flower.hosting import Arrival, Node
from anyfleet.runtime.replayed import Arrived
from anyfleet.wire import encode_offer, encode_order
from anyfleet.wire.check_in import CheckInReport, decode_check_in, decode_choice
from anyfleet.wire.inbox import Inbox

_LOOK = 1.0  # seconds between two looks at who is online
_POLL = 0.05  # seconds between two looks for replies, at least
_MESSAGES = 100  # outstanding messages that are looked for in a second of polling
_PROBE = bytes(64 << 10)  # the same for all devices
_MOST_ERRORS = 5  # of messages about one order, before it is given up
_AWAY, _STARTED = "the SuperLink was away", "the device was started again"  # sent again, why
_TWO_LEVELS = ("refused", "no reply")  # reasons of failures that the server gives, with another
_MARGIN = 60.0  # seconds that a message is kept longer than anybody waits for its reply

State = Literal["enrolled", "refused", "offline", "checking in", "free", "working", "revoked"]


class Post(Protocol):
    """What carries letters to nodes and brings their replies; `HostedRun` is one."""

    @property
    def run_id(self) -> int:
        """The number of Flower's run."""

    def nodes(self) -> list[Node]:
        """Return the nodes that are registered."""

    def send(self, letters: Sequence[tuple[int, Letter]], ttl: float | None = None) -> list[str]:
        """Send letters to nodes; return the ids of their messages."""

    def receive(self, wanted: Collection[str]) -> list[Arrival]:
        """Return the replies to these messages that are whole by now, each once."""

    def so_far(self, message: str) -> Arrival | None:
        """Return the part of a reply that has come in; None if there is nothing yet."""

    def begun(self, messages: Collection[str]) -> set[str]:
        """Return to which of these messages a reply has begun to come in."""

    def forget(self, message: str) -> None:
        """Let go of a message to which no more is wanted."""

    @property
    def breaks(self) -> int:
        """How many calls failed so that messages or replies may be lost."""


class Enrolled(Protocol):
    """A row of the roster."""

    @property
    def name(self) -> str:
        """The name of the device."""

    @property
    def node(self) -> int | None:
        """The node that is the device; None before it is registered."""

    @property
    def revoked(self) -> str:
        """When the device was revoked; "" while it may take part."""


class Roster(Protocol):
    """Who may take part; it may change while a run goes on."""

    def enrolled(self) -> Sequence[Enrolled]:
        """Return all devices that were ever enrolled; the place of each is its number."""


@checked
@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds."""

    order: float = 600.0  # for the reply to an order
    absence: float = 45.0  # for a device with an order that is offline
    check_in: float = 30.0  # for the reply to a check-in
    offer: float = 30.0  # for a choice from a menu; then the device counts as declining
    refresh: float = 60.0  # until the conditions of a device without an order are asked for again

    def __post_init__(self) -> None:
        refuse(
            f"Patience.{each.name} must be above 0 seconds, got {getattr(self, each.name)}."
            for each in fields(self)
            if not getattr(self, each.name) > 0
        )


@dataclass(frozen=True)
class DeviceStatus:
    """A device as people see it."""

    number: int
    name: str
    state: State
    since: float  # seconds since the start of the run
    samples: int
    why: str = ""  # it is refused, or its last order failed


@dataclass(frozen=True)
class FleetStatus:
    """The fleet as people see it, and what was counted since this server began."""

    now: float  # seconds since the start of the run
    round_index: int
    devices: tuple[DeviceStatus, ...]
    under_way: int  # orders
    replies: int
    failures: Mapping[str, int]  # by reason
    sent_again: Mapping[str, int]  # orders and offers, by why no reply to them came
    bytes_down: float
    bytes_up: float
    seconds: Mapping[str, float]  # of orders that were replied to, by phase


@dataclass(eq=False)
class _Device:
    """What the server knows of one device."""

    number: int
    name: str
    revoked: bool = False
    node: int | None = None
    online: bool = False
    changed: float = 0.0  # when its state changed last
    report: CheckInReport | None = None  # as it checked in last
    reported: float = -np.inf  # when it did
    refused: str = ""  # why it may not take part, or ""
    asked: float = -np.inf  # when it was last asked to check in
    asking: str | None = None  # the message that asks it to
    busy: str | None = None  # the message that it works on, also if nobody wants its reply
    order: int | None = None  # the order that it has, until the loop is told how it ended
    failure: str = ""  # of its last order
    entered: bool = False  # whether the loop knows what it declared
    probed: bool = False  # whether it was sent something large enough to measure its link
    session: float | None = None  # another one after every start of the device; None: never online


@dataclass(eq=False)
class _Sent:
    """A single order that was sent or offered."""

    order: Cohort
    began: float
    offered: bool = False
    message: str | None = None  # None: to be sent again
    data: bytes = b""
    errors: int = 0  # of messages that came to nothing
    reply: "_Ended | None" = None  # came in, and is not yet told
    choice: OrderChoices | None = None  # the same, of an offer


@dataclass(frozen=True, eq=False)
class _Ended:
    """A reply or a failure, with what was spent."""

    charges: Charges
    reply: Replies | None = None
    reason: str = ""


@dataclass(eq=False)
class _Counts:
    replies: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    sent_again: Counter[str] = field(default_factory=Counter)
    down: float = 0.0
    up: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class FlowerFleet:
    """A fleet of real devices under real time, as the loop sees it (`core.seam.Runtime`).

    A server that takes a run over says from which order on what devices did is `void`, and with
    which round it goes on.
    """

    def __init__(
        self,
        post: Post,
        task: Task,
        roster: Roster,
        *,
        run: str,
        bundle: str,
        counting: Counting = "flops",
        limits: Limits | None = None,
        patience: Patience | None = None,
        void: int = 0,
        round_index: int = 0,
    ) -> None:
        self._post, self._task, self._roster = post, task, roster
        self._run, self._bundle, self._counting = run, bundle, counting
        self.limits = limits or Limits()
        self._patience = patience or Patience()
        self._inbox = Inbox(task, self.limits)
        self._start, self._round_index = time.monotonic(), round_index
        self._fleet: list[_Device] = []
        self._sent: dict[int, _Sent] = {}  # by the number of the order, until its end is told
        self._ends: list[int] = []  # orders that have ended, in the order in which they did
        self._choices: list[OrderChoices] = []  # of orders without a menu, not yet told
        self._declared: Devices | None = None
        self._losses: dict[int, float] = {}
        self._looked = -np.inf
        self._settled = 0  # orders below never come again
        self._settling = (0, 0)  # the same of the last two checkpoints: the newer may be damaged
        self._next = 0  # number of the next order, as far as is known
        self._void = void  # orders from here on that devices did for an earlier server are void
        self._counts = _Counts()
        self._arrivals: list[Arrived] = []
        self._breaks = post.breaks  # after which everything was sent again

    # -- what policies learn

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._start

    def begin_round(self, round_index: int) -> None:
        """Begin a round, with the devices that are enrolled now."""
        self._round_index = round_index
        self._look(at_once=True)
        self._receive()
        self._declared = None

    def devices(self) -> Devices:
        """Return what the devices declared at check-in; one that never did has no samples."""
        if self._declared is None:
            for each in self._fleet:
                each.entered = each.report is not None
            reports = [each.report for each in self._fleet]
            zeros = np.zeros(len(reports), dtype=np.int64)
            self._declared = Devices(
                level=_column([0 if r is None else r.level for r in reports]),
                samples=_column([0 if r is None else r.samples for r in reports]),
                group=zeros,
                column_width=np.array([1.0 if r is None else r.column_width for r in reports]),
                counting=self._counting,
            )
        return self._declared

    def free(self, devices: Ints) -> Flags:
        """Return which devices are online, have checked in, and have nothing to do."""
        self._look()
        self._receive()
        self._await_somebody()
        known = [self._fleet[number] for number in devices.tolist()]
        return np.array([each.entered and self._is_free(each) for each in known], dtype=bool)

    def _is_free(self, device: _Device) -> bool:
        known = device.report is not None and not device.refused and not device.revoked
        return known and device.online and device.busy is None and device.order is None

    def _await_somebody(self) -> None:
        """Wait while no device at all is there: a round without devices would be wasted.

        One that the loop does not know yet ends it, too: `wait` tells of it.
        """
        until = self.now() + self._patience.order
        while not self._sent and self.now() < until:
            if any(map(self._is_free, self._fleet)):
                return
            time.sleep(_LOOK)
            self._look()
            self._receive()

    def start_clock(self, now: float = 0.0) -> None:
        """Let the run be so many seconds old: those that people waited for devices do not count."""
        later = now - self.now()
        self._start -= later
        self._looked += later
        for device in self._fleet:
            device.changed += later
            device.reported += later
            device.asked += later

    def ready(self) -> int:
        """Look once who is there, and return how many devices could take an order."""
        self._look(at_once=True)
        self._receive()
        return sum(map(self._is_free, self._fleet))

    def free_memory(self, devices: Ints) -> Floats:
        """Return the memory of `conditions`."""
        return self.conditions(devices).memory

    def conditions(self, devices: Ints) -> Conditions:
        """Return what these devices said of themselves last; NaN where they said nothing."""
        told = []
        for number in devices.tolist():
            report = self._fleet[number].report
            known = {} if report is None else dict(report.conditions)
            told.append({**known, "loss": self._losses.get(number, np.nan)})
        names = [each.name for each in fields(Conditions)]
        return Conditions(
            **{name: np.array([row.get(name, np.nan) for row in told]) for name in names}
        )

    # -- orders

    def offer(self, orders: Cohort) -> None:
        """Let devices choose from the menus of orders; those without a menu have nothing to."""
        plain = np.flatnonzero(orders.menu_index < 0)
        if len(plain):
            rest = orders.take(plain)
            nothing = decide(rest, self.conditions(rest.device), [{}] * len(rest), self._task)
            self._choices.append(OrderChoices(rest.id, nothing))
        asked = orders.take(orders.menu_index >= 0)
        self._dispatch(asked.rows(), offered=True)

    def submit(self, orders: Cohort) -> None:
        """Send orders to their devices."""
        self._settled = self._settling[0]
        self._dispatch(orders.rows(), offered=False)

    def _dispatch(self, orders: Sequence[Cohort], *, offered: bool) -> None:
        began, fresh = self.now(), []
        for order in orders:
            encode = encode_offer if offered else encode_order
            sent = _Sent(order, began, offered, data=encode(order, self._task))
            number = int(order.id[0])
            self._sent[number], self._next = sent, max(self._next, number + 1)
            self._of(sent).order = number
            if not offered:
                self._inbox.expect(order)
            fresh.append(sent)
        self._post_orders(fresh)

    def _post_orders(self, orders: Sequence[_Sent]) -> None:
        """Send what is to be sent to devices that are there; the others get it when they are."""
        ready = [(each, self._of(each)) for each in orders]
        ready = [(each, device) for each, device in ready if device.node is not None]
        about = {**self._about, "settled": self._settled}
        letters = [
            (
                device.node or 0,
                Letter("offer" if each.offered else "order", each.data, about),
            )
            for each, device in ready
        ]
        kept = self._patience.order + _MARGIN
        messages = self._post.send(letters, kept) if letters else []
        for (each, device), message in zip(ready, messages, strict=True):
            each.message = device.busy = message
            device.changed = self.now()

    @property
    def _about(self) -> dict[str, Value]:
        """What is told beside everything that is sent."""
        return {
            "run": self._run,
            "server": str(self._post.run_id),
            "void": self._void,
            "counting": self._counting,
        }

    def _of(self, sent: _Sent) -> _Device:
        return self._fleet[int(sent.order.device[0])]

    # -- waiting

    def wait(self, until: float | None, enough: int) -> Events:
        """Wait for `enough` replies and failures, or until `until`; choices come back alone.

        If nothing is under way, wait until a device is free: there may have been none.
        """
        events = self._awaited(until, enough)
        self._arrivals.append(Arrived.of(events, self.now()))
        return events

    def arrivals(self) -> tuple[Arrived, ...]:
        """Return what came in at each call of `wait`, since this was asked last."""
        found, self._arrivals = tuple(self._arrivals), []
        return found

    def _awaited(self, until: float | None, enough: int) -> Events:
        while True:
            self._look()
            self._receive()
            self._give_up()
            if chosen := self._chosen():
                return Events(choices=join(chosen))
            if len(self._ends) >= enough or (until is not None and self.now() >= until):
                return self._told(enough)
            if not self._sent:
                free = [each for each in self._fleet if self._is_free(each)]
                if free and (until is None or not any(each.entered for each in free)):
                    self._declared = None  # the roster is read again
                    return Events(free=len(free))
            time.sleep(self._pause(until))

    def _pause(self, until: float | None) -> float:
        pause = max(_POLL, len(self._sent) / _MESSAGES)
        return pause if until is None else max(0.0, min(pause, until - self.now()))

    def _chosen(self) -> list[OrderChoices]:
        """Return the choices that were made, and close what was offered."""
        found, self._choices = self._choices, []
        for number in [number for number, each in self._sent.items() if each.choice]:
            if (choice := self._closed(number).choice) is not None:
                found.append(choice)
        return found

    def _told(self, enough: int) -> Events:
        """Return the events that came first, at most so many, and close their orders."""
        numbers, self._ends = self._ends[:enough], self._ends[enough:]
        ended = [(number, self._closed(number).reply) for number in numbers]
        replies = [(e.reply, e.charges) for _, e in ended if e is not None and e.reply is not None]
        failed = [(n, e) for n, e in ended if e is not None and e.reply is None]
        failures = None
        if failed:
            order = np.array([number for number, _ in failed], dtype=np.int64)
            spent = join([each.charges for _, each in failed])
            failures = Failures(order, tuple(each.reason for _, each in failed), spent)
        if not replies:
            return Events(failures=failures)
        came, charges = join([reply for reply, _ in replies]), join([each for _, each in replies])
        return Events(replies=came, charges=charges, failures=failures)

    def _closed(self, number: int) -> _Sent:
        """Return an order that the loop is told of, and let its device have another."""
        sent = self._sent.pop(number)
        self._of(sent).order = None
        return sent

    def cancel(self, orders: Ints, reason: str) -> Failures:
        """Cancel orders; a device that works on one is busy until it has replied."""
        charges = []
        for number in orders.tolist():
            sent = self._closed(number)
            self._inbox.close(number)
            self._ends = [each for each in self._ends if each != number]
            spent = sent.reply.charges if sent.reply else self._unfinished(sent)
            charges.append(spent)
        return Failures(orders, (reason,) * len(orders), join(charges))

    # -- what comes in

    def _look(self, *, at_once: bool = False) -> None:
        """Look who is enrolled and online, and ask those to check in of whom too little is known.

        An order whose message was lost is sent again to a device that is back.
        """
        now = self.now()
        if not at_once and now - self._looked < _LOOK:
            return
        self._looked = now
        for number, row in enumerate(self._roster.enrolled()):
            if number == len(self._fleet):
                self._fleet.append(_Device(number, row.name, changed=now))
            self._fleet[number].node = row.node
            self._fleet[number].revoked = bool(row.revoked)
        online = {node.id: node.session for node in self._post.nodes() if node.online}
        for device in self._fleet:
            self._see(device, device.node in online and not device.revoked, now)
            if device.online:
                session = online[device.node or 0]
                if device.session not in (None, session):
                    self._recall([device], _STARTED)
                device.session = session
        self._ask([each for each in self._fleet if self._is_due(each, now)], now)
        lost = [
            each
            for each in self._sent.values()
            if each.message is None and not (each.reply or each.choice)
        ]
        self._post_orders([each for each in lost if self._of(each).online])

    def _see(self, device: _Device, online: bool, now: float) -> None:
        if online == device.online:
            return
        device.online, device.changed = online, now
        if online and device.busy is None and device.order is None:
            device.report = None  # it may have been started with other settings

    def _is_due(self, device: _Device, now: float) -> bool:
        """Return whether a device is to be asked for its conditions now."""
        engaged = device.busy is not None or device.order is not None
        if not device.online or device.asking is not None or engaged:
            return False
        if device.refused:
            return now - device.asked > self._patience.refresh
        return device.report is None or now - device.reported > self._patience.refresh

    def _ask(self, devices: Sequence[_Device], now: float) -> None:
        letters = [
            (
                device.node or 0,
                Letter(
                    "check-in",
                    b"" if device.probed else _PROBE,  # by which it measures its link
                    {
                        **self._about,
                        "version": anyfleet.__version__,
                        "bundle": self._bundle,
                        "round": self._round_index,
                        "device": device.number,
                    },
                ),
            )
            for device in devices
        ]
        messages = self._post.send(letters, self._patience.check_in) if letters else []
        for device, message in zip(devices, messages, strict=True):
            device.asking, device.asked, device.probed = message, now, True

    def _receive(self) -> None:
        """Take in everything that has come."""
        asked = {each.asking: each for each in self._fleet if each.asking is not None}
        busy = {each.busy: each for each in self._fleet if each.busy is not None}
        orders = {each.message: each for each in self._sent.values() if each.message is not None}
        for arrival in self._post.receive([*asked, *busy]):
            if arrival.message in asked:
                asked[arrival.message].asking = None
                self._checked_in(asked[arrival.message], arrival)
            elif arrival.message in busy:
                device = busy[arrival.message]
                device.busy, device.changed = None, self.now()
                if arrival.message in orders:
                    self._replied(orders[arrival.message], device, arrival)
        if self._breaks != self._post.breaks:
            self._breaks = self._post.breaks
            self._recall(self._fleet, _AWAY)

    def _recall(self, devices: Sequence[_Device], reason: str) -> None:
        """Take back what devices are about, so that it is sent again.

        Messages and replies can be taken once: one that is just being taken when the SuperLink or
        the device dies reaches nobody. A device that has carried out an order answers it again with
        what it has kept. A reply that has begun to come in is not lost: its device had kept it
        before it sent it, and goes on with what is missing. Should it not, the upload expires after
        some minutes, and the order is sent again then.
        """
        about = [each for device in devices for each in (device.asking, device.busy) if each]
        begun = self._post.begun(about) if about else set()
        for message in about:
            if message not in begun:
                self._post.forget(message)
        for device in devices:
            if device.asking not in begun:
                device.asking = None
            if device.busy in begun:
                continue
            device.busy = None
            sent = None if device.order is None else self._sent.get(device.order)
            if sent is not None and sent.message and not (sent.reply or sent.choice):
                sent.message = None
                self._counts.sent_again[reason] += 1

    def _checked_in(self, device: _Device, arrival: Arrival) -> None:
        if arrival.error:
            return
        if arrival.letter.kind == "check-in":
            self._report(device, arrival.letter.data)
        else:  # it is asked again when its conditions would be
            device.refused = f"it cannot check in: {_reason(arrival.letter)}"

    def _report(self, device: _Device, data: bytes) -> None:
        """Enter what a device says of itself, or why it may not take part."""
        try:
            report = decode_check_in(data)
        except BadMessage as error:
            device.refused = f"its check-in cannot be read: {printable(str(error))}"
            return
        device.refused = self._unfit(report)
        if device.report is None:
            device.changed = self.now()
        if self._differs(device, report):
            device.entered = False  # it takes part from the next round on
        device.report, device.reported = report, self.now()

    def _differs(self, device: _Device, report: CheckInReport) -> bool:
        """Return whether a device declares something else than the loop knows."""
        if self._declared is None or len(self._declared) <= device.number:
            return True
        row, known = device.number, self._declared
        declared = report.level, report.samples, report.column_width
        return declared != (known.level[row], known.samples[row], known.column_width[row])

    def _unfit(self, report: CheckInReport) -> str:
        """Return why a device with such a report cannot take part, or ""."""
        if report.version != anyfleet.__version__:
            return (
                f"the device has Anyfleet {printable(report.version)}, this server has "
                f"{anyfleet.__version__}: install the same version on both"
            )
        if report.bundle != self._bundle:
            return (
                f"the device has bundle {printable(report.bundle[:12])}, this run needs "
                f"{self._bundle[:12]}: hand over the folder `device` again"
            )
        if report.column_width * self.limits.columns < 1:
            return (
                f"the device wants columns of width {report.column_width:g}: start it with "
                f"--column-width {1 / self.limits.columns:.4g} or more"
            )
        return ""

    def _replied(self, sent: _Sent, device: _Device, arrival: Arrival) -> None:
        """Enter the reply to an order or to an offer."""
        if arrival.error:
            # It never arrived, or its reply: it is sent again when the device is there.
            sent.message, sent.errors = None, sent.errors + 1
            self._counts.sent_again[arrival.error.partition(":")[0]] += 1
            if sent.errors > _MOST_ERRORS:
                self._abandon(sent, device, f"no reply: {arrival.error}")
            return
        if sent.offered:
            self._chose(sent, arrival)
        else:
            self._end(sent, device, arrival)

    def _chose(self, sent: _Sent, arrival: Arrival) -> None:
        letter = arrival.letter
        if letter.kind == "choice":
            try:
                chosen = decode_choice(letter.data, sent.order, self.limits)
            except BadMessage as error:
                sent.choice = _declined(
                    sent.order, f"its choice was refused: {printable(str(error))}"
                )
                return
            told = tuple(map(printable, chosen.choices.declined))
            sent.choice = replace(chosen, choices=replace(chosen.choices, declined=told))
        else:
            sent.choice = _declined(sent.order, _reason(letter))

    def _end(self, sent: _Sent, device: _Device, arrival: Arrival) -> None:
        """End an order by what came of its reply, which may be a part of it."""
        letter, number = arrival.letter, int(sent.order.id[0])
        if isinstance(said := letter.about.get("report"), bytes):
            self._report(device, said)
        reply, reason = None, ""
        if letter.kind == "reply":
            try:
                reply = self._inbox.receive(letter.data, device.number)
            except BadMessage as error:
                reason = f"refused: {error.reason}: {printable(str(error))}"
        else:
            reason = f"refused by the device: {_reason(letter)}"
        self._inbox.close(number)
        charges = self._spent(sent, letter, reply)
        if reply is not None:
            loss = float(reply.reported("loss")[0])
            if not np.isnan(loss):
                self._losses[device.number] = loss
        self._finish(sent, device, _Ended(charges, reply, reason))

    def _finish(self, sent: _Sent, device: _Device, ended: _Ended) -> None:
        sent.reply = ended
        self._ends.append(int(sent.order.id[0]))
        device.failure, counts = ended.reason, self._counts
        counts.down += float(ended.charges.bits_down[0]) / 8
        counts.up += float(ended.charges.bits_up[0]) / 8
        if ended.reply is None:
            counts.failures[_sort(ended.reason)] += 1
            return
        counts.replies += 1
        for phase in ("download", "compute", "upload"):
            spent = float(getattr(ended.charges, f"{phase}_seconds")[0])
            if not np.isnan(spent):
                counts.seconds[phase] = counts.seconds.get(phase, 0.0) + spent

    # -- patience

    def _give_up(self) -> None:
        """End what has taken too long."""
        now, patience = self.now(), self._patience
        for device in self._fleet:
            if device.asking is not None and now - device.asked > patience.check_in:
                self._post.forget(device.asking)
                device.asking, device.asked = None, now
        for sent in [each for each in self._sent.values() if not (each.reply or each.choice)]:
            device = self._of(sent)
            if sent.offered:
                if now - sent.began > patience.offer or device.revoked:
                    self._decline(sent, device, f"no choice within {patience.offer:g} s")
            elif reason := self._hopeless(sent, device, now):
                self._abandon(sent, device, reason)

    def _hopeless(self, sent: _Sent, device: _Device, now: float) -> str:
        if device.revoked:
            return "revoked"
        if now - sent.began > self._patience.order:
            return "no reply in time"
        gone = not device.online and now - max(device.changed, sent.began) > self._patience.absence
        return "went offline" if gone else ""

    def _decline(self, sent: _Sent, device: _Device, reason: str) -> None:
        if sent.message is not None:
            self._post.forget(sent.message)
        if device.busy == sent.message:
            device.busy = None
        sent.choice = _declined(sent.order, reason)

    def _abandon(self, sent: _Sent, device: _Device, reason: str) -> None:
        """End an order with the columns of its reply that came in, if they are of use."""
        if sent.offered:
            self._decline(sent, device, reason)
            return
        arrival = None
        if sent.message is not None and not device.revoked:
            arrival = self._post.so_far(sent.message)
        if sent.message is not None:
            self._post.forget(sent.message)
        if device.busy == sent.message:
            device.busy = None
        device.changed = self.now()
        if arrival is not None and arrival.letter.kind == "reply" and arrival.letter.data:
            try:
                read = self._inbox.receive(arrival.letter.data, device.number)
            except BadMessage:
                pass
            else:
                self._inbox.close(int(sent.order.id[0]))
                self._finish(sent, device, _Ended(self._spent(sent, arrival.letter, read), read))
                return
        self._inbox.close(int(sent.order.id[0]))
        self._finish(sent, device, _Ended(self._unfinished(sent), reason=reason))

    # -- charges

    def _spent(self, sent: _Sent, letter: Letter, reply: Replies | None) -> Charges:
        """Return what an order cost, as far as it was measured; what is not known is NaN.

        The device tells how long it downloaded and computed; all the rest counts as upload, also
        waiting for the device to ask and for its restarts. A device that does not tell its download
        has the rest divided by bits.
        """
        order, number = sent.order, np.array([int(sent.order.id[0])])
        elapsed = self.now() - sent.began
        compute = min(_number(letter, "seconds"), elapsed)  # NaN stays NaN
        down, up = float(order.bits[0]), 0.0 if reply is None else float(reply.bits[0])
        link = elapsed - (0.0 if np.isnan(compute) else compute)
        download = min(_number(letter, "download"), link)
        if np.isnan(download):
            download = link * down / max(1.0, down + up)
        return replace(
            no_charges(number, sent.began),
            flops=np.array([_number(letter, "flops")]),
            bits_down=np.array([down]),
            bits_up=np.array([up]),
            download_seconds=np.array([download]),
            compute_seconds=np.array([compute]),
            upload_seconds=np.array([link - download]),
            download_joules=np.full(1, np.nan),
            compute_joules=np.array([_number(letter, "joules")]),
            upload_joules=np.full(1, np.nan),
            delivered_down=np.array([min(_number(letter, "delivered", 1.0), 1.0)]),
            delivered_up=np.zeros(1) if reply is None else reply.delivered_width,
        )

    def _unfinished(self, sent: _Sent) -> Charges:
        """Return what is known of the cost of an order to which nothing came."""
        unknown, number = np.full(1, np.nan), np.array([int(sent.order.id[0])])
        if sent.offered or sent.message is None:
            return no_charges(number, sent.began)
        return replace(
            no_charges(number, sent.began),
            flops=unknown,
            bits_down=sent.order.bits,
            download_seconds=unknown,
            compute_seconds=unknown,
            upload_seconds=unknown,
            download_joules=unknown,
            compute_joules=unknown,
            upload_joules=unknown,
        )

    # -- checkpoints

    def save(self) -> FleetState:
        """Return the state for a checkpoint."""
        self._settling = self._settling[1], min([*self._sent, self._next])
        losses = np.full(len(self._fleet), np.nan)
        for number, loss in self._losses.items():
            losses[number] = loss
        orders = [self._sent[number] for number in sorted(self._sent)]
        return FleetState(
            self._post.run_id,
            self.now(),
            self._next,
            losses,
            tuple(each.order for each in orders if not each.offered),
            tuple(each.order for each in orders if each.offered),
        )

    def restore(self, saved: FleetState) -> None:
        """Go on from a state; what was under way is asked again, with the same numbers and keys.

        Devices that did it already reply with what they have kept.
        """
        self.start_clock(saved.now)
        known = enumerate(saved.losses.tolist())
        self._losses = {number: loss for number, loss in known if not np.isnan(loss)}
        self._next = saved.next_order
        self._look(at_once=True)
        if len(self._fleet) < len(saved.losses):
            raise StoreError(
                f"the run had {len(saved.losses)} devices, but the roster has {len(self._fleet)}. "
                "Restore roster.toml: rows of it are never removed."
            )
        self._settled, self._settling = 0, (0, 0)  # the checkpoint before may still be needed
        self._dispatch(saved.under_way, offered=False)
        self._dispatch(saved.offered, offered=True)

    # -- for people

    def status(self) -> FleetStatus:
        """Return the fleet as it stands; may be called from another thread."""
        counts = self._counts
        return FleetStatus(
            now=self.now(),
            round_index=self._round_index,
            devices=tuple(map(self._status_of, list(self._fleet))),
            under_way=len(self._sent),
            replies=counts.replies,
            failures=dict(counts.failures),
            sent_again=dict(counts.sent_again),
            bytes_down=counts.down,
            bytes_up=counts.up,
            seconds=dict(counts.seconds),
        )

    def _status_of(self, device: _Device) -> DeviceStatus:
        report = device.report
        return DeviceStatus(
            device.number,
            device.name,
            self._state_of(device),
            device.changed,
            0 if report is None else report.samples,
            device.refused or device.failure,
        )

    def _state_of(self, device: _Device) -> State:
        if device.revoked:
            return "revoked"
        if not device.online:
            return "enrolled" if device.reported == -np.inf else "offline"
        if device.refused:
            return "refused"
        if device.busy is not None:
            return "working"
        return "checking in" if device.report is None else "free"

    def say_done(self) -> None:
        """Tell all devices that are online that the run has ended."""
        there = [each.node for each in self._fleet if each.online and each.node is not None]
        if there:
            self._post.send([(node, Letter("done", b"", {"run": self._run})) for node in there])


def _column(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def _declined(order: Cohort, reason: str) -> OrderChoices:
    """Return the choice of a device that takes nothing of its menu."""
    choice = Choices(
        entry=np.zeros(1, dtype=np.int64),
        hyperparameters=order.hyperparameters,
        utility=np.full(1, np.nan),
        declined=(reason,),
    )
    return OrderChoices(order.id, choice)


def _reason(letter: Letter) -> str:
    """Return the reason that a device gives, as far as it can be printed."""
    return printable(str(letter.about.get("reason", "it gave no reason")))


def _sort(reason: str) -> str:
    """Return under which of a few reasons a failure is counted.

    What the server itself found has two levels; what a node says has one: it could say anything.
    """
    first, _, rest = reason.partition(": ")
    second = rest.partition(":")[0]
    return f"{first}: {second}" if first in _TWO_LEVELS else first


def _number(letter: Letter, name: str, otherwise: float = np.nan) -> float:
    """Return a number that a device sent beside its reply; NaN unless it makes sense."""
    value = letter.about.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    return float(value) if 0 <= value < 1e30 else np.nan
