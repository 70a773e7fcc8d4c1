"""The loop of a device: it receives letters, does what they ask for, and replies.

It is one process that stays. An order is on disk before it is worked on, and so is its answer
before it is sent. So a process that is killed finds what it had to do when it comes back.
"""

import math
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, get_args

import msgspec
import numpy as np

import anyfleet
from anyfleet.core import client
from anyfleet.core.choosing import decide
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.limits import Limits
from anyfleet.core.messages import OF_TRAINING, Kind, measured
from anyfleet.core.orders import Cohort
from anyfleet.device.bundle import Bundle
from anyfleet.device.conditions import BitRates, Reporter, as_conditions, assumed
from anyfleet.device.data import OwnData
from anyfleet.device.device_task import MOST_NUMBER, DeviceTask
from anyfleet.device.log import Log
from anyfleet.device.memory import KeptAnswer, KeptOrder, Memory, Past
from anyfleet.device.sensors import Sensors, read_sensors
from anyfleet.elastic.cost.operations import Counting
from anyfleet.errors import BadMessage, LinkDown, LinkError, NotEnrolled, RunGone, StoreError
from anyfleet.runtime.flower.envelopes import Letter, Value
from anyfleet.runtime.simulated.charging import demand
from anyfleet.stopping import stop_if_told
from anyfleet.wire import (
    CheckInReport,
    decode_order,
    encode_check_in,
    encode_choice,
    encode_reply,
)

POLL_SECONDS = 0.1  # from one look for a letter to the next; the gate may hold a look back
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0  # seconds between two tries to reach the server
MOST_ATTEMPTS = 3  # at an order during which the process ended
_LONGEST_REASON = 1000  # characters that the server is told of what went wrong
_MOST_PROBE = 64 << 10  # bytes that are sent back to measure the link
_UNCHANGED = (Kind.EVALUATE, Kind.STATISTICS, Kind.REPORT)  # kinds that leave a state as it is


class Received(Protocol):
    """A letter from the server."""

    @property
    def letter(self) -> Letter:
        """The letter; its data is a prefix where the link failed in the middle."""

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""

    @property
    def handle(self) -> bytes:
        """All that a reply needs, also in another process."""

    @property
    def seconds(self) -> float:
        """The seconds that it took to come, from the moment on at which it was there."""


class Link(Protocol):
    """A device's end of the link, such as `runtime.flower.connection.Connection`."""

    def receive(self) -> Received | None:
        """Return the next letter; None if there is none now."""

    def reply(self, handle: bytes, letter: Letter) -> None:
        """Send the reply to a letter; called again after a failure it sends what is missing."""


Connect = Callable[[], AbstractContextManager[Link]]


@dataclass(frozen=True)
class Member:
    """What a device is in a fleet: its model, its data, and what it declares."""

    bundle: Bundle
    data: OwnData
    level: int = 0  # capability class, 0 the strongest
    column_width: float = 1.0  # models cross its link in columns of this width
    allow: tuple[str, ...] = ()  # packages besides Anyfleet whose parts orders may name
    limits: Limits = field(default_factory=Limits)


class Resident:
    """A device that stays in its fleet."""

    def __init__(
        self,
        member: Member,
        memory: Memory,
        reporter: Reporter,
        log: Log,
        *,
        rates: BitRates | None = None,
        sensors: Callable[[], Sensors] = read_sensors,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._member, self._memory, self._reporter, self._log = member, memory, reporter, log
        self._rates, self._sensors, self._sleep = rates or BitRates(), sensors, sleep
        self._task = DeviceTask(member.bundle, 0, member.data.train, member.data.test)
        self._number: int | None = None  # as the server said at the last check-in
        self._run = ""  # as the server said last
        self._pause = FIRST_PAUSE
        self._readings: dict[str, float] = {}  # temperature and power, at the last report

    def stay(self, connect: Connect, *, once: bool = False) -> None:
        """Take part in the fleet until the process is stopped, or until a run has ended: `once`."""
        for file in self._memory.set_damaged_aside():
            self._log.note(
                f"{file} was damaged, and has been set aside: the device goes on as one that has "
                "forgotten it."
            )
        while True:
            try:
                with connect() as link:
                    if self._serve(link, once=once):
                        return
            except LinkError as error:
                self._wait_for_link(error)

    def _serve(self, link: Link, *, once: bool) -> bool:
        """Take letters from a link; return True when a run has ended and the device shall leave."""
        while True:
            stop_if_told()
            try:
                left_over = self._memory.under_way()
                if left_over is not None:
                    self._deliver(left_over, link)
                began = time.perf_counter()
                received = link.receive()
                self._pause = FIRST_PAUSE
                if received is None:
                    known = "" if self._number is None else f"as device {self._number} "
                    self._log.say("wait", f"{known}for an order")
                    self._sleep(max(0.0, began + POLL_SECONDS - time.perf_counter()))
                    continue
                # Not since `began`: the server may have held the answer back until there was one.
                self._rates.received(len(received.letter.data), received.seconds)
                if self._heed(received, link) and once:
                    return True
            except LinkDown as error:
                self._wait_for_link(error)
            except BadMessage as error:
                self._log.note(f"a letter that cannot be read was left out: {error}")
                self._sleep(POLL_SECONDS)

    def _wait_for_link(self, error: LinkError) -> None:
        why = str(error) or type(error).__name__
        if isinstance(error, NotEnrolled):
            advice = "Ask the owner of the server to run `anyfleet fleet add` with device.pub."
            why = f"{why.rstrip('.')}. {advice}"
        self._log.say("retry", f"in {self._pause:.0f} s: {why}")
        self._sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    # -- letters

    def _heed(self, received: Received, link: Link) -> bool:
        """Read a letter and do what it asks for; return True if it says that the run has ended."""
        letter = received.letter
        self._note_run(letter.about)
        if letter.kind == "done":
            self._log.say("done", _reason(letter, "the run has ended"))
            if not self._run:  # nothing would tell the next run from this one
                self._memory.forget()
            return True
        if letter.kind == "order":
            kept = KeptOrder(
                kind=letter.kind,
                data=letter.data,
                about=dict(letter.about),
                whole=received.whole,
                handle=received.handle,
                seconds=received.seconds,
            )
            self._deliver(kept, link)
            return False
        replies = {"check-in": self._check_in, "offer": self._choose}
        try:
            reply = replies.get(letter.kind, _unknown)(letter)
        except Exception as error:  # noqa: BLE001 - a user's part can fail in any way
            reply = self._refusal(error)
        self._send(link, received.handle, reply)
        return False

    def _check_in(self, letter: Letter) -> Letter:
        """Return what the device is; the server decides whether it fits."""
        number, round_index = letter.about.get("device"), letter.about.get("round", 0)
        if isinstance(number, int):
            self._become(number)
        self._compare(letter)
        index = round_index if isinstance(round_index, int) else 0
        report = self._report(index, self._memory.last_loss(self._run), self._sensors())
        # Something to measure the link by travels back as it came.
        about = {"probe": letter.data[:_MOST_PROBE]} if letter.data else {}
        return Letter("check-in", report, about)

    def _compare(self, letter: Letter) -> None:
        """Say in the log where the server has another version or another bundle."""
        own = {"version": anyfleet.__version__, "bundle": self._member.bundle.digest}
        remedy = {
            "version": "install the version of the server",
            "bundle": "copy the folder device/ of the server again",
        }
        for what, mine in own.items():
            theirs = str(letter.about.get(what, mine))
            if theirs != mine:
                self._log.note(
                    f"the {what} of the server is {theirs}, that of this device {mine}: the "
                    f"server will refuse it. To take part, {remedy[what]}."
                )

    def _choose(self, letter: Letter) -> Letter:
        """Return what the device chooses from a menu."""
        order = self._read(letter.data)
        past = self._memory.before(int(order.id[0]), self._run)
        known = self._reporter.conditions(order.round_index, past.loss, self._sensors())
        if self._reporter.given is None:
            known = assumed(known)
        states = [past.state.chooser]
        counting = _counting(letter.about)
        choices = decide(order, as_conditions(known), states, self._task, counting)
        return Letter("choice", encode_choice(choices, order))

    # -- orders

    def _deliver(self, order: KeptOrder, link: Link) -> None:
        """Send the answer to an order, which is carried out first unless that is done already."""
        try:
            answer = self._memory.answer_to(order)
            if answer is None:
                answer = self._answer(order)
                self._memory.answer(answer)
            else:
                self._memory.begin(order)
            reply = Letter(answer.kind, answer.data, answer.about)
        except StoreError as error:  # a full disk: what cannot be kept must not be done
            reply = self._refusal(error)
        self._send(link, order.handle, reply)
        self._memory.delivered()

    def _answer(self, kept: KeptOrder) -> KeptAnswer:
        """Return the answer to an order: the reply, or why there is none."""
        kept = msgspec.structs.replace(kept, attempts=kept.attempts + 1)
        self._memory.begin(kept)
        self._note_run(kept.about)
        try:
            if kept.attempts > MOST_ATTEMPTS:
                raise BadMessage(f"this device ended {MOST_ATTEMPTS} times during it", "fault")
            return self._carry_out(kept)
        except KeyboardInterrupt:
            # Whoever stops the device is not the fault of the order.
            self._memory.begin(msgspec.structs.replace(kept, attempts=kept.attempts - 1))
            raise
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's model can fail in any way
            refusal = self._refusal(error)
            return KeptAnswer(kept.digest, refusal.kind, refusal.data, dict(refusal.about))

    def _carry_out(self, kept: KeptOrder) -> KeptAnswer:
        order = self._read(kept.data)
        number, settled = int(order.id[0]), kept.about.get("settled")
        size = f"width {order.width[0]:.3g}, layers from {order.slice_of(0).first_trained_layer} on"
        received = "" if kept.whole else f", {order.delivered_width[0]:.0%} of it received"
        self._log.say(
            "work",
            f"order {number}, round {order.round_index + 1}, {order.kind}, {size}{received}",
        )
        past = self._memory.before(number, self._run)
        flops = self._flops(order, past, _counting(kept.about))
        began = time.perf_counter()
        done = client.work(order, (past.state,), self._task)
        seconds, sensors = time.perf_counter() - began, self._sensors()
        data = encode_reply(done.replies, order, self._task)
        told = measured(done.replies.report_of(0), "loss")
        trained = order.kind in OF_TRAINING and not math.isnan(told)
        now = Past(done.states[0], told if trained else past.loss)
        if order.kind not in _UNCHANGED:
            self._memory.keep(number, now, self._run)
        if isinstance(settled, int):
            self._memory.settle(settled)
        report = self._report(order.round_index + 1, now.loss, sensors)
        about: dict[str, Value] = {"seconds": seconds, "flops": flops, "report": report}
        about["delivered"] = float(order.delivered_width[0])
        if kept.seconds is not None:
            about["download"] = kept.seconds
        if sensors.power is not None:  # as the machine draws when the work is done
            about["joules"] = sensors.power * seconds
        return KeptAnswer(kept.digest, "reply", data, {**about, **self._readings})

    def _flops(self, order: Cohort, past: Past, counting: Counting) -> float:
        """Return the FLOP of an order, with what its chooser measures once."""
        states, number = DeviceStates(self._task), int(order.device[0])
        states.adopt(number, past.state)
        samples = np.array([len(self._member.data.train)])
        return float(demand(order, samples, self._task, counting, states).effort.flops[0])

    def _read(self, data: bytes) -> Cohort:
        """Return an order for this device; raise BadMessage for any other bytes."""
        member = self._member
        order = decode_order(data, self._task, member.allow, member.limits)
        number = int(order.device[0])
        if self._number is not None and number != self._number:
            what = f"an order for device {number}; this is device {self._number}"
            raise BadMessage(what, "wrong device")
        self._become(number, told=False)
        return order

    def _become(self, number: int, *, told: bool = True) -> None:
        """Take the number that this device has in the fleet."""
        if not 0 <= number <= MOST_NUMBER:
            raise BadMessage(f"device {number}", "numbers")
        if number != self._task.number:
            data = self._member.data
            self._task = DeviceTask(self._member.bundle, number, data.train, data.test)
        if told:
            self._number = number

    def _note_run(self, about: Mapping[str, object]) -> None:
        """Note to which run letters belong from now on, and which server sends them."""
        run, server, void = (about.get(key) for key in ("run", "server", "void"))
        if not isinstance(run, str):
            return
        self._run = run
        if isinstance(server, str) and isinstance(void, int):
            try:
                self._memory.hear(run, server, void)
            except StoreError as error:  # a full disk: the order itself will be refused
                self._log.note(f"which server it hears cannot be kept: {error}")

    # -- what is told

    def _report(self, round_index: int, loss: float | None, sensors: Sensors) -> bytes:
        member = self._member
        told = {"temperature": sensors.temperature, "power": sensors.power}
        self._readings = {name: value for name, value in told.items() if value is not None}
        report = CheckInReport(
            version=anyfleet.__version__,
            bundle=member.bundle.digest,
            samples=len(member.data.train),
            test_samples=len(member.data.test),
            level=member.level,
            column_width=member.column_width,
            conditions=self._reporter.conditions(round_index, loss, sensors),
        )
        return encode_check_in(report)

    def _refusal(self, error: Exception) -> Letter:
        """Return the letter that says why there is no answer; the log has the traceback."""
        if isinstance(error, BadMessage):
            why = f"{error.reason}: {error}"
            self._log.note(f"a letter was refused: {why}")
        else:
            why = f"fault: {type(error).__name__}: {error}"
            self._log.note("".join(traceback.format_exception(error)))
        return Letter("refused", b"", {"reason": why[:_LONGEST_REASON]})

    def _send(self, link: Link, handle: bytes, letter: Letter) -> None:
        """Send a reply; what nobody waits for any longer is left."""
        began = time.perf_counter()
        try:
            link.reply(handle, letter)
        except RunGone:
            self._log.note("nobody waits for the last answer: its run has ended")
            return
        probe = letter.about.get("probe")
        count = len(letter.data) + (len(probe) if isinstance(probe, bytes) else 0)
        self._rates.sent(count, time.perf_counter() - began)


def _counting(about: Mapping[str, Value]) -> Counting:
    """Return what speeds count, as the server says."""
    named = str(about.get("counting", "flops"))
    found: Counting | None = next((n for n in get_args(Counting) if n == named), None)
    if found is None:
        raise BadMessage(f"operations counted by {named[:40]!r}", "numbers")
    return found


def _unknown(letter: Letter) -> Letter:
    """Refuse a letter of a kind that this version does not know."""
    raise BadMessage(f"a letter of the kind {letter.kind[:40]!r}", "kind")


def _reason(letter: Letter, otherwise: str) -> str:
    return str(letter.about.get("reason", otherwise))
