"""Runs that are played together: each is its own single run, whoever else is there."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.core.slots import Minibatch, TrainingContext, TrainingStart, TrainingState
from anyfleet.errors import AnyfleetWarning
from anyfleet.experiment import Experiment, Prepared, RoundResult, State, prepare
from anyfleet.methods import fedavg, fedrescue, heterofl
from anyfleet.parts.codec import ErrorFeedback, Stc
from anyfleet.parts.schedule import Buffered, HoldAndFetch
from anyfleet.parts.select import Everyone, Largest
from anyfleet.parts.train import Decaying, Gradient
from anyfleet.parts.train.gradient import MinibatchGradient
from anyfleet.runtime import Sequential, Stacked
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.losses import cross_entropy
from anyfleet.tasks.partition import LogNormalSizes
from anyfleet.together import MEETINGS, FailedRuns, play_together
from anyfleet.world import levels
from tests.helpers import small

FLEET = levels(speeds=(1e9, 1e8))
BASE = fedavg(count=4, lr=0.1, batch_size=4)
METHODS: dict[str, Method] = {
    "synchronous": BASE,
    "remembering": replace(BASE, uplink=ErrorFeedback(Stc(0.2)), cache=True),
    "widths": heterofl(count=4, lr=0.1, widths=(1.0, 0.5)),
    "asynchronous": replace(
        heterofl(lr=0.1, widths=(1.0, 0.5)), select=Everyone(), schedule=Buffered(4, 2)
    ),
    "held": replace(fedavg(lr=0.1), select=Largest(5, 2), schedule=HoldAndFetch()),
    "drawing": fedrescue(count=4, lr=0.1),  # widths that the devices of a cohort draw together
}
EXACT = ("order", "device", "bits_up", "bits_down", "compute_seconds", "upload_joules", "flops")


def net(width: int = 4) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(9 * width, 10),
        )


@lru_cache(maxsize=16)
def task(seed: int = 0, data: int = 1, width: int = 4, loss: Any = cross_entropy) -> Task:
    """A small net in double precision, and devices with unequal data that depend on the seed."""
    split = Split(devices=6, partition=LogNormalSizes(), test_share=0.0, server=10, seed=seed)
    given: tuple[Data, Data] = small.patterns(60, data), small.patterns(10, 2)
    made = Task.of(net(width), *given, split=split, loss=loss, classified=True)
    return made.to(torch.float64)


def prepared(
    method: Method,
    problem: Task,
    seed: int = 0,
    *,
    engine: Engine | None = None,
    rounds: int = 3,
    device: str = "cpu",
) -> Prepared:
    engine = engine or Stacked()
    options: Any = {"engine": engine, "device": device, "rounds": rounds, "seed": seed}
    return prepare(Experiment(problem, method, FLEET, **options))


def seeds(method: Method, count: int = 3, **options: Any) -> list[Prepared]:
    return [prepared(method, task(seed), seed, **options) for seed in range(count)]


def played(
    runs: Sequence[Prepared],
    states: Sequence[State | None] | None = None,
    meetings: int = MEETINGS,
) -> list[list[RoundResult]]:
    """The results of each run, played together."""
    found: list[list[RoundResult]] = [[] for _ in runs]
    play_into(found, runs, states, meetings)
    return found


def play_into(
    found: list[list[RoundResult]],
    runs: Sequence[Prepared],
    states: Sequence[State | None] | None = None,
    meetings: int = MEETINGS,
) -> None:
    states = states or [None] * len(runs)
    for number, result in play_together(runs, states, meetings=meetings):
        found[number].append(result)


def assert_same(one: Sequence[RoundResult], other: Sequence[RoundResult]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert small.distance(a.round.params, b.round.params) < 1e-10
        for column in EXACT:
            np.testing.assert_array_equal(
                getattr(a.round.ledger, column), getattr(b.round.ledger, column)
            )
        np.testing.assert_allclose(a.round.ledger.loss, b.round.ledger.loss, rtol=1e-9)
        assert a.record.time == b.record.time
        assert a.record.joules == b.record.joules
        assert a.execution == b.execution


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a stack began to train: the only entry counts."""
    found, start = [0], Gradient.start

    def counted(self: Gradient, *given: Any) -> TrainingState:
        found[0] += 1
        return start(self, *given)

    monkeypatch.setattr(Gradient, "start", counted)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_every_seed_is_its_own_single_run(name: str) -> None:
    runs = seeds(METHODS[name])
    for alone, together in zip(runs, played(runs), strict=True):
        assert_same(list(alone.play()), together)


def test_stacks_of_all_seeds_are_one(starts: list[int]) -> None:
    method = replace(BASE, train=Gradient(Decaying(0.1), local_steps=3, batch_size=2))
    runs = seeds(method)
    for run in runs:
        list(run.play())
    alone, starts[0] = starts[0], 0
    played(runs)
    assert (alone, starts[0]) == (9, 3)


def test_seeds_may_have_data_of_their_own() -> None:
    runs = [prepared(BASE, task(seed, data), seed) for seed, data in enumerate((1, 4, 1, 5))]
    for alone, together in zip(runs, played(runs), strict=True):
        assert_same(list(alone.play()), together)


def test_hyperparameters_of_orders_may_differ(starts: list[int]) -> None:
    train = Gradient(Decaying(0.1), local_steps=3, batch_size=4)
    trainers = (
        train,
        replace(train, lr=Decaying(0.01, 0.5)),
        replace(train, batch_size=3),
        replace(train, local_steps=4),
        replace(train, local_steps=None, epochs=2),
    )
    runs = [prepared(replace(BASE, train=each), task()) for each in trainers]
    together = played(runs)
    assert starts[0] < 3 * len(runs)
    for alone, found in zip(runs, together, strict=True):
        assert_same(list(alone.play()), found)


def test_a_run_alone_has_the_bits_of_play() -> None:
    (run,) = runs = seeds(METHODS["widths"], 1)
    (found,) = played(runs)
    for one, two in zip(run.play(), found, strict=True):
        assert small.identical(one.round.params, two.round.params)
        assert repr(one.round.ledger.as_dicts()) == repr(two.round.ledger.as_dicts())


def test_runs_that_cannot_be_joined_are_played() -> None:
    runs = [
        prepared(BASE, task()),
        prepared(BASE, task(1), 1, engine=Sequential()),
        prepared(BASE, task(width=6), 2),
        prepared(METHODS["drawing"], task(3), 3),
        prepared(replace(BASE, train=Gradient(Decaying(0.1), proximal=0.5)), task()),
        prepared(BASE, task(4), 4, engine=Stacked(2, workers=2)),
        prepared(BASE, task(5), 5, engine=Stacked(chunk=1), rounds=1),
    ]
    for alone, together in zip(runs, played(runs), strict=True):
        assert_same(list(alone.play()), together)


def test_runs_take_turns_in_the_order_given() -> None:
    runs = [*seeds(BASE, 2, rounds=2), *seeds(BASE, 1, engine=Sequential(), rounds=3)]
    numbers = [number for number, _ in play_together(runs, [None] * 3)]
    assert numbers == [2, 0, 1, 2, 0, 1, 2]


def test_runs_go_on_from_their_states() -> None:
    runs = seeds(METHODS["remembering"], rounds=4)
    whole = [list(run.play()) for run in runs]
    states = [whole[0][1].state, None, whole[2][3].state]
    first, second, third = played(runs, states)
    assert_same(whole[0][2:], first)
    assert_same(whole[1], second)
    assert third == []


# --- failures and ends ---------------------------------------------------------------------------


class Spoilt:
    """A loss that cannot be computed any more from its call of some number on."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("no more")
        return cross_entropy(output, target)


def test_a_run_that_fails_leaves_the_others_alone() -> None:
    runs = seeds(BASE)
    probe = Spoilt(10**6)
    broken = task(3, loss=probe)
    before = probe.left
    list(islice(prepared(BASE, broken).play(), 1))
    used = before - probe.left
    probe.left = used + 1  # enough for the first round
    runs.insert(1, prepared(BASE, broken))
    found: list[list[RoundResult]] = [[] for _ in runs]
    with pytest.raises(FailedRuns, match=r"1 of 4 runs failed \(by number from 0: 1\)") as caught:
        play_into(found, runs)
    assert isinstance(caught.value.errors[1], ArithmeticError)
    assert "loss=" in "".join(caught.value.errors[1].__notes__)
    assert len(found[1]) == 1
    for i in (0, 2, 3):
        assert_same(list(runs[i].play()), found[i])


def test_a_single_run_fails_with_its_own_error() -> None:
    probe = Spoilt(10**6)
    run = prepared(BASE, task(loss=probe))
    probe.left = 0
    with pytest.raises(ArithmeticError, match="no more"):
        played([run])


@dataclass(frozen=True)
class Homesick(Gradient):
    """A trainer that begins half-way between the received and the initial model of its run."""

    def start(self, context: TrainingContext, start: TrainingStart) -> TrainingState:
        initial: Params = context.task.params
        params = {n: 0.5 * (value + initial[n]) for n, value in start.params.items()}
        return super().start(context, start._replace(params=params))


def test_a_trainer_that_reads_what_differs_is_not_joined() -> None:
    method = replace(BASE, train=Homesick(Decaying(0.1), batch_size=4))
    problems = [task(), replace(task(1), params={n: 2 * v for n, v in task().params.items()})]
    runs = [prepared(method, each, seed) for seed, each in enumerate(problems)]
    with pytest.warns(AnyfleetWarning, match="reads `params` of its task") as caught:
        together = played(runs)
    assert len(caught) == 1
    for alone, found in zip(runs, together, strict=True):
        assert_same(list(alone.play()), found)


@dataclass(frozen=True)
class Scaled(Gradient):
    """A trainer that reads its learning rate where others read that of their order."""

    def descend(
        self,
        context: TrainingContext,
        state: TrainingState,
        found: MinibatchGradient,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
    ) -> TrainingState:
        own = {**hyperparameters, "lr": torch.full_like(hyperparameters["lr"], self.lr(0))}
        return super().descend(context, state, found, batch, own)


def test_a_trainer_of_ones_own_keeps_its_hyperparameters() -> None:
    trainers = [Scaled(Decaying(lr), batch_size=4) for lr in (0.1, 0.02)]
    runs = [prepared(replace(BASE, train=each), task()) for each in trainers]
    for alone, found in zip(runs, played(runs), strict=True):
        assert_same(list(alone.play()), found)


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def begun() -> Iterator[tuple[int, RoundResult]]:
    return play_together(seeds(METHODS["widths"], rounds=10**6), [None] * 3)


def test_closing_ends_all_runs() -> None:
    before = names_of_threads()
    results = begun()
    next(results)
    assert names_of_threads() > before
    results.close()  # type: ignore[attr-defined]
    assert names_of_threads() == before


def test_an_interruption_ends_all_runs() -> None:
    before = names_of_threads()
    results = begun()
    list(islice(results, 4))
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert names_of_threads() == before


def test_states_are_as_many_as_runs() -> None:
    with pytest.raises(ValueError, match="got 2 runs and 1 states"):
        play_together(seeds(BASE, 2), [None])
    with pytest.raises(ValueError, match="meetings must be at least 1"):
        play_together(seeds(BASE, 2), [None] * 2, meetings=0)
    assert list(play_together([], [])) == []


def test_threads_of_torch_are_those_of_the_caller() -> None:
    class Asked(Spoilt):
        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return super().__call__(output, target)

    seen: set[int] = set()
    before = torch.get_num_threads()
    run = prepared(BASE, task(loss=Asked(10**6)))
    seen.clear()
    torch.set_num_threads(2)
    try:
        played([run])
    finally:
        torch.set_num_threads(before)
    assert seen == {2}
