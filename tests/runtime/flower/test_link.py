"""Both ends of the link, over a real SuperLink on loopback with TLS, node keys and SQLite."""

import contextlib
import datetime as dt
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.date import now

from anyfleet.errors import LinkBusy, LinkDown, LinkError, NotEnrolled, RunGone
from anyfleet.runtime.flower import flower_api
from anyfleet.runtime.flower.connection import Connection, Received
from anyfleet.runtime.flower.envelopes import Letter, pack
from anyfleet.runtime.flower.flower_api import Heading
from anyfleet.runtime.flower.hosting import Arrival, HostedRun, register_node, unregister_node
from anyfleet.wire import frames
from tests.helpers.cut_link import CutLink
from tests.helpers.superlink import SuperLink, make_certificates, make_key, public_text

T = TypeVar("T")
LIMIT = 60.0  # seconds after which a test fails; nothing here takes a tenth of it
COLUMN = 100_000  # bytes
COLUMNS = [os.urandom(COLUMN) for _ in range(4)]
LONG = frames.join_message("r", b"header", COLUMNS)  # five pieces
TWO = frames.join_message("r", b"header", COLUMNS[:2])  # what two columns leave of it


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    superlink = SuperLink(tmp_path_factory.mktemp("link"))
    yield superlink
    superlink.kill()


@pytest.fixture(scope="module")
def run(link: SuperLink) -> Iterator[HostedRun]:
    with HostedRun(link.address, ca=link.ca, secret=link.secret) as hosted:
        yield hosted


class Device:
    """A device with a key that is enrolled, and with a link that can be cut."""

    def __init__(self, link: SuperLink, home: Path) -> None:
        self.superlink, self.home, self.key = link, home, make_key()
        self.node = enrol(link, self.key, home.name)
        self.link = CutLink(link.address)
        self.connection = self.connect()

    def connect(self) -> Connection:
        """Return a new connection, as a process that has just been started has it."""
        self.connection = Connection(
            self.link.address, ca=self.superlink.ca, key=self.key, home=self.home, patience=0.5
        )
        return self.connection

    def vanish(self) -> None:
        """Go as a killed process goes: without a word."""
        self.connection._stop.set()
        self.connection._heart.join()
        self.connection._api.close()


@pytest.fixture(scope="module")
def devices(link: SuperLink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Device]]:
    homes = tmp_path_factory.mktemp("homes")
    made = [Device(link, homes / f"device-{number}") for number in range(3)]
    yield made
    for device in made:
        device.connection.close()
        device.link.close()


def enrol(link: SuperLink, key: ec.EllipticCurvePrivateKey, name: str) -> int:
    return register_node(link.address, ca=link.ca, public_key=public_text(key), name=name)


def until(call: Callable[[], T | None]) -> T:
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        with contextlib.suppress(LinkDown):
            if found := call():
                return found
        time.sleep(0.02)
    raise AssertionError("nothing came")


def receive(device: Device) -> Received:
    return until(device.connection.receive)


def arrivals(run: HostedRun, messages: Sequence[str]) -> list[Arrival]:
    """The replies to all these messages, in their order."""
    found: dict[str, Arrival] = {}
    limit = time.monotonic() + LIMIT
    while len(found) < len(messages) and time.monotonic() < limit:
        for arrival in run.receive(set(messages) - set(found)):
            assert arrival.message not in found
            found[arrival.message] = arrival
        time.sleep(0.02)
    return [found[message] for message in messages]


def order(run: HostedRun, device: Device, data: bytes = b"do it") -> tuple[str, Received]:
    """Send an order and receive it."""
    [message] = run.send([(device.node, Letter("order", data))])
    return message, receive(device)


# --- letters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"short", LONG], ids=["empty", "short", "long"])
def test_letters_go_down_and_come_back(run: HostedRun, devices: list[Device], data: bytes) -> None:
    letter = Letter("order", data, {"round": 3, "share": 0.5, "name": "x", "bytes": b"\0"})
    messages = run.send([(device.node, letter) for device in devices])
    for number, device in enumerate(devices):
        got = receive(device)
        assert got.letter == letter
        assert got.whole
        back = Letter("reply", got.letter.data, {"number": number})
        device.connection.reply(got.handle, back)
    for number, arrival in enumerate(arrivals(run, messages)):
        assert arrival.letter == Letter("reply", data, {"number": number})
        assert (arrival.node, arrival.whole) == (devices[number].node, True)
        assert not arrival.error
    assert run.receive(messages) == []  # each once


def test_a_letter_of_more_than_four_megabytes_goes_through(
    run: HostedRun, devices: list[Device]
) -> None:
    message, got = order(run, devices[0], data := os.urandom(9 << 19))
    assert got.letter.data == data
    assert 0 < got.seconds < LIMIT
    devices[0].connection.reply(got.handle, Letter("reply", data[::-1]))
    assert arrivals(run, [message])[0].letter.data == data[::-1]


def test_two_orders_at_once_reach_a_device_one_after_the_other(
    run: HostedRun, devices: list[Device]
) -> None:
    device = devices[0]
    messages = run.send([(device.node, Letter("order", data)) for data in (b"one", b"two")])
    received = [receive(device), receive(device)]
    assert {got.letter.data for got in received} == {b"one", b"two"}
    for got in reversed(received):
        device.connection.reply(got.handle, Letter("reply", got.letter.data))
    assert [each.letter.data for each in arrivals(run, messages)] == [b"one", b"two"]


def test_what_many_devices_get_is_uploaded_once(
    link: SuperLink, run: HostedRun, devices: list[Device]
) -> None:
    counter = CutLink(link.address)
    with HostedRun(counter.address, ca=link.ca, secret=link.secret) as other:
        data = os.urandom(2 * COLUMN)
        counter.heal()
        messages = other.send([(device.node, Letter("order", data)) for device in devices])
        assert len(data) < counter.crossed["up"] < 1.5 * len(data)
        for device in devices:
            assert receive(device).letter.data == data
        for message in messages:
            other.forget(message)
    counter.close()


def test_a_device_that_leaves_lets_its_last_reply_be_read(
    run: HostedRun, devices: list[Device]
) -> None:
    device = devices[1]
    message, got = order(run, device)
    device.connection.reply(got.handle, Letter("reply", b"last"))
    leaving = threading.Thread(target=device.connection.close)
    leaving.start()
    [arrival] = arrivals(run, [message])
    leaving.join()
    assert arrival.letter.data == b"last"
    online = {node.id: node.online for node in run.nodes()}
    assert (online[device.node], online[devices[0].node]) == (False, True)
    [message] = run.send([(device.node, Letter("order"))])
    assert arrivals(run, [message])[0].error  # it is not there
    device.connect()


# --- who may take part ----------------------------------------------------------------------------


def test_a_key_that_is_not_enrolled_is_refused(link: SuperLink, tmp_path: Path) -> None:
    with pytest.raises(NotEnrolled, match="unknown"):
        Connection(link.address, ca=link.ca, key=make_key(), home=tmp_path)


def test_a_key_is_refused_after_it_was_revoked(
    link: SuperLink, run: HostedRun, tmp_path: Path
) -> None:
    key = make_key()
    node = enrol(link, key, "revoked")
    assert enrol(link, key, "revoked") == node
    assert "revoked" in {each.name for each in run.nodes()}
    with Connection(link.address, ca=link.ca, key=key, home=tmp_path) as connection:
        assert connection.node_id == node
        unregister_node(link.address, ca=link.ca, node=node)
        with pytest.raises(NotEnrolled):
            connection.receive()
    assert "revoked" not in {each.name for each in run.nodes()}
    with pytest.raises(NotEnrolled):
        Connection(link.address, ca=link.ca, key=key, home=tmp_path)
    [message] = run.send([(node, Letter("order"))])
    assert "not enrolled" in arrivals(run, [message])[0].error


def test_a_node_can_reply_to_its_own_orders_only(run: HostedRun, devices: list[Device]) -> None:
    mine, other = devices[:2]
    message, got = order(run, mine)
    with pytest.raises(RunGone, match="another node"):
        other.connection.reply(got.handle, Letter("reply", b"forged"))
    heading = Heading(
        run=run.run_id,
        sender=other.node,
        receiver=flower_api.SERVER_NODE,
        replies_to=message,
        written=time.time(),
        kept=60.0,
        note="",
    )
    forged = pack(Letter("reply", b"forged"), heading)
    assert not other.connection._api.push_message(other.node, forged.sealed).objects
    with pytest.raises(NotEnrolled):  # the key is not that of the node
        other.connection._api.push_message(mine.node, forged.sealed)
    mine.connection.reply(got.handle, Letter("reply", b"true"))
    [arrival] = arrivals(run, [message])
    assert (arrival.node, arrival.letter.data) == (mine.node, b"true")


def test_a_server_without_the_secret_is_refused(link: SuperLink) -> None:
    with pytest.raises(LinkError, match="secret"):
        HostedRun(link.address, ca=link.ca, secret=b"0" * 64)


def test_a_server_that_another_authority_signed_is_no_server(
    link: SuperLink, devices: list[Device], tmp_path: Path
) -> None:
    other = make_certificates()[0]
    with pytest.raises(LinkDown, match="certificate"):
        Connection(link.address, ca=other, key=devices[0].key, home=tmp_path)


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_device_with_a_wrong_clock_takes_part(
    run: HostedRun, devices: list[Device], hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_api, "now", lambda: now() + dt.timedelta(hours=hours))
    message, got = order(run, devices[0])  # its clock changes while it is connected
    devices[0].connection.reply(got.handle, Letter("reply", b"late"))
    assert arrivals(run, [message])[0].letter.data == b"late"


def test_a_reply_that_cannot_be_read_is_an_error(run: HostedRun, devices: list[Device]) -> None:
    message, _ = order(run, devices[0])
    heading = Heading(
        run=run.run_id,
        sender=devices[0].node,
        receiver=flower_api.SERVER_NODE,
        replies_to=message,
        written=time.time(),
        kept=60.0,
        note="junk",
    )
    devices[0].connection._api.push_message(devices[0].node, flower_api.seal(heading, []))
    [arrival] = arrivals(run, [message])
    assert (arrival.whole, arrival.node) == (False, devices[0].node)
    assert "cannot be read" in arrival.error


def test_an_error_in_place_of_a_reply_is_cleaned(
    run: HostedRun, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, said = run._api.pull_messages, "\x1b[31mred\n" + 9999 * "x"

    def erring(wanted: object) -> object:
        return [found._replace(error=said) for found in plain(wanted)]  # type: ignore[arg-type]

    monkeypatch.setattr(run._api, "pull_messages", erring)
    message, got = order(run, devices[0])
    devices[0].connection.reply(got.handle, Letter("reply"))
    [arrival] = arrivals(run, [message])
    assert arrival.error.startswith("an error in place of a reply:  [31mred x")
    assert arrival.error.isprintable()
    assert len(arrival.error) < 600


# --- processes that die ---------------------------------------------------------------------------


def test_a_killed_device_is_back_at_once_and_gets_its_order_again(
    run: HostedRun, devices: list[Device]
) -> None:
    device = devices[0]
    message, got = order(run, device, LONG)
    device.vanish()
    device.connect()
    again = receive(device)
    assert again == got
    assert run.receive([message]) == []  # nobody gave it up in between
    device.connection.reply(again.handle, Letter("reply", b"done"))
    assert arrivals(run, [message])[0].letter.data == b"done"
    device.vanish()
    assert device.connect().receive() is None  # it has been taken
    assert (device.home.stat().st_mode | device.home.joinpath("node").stat().st_mode) & 0o077 == 0


def test_the_reply_of_a_stopped_run_is_refused(
    link: SuperLink, run: HostedRun, devices: list[Device]
) -> None:
    old = HostedRun(link.address, ca=link.ca, secret=link.secret)
    [message] = old.send([(devices[0].node, Letter("order", b"old"))])
    got = receive(devices[0])
    old.send([(devices[1].node, Letter("order", LONG))])
    with HostedRun(link.address, ca=link.ca, secret=link.secret, replaces=old.run_id):
        with pytest.raises(RunGone):
            devices[0].connection.reply(got.handle, Letter("reply", LONG))
        with pytest.raises(RunGone):
            old.receive([message])
        assert devices[1].connection.receive() is None
    old.close()
    message, got = order(run, devices[0])  # a device whose run is gone works for another
    devices[0].connection.reply(got.handle, Letter("reply"))
    assert arrivals(run, [message])[0].whole


def test_a_run_that_nobody_claimed_is_closed(link: SuperLink, run: HostedRun) -> None:
    orphan = run._control.start_run()
    with HostedRun(link.address, ca=link.ca, secret=link.secret) as hosted:
        assert hosted.run_id != orphan
        assert not run._control.stop_run(orphan)  # it has ended already


# --- links that fail ------------------------------------------------------------------------------


def cut_reply(run: HostedRun, device: Device) -> tuple[str, bytes]:
    """Reply to an order over a link that fails in the third column."""
    message, got = order(run, device)
    device.link.heal(up=5 * COLUMN // 2)
    with pytest.raises(LinkDown):
        device.connection.reply(got.handle, Letter("reply", LONG))
    device.vanish()
    device.link.heal()
    return message, got.handle


@pytest.mark.parametrize("read", [False, True], ids=["before it is read", "after it was read"])
def test_a_cut_reply_is_a_prefix_and_is_completed_by_a_new_process(
    run: HostedRun, devices: list[Device], read: bool
) -> None:
    device = devices[2]
    message, handle = cut_reply(run, device)
    if read:
        part = run.so_far(message)
        assert part is not None
        assert not part.whole
        assert part.letter.data == TWO
        assert run.receive([message]) == []
    device.connect()
    device.link.heal()
    device.connection.reply(handle, Letter("reply", LONG))
    missing = len(LONG) - len(TWO)
    assert missing < device.link.crossed["up"] < missing + COLUMN // 2
    [arrival] = arrivals(run, [message])
    assert arrival.whole
    assert arrival.letter.data == LONG
    device.link.heal()
    device.connection.reply(handle, Letter("reply", LONG))  # once more: nothing is wanted
    assert device.link.crossed["up"] < COLUMN


def expire_uploads(link: SuperLink) -> None:
    """Let three minutes pass without a piece, as the SuperLink sees it."""
    with contextlib.closing(sqlite3.connect(link.folder / "link.db", timeout=30)) as database:
        database.execute("UPDATE object_push_sessions SET expires_at = '2026-01-01 00:00:00'")
        database.commit()


def test_an_upload_that_expired_before_it_was_read_begins_anew(
    link: SuperLink, run: HostedRun, devices: list[Device]
) -> None:
    device = devices[2]
    message, handle = cut_reply(run, device)
    expire_uploads(link)
    device.connect().reply(handle, Letter("reply", LONG))
    assert arrivals(run, [message])[0].letter.data == LONG


def test_an_upload_that_expired_after_it_was_read_stays_a_prefix(
    link: SuperLink, run: HostedRun, devices: list[Device]
) -> None:
    device = devices[2]
    message, handle = cut_reply(run, device)
    assert run.so_far(message)
    expire_uploads(link)
    [arrival] = arrivals(run, [message])
    assert "expired" in arrival.error
    assert not arrival.whole
    assert arrival.letter.data == TWO
    device.connect().reply(handle, Letter("reply", LONG))  # nobody wants it


def test_a_reply_that_was_forgotten_is_not_wanted(run: HostedRun, devices: list[Device]) -> None:
    device = devices[2]
    message, got = order(run, device)
    run.forget(message)
    device.connection.reply(got.handle, Letter("reply", LONG))
    assert run.receive([message]) == []
    device.connection.reply(got.handle, Letter("reply", LONG))
    assert run.so_far(message) is None
    [message] = run.send([(device.node, Letter("order", LONG))])
    run.forget(message)
    assert device.connection.receive() is None  # nor does an order come that was forgotten


def test_a_cut_order_is_a_prefix(run: HostedRun, devices: list[Device]) -> None:
    device = devices[2]
    [message] = run.send([(device.node, Letter("order", LONG))])
    device.link.heal(down=5 * COLUMN // 2)
    got = receive(device)
    assert not got.whole
    assert got.letter.data == TWO
    device.link.heal()
    device.connection.reply(got.handle, Letter("reply", b"padded"))
    assert arrivals(run, [message])[0].letter.data == b"padded"


def test_an_order_of_which_nothing_came_comes_later(run: HostedRun, devices: list[Device]) -> None:
    device = devices[2]
    [message] = run.send([(device.node, Letter("order", COLUMNS[0]))])
    device.link.heal(down=COLUMN // 2)
    with pytest.raises(LinkDown):
        device.connection.receive()
    device.link.heal()
    got = receive(device)
    assert got.whole
    device.connection.reply(got.handle, Letter("reply"))
    assert arrivals(run, [message])[0].whole


def test_what_is_missing_of_a_cut_reply_is_sent_after_the_superlink_was_killed(
    link: SuperLink, run: HostedRun, devices: list[Device]
) -> None:
    device, breaks = devices[2], run.breaks
    lost, _ = order(run, devices[0])
    message, handle = cut_reply(run, device)
    assert run.receive([lost, message]) == []
    link.kill()
    starting = threading.Thread(target=link.start)
    starting.start()
    assert run.begun([lost, message]) == {message}  # waits for the SuperLink
    starting.join()
    assert run.breaks > breaks
    device.connect()
    device.link.heal()
    device.connection.reply(handle, Letter("reply", LONG))
    missing = len(LONG) - len(TWO)
    assert missing < device.link.crossed["up"] < missing + COLUMN // 2
    assert arrivals(run, [message])[0].letter.data == LONG
    run.forget(lost)
    until(lambda: not devices[0].connection.receive())


def test_a_superlink_that_is_busy_has_lost_nothing_unless_it_hands_over(
    run: HostedRun, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, breaks = devices[0], run.breaks
    calls = {"nodes": run._control, "confirm": run._api, "pull_messages": run._api}
    for name, api in calls.items():
        plain, tried = getattr(api, name), list[str]()

        def busy(*words: object, plain: object = plain, tried: list[str] = tried) -> object:
            tried.append("")
            if len(tried) == 1:
                raise LinkBusy("status 500")
            return plain(*words)  # type: ignore[operator]

        with monkeypatch.context() as broken:
            broken.setattr(api, name, busy)
            message, _ = order(run, device)
            run.nodes()
            assert run.begun([message]) == set()
            run.forget(message)
        assert len(tried) >= 1
        assert run.breaks == breaks + (name == "pull_messages")


def test_both_ends_go_on_after_the_superlink_was_killed(
    link: SuperLink, run: HostedRun, devices: list[Device]
) -> None:
    before, got = order(run, devices[0], LONG)
    cut, handle = cut_reply(run, devices[2])
    link.kill()
    with pytest.raises(LinkDown):
        devices[1].connection.receive()
    starting = threading.Thread(target=link.start)
    starting.start()
    [during] = run.send([(devices[1].node, Letter("order", b"during"))])
    starting.join()
    devices[0].connection.reply(got.handle, Letter("reply", got.letter.data))
    second = receive(devices[1])
    devices[1].connection.reply(second.handle, Letter("reply", second.letter.data))
    devices[2].connect().reply(handle, Letter("reply", LONG))
    data = [arrival.letter.data for arrival in arrivals(run, [before, during, cut])]
    assert data == [LONG, b"during", LONG]
