"""Runs among hostile devices: they go on, say why, and end as if those had sent nothing."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anyfleet.core.device_states import DeviceStates
from anyfleet.core.loop import Round, run
from anyfleet.core.method import Method
from anyfleet.core.stacks import Replies
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.norm import Tracked
from anyfleet.parts.schedule import Buffered, Deadline, HoldAndFetch
from anyfleet.parts.select import Everyone, Largest
from anyfleet.runtime import Limits, Sequential, Simulated, Stacked, Threads
from anyfleet.runtime.simulated.engines import Assignment, Engine, Executed, PackedReply
from anyfleet.world import Fleet, Group, Uniform
from tests.helpers import small
from tests.helpers.changed import with_contents
from tests.helpers.engines import Changed, spoilt
from tests.helpers.messages import put_together, taken_apart, with_header

BAD = (1, 4)  # devices
METHOD = replace(fedavg(lr=0.1, batch_size=8), norm=Tracked(), select=Everyone())
LIMITS = Limits(norm=100.0)


@dataclass(frozen=True)
class Losing(Changed):
    """Nothing of what these devices send is taken notice of."""

    devices: tuple[int, ...] = BAD

    def done(self, given: Assignment, memories: DeviceStates, executed: Executed) -> Executed:
        return spoilt(executed, lambda r: None if int(r.device[0]) in self.devices else r)


def steps(
    method: Method, engine: Engine, count: int = 2, fleet: Fleet | None = None
) -> list[Round]:
    task = small.task(devices=6)
    return small.steps(method, task, count, engine=engine, fleet=fleet, limits=LIMITS)


@cache
def without() -> list[Round]:
    return steps(METHOD, Losing())


def rows(played: list[Round]) -> list[SimpleNamespace]:
    return [row for step in played for row in small.rows(step)]


def same_but_for_reasons(one: list[Round], two: list[Round]) -> None:
    assert small.identical(one[-1].params, two[-1].params)
    assert small.identical(one[-1].buffers, two[-1].buffers)
    assert [step.time for step in one] == [step.time for step in two]
    assert len(rows(one)) == len(rows(two))
    for mine, theirs in zip(rows(one), rows(two), strict=True):
        assert bool(mine.failure) == bool(theirs.failure)
        assert repr({**vars(mine), "failure": ""}) == repr({**vars(theirs), "failure": ""})


# --- bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hostile(Threads):
    """Every message of the bad devices is tampered with, in one way."""

    way: str = ""
    sent: dict[int, bytes] = field(default_factory=dict, hash=False)

    def transmit(self, packed: list[PackedReply]) -> Iterable[PackedReply]:
        good = [each for each in packed if each.sender not in BAD]
        for each in packed:
            if each.sender in BAD:
                yield from WAYS[self.way](each, good[0], self.sent)
            else:
                yield each
            self.sent.setdefault(each.sender, each.data)


Tamper = Callable[[PackedReply, PackedReply, dict[int, bytes]], list[PackedReply]]


def over_a_column(number: float) -> Tamper:
    def tamper(
        packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
    ) -> list[PackedReply]:
        header, columns = taken_apart(packed.data)
        value = np.array([number], dtype="<f4").tobytes()
        spoilt = columns[0][:-4] + value
        return [packed._replace(data=put_together(packed.data, header, (spoilt,)))]

    return tamper


def flipped(packed: PackedReply, other: PackedReply, sent: dict[int, bytes]) -> list[PackedReply]:
    raw = bytearray(packed.data)
    raw[len(raw) // 2] ^= 1
    return [packed._replace(data=bytes(raw))]


def lying(packed: PackedReply, other: PackedReply, sent: dict[int, bytes]) -> list[PackedReply]:
    return [packed._replace(data=packed.data[:4] + b"\xff\xff\xff\xff" + packed.data[8:])]


def under_another_order(
    packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
) -> list[PackedReply]:
    theirs, _ = taken_apart(other.data)
    return [packed._replace(data=with_header(packed.data, order=theirs["order"]))]


def replayed(packed: PackedReply, other: PackedReply, sent: dict[int, bytes]) -> list[PackedReply]:
    """What it sent first, again and again; at first, under a number that nobody gave out."""
    first = sent.get(packed.sender)
    return [packed._replace(data=first or with_header(packed.data, order=10**6))]


def renamed(packed: PackedReply, other: PackedReply, sent: dict[int, bytes]) -> list[PackedReply]:
    """The content of another's answer, under its own number."""
    header, _ = taken_apart(packed.data)
    own = {name: header[name] for name in ("order", "device")}
    return [packed._replace(data=with_header(other.data, **own))]


def extra_column(
    packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
) -> list[PackedReply]:
    header, columns = taken_apart(packed.data)
    return [packed._replace(data=put_together(packed.data, header, (*columns, *columns)))]


def many_samples(
    packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
) -> list[PackedReply]:
    return [packed._replace(data=with_header(packed.data, samples=10**9))]


def other_tensors(
    packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
) -> list[PackedReply]:
    header, _ = taken_apart(packed.data)
    trees = {**header["trees"], "delta": header["trees"]["delta"][:-1]}
    return [packed._replace(data=with_header(packed.data, trees=trees))]


def free_of_charge(
    packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
) -> list[PackedReply]:
    """Whoever says that it sent nothing arrives at once, and pays nothing."""
    return [packed._replace(data=with_header(packed.data, bits=0.0))]


def hardly_anything(
    packed: PackedReply, other: PackedReply, sent: dict[int, bytes]
) -> list[PackedReply]:
    """No tensors at all, which would count as acknowledged."""
    header, _ = taken_apart(packed.data)
    empty = {**header, "trees": {"delta": []}, "bits": 0.0}
    return [packed._replace(data=put_together(packed.data, empty, (b"",)))]


def silent(packed: PackedReply, other: PackedReply, sent: dict[int, bytes]) -> list[PackedReply]:
    return []


WAYS: dict[str, Tamper] = {
    "not finite": over_a_column(math.nan),
    "norm": over_a_column(1e30),
    "nothing came through": flipped,
    "cut": lying,
    "wrong device": under_another_order,
    "stale": replayed,
    "replayed": renamed,
    "trailing": extra_column,
    "samples": many_samples,
    "tensors": other_tensors,
    "numbers": free_of_charge,
    "content": hardly_anything,
    "nothing came": silent,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_and_ends_as_if_they_had_sent_nothing(way: str) -> None:
    played = steps(METHOD, Hostile(way=way))
    same_but_for_reasons(played, without())
    told = [row.failure for row in rows(played) if row.device in BAD]
    assert len(told) == 4
    # A replay begins with an order that nobody sent.
    assert all(lost.startswith(f"refused: {way}") for lost in told[2 if way == "stale" else 0 :])
    if way == "stale":
        assert all(lost.startswith("refused: unknown order") for lost in told[:2])
    assert not any(row.failure for row in rows(played) if row.device not in BAD)


def test_who_sends_twice_counts_once() -> None:
    def twice(packed: PackedReply, other: PackedReply, sent: dict[int, bytes]) -> list[PackedReply]:
        return [packed, packed, over_a_column(math.nan)(packed, other, sent)[0]]

    WAYS["duplicate"] = twice
    try:
        played, honest = steps(METHOD, Hostile(way="duplicate")), steps(METHOD, Threads())
    finally:
        del WAYS["duplicate"]
    same_but_for_reasons(played, honest)
    assert not any(row.failure for row in rows(played))


# --- orders that devices refuse -----------------------------------------------------------------


@dataclass(frozen=True)
class Misled(Changed):
    """Some devices are sent orders that no server sends."""

    inner: Engine = field(default_factory=Threads)

    def given(self, given: Assignment) -> Assignment:
        numbers, misled = given.sent.hyperparameters, np.isin(given.sent.device, BAD)
        numbers = replace(numbers, lr=np.where(misled, math.nan, numbers.lr))
        return replace(given, sent=replace(given.sent, hyperparameters=numbers))


def test_an_order_that_its_device_refuses_is_lost_and_the_round_goes_on() -> None:
    played = steps(METHOD, Misled())
    assert small.identical(played[-1].params, without()[-1].params)
    assert small.identical(played[-1].buffers, without()[-1].buffers)
    for row, gone in zip(rows(played), rows(without()), strict=True):
        assert row.began == gone.began or row.device in BAD
        if row.device in BAD:
            assert row.failure == "refused by the device: numbers: lr of nan"
            # It got the order, and did nothing.
            assert row.bits_down == gone.bits_down
            assert row.flops == row.bits_up == row.upload_seconds == row.upload_joules == 0
        else:
            assert not row.failure
    assert played[-1].snapshot.acknowledged[list(BAD)].tolist() == [-1, -1]


# --- values, whatever the engine --------------------------------------------------------------


@dataclass(frozen=True)
class Diverging(Changed):
    """Training goes wrong on some devices."""

    def done(self, given: Assignment, memories: DeviceStates, executed: Executed) -> Executed:
        return spoilt(executed, lambda r: _diverged(r) if int(r.device[0]) in BAD else r)


def _diverged(update: Replies) -> Replies:
    trees = {
        tree: {name: value / 0 if name == "4.bias" else value for name, value in values.items()}
        for tree, values in update.trees_of(0).items()
    }
    return with_contents(update, trees=trees)


FLEET = Fleet(groups=(Group(speed=Uniform(2e7, 2e8)),))
SCHEDULED: dict[str, Method] = {
    "synchronous": METHOD,
    "slices": replace(heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=8), select=Everyone()),
    "deadline": replace(METHOD, schedule=Deadline(0.6, late="counted", staleness=2)),
    "asynchronous": replace(METHOD, schedule=Buffered(concurrency=4, buffer_size=2)),
    "two phases": replace(METHOD, schedule=HoldAndFetch(), select=Largest(6, 4)),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, Sequential()) for name in SCHEDULED),
        *(("slices", engine) for engine in (Stacked(), Threads())),
    ],
    ids=repr,
)
def test_updates_that_are_not_finite_are_refused_in_every_engine(name: str, engine: Engine) -> None:
    method = SCHEDULED[name]
    played = steps(method, Diverging(engine), 3, FLEET)
    told = {row.failure for row in rows(played) if row.device in BAD and row.kind != "hold"}
    assert "refused: not finite: 4.bias" in told
    assert not any(
        row.failure.startswith("refused") for row in rows(played) if row.device not in BAD
    )
    assert all(bool(torch.isfinite(value).all()) for value in played[-1].params.values())
    if name in ("synchronous", "slices"):
        same_but_for_reasons(played, steps(method, Losing(engine), 3, FLEET))


def test_a_refused_reply_is_paid_for_and_its_device_is_free_and_not_acknowledged() -> None:
    played, honest = steps(METHOD, Diverging(Sequential()), 2), steps(METHOD, Sequential(), 2)
    for row, good in zip(rows(played), rows(honest), strict=True):
        costs = ("bits_up", "upload_seconds", "upload_joules", "delivered_up", "flops", "began")
        # The second model differs, but not what it costs.
        assert all(getattr(row, cost) == getattr(good, cost) for cost in costs)
        assert math.isnan(row.loss) == (row.device in BAD)
    assert played[-1].snapshot.acknowledged[list(BAD)].tolist() == [-1, -1]
    assert (np.delete(played[-1].snapshot.acknowledged, BAD) >= 0).all()


def test_real_divergence_is_survived() -> None:
    """A learning rate beyond all reason: everybody is refused, the model stays as it was."""
    played = steps(replace(fedavg(lr=1e30, batch_size=8), select=Everyone()), Sequential(), 2)
    assert all(row.failure.startswith("refused: not finite: ") for row in rows(played))
    assert small.identical(played[-1].params, small.task(devices=6).params)


def test_a_refused_reply_on_its_way_survives_a_restart() -> None:
    task = small.task(devices=6)
    method = replace(METHOD, schedule=Buffered(concurrency=6, buffer_size=1))

    def begun() -> Simulated:
        world = small.world(task, FLEET)
        return Simulated(task, world, engine=Losing(), limits=LIMITS)

    whole = list(islice(run(method, task, begun(), 0), 5))
    first, second = begun(), begun()
    half = list(islice(run(method, task, first, 0), 1))
    saved = first.save()
    assert saved.under_way is not None
    assert saved.under_way.details  # or it shows nothing
    second.restore(saved)
    rest = list(islice(run(method, task, second, 0, resume=half[-1].snapshot), 4))
    assert repr(rows([*half, *rest])) == repr(rows(whole))
    assert small.identical(rest[-1].params, whole[-1].params)
