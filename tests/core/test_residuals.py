"""Error feedback through whole runs: nothing that a device learned is lost, or sent twice."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import SENT, DeviceStates
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Aggregated, Kind, Params
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.residuals import compress_updates
from anyfleet.core.slots import State
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.elastic import paste
from anyfleet.methods import fedavg, fedrolex, heterofl
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.codec import ErrorFeedback, Nothing, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.extract import Strongest
from anyfleet.parts.norm import PerWidth
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.schedule import Buffered, Deadline, HoldAndFetch, Overselected, Surveyed, Tiers
from anyfleet.parts.select import Largest, Uniform
from anyfleet.runtime import Limits, Sequential, Simulated, Stacked, Threads
from anyfleet.runtime.simulated.engines import Assignment, Engine, Executed
from anyfleet.tasks import Dirichlet
from anyfleet.world import Fleet, Group, Intermittent, levels
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.engines import Changed

SLOT = ErrorFeedback.state_name
CODEC = ErrorFeedback(Stc(0.1))
STEPS = 5
TASK = small.task(partition=Dirichlet(0.5), dtype=torch.float64)  # devices lack labels


class Watched(NamedTuple):
    """An order that was carried out, and the memory of its device before and after."""

    order: Cohort
    before: DeviceState
    after: DeviceState


@dataclass(frozen=True)
class Watching(Changed):
    """An engine whose work is looked at."""

    log: list[Watched] = field(default_factory=list)

    def done(self, given: Assignment, memories: DeviceStates, executed: Executed) -> Executed:
        rows = zip(given.orders.rows(), executed.remembered.rows(), strict=True)
        for order, remembered in rows:
            before, after = memories.state(int(order.device[0])), DeviceStates(TASK)
            after.adopt(int(order.device[0]), before)
            after.commit(remembered)
            self.log.append(Watched(order, before, after.state(int(order.device[0]))))
        return executed


@dataclass(frozen=True)
class Counting(Mean):
    """A mean that remembers what it was given, device by device, on the whole model."""

    got: list[tuple[int, Params]] = field(default_factory=list, compare=False, hash=False)

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        for row, device in enumerate(updates.device):
            self.got.append((int(device), updates.take([row]).mean(np.ones(1))))
        return super().__call__(model, updates, view, state, key)


class Run(NamedTuple):
    """A run, and all that can be known of it."""

    steps: list[Round]
    runtime: Simulated
    log: list[Watched]
    got: list[tuple[int, Params]]

    @property
    def reasons(self) -> set[str]:
        return {row.failure for step in self.steps for row in small.rows(step)}


class Case(NamedTuple):
    """Something that can happen to a message, and how to see that it did."""

    method: Method
    fleet: Fleet = Fleet()
    reason: str = ""
    limits: Limits = Limits()


HALF = replace(fedavg(lr=0.1, batch_size=16), select=Uniform(4))
TWO_SPEEDS = levels(speeds=(1e9, 1e8))
CASES: dict[str, Case] = {
    "all arrive": Case(HALF),
    "idle for rounds": Case(replace(HALF, select=Uniform(2))),
    "deadline": Case(replace(HALF, schedule=Deadline(0.025)), TWO_SPEEDS, "too late"),
    "late": Case(replace(HALF, schedule=Deadline(0.02, "counted", 1)), TWO_SPEEDS, "stale"),
    "mortality": Case(HALF, levels(mortality=0.4), "died"),
    "away": Case(HALF, Fleet((Group(availability=Intermittent(0.5, every=0.01)),)), "offline"),
    "refused": Case(HALF, reason="refused", limits=Limits(norm=0.1)),
    "surplus": Case(replace(HALF, schedule=Overselected(2)), TWO_SPEEDS, "too late"),
    "asynchronous": Case(replace(HALF, schedule=Buffered(4, 2, staleness=0)), reason="stale"),
    "tiers": Case(replace(HALF, schedule=Tiers(staleness=4)), TWO_SPEEDS),
    "stale": Case(replace(HALF, schedule=Tiers(staleness=1)), TWO_SPEEDS),
    "never fetched": Case(
        replace(fedavg(lr=0.1, batch_size=16), select=Largest(5, 2), schedule=HoldAndFetch())
    ),
    "evaluated between": Case(
        replace(HALF, schedule=Surveyed(Deadline(0.025), Kind.EVALUATE)), TWO_SPEEDS, "too late"
    ),
    "slices that move": Case(
        replace(fedrolex(widths=(0.5,), lr=0.1, batch_size=16, masked=False), select=Uniform(5)),
        levels(mortality=0.3),
        "died",
    ),
    "channels by norm": Case(
        replace(
            fedavg(lr=1.0, batch_size=16),
            select=Uniform(5),
            plan=WidthByLevel((0.5,)),
            extract=Strongest(),
        ),
        levels(mortality=0.3),
        "died",
    ),
    "label masks": Case(
        replace(heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=16), select=Uniform(5)),
        levels(mortality=0.3),
        "died",
    ),
}


def watched(case: Case, engine: Engine | None = None) -> Run:
    counting, watching = Counting(), Watching(engine or Sequential())
    method, world = replace(case.method, aggregate=counting), small.world(TASK, case.fleet)
    runtime = Simulated(TASK, world, engine=watching, limits=case.limits)
    steps = list(itertools.islice(run(method, TASK, runtime, 0), STEPS))
    return Run(steps, runtime, watching.log, counting.got)


@cache
def plainly(name: str) -> Run:
    """One device after the other, with the codec of most tests."""
    return watched(CASES[name]._replace(method=replace(CASES[name].method, uplink=CODEC)))


def learned(order: Cohort, memory: DeviceState, task: Task = TASK) -> dict[str, Tensor]:
    """What a device learned from an order, on the whole model; nothing if it did not train."""
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        return {}
    plain = replace(order, kind=Kind.TRAIN, job=replace(order.job, uplink=Raw()))
    done = work(plain, (memory,), task).replies
    tree, mask = done.trees_of(0), done.masks_of(0)
    update = {n: v * mask[n].to(v) if n in mask else v for n, v in tree["delta"].items()}
    return paste(update, zeros(task), order.slice_of(0), task.blueprint)


def zeros(task: Task = TASK) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in task.params.items()}


def any_of(tree: Params) -> bool:
    return any(bool(value.any()) for value in tree.values())


def summed(trees: Iterable[Params]) -> dict[str, Tensor]:
    total = zeros()
    for tree in trees:
        total |= {name: total[name] + value for name, value in tree.items()}
    return total


def finished(found: Run, device: int) -> Iterator[Watched]:
    """What a device really carried out: not what was cancelled before it was done."""
    mine = [each for each in found.log if int(each.order.device[0]) == device]
    nexts = [each.before for each in mine] + [found.runtime.state(device)]
    return (each for each, after in zip(mine, nexts[1:], strict=True) if same(after, each.after))


def same(one: DeviceState, other: DeviceState) -> bool:
    """Return whether a device that went on from one state can be in the other."""
    told = one.last_sent_order == other.last_sent_order
    return told and one.tensors.keys() == other.tensors.keys()


def residual_of(state: DeviceState, name: str, acknowledged: int) -> dict[str, Tensor]:
    """The residual of the whole model; all of a reply that never arrived is part of it."""
    left = dict(state.tensors.get(name, {}))
    if state.last_sent_order == acknowledged:
        return left
    unacknowledged = state.tensors.get(SENT, {})
    both = {n: left[n] + value for n, value in unacknowledged.items() if n in left}
    return {**unacknowledged, **left, **both}


def remembering(state: DeviceState) -> DeviceStates:
    """The memories of a fleet in which device 0 is in this state."""
    memories = DeviceStates(TASK)
    memories.adopt(0, state)
    return memories


def delivered(found: Run, device: int) -> Iterator[Params]:
    yield from (change for of, change in found.got if of == device)
    # Came in, and will count in a later step.
    waiting = found.steps[-1].snapshot.waiting
    for row in np.flatnonzero(waiting.orders.device == device).tolist():
        trees = waiting.replies.trees_of(row)
        if "delta" in trees:
            yield paste(trees["delta"], zeros(), waiting.orders.slice_of(row), TASK.blueprint)


@pytest.mark.parametrize("name", CASES)
def test_all_that_was_learned_is_delivered_or_still_owed(name: str) -> None:
    found = plainly(name)
    assert any(CASES[name].reason in reason for reason in found.reasons), found.reasons
    acknowledged, owing = found.steps[-1].snapshot.acknowledged, 0
    for device in range(TASK.devices):
        total = summed(learned(each.order, each.before) for each in finished(found, device))
        owed = residual_of(found.runtime.state(device), SLOT, int(acknowledged[device]))
        accounted = summed([*delivered(found, device), owed])
        owing += bool(owed)
        assert small.distance(accounted, total) < 1e-12 if owed else not any_of(total)
    assert owing > 1


def test_the_cases_are_what_they_are_called() -> None:
    """Some devices wait, some results are never fetched, some labels are masked."""
    idle = plainly("idle for rounds")
    asked = [{row.device for row in small.rows(step)} for step in idle.steps]
    visits = [[at for at, devices in enumerate(asked) if device in devices] for device in range(8)]
    assert any(b - a > 1 for at in visits for a, b in itertools.pairwise(at))
    held = plainly("never fetched")
    kinds = [row.kind for step in held.steps for row in small.rows(step)]
    assert kinds.count("hold") == 5 * STEPS
    assert kinds.count("fetch") == 2 * STEPS
    moving = plainly("slices that move")
    assert len({each.order.slice_of(0) for each in moving.log}) >= STEPS
    assert len({each.order.slice_of(0) for each in plainly("channels by norm").log}) > 1
    assert not all(TASK.labels(device).all() for device in range(TASK.devices))


@pytest.mark.parametrize("name", ["deadline", "mortality", "slices that move", "label masks"])
def test_engines_agree(name: str) -> None:
    # With rounding at random in half of the cases.
    codec = ErrorFeedback(TopK(0.2, Qsgd(4))) if name in ("mortality", "label masks") else CODEC
    case = CASES[name]._replace(method=replace(CASES[name].method, uplink=codec))
    plain, bytes_, stacked = (watched(case, e) for e in (Sequential(), Threads(), Stacked()))
    assert small.identical(plain.steps[-1].params, bytes_.steps[-1].params)
    assert small.distance(plain.steps[-1].params, stacked.steps[-1].params) < 1e-10
    for device in range(8):
        mine, other = plain.runtime.state(device), bytes_.runtime.state(device)
        assert mine.last_sent_order == other.last_sent_order
        assert mine.tensors.keys() == other.tensors.keys()
        for slot in mine.tensors:
            assert small.identical(mine.tensors[slot], other.tensors[slot])
        theirs = stacked.runtime.state(device)
        if mine.tensors:
            assert small.distance(mine.tensors[SLOT], theirs.tensors[SLOT]) < 1e-9


def test_only_what_was_not_acknowledged_is_sent_again() -> None:
    task = small.task(dtype=torch.float64)
    method = replace(fedavg(lr=0.1, batch_size=16), uplink=CODEC)
    first = orders(method, task, [3])
    after = work(first, (DeviceState(),), task)
    (memory,) = after.states
    sent = after.replies.trees_of(0)["delta"]
    assert memory.last_sent_order == first.id[0]
    assert small.identical(memory.tensors[SENT], sent)
    left, memories = memory.tensors[SLOT], DeviceStates(task)
    memories.adopt(3, memory)
    told, untold = (
        memories.residual(replace(first, acknowledged=np.array([order])), tuple(left))
        for order in (int(first.id[0]), -1)
    )
    assert small.identical(told, {name: value[None] for name, value in left.items()})
    again = {name: (left[name] + sent[name])[None] for name in left}
    assert small.identical(untold, again)


def test_feedback_forgets_what_is_no_number() -> None:
    """A device that diverged once would otherwise send nothing useful ever again."""
    task = small.task(dtype=torch.float64)
    method = replace(fedavg(lr=0.1, batch_size=16), uplink=CODEC)
    order = orders(method, task, [3])
    broken = {name: torch.full_like(value, math.nan) for name, value in task.params.items()}
    fresh = work(order, (DeviceState(),), task).replies.trees_of(0)["delta"]
    spoilt = DeviceState(tensors={SLOT: broken, SENT: broken}, last_sent_order=7)
    done = work(order, (spoilt,), task)
    assert small.identical(done.replies.trees_of(0)["delta"], fresh)
    assert all(value.isfinite().all() for value in done.states[0].tensors[SLOT].values())


def test_what_a_codec_sends_nothing_of_is_all_left() -> None:
    task = small.task(dtype=torch.float64)
    method = replace(fedavg(lr=0.1, batch_size=16), uplink=ErrorFeedback(Nothing()))
    order = orders(method, task, [3])
    done = work(order, (DeviceState(),), task)
    update = learned(order, DeviceState(), task)
    assert small.identical(done.states[0].tensors[SLOT], update)


def test_weights_cannot_be_fed_back() -> None:
    with pytest.raises(ValueError, match='use send="delta"'):
        replace(fedavg(), uplink=CODEC, send="weights")
    with pytest.raises(ValueError, match="downlink"):
        replace(fedavg(), downlink=CODEC)


@pytest.mark.parametrize("codec", [CODEC, ErrorFeedback(Uveq())], ids=["zeros", "noise"])
def test_what_was_not_trained_is_owed_as_before(codec: ErrorFeedback) -> None:
    """A quantiser with dither answers 0 with noise, which is not to be made good later."""
    order = orders(replace(fedavg(lr=0.1), uplink=codec), TASK, [0])
    update, left = (
        {n: rng.normal(rng.root(seed, n), v.numel()).view_as(v) for n, v in TASK.params.items()}
        for seed in (1, 2)
    )
    trained = torch.arange(10) % 3 == 0  # of ten labels
    mask = {"10.bias": trained, "10.weight": trained[:, None].expand(10, 16)}
    memories = remembering(DeviceState(tensors={SLOT: left}))
    stacked, masks = ({n: v[None] for n, v in tree.items()} for tree in (update, mask))
    found = compress_updates(order, memories, stacked, masks, TASK)
    for name, value in update.items():
        flags = mask.get(name, torch.ones_like(value, dtype=torch.bool))
        expected = torch.where(flags, left[name] + value - found.received[name][0], left[name])
        assert torch.allclose(found.state[name][0], expected, rtol=1e-6, atol=1e-6), name


def test_a_width_owes_to_its_own_normalisation_alone() -> None:
    wide, narrow = (
        orders(replace(heterofl(widths=(share,), lr=0.1), norm=PerWidth(), uplink=CODEC), TASK, [0])
        for share in (0.5, 0.25)
    )
    (memory,) = work(wide, (DeviceState(),), TASK).states
    left = residual_of(memory, SLOT, int(wide.id[0]))
    assert "1.weight" not in left
    (own,) = (name for name in left if name.startswith("1.weight@"))
    assert left[own].any()
    # The next order is of another width: it finds what was left of the shared tensors only.
    local = TASK.blueprint.local(narrow.slice_of(0))
    nothing = {n: torch.zeros(1, *local.shape(n), dtype=torch.float64) for n in TASK.params}
    later = replace(narrow, acknowledged=wide.id)
    found = compress_updates(later, remembering(memory), nothing, {}, TASK)
    owed = {name: found.state[name] + found.received[name] for name in nothing}
    assert owed["0.weight"].any()
    assert not owed["1.weight"].any()
