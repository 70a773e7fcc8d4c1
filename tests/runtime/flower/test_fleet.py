"""The fleet of real devices: what the loop computes on it is what it computes in the simulator."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import anyfleet
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Conditions
from anyfleet.core.method import Method
from anyfleet.methods import (
    anycost,
    fedavg,
    fedpmt,
    fedpns,
    fedrescue,
    heterofl,
    stc,
    whale,
)
from anyfleet.parts.schedule import Buffered, Deadline
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Simulated
from anyfleet.runtime.flower.envelopes import Letter, Value
from anyfleet.runtime.flower.fleet import FlowerFleet, Patience
from anyfleet.runtime.flower.hosting import Arrival
from anyfleet.runtime.replayed import Replayed
from anyfleet.wire import CheckInReport, encode_check_in
from anyfleet.world import World, levels, lossy
from tests.helpers import small
from tests.helpers.near_fleet import NearFleet, NearLink, Received

TASK = small.task()
WORLD = small.world(TASK, levels(speeds=(2e9, 2e8)))
QUICK = Patience(order=30, absence=0.3, check_in=5, offer=30, refresh=60)
Make = Callable[..., tuple[FlowerFleet, NearFleet]]


def always(world: World) -> Conditions:
    return Simulated(TASK, world).conditions(np.arange(TASK.devices))


def known(number: int, world: World) -> dict[str, float]:
    row = always(world).take([number])
    told = {f.name: float(getattr(row, f.name)[0]) for f in fields(Conditions)}
    return {name: value for name, value in told.items() if not np.isnan(value)}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Make]:
    begun: list[NearFleet] = []
    torch.set_num_threads(1)

    def make(world: World = WORLD, count: int = TASK.devices, **patience: float) -> object:
        near = NearFleet(
            TASK,
            tmp_path,
            {number: known(number, world) for number in range(TASK.devices)},
            world.declared.level.tolist(),
            world.declared.column_width.tolist(),
        )
        begun.append(near)
        for number in range(count):
            near.enrol(number)
            near.start(number)
        return server(near, 0, **patience), near

    yield make  # type: ignore[misc]
    for each in begun:
        each.close()
        assert not each.errors


def server(near: NearFleet, void: int = 0, **patience: float) -> FlowerFleet:
    near.post.run_id += 1
    fleet = FlowerFleet(
        near.post,
        TASK,
        near.roster,
        run="a run",
        bundle=near.bundle.digest,
        counting=WORLD.declared.counting,
        patience=replace(QUICK, **patience),
        void=void,
    )
    gathered(fleet, len(near.threads))
    return fleet


def gathered(fleet: FlowerFleet, count: int) -> None:
    until = time.monotonic() + 20
    while fleet.ready() < count:
        assert time.monotonic() < until, fleet.status()
        time.sleep(0.01)


def played(method: Method, fleet: object, count: int = 3) -> list[Round]:
    return list(islice(run(method, TASK, fleet, 0), count))  # type: ignore[arg-type]


METHODS = {
    "FedAvg": fedavg(count=4, lr=0.1),
    "HeteroFL": heterofl(widths=(1.0, 0.5), count=4, lr=0.1),
    "FedPMT": fedpmt(count=4, lr=0.1),
    "WHALE-FL": whale(lr=0.1),
    "AnycostFL": anycost(count=4, lr=0.1),
    "FedResCuE": fedrescue(count=4, lr=0.1),
    "FedPNS": fedpns(count=4, lr=0.1),
    "STC with error feedback": stc(count=4, lr=0.1),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_model_is_that_of_the_simulator(made: Make, method: Method) -> None:
    fleet, _ = made()
    found = played(method, fleet)
    expected = played(method, Simulated(TASK, WORLD))
    assert [each.ledger.failure for each in found] == [each.ledger.failure for each in expected]
    assert small.identical(found[-1].params, expected[-1].params)
    assert small.identical(found[-1].buffers, expected[-1].buffers)
    for one, other in zip(found, expected, strict=True):
        for column in ("order", "device", "bits_down", "bits_up", "width", "flops"):
            assert getattr(one.ledger, column).tolist() == getattr(other.ledger, column).tolist()


def test_an_asynchronous_run_is_that_of_its_replay(made: Make) -> None:
    method = replace(METHODS["STC with error feedback"], schedule=Buffered(4, 2))
    fleet, _ = made()
    found = played(method, fleet, 5)
    replayed = Replayed(TASK, WORLD.declared, always(WORLD), fleet.arrivals())
    expected = played(method, replayed, 5)
    assert small.identical(found[-1].params, expected[-1].params)


def test_what_is_not_measured_is_unknown_and_poisons_no_sum(made: Make) -> None:
    fleet, _ = made()
    (found,) = played(METHODS["FedAvg"], fleet, 1)
    assert np.isnan(found.ledger.joules).all()
    assert (found.ledger.compute_seconds > 0).all()
    assert found.time < 60


def test_a_device_that_is_switched_off_fails_its_order_and_no_more(made: Make) -> None:
    fleet, near = made()
    rounds = run(fedavg(count=TASK.devices, lr=0.1), TASK, fleet, 0)
    next(rounds)
    near.stop(2)
    assert fleet.ready() == TASK.devices - 1
    found = next(rounds)
    assert 2 not in found.ledger.device  # it was not even asked
    assert set(found.ledger.failure) == {""}
    near.start(2)
    gathered(fleet, TASK.devices)
    found = next(rounds)
    assert 2 in found.ledger.device


def test_an_order_of_a_device_that_stays_away_is_given_up(made: Make) -> None:
    fleet, near = made()
    rounds = run(fedavg(count=TASK.devices, lr=0.1), TASK, fleet, 0)
    next(rounds)
    link = near.post.links[2]
    link.letters = _Never()  # type: ignore[assignment] # letters no longer reach it
    near.threads.pop(2)
    old = near.post.nodes

    def gone() -> object:
        if any(letter.kind == "order" for node, letter in near.post.sent[-20:] if node == 2):
            near.post.online.discard(2)
        return old()

    near.post.nodes = gone  # type: ignore[method-assign, assignment]
    found = next(rounds)
    link.off.set()
    assert [each for each in found.ledger.failure if each] == ["went offline"]
    assert fleet.status().failures == {"went offline": 1}


class _Never:
    """A queue into which letters vanish."""

    def put(self, _: object) -> None:
        return

    def get(self, timeout: float) -> object:
        from queue import Empty

        time.sleep(timeout)
        raise Empty


def test_a_device_that_joins_takes_part_from_the_next_round_on(made: Make) -> None:
    fleet, near = made(count=3)
    rounds = run(fedavg(count=TASK.devices, lr=0.1), TASK, fleet, 0)
    assert sorted(next(rounds).ledger.device) == [0, 1, 2]
    near.enrol(3)
    near.start(3)
    gathered(fleet, 4)
    next(rounds)  # which had begun already
    assert sorted(next(rounds).ledger.device) == [0, 1, 2, 3]


def test_a_device_that_is_revoked_is_asked_no_more(made: Make) -> None:
    fleet, near = made(count=4)
    rounds = run(fedavg(count=TASK.devices, lr=0.1), TASK, fleet, 0)
    next(rounds)
    near.roster.rows[1] = dataclasses.replace(near.roster.rows[1], revoked="now")
    assert fleet.ready() == 3
    assert sorted(next(rounds).ledger.device) == [0, 2, 3]
    assert fleet.status().devices[1].state == "revoked"


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"version": "9.9.9"}, "9.9.9"), ({"bundle": "0" * 64}, "hand over")],
    ids=["version", "bundle"],
)
def test_another_version_or_bundle_is_refused_by_name(
    made: Make, changes: dict[str, str], told: str
) -> None:
    fleet, near = made(count=1)
    near.enrol(1)
    near.post.links[1] = NearLink(1, near.post)  # a device that the test plays
    near.post.online.add(1)
    fleet.ready()
    letter = near.post.links[1].letters.get(timeout=5)
    own = {"version": anyfleet.__version__, "bundle": near.bundle.digest, **changes}
    report = CheckInReport(
        **own, samples=5, test_samples=0, level=0, column_width=1.0, conditions={}
    )
    said = Letter("check-in", encode_check_in(report))
    near.post.deliver(letter.handle.decode(), 1, said)
    assert fleet.ready() == 1
    status = fleet.status().devices[1]
    assert status.state == "refused"
    assert told in status.why
    assert anyfleet.__version__ in status.why or "bundle" in changes


@pytest.mark.parametrize("further", [0, 1, 2], ids="{} rounds later".format)
def test_a_server_that_comes_back_goes_on_where_it_stood(
    made: Make, further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever devices did for the server before is done again, from what they had then."""
    method = replace(METHODS["STC with error feedback"], schedule=Buffered(4, 2))
    fleet, near = made(count=4)
    rounds = run(method, TASK, fleet, 0)
    for _ in range(2):
        done = next(rounds)
    saved, before = fleet.save(), fleet.arrivals()
    assert len(saved.under_way)  # or nothing is asked again
    for _ in range(further):  # of which no checkpoint knows
        next(rounds)
    again = server(near, saved.next_order)
    again.restore(saved)
    kept = near.post.arrivals

    def slowly(wanted: Collection[str]) -> list[Arrival]:
        time.sleep(0.02)  # so that several are there: now the last device is the first
        there = [each for each in wanted if each in kept]
        return [kept.pop(there[-1])] if there else []

    monkeypatch.setattr(near.post, "receive", slowly)
    later = list(islice(run(method, TASK, again, 0, resume=done.snapshot), 4))
    four = np.arange(4)
    arrivals = (*before, *again.arrivals())
    replayed = Replayed(TASK, WORLD.declared.take(four), always(WORLD).take(four), arrivals)
    expected = played(method, replayed, 6)
    assert small.identical(later[-1].params, expected[-1].params)


def test_a_server_that_comes_back_goes_on_without_a_device_that_is_gone(made: Make) -> None:
    method = replace(METHODS["STC with error feedback"], schedule=Buffered(4, 2))
    fleet, near = made(count=4)
    rounds = run(method, TASK, fleet, 0)
    for _ in range(2):
        done = next(rounds)
    saved = fleet.save()
    gone = int(saved.under_way[0].device[0])
    near.stop(gone)  # for good
    again = server(near, saved.next_order)
    again.restore(saved)
    later: list[Round] = []
    for each in run(method, TASK, again, 0, resume=done.snapshot):
        later.append(each)
        if any(each.ledger.failure):
            break
        assert gone not in each.ledger.device
        assert each.time < 20
    assert [each for each in later[-1].ledger.failure if each] == ["went offline"]


COLUMNS = small.world(TASK, lossy(errors=(0.1,), column_width=0.25))


def halved(data: bytes) -> bytes:
    """A message that is cut off after half of its bytes."""
    return data[: len(data) // 2]


def test_what_came_of_a_reply_that_was_cut_off_counts(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made(COLUMNS)
    rounds = run(METHODS["FedResCuE"], TASK, fleet, 0)
    whole = next(rounds)
    assert set(whole.ledger.delivered_up) == {1.0}
    deliver, cut = near.post.deliver, list[int]()

    def in_part(message: str, node: int, letter: Letter) -> None:
        if letter.kind != "reply" or cut:
            deliver(message, node, letter)
            return
        cut.append(node)
        part = replace(letter, data=halved(letter.data))
        near.post.parts[message] = Arrival(message, node, part, False, "")
        near.post.online.discard(node)  # its link is down for good

    monkeypatch.setattr(near.post, "deliver", in_part)
    found = next(rounds)
    assert set(found.ledger.failure) == {""}
    came = found.ledger.delivered_up[found.ledger.device == cut[0]]
    assert 0 < came[0] < 1
    assert (found.ledger.delivered_up[found.ledger.device != cut[0]] == 1).all()


def test_a_device_pads_what_it_missed_of_a_download(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made(COLUMNS)
    rounds = run(METHODS["FedResCuE"], TASK, fleet, 0)
    next(rounds)
    link = near.post.links[0]
    put = link.letters.put

    def in_part(received: Received) -> None:
        letter = received.letter
        part = replace(letter, data=halved(letter.data)) if letter.kind == "order" else letter
        put(Received(part, received.handle, letter is part))

    monkeypatch.setattr(link.letters, "put", in_part)
    while True:
        found = next(rounds)
        if 0 in found.ledger.device:
            break
    assert set(found.ledger.failure) == {""}
    assert 0 < found.ledger.delivered_down[found.ledger.device == 0][0] < 1


def test_an_order_whose_reply_never_can_be_read_is_given_up(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made()
    deliver = near.post.deliver

    def too_large(message: str, node: int, letter: Letter) -> None:
        if node != 1 or letter.kind != "reply":
            deliver(message, node, letter)
            return
        near.post.arrivals[message] = Arrival(message, node, Letter(""), False, "too large")

    monkeypatch.setattr(near.post, "deliver", too_large)
    (found,) = played(fedavg(count=TASK.devices, lr=0.1), fleet, 1)
    failed = [each for each in found.ledger.failure if each]
    assert failed == ["no reply: too large"]
    asked = [letter for node, letter in near.post.sent if node == 1 and letter.kind == "order"]
    assert 1 < len(asked) < 10


def test_what_nodes_write_is_cleaned_and_counted_under_few_reasons(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made()
    deliver, number = near.post.deliver, itertools.count()

    def hostile(message: str, node: int, letter: Letter) -> None:
        if letter.kind != "reply" or node > 2:
            deliver(message, node, letter)
        elif node == 1:  # it can be read, but not used
            deliver(message, node, replace(letter, data=letter.data[:-1]))
        elif node == 2:
            said = {"reason": f"fault{next(number)}: \x1b[2J\n" + 9999 * "x"}
            deliver(message, node, Letter("refused", b"", said))
        else:
            error = f"an error in place of a reply: number {next(number)}"
            near.post.arrivals[message] = Arrival(message, node, Letter(""), False, error)

    monkeypatch.setattr(near.post, "deliver", hostile)
    (found,) = played(fedavg(count=TASK.devices, lr=0.1), fleet, 1)
    failed = [each for each in found.ledger.failure if each]
    assert len(failed) == 3
    assert all(each.isprintable() and len(each) < 600 for each in failed)
    status = fleet.status()
    assert [*status.sent_again] == ["an error in place of a reply"]
    told = {
        "no reply: an error in place of a reply",
        "refused by the device",
        "refused: nothing came through",
    }
    assert status.failures.keys() == told


def test_what_was_lost_while_the_link_was_away_is_sent_again(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made()
    receive = near.post.receive
    lost: list[Arrival] = []

    def breaking(wanted: Collection[str]) -> list[Arrival]:
        came = receive(wanted)
        gone = [each for each in came if each.letter.kind == "reply" and len(lost) < 3]
        if gone:  # they were handed over to nobody
            lost.extend(gone)
            near.post.breaks += 1
        return [each for each in came if each not in gone]

    monkeypatch.setattr(near.post, "receive", breaking)
    method = METHODS["STC with error feedback"]
    found, expected = played(method, fleet), played(method, Simulated(TASK, WORLD))
    assert len(lost) >= 3
    assert not [each for record in found for each in record.ledger.failure if each]
    assert fleet.status().sent_again["the SuperLink was away"] >= 3
    assert small.identical(found[-1].params, expected[-1].params)


def test_an_order_that_a_device_lost_as_it_died_is_sent_again(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made()
    letters = near.post.links[2].letters
    lost: list[Received] = []
    put = letters.put

    def losing(received: Received) -> None:
        if received.letter.kind == "order" and not lost:  # it took the order, and was killed
            lost.append(received)
            near.post.starts[2] += 1
        else:
            put(received)

    monkeypatch.setattr(letters, "put", losing)
    method = replace(METHODS["STC with error feedback"], select=Everyone())
    found, expected = played(method, fleet), played(method, Simulated(TASK, WORLD))
    assert lost
    assert not [each for record in found for each in record.ledger.failure if each]
    assert fleet.status().sent_again == {"the device was started again": 1}
    assert small.identical(found[-1].params, expected[-1].params)


@pytest.mark.parametrize("broken", ["the SuperLink", "the device"])
def test_a_reply_that_has_begun_is_not_asked_for_again(
    made: Make, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    fleet, near = made(COLUMNS)
    deliver, cut, rest = near.post.deliver, list[int](), list[threading.Timer]()

    def in_part(message: str, node: int, letter: Letter) -> None:
        if letter.kind != "reply" or cut:
            deliver(message, node, letter)
            return
        cut.append(node)
        part = replace(letter, data=halved(letter.data))
        near.post.parts[message] = Arrival(message, node, part, False, "")
        if broken == "the SuperLink":
            near.post.breaks += 1
        else:
            near.post.starts[node] += 1  # it was killed, and is back
        rest.append(threading.Timer(2.5, deliver, [message, node, letter]))
        rest[0].start()

    monkeypatch.setattr(near.post, "deliver", in_part)
    method = replace(METHODS["FedResCuE"], select=Everyone())
    (found,) = played(method, fleet, 1)
    assert set(found.ledger.failure) == {""}
    assert set(found.ledger.delivered_up) == {1.0}
    orders = [node for node, letter in near.post.sent if letter.kind == "order"]
    assert orders.count(cut[0]) == 1
    assert not near.post.parts.keys() & set(near.post.forgotten)


def test_a_fleet_without_devices_waits_for_one(made: Make) -> None:
    fleet, near = made(count=1)
    rounds = run(fedavg(count=1, lr=0.1), TASK, fleet, 0)
    next(rounds)
    near.stop(0)
    assert fleet.ready() == 0
    threading.Timer(0.5, near.start, [0]).start()
    found = next(rounds)
    assert found.ledger.device.tolist() == [0]
    assert set(found.ledger.failure) == {""}


def test_a_device_that_comes_back_as_a_round_begins_is_not_waited_for_in_vain(made: Make) -> None:
    fleet, near = made(count=1, order=20)
    rounds = run(replace(fedavg(count=1, lr=0.1), schedule=Deadline(30.0)), TASK, fleet, 0)
    next(rounds)
    near.stop(0)
    assert fleet.ready() == 0
    fleet.begin_round(1)
    near.start(0)
    began = time.monotonic()
    assert next(rounds).ledger.device.tolist() == [0]
    assert time.monotonic() - began < 15


def test_a_choice_that_was_not_told_yet_is_asked_for_again(made: Make) -> None:
    method = replace(METHODS["WHALE-FL"], schedule=Buffered(4, 2))
    fleet, near = made()
    rounds = run(method, TASK, fleet, 0)
    done = next(rounds)
    offered = [len(fleet.save().offered)]
    while not offered[-1]:
        done = next(rounds)
        offered.append(len(fleet.save().offered))
    until = time.monotonic() + 10
    while not any(each.choice for each in fleet._sent.values()):
        assert time.monotonic() < until
        fleet.ready()
    saved = fleet.save()
    assert len(saved.offered) == offered[-1]
    waiting = [int(each.order.device[0]) for each in fleet._sent.values()]
    assert not fleet.free(np.array(waiting)).any()
    again = server(near)
    again.restore(saved)
    later = list(islice(run(method, TASK, again, 0, resume=done.snapshot), 2))
    assert not any(any(each.ledger.failure) for each in later)


def test_what_a_device_measured_is_in_the_ledger(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made()
    deliver = near.post.deliver
    said: dict[int, dict[str, Value]] = {
        0: {"joules": 3.0, "download": 0.001, "seconds": 0.002},
        1: {"download": 1e9, "seconds": 0.0},  # more than there was
    }

    def telling(message: str, node: int, letter: Letter) -> None:
        about = {name: value for name, value in letter.about.items() if name != "download"}
        deliver(message, node, replace(letter, about={**about, **said.get(node, {})}))

    monkeypatch.setattr(near.post, "deliver", telling)
    (found,) = played(fedavg(count=TASK.devices, lr=0.1), fleet, 1)
    ledger = found.ledger.take(np.argsort(found.ledger.device))
    assert ledger.compute_joules[0] == ledger.known_joules[0] == 3.0
    assert np.isnan(ledger.joules).all()  # of the links nobody knows
    assert ledger.download_seconds[0] == 0.001
    assert ledger.upload_seconds[0] > 0.001
    assert ledger.upload_seconds[1] == 0.0
    assert ledger.download_seconds[2] == pytest.approx(ledger.upload_seconds[2], rel=0.2)  # by bits


def test_what_a_device_says_beside_its_reply_is_bounded(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, near = made()
    deliver = near.post.deliver
    lies: dict[int, dict[str, Value]] = {
        0: {"seconds": 1e29, "delivered": 7.0},
        1: {"seconds": "long"},
    }

    def lying(message: str, node: int, letter: Letter) -> None:
        deliver(message, node, replace(letter, about={**letter.about, **lies.get(node, {})}))

    monkeypatch.setattr(near.post, "deliver", lying)
    (found,) = played(fedavg(count=TASK.devices, lr=0.1), fleet, 1)
    assert set(found.ledger.failure) == {""}
    assert np.nanmax(found.ledger.compute_seconds) < 30
    assert found.ledger.delivered_down.max() == 1.0
    assert np.isfinite(list(fleet.status().seconds.values())).all()
