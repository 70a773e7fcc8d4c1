"""The engine of a run that names none: measured once, kept, the same for all that is compared.

Nothing here asserts which engine is the fastest: what was measured is put into the cache by hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet import methods
from anyfleet.core.messages import EVERYTHING
from anyfleet.core.method import Method
from anyfleet.core.slots import Minibatch, Select, TrainingContext, TrainingState
from anyfleet.core.view import Ids, View
from anyfleet.parts.train import Gradient
from anyfleet.runtime import Limits, Sequential, Stacked, Workers
from anyfleet.runtime.simulated import engine_choice
from anyfleet.runtime.simulated.engine_choice import (
    Choice,
    Measurement,
    Prospect,
    candidates,
    choose,
    measure,
    shape_of,
)
from anyfleet.runtime.simulated.engines import Assignment, Engine
from tests.helpers import small

STACKS = Stacked(chunk=32)
SHORT, LONG = 1, 10_000  # rounds: nothing is ever run for so many
METHOD = methods.fedavg(count=2, lr=0.1, batch_size=16)
ENOUGH = 60.0  # seconds, also on a machine that is busy: so few orders take less


def prospect(method: Method = METHOD, rounds: int = LONG, seed: int = 0) -> Prospect:
    task = small.task()
    return Prospect(method, task, small.world(task), Limits(), seed, rounds)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFLEET_CACHE", str(tmp_path))
    return tmp_path / "engines"


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def remember(folder: Path, seconds: Mapping[str, float], each: Prospect) -> None:
    """Put into the cache what a round of a run took."""
    before = set(folder.iterdir()) if folder.exists() else set()
    measure(each, ENOUGH)
    (file,) = set(folder.iterdir()) - before
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": seconds}))


def test_a_short_run_is_not_measured(cache: Path) -> None:
    choice = choose([prospect(rounds=SHORT)])
    assert choice == Choice(Sequential(), "not measured: the run is short")
    assert not cache.exists()


def test_a_short_run_has_the_same_engine_before_and_after_a_long_one(cache: Path) -> None:
    before = choose([prospect(rounds=SHORT)])
    remember(cache, {str(Sequential()): 1.0, str(STACKS): 0.1}, prospect())
    assert choose([prospect()]).engine == STACKS
    assert choose([prospect(rounds=SHORT)]) == before


def test_what_is_measured_of_a_run_does_not_depend_on_what_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    def measured(each: Prospect, seconds: float = engine_choice.SECONDS) -> Measurement:
        given.append(seconds)
        return Measurement({str(Sequential()): 1.0})

    monkeypatch.setattr(engine_choice, "measure", measured)
    choose([prospect()])
    choose([prospect(), prospect(), prospect()])
    assert given == [engine_choice.SECONDS] * 4


def test_what_is_kept_is_never_written_over(cache: Path) -> None:
    remember(cache, {str(Sequential()): 1.0}, prospect())
    kept = only(cache).read_bytes()
    later = Measurement({str(Sequential()): 2.0})
    found = engine_choice._keep(only(cache), shape_of(prospect()), later)
    assert found == Measurement({str(Sequential()): 1.0})
    assert only(cache).read_bytes() == kept


def test_what_was_measured_is_kept_and_not_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(prospect(), ENOUGH)
    assert first.seconds.keys() == candidates().keys()
    assert all(seconds > 0 for seconds in first.seconds.values())
    kept = json.loads(only(cache).read_text())
    assert kept["shape"] == json.loads(json.dumps(shape_of(prospect())))
    monkeypatch.delattr(engine_choice, "_measured_now")
    again = measure(prospect(rounds=2 * LONG), ENOUGH)
    assert again.seconds == {name: 2 * seconds for name, seconds in first.seconds.items()}
    assert choose([prospect()]) == choose([prospect(seed=1)])


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"seconds": {}}', '{"seconds": {"Sequential()": -1}, "shape": 0}', "\xff"],
)
def test_a_cache_that_cannot_be_read_is_ignored(cache: Path, content: str) -> None:
    measure(prospect(), ENOUGH)
    file = only(cache)
    file.write_text(content, encoding="latin-1")
    assert measure(prospect(), ENOUGH).seconds.keys() == candidates().keys()
    assert json.loads(file.read_text())["seconds"].keys() == candidates().keys()


def test_without_a_place_for_the_cache_it_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYFLEET_CACHE", str(tmp_path / "file"))
    assert measure(prospect(), ENOUGH).seconds
    monkeypatch.setenv("ANYFLEET_CACHE", "")
    assert measure(prospect(), ENOUGH).seconds
    monkeypatch.delenv("ANYFLEET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    measure(prospect(), ENOUGH)
    assert only(tmp_path / "home/anyfleet/engines").suffix == ".json"


def test_the_shape_is_what_time_depends_on() -> None:
    plain = shape_of(prospect())
    assert shape_of(prospect(methods.fedavg(count=2, lr=0.5, batch_size=16), seed=3)) == plain
    assert shape_of(prospect(rounds=SHORT)) == plain
    for other in (
        methods.fedavg(count=3, lr=0.1, batch_size=16),
        methods.fedavg(count=2, lr=0.1, batch_size=9),
        methods.heterofl(count=2, lr=0.1, batch_size=16),
        methods.fedprox(count=2, lr=0.1, batch_size=16),
    ):
        assert shape_of(prospect(other)) != plain
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert shape_of(prospect()) != plain
    finally:
        torch.set_num_threads(threads)
    task = small.task(dtype=torch.float64)
    assert shape_of(replace(prospect(), task=task)) != plain


def test_one_engine_is_chosen_for_all_runs_of_a_comparison(cache: Path) -> None:
    one, two = prospect(), prospect(methods.fedprox(count=2, lr=0.1))
    engines = {str(engine): engine for engine in (Sequential(), STACKS)}
    remember(cache, dict(zip(engines, (1.0, 0.1), strict=True)), one)
    remember(cache, dict(zip(engines, (1.0, 3.0), strict=True)), two)
    assert choose([one]).engine == STACKS
    assert choose([one]).why == "measured: 10 times as fast as Sequential"
    assert choose([two]).engine == Sequential()
    assert choose([one, two]) == Choice(Sequential(), "measured: no other is faster")
    longer = replace(one, rounds=10 * LONG)
    assert choose([longer, two]).engine == STACKS


def test_a_simpler_engine_is_preferred_to_one_that_is_hardly_faster(cache: Path) -> None:
    remember(cache, {str(Sequential()): 1.04, str(STACKS): 1.0}, prospect())
    assert choose([prospect()]).engine == Sequential()


def test_an_engine_that_not_all_runs_can_have_is_not_chosen(cache: Path) -> None:
    one, two = prospect(), prospect(methods.fedprox(count=2, lr=0.1))
    remember(cache, {str(Sequential()): 1.0, str(STACKS): 0.1}, one)
    remember(cache, {str(Sequential()): 1.0}, two)
    assert choose([one, two]).engine == Sequential()


@dataclass(frozen=True)
class Branching(Gradient):
    """A trainer that looks at a value, which no stack can."""

    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: object,
    ) -> TrainingState:
        assert float(hyperparameters["lr"]) > 0
        return super().step(context, state, batch, hyperparameters, draw)


def test_stacks_are_left_out_if_they_fail() -> None:
    method = replace(METHOD, train=Branching(batch_size=16))
    others = [engine for engine in candidates().values() if not isinstance(engine, Stacked)]
    assert [*measure(prospect(method), ENOUGH).seconds] == [*map(str, others)]
    choice = choose([prospect(method)], ENOUGH)
    assert choice.engine in others
    assert "; Branching cannot be stacked: RuntimeError: vmap: It looks like you're" in choice.why
    assert "\n" not in choice.why


@dataclass(frozen=True)
class Failing(Select):
    """A selection that fails."""

    def __call__(self, view: View, state: object, key: Tensor) -> Ids:
        raise ZeroDivisionError


def test_a_part_that_fails_is_left_to_the_run() -> None:
    choice = choose([prospect(replace(METHOD, select=Failing()))])
    assert choice == Choice(Sequential(), "not measured: the first orders cannot be carried out")


def test_measuring_leaves_the_random_numbers_of_torch_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    assert measure(prospect(), ENOUGH).seconds
    assert torch.equal(torch.rand(3), expected)


def test_a_sample_grows_to_orders_for_a_stack_then_to_all_steps_then_to_all_orders() -> None:
    sizes = [(8, 1)]
    while (larger := engine_choice._grown(*sizes[-1], 50, 5)) != sizes[-1]:
        sizes.append(larger)
    assert sizes == [(8, 1), (16, 1), (32, 1), (32, 2), (32, 4), (32, 5), (50, 5)]
    assert engine_choice._grown(2, 1, 3, 1) == (3, 1)
    assert engine_choice._grown(1, 1, 1, 1) == (1, 1)


def test_orders_are_shortened_in_proportion() -> None:
    """A stack pads its devices to the longest: equally short ones would hide what that takes."""
    each = prospect(methods.fedavg(count=3, lr=0.1, batch_size=16))
    orders = engine_choice._first_orders(each)
    own = replace(orders.orders.hyperparameters, local_steps=np.array([10, 5, 1]))
    long = replace(own, epochs=np.full(3, EVERYTHING))
    orders = replace(
        orders,
        orders=replace(orders.orders, hyperparameters=long),
        sent=replace(orders.sent, hyperparameters=long),
    )
    found = engine_choice._shortened(orders, [0, 1, 2], 4, each.task)
    assert found.orders.hyperparameters.local_steps.tolist() == [4, 2, 1]
    whole = engine_choice._shortened(orders, [0, 1, 2], 20, each.task)
    assert whole.sent.hyperparameters.local_steps.tolist() == [10, 5, 1]


def test_an_engine_that_fell_behind_stays_as_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger samples may take everybody longer: it is not the fastest for having been left out."""
    took = {str(Sequential()): iter([1.0, 8.0]), str(STACKS): iter([4.0])}

    def seconds(_: object, engine: Engine, orders: Assignment) -> float:
        return next(took[str(engine)]) * engine_choice._steps(orders, each.task)

    each = prospect()
    monkeypatch.setattr(engine_choice._Clock, "seconds", seconds)
    clock, orders = engine_choice._Clock(each), engine_choice._first_orders(each)
    engines: dict[str, Engine] = {str(Sequential()): Sequential(), str(STACKS): STACKS}
    monkeypatch.setattr(engine_choice, "_PASSES", 1)
    found = engine_choice._contest(clock, engines, orders, (1, 99), float("inf"))
    assert found == {str(Sequential()): 8.0, str(STACKS): 32.0}


def test_candidates_use_the_cores_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [Sequential(), Stacked(chunk=16), Stacked(chunk=32)]
    monkeypatch.setattr(engine_choice, "cores", lambda: 1)
    assert [*candidates().values()] == alone
    monkeypatch.setattr(engine_choice, "cores", lambda: 4)
    more = [Workers(), Stacked(chunk=16, workers=4), Stacked(chunk=32, workers=4)]
    assert [each for each in candidates().values() if each not in more] == alone
    assert [each for each in candidates().values() if each in more] == more


def test_engines_that_do_the_same_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "cores", lambda: 1)
    one, few, many = candidates()
    assert engine_choice._unlike(candidates(), 16) == [[one], [few, many]]
    assert engine_choice._unlike(candidates(), 17) == [[one], [few], [many]]


@pytest.mark.parametrize(
    ("cores", "threads", "engine"), [(1, 1, Sequential()), (2, 1, Workers()), (2, 2, Sequential())]
)
def test_long_steps_are_done_side_by_side(
    cores: int, threads: int, engine: Engine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    # A machine on which every step takes hours.
    monkeypatch.setattr(engine_choice, "_FLOPS", 1.0)
    told = Choice(engine, "not measured: a local step takes too long")
    assert choose([prospect()]) == told
    assert not cache.exists()


def test_whether_a_run_is_measured_depends_on_no_clock(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a busy machine would choose another engine for the same run.
    monkeypatch.setattr(engine_choice._Clock, "seconds", lambda *_: 1e4)
    assert choose([prospect()]).why.startswith("measured: ")
    assert only(cache).exists()
