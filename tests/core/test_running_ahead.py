"""Rounds that begin before the replies of the round before are checked: the same run, sooner."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyfleet import Experiment, play
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.method import Method
from anyfleet.core.server import Ending, Server
from anyfleet.core.slots import State
from anyfleet.core.stacks import Replies, Stack
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.methods import (
    anycost,
    fedadp,
    fedavg,
    fedpmt,
    fedpns,
    fedrescue,
    heterofl,
    stc,
    whale,
)
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.norm import Tracked
from anyfleet.parts.schedule import Buffered, Deadline
from anyfleet.runtime import Sequential, Simulated, Stacked
from anyfleet.tasks import Embedded
from tests.helpers import small
from tests.helpers.late import Late, Spoil

FAST = fedavg(count=4, lr=0.1)
METHODS = {
    "fedavg": FAST,
    "heterofl": heterofl(count=4, lr=0.1),
    "fedpmt": fedpmt(lr=0.1),
    "fedadp": fedadp(lr=0.1),
    "fedpns": fedpns(count=4, lr=0.1),
    "whale": whale(lr=0.1),
    "anycost": anycost(count=4, lr=0.1),
    "stc": stc(count=4, lr=0.1),
    "fedrescue": fedrescue(count=4, lr=0.1),
    "deadline": replace(FAST, schedule=Deadline(seconds=1e3)),
    "buffered": replace(FAST, schedule=Buffered(concurrency=4, buffer_size=2)),
    "tracked": replace(FAST, norm=Tracked()),
}


def played(method: Method, engine: Late | Sequential, count: int = 4) -> list[Round]:
    return small.steps(method, small.task(norm=False), count, engine=engine)


def same(found: list[Round], expected: list[Round]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert small.identical(one.params, other.params)
        assert small.identical(one.buffers, other.buffers)
        assert repr(one.ledger.as_dicts()) == repr(other.ledger.as_dicts())
        assert repr(one.diagnostics) == repr(other.diagnostics)
        for what, sizes in one.snapshot.update_sizes.items():
            kept = other.snapshot.update_sizes[what]
            assert repr(vars(sizes)) == repr(vars(kept))


@pytest.mark.parametrize("name", METHODS)
def test_the_run_is_the_one_that_waits(name: str) -> None:
    same(played(METHODS[name], Late()), played(METHODS[name], Sequential()))


def test_training_begins_before_the_round_before_is_checked() -> None:
    late = Late()
    played(FAST, late, 3)
    assert late.log == ["train 0", "train 1", "read 0", "train 2", "read 1", "train 3", "read 2"]


def test_nothing_is_trained_beyond_the_last_round() -> None:
    late = Late()
    experiment = Experiment(Embedded(devices=4, limit=80, server=20), FAST, engine=late, rounds=2)
    assert len(list(play(experiment))) == 2
    assert [each for each in late.log if each.startswith("train")] == ["train 0", "train 1"]


def test_a_method_that_looks_at_numbers_waits_for_them() -> None:
    late = Late()
    played(replace(FAST, aggregate=ByLoss()), late, 2)
    assert late.log[:3] == ["train 0", "read 0", "train 1"]


@dataclass(frozen=True)
class ByLoss(Mean):
    """A mean that looks at the losses of devices."""

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        assert np.isfinite(updates.report("loss")).all()
        return super().__call__(model, updates, view, state, key)


def changed(number: int, what: str) -> Spoil:
    """Return what spoils one reply of a round."""

    def spoil(round_index: int, replies: Replies) -> Replies:
        if round_index != number:
            return replies
        first, *others = replies.stacks
        tree = {name: value.clone() for name, value in first.trees["delta"].items()}
        report = dict(first.report)
        value = next(iter(tree.values()))
        if what == "nan":
            value.view(-1)[0] = torch.nan
        if what == "large":
            value += 1e6
        if what == "loss":
            report["loss"] = np.array([np.inf])
        spoilt = Stack(trees={**first.trees, "delta": tree}, report=report)
        return replies.having(stacks=(spoilt, *others))

    return spoil


@pytest.mark.parametrize("what", ["nan", "large", "loss"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_reply_that_does_not_count_is_refused_as_ever(what: str, number: int) -> None:
    spoil = changed(number, what)
    ahead = played(FAST, Late(spoil=spoil), 5)
    never = played(FAST, _Waiting(spoil=spoil), 5)
    same(ahead, never)
    assert any("refused" in text for text in ahead[number].ledger.failure)


class _Waiting(Late):
    """The same engine, whose numbers are there at once."""

    def start(self, task: object, limits: object) -> object:  # type: ignore[override]
        return _AtOnce(super().start(task, limits))  # type: ignore[arg-type]


class _AtOnce:
    def __init__(self, inner: object) -> None:
        self._inner = inner

    def execute(self, given: object, states: object) -> object:
        done = self._inner.execute(given, states)  # type: ignore[attr-defined]
        stacks = tuple(
            replace(stack, report=dict(stack.report), known_lengths=dict(stack.known_lengths))
            for stack in done.replies.stacks
        )
        return replace(done, replies=done.replies.having(stacks=stacks))


@dataclass(frozen=True)
class Strict(Mean):
    """A mean that fails on what is not finite."""

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        for update in updates:
            if any(value.isnan().any() for value in update.delta.values()):
                raise ArithmeticError("not a number")
        return super().__call__(model, updates, view, state, key)


def test_a_part_that_fails_on_a_reply_that_does_not_count_has_not_failed() -> None:
    method, spoil = replace(FAST, aggregate=Strict()), changed(1, "nan")
    same(played(method, Late(spoil=spoil)), played(method, _Waiting(spoil=spoil)))


def test_a_part_that_fails_ends_the_run_after_the_rounds_before() -> None:
    method = replace(FAST, aggregate=Failing())
    rounds = run(method, small.task(), _runtime(Late()), 0)
    assert [each.index for each in _until_error(rounds)] == [0, 1]


@dataclass(frozen=True)
class Failing(Mean):
    """A mean that fails in the third round."""

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        if view.round_index == 2:
            raise ArithmeticError("in the third round")
        return super().__call__(model, updates, view, state, key)


def _until_error(rounds: Iterator[Round]) -> Iterator[Round]:
    with pytest.raises(ArithmeticError, match="third round"):
        yield from rounds


def _runtime(engine: Late) -> Simulated:
    return Simulated(small.task(), small.world(small.task()), engine=engine)


def test_every_round_can_be_resumed_though_the_next_one_has_begun() -> None:
    whole = played(FAST, Late(), 4)
    for before in whole[:3]:
        runtime = Simulated(
            small.task(norm=False), small.world(small.task(norm=False)), engine=Late()
        )
        runtime.restore(before.fleet)
        rest = run(FAST, small.task(norm=False), runtime, 0, resume=before.snapshot)
        same(list(islice(rest, 3 - before.index)), whole[before.index + 1 :])


def test_stacks_run_ahead_too() -> None:
    method = heterofl(count=4, lr=0.1)
    late = Late(inner=Stacked())
    same(played(method, late), small.steps(method, small.task(norm=False), 4, engine=Stacked()))
    assert late.log[1:3] == ["train 1", "read 0"]


def test_statistics_of_normalisation_are_checked_too() -> None:
    problem, engines = small.task(), (Late(), Sequential())
    for name in ("fedavg", "tracked"):
        same(*(small.steps(METHODS[name], problem, 3, engine=each) for each in engines))


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedpmt", "tracked"])
def test_nothing_is_asked_of_an_accelerator_that_trains_the_next_round(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks and statistics of normalisation are measured before the next training begins."""
    asked, settle = Operators(), Server.settle
    checked: list[bool] = []

    def watched(server: Server, ending: Ending) -> Round | None:
        checked.append(ending.unchecked is not None)
        with asked:
            return settle(server, ending)

    monkeypatch.setattr(Server, "settle", watched)
    small.steps(METHODS[name], small.task(), 3, engine=Late())
    assert checked
    assert all(checked)
    assert not asked.names


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes which operators run in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
