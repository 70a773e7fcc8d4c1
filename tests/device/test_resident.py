"""The loop of a device: what it replies, what it survives, and what its log says."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyfleet
from anyfleet.core import client
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Kind
from anyfleet.core.orders import NOTHING, Cohort
from anyfleet.device import resident as module
from anyfleet.device.bundle import Bundle, bundle_of
from anyfleet.device.conditions import BitRates, GivenConditions, Reporter
from anyfleet.device.data import OwnData
from anyfleet.device.log import Log
from anyfleet.device.memory import Memory
from anyfleet.device.resident import Link, Member, Resident
from anyfleet.device.sensors import Sensors
from anyfleet.errors import LinkDown, NotEnrolled, RunGone
from anyfleet.methods import fedavg, heterofl, stc
from anyfleet.parts.plan import WidthMenu
from anyfleet.runtime.flower.envelopes import Letter
from anyfleet.store.disk import DiskError
from anyfleet.wire import (
    decode_check_in,
    decode_choice,
    encode_offer,
    encode_order,
    encode_reply,
)
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.hidden import without_range_coder

TASK = small.task()
NUMBER = 3
CONDITIONS = {"speed": 1e9, "load": 1.0, "memory": 1e9, "fastest": 1e9, "slowest": 1e9}
DONE = Letter("done", b"", {"reason": "3 rounds", "run": "r"})


@cache
def bundle() -> Bundle:
    return bundle_of(TASK)


@dataclass(frozen=True)
class Arrived:
    letter: Letter
    handle: bytes
    whole: bool = True
    seconds: float = 0.25


@dataclass
class QueueLink:
    """A link within this process: letters wait in a queue, and replies are collected."""

    letters: list[Letter | Exception | None]
    replies: dict[bytes, Letter] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)  # of the next replies
    whole: bool = True
    closed: int = 0

    def receive(self) -> Arrived | None:
        letter = self.letters.pop(0)
        if isinstance(letter, Exception):
            raise letter
        return None if letter is None else Arrived(letter, letter.kind.encode(), self.whole)

    def reply(self, handle: bytes, letter: Letter) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.replies[handle] = letter

    @contextmanager
    def connect(self) -> Iterator["QueueLink"]:
        try:
            yield self
        finally:
            self.closed += 1


@dataclass
class Home:
    """A device with a folder: it can be started again and again."""

    folder: Path
    number: int = NUMBER
    naps: list[float] = field(default_factory=list)
    out: io.StringIO = field(default_factory=io.StringIO)
    as_json: bool = False
    bundle: Bundle = field(default_factory=bundle)
    power: float | None = None  # watts, as its system tells them
    rates: BitRates = field(default_factory=BitRates)

    @property
    def memory(self) -> Memory:
        return Memory(self.folder / "state")

    def resident(self) -> Resident:
        data = OwnData(TASK.data(self.number), TASK.own_test(self.number))
        return Resident(
            Member(self.bundle, data, level=1, column_width=0.5),
            self.memory,
            Reporter(GivenConditions(CONDITIONS), None),
            Log(self.out, self.as_json),
            rates=self.rates,
            sensors=lambda: Sensors(temperature=40.0, power=self.power),
            sleep=self.naps.append,
        )

    def serve(self, *letters: Letter | Exception | None, **link: Any) -> QueueLink:
        """Serve letters until the last, which is that the run has ended."""
        queue = QueueLink([*letters, DONE], **link)
        self.resident().stay(queue.connect, once=True)
        return queue

    def log(self) -> list[str]:
        """The words and reasons of the log, without times."""
        return [line.split(" ", 1)[1] for line in self.out.getvalue().splitlines()]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def ordered(order: Cohort, **about: Any) -> Letter:
    return Letter("order", encode_order(order, TASK), {"run": "r", **about})


def numbered(order: Cohort, number: int) -> Cohort:
    return replace(order, id=np.array([number]))


@cache
def order() -> Cohort:
    return orders(stc(lr=0.1), TASK, [NUMBER])


def replied(order: Cohort, state: DeviceState | None = None) -> bytes:
    """Return the reply of the simulator's device."""
    done = client.work(order, (state or DeviceState(),), TASK)
    return encode_reply(done.replies, order, TASK)


# --- what it replies --------------------------------------------------------------------------


def test_a_device_says_what_it_is(home: Home) -> None:
    own = {"version": anyfleet.__version__, "bundle": bundle().digest}
    asked: dict[str, str | int] = {**own, "round": 0, "device": 3}
    link = home.serve(Letter("check-in", b"", asked))
    report = decode_check_in(link.replies[b"check-in"].data)
    assert report.version == anyfleet.__version__
    assert report.bundle == bundle().digest
    assert (report.samples, report.test_samples) == (TASK.size(3), len(TASK.own_test(3)))
    assert (report.level, report.column_width) == (1, 0.5)
    assert report.conditions == CONDITIONS
    assert home.log() == ["done  3 rounds"]
    assert link.closed == 1


def test_another_version_or_bundle_is_said_and_replied_to_all_the_same(home: Home) -> None:
    asked: dict[str, str | int] = {"version": "99.0", "bundle": "f" * 64, "round": 0, "device": 3}
    link = home.serve(Letter("check-in", b"", asked))
    assert decode_check_in(link.replies[b"check-in"].data).version == anyfleet.__version__
    told = "\n".join(home.log())
    for text in ("99.0", anyfleet.__version__, "f" * 64, bundle().digest, "install", "copy"):
        assert text in told


def test_the_reply_to_an_order_is_that_of_the_simulator(home: Home) -> None:
    link = home.serve(ordered(order()))
    reply = link.replies[b"order"]
    assert reply.kind == "reply"
    assert reply.data == replied(order())
    assert float(reply.about["seconds"]) > 0
    assert reply.about["temperature"] == 40.0
    assert reply.about["download"] == 0.25
    assert "joules" not in reply.about
    said = decode_check_in(bytes(reply.about["report"]))  # type: ignore[arg-type]
    assert said.conditions.keys() == CONDITIONS.keys() | {"loss"}
    assert home.log()[0].startswith("work  order 0, round 1, train, width 1, layers from 0 on")


def test_joules_are_told_where_the_system_tells_its_power(home: Home) -> None:
    home.power = 8.0
    about = home.serve(ordered(order())).replies[b"order"].about
    assert about["joules"] == pytest.approx(8.0 * float(about["seconds"]))
    assert float(about["joules"]) > 0


def test_the_bit_rate_of_a_letter_is_without_the_wait_for_it(home: Home) -> None:
    letter = ordered(order())
    home.serve(replace(letter, data=letter.data + bytes(10**6)))
    assert home.rates.down == pytest.approx(8 * (len(letter.data) + 10**6) / 0.25)


@pytest.mark.parametrize("kind", [Kind.EVALUATE, Kind.STATISTICS, Kind.REPORT, Kind.HOLD])
def test_orders_of_every_kind_are_carried_out(home: Home, kind: Kind) -> None:
    asked = replace(orders(heterofl(lr=0.1), TASK, [NUMBER]), kind=kind)
    assert home.serve(ordered(asked)).replies[b"order"].data == replied(asked)
    kept = home.memory.orders()
    assert kept == ([0] if kind == Kind.HOLD else [])
    if kind == Kind.HOLD:
        state = client.work(asked, (DeviceState(),), TASK).states[0]
        fetch = replace(asked, id=asked.id + 1, held_order=asked.id, kind=Kind.FETCH)
        fetch = replace(fetch.with_downloads(NOTHING), bits=_fetch_bits(fetch))
        reply = home.serve(ordered(fetch)).replies[b"order"]
        assert reply.data == replied(fetch, state)


def _fetch_bits(fetch: Cohort) -> Any:
    from anyfleet.core.message_size import order_extra_bits

    return np.array([order_extra_bits({}, fetch, TASK.blueprint)])


def test_a_device_chooses_from_an_offer(home: Home) -> None:
    method = replace(fedavg(lr=0.1), plan=WidthMenu((1.0, 0.5)))
    offered = orders(method, TASK, [NUMBER])
    link = home.serve(Letter("offer", encode_offer(offered, TASK), {"run": "r"}))
    choice = link.replies[b"offer"]
    assert choice.kind == "choice"
    assert decode_choice(choice.data, offered).choices.entry.tolist() in ([0], [1])
    strange = Letter("offer", encode_offer(offered, TASK), {"counting": "fingers"})
    refused = home.serve(strange).replies[b"offer"]
    assert (refused.kind, "fingers" in str(refused.about["reason"])) == ("refused", True)


# --- what it survives -------------------------------------------------------------------------


def test_a_state_lives_from_order_to_order_and_through_restarts(home: Home) -> None:
    state = DeviceState()
    for number in range(3):
        asked = numbered(order(), number)
        expected = replied(asked, state)
        state = client.work(asked, (state,), TASK).states[0]
        assert home.serve(ordered(asked)).replies[b"order"].data == expected
    assert replied(numbered(order(), 2)) != expected  # the residual of earlier orders is in it


def test_a_board_without_a_range_coder_refuses_what_needs_one_and_goes_on(home: Home) -> None:
    plain = numbered(orders(fedavg(lr=0.1), TASK, [NUMBER]), 1)
    entropy_coded, expected = ordered(order()), replied(plain)
    with without_range_coder():
        assert home.serve(ordered(plain)).replies[b"order"].data == expected
        refusal = home.serve(entropy_coded).replies[b"order"]
    assert refusal.kind == "refused"
    assert str(refusal.about["reason"]).startswith("library: uplink: the library constriction")
    assert not [line for line in home.log() if "Traceback" in line]
    assert (
        home.serve(entropy_coded, ordered(numbered(order(), 2))).replies[b"order"].kind == "reply"
    )


def test_the_same_order_again_gets_the_stored_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = home.serve(ordered(order())).replies[b"order"]
    monkeypatch.setattr(client, "work", None)
    again = home.serve(ordered(order(), settled=0)).replies[b"order"]
    assert (again.data, again.about) == (first.data, first.about)


def test_a_server_that_went_back_finds_the_state_of_then(home: Home) -> None:
    one, two = numbered(order(), 4), numbered(order(), 6)
    home.serve(ordered(one), ordered(two))
    before = client.work(one, (DeviceState(),), TASK).states[0]
    other = replace(two, key=two.key + 1)
    assert home.serve(ordered(other)).replies[b"order"].data == replied(other, before)
    earliest = replace(one, key=one.key + 1)
    assert home.serve(ordered(earliest)).replies[b"order"].data == replied(earliest)
    assert home.memory.orders() == [4]


def test_what_it_did_for_a_server_that_is_gone_is_void(home: Home) -> None:
    one, lost, next_ = (numbered(order(), number) for number in (4, 6, 9))
    home.serve(*(ordered(each, server="first", void=0) for each in (one, lost)))
    before = client.work(one, (DeviceState(),), TASK).states[0]
    both = client.work(lost, (before,), TASK).states[0]
    taken_over = ordered(next_, server="second", void=5)  # order 6 was never counted
    assert replied(next_, both) != replied(next_, before)
    assert home.serve(taken_over).replies[b"order"].data == replied(next_, before)


def test_what_is_settled_is_forgotten(home: Home) -> None:
    for number in range(4):
        home.serve(ordered(numbered(order(), number), settled=number))
    assert home.memory.orders() == [2, 3]


def test_another_run_begins_with_nothing(home: Home) -> None:
    home.serve(ordered(order()))
    second = numbered(order(), 1)
    letter = replace(ordered(second), about={"run": "another"})
    assert home.serve(letter).replies[b"order"].data == replied(second)


class Killed(BaseException):
    """What a killed process meets: nothing after it runs."""


def test_an_order_during_which_the_device_was_killed_is_done_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.work

    def killed(*args: Any) -> Any:
        real(*args)
        raise Killed

    monkeypatch.setattr(client, "work", killed)
    with pytest.raises(Killed):
        home.serve(ordered(order()))
    monkeypatch.setattr(client, "work", real)
    assert home.serve().replies[b"order"].data == replied(order())
    assert home.memory.under_way() is None


@pytest.mark.parametrize("moment", ["keep", "answer", "delivered"])
def test_it_may_be_killed_at_any_write(
    home: Home, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = order(), numbered(order(), 1)
    state = client.work(one, (DeviceState(),), TASK).states[0]
    home.serve(ordered(one))
    for when in ("before", "after"):
        real = getattr(Memory, moment)

        def killed(self: Memory, *args: Any, real: Any = real, when: str = when) -> None:
            if when == "after":
                real(self, *args)
            raise Killed

        monkeypatch.setattr(Memory, moment, killed)
        with pytest.raises(Killed):
            home.serve(ordered(two))
        monkeypatch.setattr(Memory, moment, real)
        assert home.serve(ordered(two)).replies[b"order"].data == replied(two, state)
        home.memory.forget()
        home.serve(ordered(one))


def test_an_order_that_always_ends_the_process_is_given_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> Any:
        raise Killed

    monkeypatch.setattr(client, "work", killed)
    with pytest.raises(Killed):
        home.serve(ordered(order()))
    for _ in range(module.MOST_ATTEMPTS - 1):
        with pytest.raises(Killed):
            home.serve()
    refused = home.serve().replies[b"order"]
    assert refused.kind == "refused"
    assert "ended 3 times" in str(refused.about["reason"])


def test_whoever_stops_a_device_does_not_use_up_its_attempts(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.work

    def stopped(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "work", stopped)
    for letters in ([ordered(order())], *[[]] * module.MOST_ATTEMPTS):
        with pytest.raises(KeyboardInterrupt):
            home.serve(*letters)
    monkeypatch.setattr(client, "work", real)
    assert home.serve().replies[b"order"].kind == "reply"


def test_an_answer_that_could_not_be_sent_is_sent_later(home: Home) -> None:
    down = LinkDown("the server cannot be reached.")
    link = home.serve(ordered(order()), failures=[down, down])
    assert link.replies[b"order"].data == replied(order())
    assert home.naps[:2] == [1.0, 2.0]
    assert [line for line in home.log() if line.startswith("retry")] == [
        "retry in 1 s: the server cannot be reached.",
        "retry in 2 s: the server cannot be reached.",
    ]


def test_an_answer_that_nobody_waits_for_is_left(home: Home) -> None:
    link = home.serve(ordered(order()), failures=[RunGone("over")])
    assert not link.replies
    assert home.memory.under_way() is None
    assert any("nobody waits" in line for line in home.log())


def test_a_device_that_is_not_enrolled_yet_tries_again(home: Home) -> None:
    link = home.serve(NotEnrolled("the key is not known."), ordered(order()))
    assert link.closed == 2
    assert home.log()[0] == (
        "retry in 1 s: the key is not known. Ask the owner of the server to run `anyfleet fleet "
        "add` with device.pub."
    )
    assert link.replies[b"order"].kind == "reply"


def test_a_full_disk_refuses_the_order_and_the_device_stays(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise DiskError("there is no room left. Make room")

    with monkeypatch.context() as patched:
        patched.setattr(Memory, "keep", full)
        refused = home.serve(ordered(order())).replies[b"order"]
    assert refused.kind == "refused"
    assert "no room" in str(refused.about["reason"])
    assert home.serve(ordered(order())).replies[b"order"].data == replied(order())


def test_damaged_memory_is_said(home: Home) -> None:
    home.serve(ordered(order()))
    (home.folder / "state" / "after-0.bin").write_bytes(b"nonsense")
    home.serve()
    assert any("after-0.damaged was damaged" in line for line in home.log())


# --- what it refuses --------------------------------------------------------------------------


def test_an_error_in_the_users_code_is_a_refusal_and_no_end(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(output: Any, target: Any) -> Any:
        raise RuntimeError("the loss is broken")

    functions = replace(bundle().functions, loss=broken)
    spoilt = replace(home, bundle=replace(bundle(), functions=functions))
    spoilt.bundle.__dict__["digest"] = bundle().digest
    link = spoilt.serve(ordered(order()), None, Letter("check-in", b"", {}))
    refused = link.replies[b"order"]
    assert refused.kind == "refused"
    assert "RuntimeError: the loss is broken" in str(refused.about["reason"])
    told = spoilt.log()
    assert any("Traceback" in line for line in told)
    assert "wait  for an order" in told
    assert link.replies[b"check-in"].kind == "check-in"


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        (Letter("order", b"nonsense"), "magic: "),
        (Letter("order", encode_order(orders(fedavg(), TASK, [5]), TASK)), "wrong device: "),
        (Letter("offer", b""), "magic: "),
        (Letter("secret", b""), "kind: "),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(
    home: Home, letter: Letter, reason: str
) -> None:
    link = home.serve(Letter("check-in", b"", {"device": 3}), letter)
    refused = link.replies[letter.kind.encode()]
    assert refused.kind == "refused"
    assert str(refused.about["reason"]).startswith(reason)


def test_a_download_that_was_cut_is_padded_or_refused(home: Home) -> None:
    whole = encode_order(order(), TASK)
    cut = Letter("order", whole[:-20], {"run": "r"})
    assert str(home.serve(cut, whole=False).replies[b"order"].about["reason"]).startswith("cut: ")
    method = small.padded(fedavg(lr=0.1))
    asked = replace(orders(method, TASK, [NUMBER]), column_width=np.array([0.25]))
    data = encode_order(asked, TASK)
    reply = home.serve(Letter("order", data[:-20], {"run": "r"}), whole=False).replies[b"order"]
    assert reply.kind == "reply"
    assert any("75% of it received" in line for line in home.log())


# --- what it says -----------------------------------------------------------------------------


def test_a_line_is_written_when_the_word_or_its_reason_changes(home: Home) -> None:
    home.serve(None, None, ordered(order()), None, None, ordered(numbered(order(), 1)))
    words = [line.split()[0] for line in home.log()]
    assert words == ["wait", "work", "wait", "work", "done"]


def test_the_log_can_be_lines_of_json(home: Home) -> None:
    home.as_json = True
    home.serve(None)
    lines = [json.loads(line) for line in home.out.getvalue().splitlines()]
    assert [(line["word"], line["reason"]) for line in lines] == [
        ("wait", "for an order"),
        ("done", "3 rounds"),
    ]


def test_a_server_cannot_control_the_terminal(home: Home) -> None:
    home.resident().stay(QueueLink([Letter("done", b"", {"reason": "\x1b[2J"})]).connect, once=True)
    assert "\x1b" not in home.out.getvalue()


def test_the_connection_over_flower_is_such_a_link() -> None:
    from anyfleet.runtime.flower.connection import Connection

    connection: type[Link] = Connection
    assert {"receive", "reply", "__enter__", "__exit__"} <= set(dir(connection))
