"""Errors in a user's code keep type and traceback, and gain one line: which, when, how to go on."""

import importlib
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from typer.testing import CliRunner

from anyfleet import Experiment, play
from anyfleet.arrays import Ints
from anyfleet.cli.app import app
from anyfleet.core.method import Method
from anyfleet.core.slots import Minibatch, Select, State, TrainingContext, TrainingState
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import AnyfleetError, BadReturn, ConfigError, StoreError
from anyfleet.experiment import RoundResult, build
from anyfleet.methods import fedavg
from anyfleet.names import Factory
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.choose import First
from anyfleet.parts.codec import Raw
from anyfleet.parts.extract import Leading
from anyfleet.parts.plan import WholeModel, WidthMenu
from anyfleet.parts.schedule import Synchronous
from anyfleet.parts.select import Uniform
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.store import Recording, read_rounds
from anyfleet.tasks import Own, Task, zoo
from anyfleet.tracebacks import during, note, raised_inside, remedied
from tests.core.test_return_checks import BASE, task
from tests.helpers import small


class Oops(Exception):
    """Nobody knows this type but the user."""


def fail(step: int = 1) -> None:
    """The user's own line of code; the first round is well."""
    if step:
        raise Oops("my own words")


@dataclass(frozen=True)
class BadSelect(Select):
    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        fail(view.round_index)
        return Uniform(2)(view, state, key)


@dataclass(frozen=True)
class BadSchedule(Synchronous):
    where: str = "start"

    def start(self, view: View) -> Any:
        fail(view.round_index * (self.where == "start"))
        return super().start(view)

    def ready(self, view: View) -> bool:
        fail(view.round_index * (self.where == "ready"))
        return super().ready(view)

    def drop(self, view: View) -> tuple[int, ...]:
        fail(view.round_index * (self.where == "drop"))
        return ()


@dataclass(frozen=True)
class BadPlan(WholeModel):
    def __call__(self, plans: Any, view: View, state: State, key: Tensor) -> Any:
        fail(view.round_index)
        return plans


@dataclass(frozen=True)
class BadChoose(First):
    def __call__(self, *asked: Any) -> Any:
        fail()


@dataclass(frozen=True)
class BadExtract(Leading):
    def __call__(
        self, size: Any, view: View, state: State, key: Tensor, device: int | None
    ) -> Slice:
        fail(view.round_index)
        return super().__call__(size, view, state, key, device)


@dataclass(frozen=True)
class BadCodec(Raw):
    def compress(self, *_: Any) -> Any:
        fail()


@dataclass(frozen=True)
class BadAggregate(Mean):
    where: str = "call"

    def init(self, view: View) -> State:
        fail(self.where == "init")

    def __call__(self, model: Any, updates: Updates, view: View, state: State, key: Tensor) -> Any:
        fail(view.round_index * (self.where == "call"))
        return super().__call__(model, updates, view, state, key)

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: State
    ) -> State:
        fail(view.round_index * (self.where == "learn"))


class BadNorm(type(BASE.norm)):  # type: ignore[misc]
    def stays(self, blueprint: Blueprint) -> frozenset[str]:
        fail()
        return frozenset()


@dataclass(frozen=True)
class BadTrain(type(BASE.train)):  # type: ignore[misc]
    """At the top of a module, so that an order can name it."""

    def step(
        self,
        site: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        numbers: TrainingState,
        choice: Any,
    ) -> TrainingState:
        fail()
        return state


def bad_loss(output: Tensor, target: Tensor) -> Tensor:
    fail(len(output) != 2)
    return nn.functional.cross_entropy(output, target, reduction="none")


def bad_metric(output: Tensor, target: Tensor) -> Tensor:
    fail(len(output) != 2)
    return torch.zeros(len(output))


def bad_augment(x: Tensor, key: Tensor) -> Tensor:
    fail()
    return x


CASES: dict[str, tuple[Method, str]] = {
    "select": (replace(BASE, select=BadSelect()), "select=BadSelect(), in round 2"),
    "start": (replace(BASE, schedule=BadSchedule()), "schedule=BadSchedule("),
    "ready": (replace(BASE, schedule=BadSchedule(where="ready")), "schedule=BadSchedule("),
    "drop": (replace(BASE, schedule=BadSchedule(where="drop")), "schedule=BadSchedule("),
    "plan": (replace(BASE, plan=BadPlan()), "plan=BadPlan(), in round 2"),
    "choose": (
        replace(BASE, plan=WidthMenu(), choose=BadChoose()),
        "choose=BadChoose(), in round 1",
    ),
    "extract": (replace(BASE, extract=BadExtract()), "extract=BadExtract(), in round 1"),
    "train": (replace(BASE, train=BadTrain()), "train=BadTrain("),
    "norm": (replace(BASE, norm=BadNorm()), "norm=BadNorm()"),
    "uplink": (replace(BASE, uplink=BadCodec()), "uplink=BadCodec("),
    "downlink": (replace(BASE, downlink=BadCodec()), "downlink=BadCodec("),
    "aggregate": (replace(BASE, aggregate=BadAggregate()), "aggregate=BadAggregate("),
    "init": (replace(BASE, aggregate=BadAggregate(where="init")), "aggregate=BadAggregate("),
    "learn": (replace(BASE, aggregate=BadAggregate(where="learn")), "aggregate=BadAggregate("),
}


def failed(method: Method, problem: Task | None = None, engine: Engine | None = None) -> Oops:
    """The error that a run of two rounds ends with."""
    with pytest.raises(Oops) as caught:
        list(play(Experiment(problem or task(), method, engine=engine or Sequential(), rounds=2)))
    assert str(caught.value) == "my own words"
    (told,) = caught.value.__notes__  # one line, whatever it went through
    assert "\n" not in told
    assert told == note(caught.value)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_an_error_in_a_part_says_which_part_and_which_round(name: str) -> None:
    method, words = CASES[name]
    told = note(failed(method))
    assert told.startswith("Raised by ")
    assert words.replace(", in", " in") in told
    assert " in round " in told


@pytest.mark.parametrize("engine", [Sequential(), Threads(allow=("tests",)), Stacked()], ids=str)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": bad_loss}, "Raised by loss=bad_loss in round 1."),
        ({"augment": bad_augment}, "Raised by augment=bad_augment in round 1."),
        ({"metrics": {"mine": bad_metric}}, "Raised by metric mine=bad_metric in round 1."),
    ],
)
def test_so_does_one_in_a_function_of_the_task(engine: Engine, change: Any, words: str) -> None:
    assert note(failed(BASE, replace(task(), **change), engine)).startswith(words)


@pytest.mark.parametrize("engine", [Threads(allow=("tests",)), Stacked()], ids=str)
def test_it_survives_threads_and_stacks(engine: Engine) -> None:
    assert note(failed(replace(BASE, train=BadTrain()), engine=engine)).startswith(
        "Raised by train="
    )


def test_from_python_the_last_result_is_where_to_go_on() -> None:
    experiment = Experiment(task(), replace(BASE, select=BadSelect()), rounds=3)
    moments: list[RoundResult] = []
    with pytest.raises(Oops) as caught:
        moments.extend(play(experiment))  # keeps those before the error
    assert "The run so far is safe in the last result" in note(caught.value)
    assert "play(experiment, task, resume=result.state)" in note(caught.value)
    assert len(moments) == 1
    mended = replace(experiment, method=replace(BASE, select=Uniform(2)))
    *_, last = play(mended, resume=moments[-1].state)
    *_, whole = play(mended)
    assert small.identical(last.round.params, whole.round.params)


def test_after_resuming_a_part_keeps_its_error_too() -> None:
    """Only what our own code makes of a state is blamed on the state."""
    first = next(iter(play(Experiment(task(), BASE, rounds=1))))
    experiment = Experiment(task(), replace(BASE, select=BadSelect()), rounds=3)
    with pytest.raises(Oops):
        next(iter(play(experiment, resume=first.state)))
    unknown = replace(first.state, snapshot=replace(first.round.snapshot, states={}))
    with pytest.raises(StoreError, match=r"does not fit its run, whose first round .*KeyError"):
        next(iter(play(replace(experiment, method=BASE), resume=unknown)))


def test_before_the_first_round_there_is_nothing_to_save() -> None:
    method = replace(BASE, uplink=BadCodec())
    assert "No round was finished before it" in note(failed(method))


class Unsure(type(BASE.train)):  # type: ignore[misc]
    """Fails before the first round."""

    def misfit(self, task: Any) -> str:
        fail()
        return ""


class Greedy(Uniform):
    def excess(self, devices: Any) -> str:
        fail()
        return ""


def test_errors_before_the_first_round_say_so() -> None:
    for change, part in (
        ({"train": Unsure()}, "train=Unsure("),
        ({"select": Greedy(2)}, "select="),
    ):
        method = replace(BASE, **change)
        told = note(failed(method))
        assert told.startswith(f"Raised by {part}")
        assert told.endswith("before the first round.")


def test_what_fits_badly_is_said_with_a_text() -> None:
    class Odd(type(BASE.train)):  # type: ignore[misc]
        def misfit(self, task: Any) -> Any:
            return torch.ones(2)

    with pytest.raises(BadReturn, match=r"returned tensor.* from `misfit`; due is a text"):
        list(play(Experiment(task(), replace(BASE, train=Odd()), rounds=1)))


def test_ctrl_c_is_nobodys_fault() -> None:
    @dataclass(frozen=True)
    class Patient(Select):
        def __call__(self, view: View, state: State, key: Tensor) -> Ints:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        list(play(Experiment(task(), replace(BASE, select=Patient()), rounds=1)))
    assert not hasattr(caught.value, "__notes__")


def test_other_notes_stay_and_an_error_of_nobody_gets_none() -> None:
    error = Oops("x")
    error.add_note("mine")
    with pytest.raises(Oops), during("select", BadSelect(), round_index=4):
        raise error
    remedied(error, "Go on.")
    remedied(error, "Go on elsewhere.")
    assert error.__notes__ == ["mine", "Raised by select=BadSelect() in round 5. Go on elsewhere."]
    assert raised_inside(error)
    plain = Oops("y")
    remedied(plain, "Go on.")
    assert not note(plain)
    assert not raised_inside(plain)


def test_a_part_whose_repr_fails_is_named_by_its_class() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise ValueError

    with pytest.raises(Oops) as caught, during("select", Shy()):
        fail()
    assert note(caught.value) == "Raised by select=<Shy>."


# --- data sets --------------------------------------------------------------------------------


class Broken(Dataset[Any]):
    """Some file of it is missing."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no such picture")
        return torch.zeros(4), 0


class BrokenStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4), 0
        fail()


def broken() -> Dataset[Any]:
    return Broken()


def numbers() -> list[int]:
    return [1, 2, 3]


def unreachable() -> Dataset[Any]:
    raise ValueError("the server is down")


def net() -> nn.Module:
    return nn.Linear(4, 3)


def test_a_data_set_that_fails_says_at_which_item() -> None:
    with pytest.raises(ValueError, match=r"no such picture") as caught:
        Task.of(net(), Broken())
    assert str(caught.value) == "no such picture"
    words = "Raised by item 5 of the data set Broken while the task was built."
    assert note(caught.value) == words
    with pytest.raises(Oops) as streamed:
        Task.of(net(), BrokenStream())
    assert "item 1 of the data set BrokenStream" in note(streamed.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [(broken, "item 5 of the data set Broken"), (unreachable, "data = tests.test_tracebacks")],
)
def test_an_experiment_keeps_the_traceback_of_its_data(data: Any, words: str) -> None:
    own = Own(Factory.of(net), Factory.of(data))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the note is what matters
        build(Experiment(own, fedavg(), rounds=1))
    assert not isinstance(caught.value, AnyfleetError)
    assert words in note(caught.value)


def test_what_anyfleet_refuses_of_data_is_still_a_problem_of_the_file() -> None:
    own = Own(Factory.of(zoo.perceptron, features=4), Factory.of(numbers))
    with pytest.raises(ConfigError, match=r"task: "):
        build(Experiment(own, fedavg(), rounds=1))


# --- run folders ------------------------------------------------------------------------------


def recorded(folder: Path, experiment: Experiment, every: int | None) -> None:
    with Recording(folder, experiment, every=every) as recording:
        for moment in play(experiment):
            recording.append(moment)


def test_a_recording_says_where_the_run_is_safe(tmp_path: Path) -> None:
    experiment = Experiment(small_spec(), replace(BASE, select=BadSelect()), rounds=3)
    for name, every, words in (
        ("kept", None, f"(1 of 3 rounds): mend this, then anyfleet resume {tmp_path / 'kept'}"),
        ("bare", 0, "without a checkpoint to go on from: mend this, then run it again."),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(Oops) as caught:
            recorded(folder, experiment, every)
        assert note(caught.value).startswith("Raised by select=BadSelect() in round 2. ")
        assert note(caught.value).endswith(words)
        assert len(read_rounds(folder)) == 1


def small_spec() -> Any:
    from tests.helpers.runs import TASK

    return TASK


OWN_PART = """
from dataclasses import dataclass
from anyfleet.core.slots import Select
from anyfleet.parts.select import Uniform

@dataclass(frozen=True)
class Mine(Select):
    def __call__(self, view, state, key):
        {line}
        return Uniform(2)(view, state, key)
"""
RUN_FILE = """
rounds = 3
[allow]
packages = ["own_part"]
[task]
use = "Synthetic"
server = 20
data = { devices = 4, samples = 40 }
model = { use = "perceptron", features = 60, hidden = [8] }
[method]
use = "fedavg"
lr = 0.1
select = { use = "own_part:Mine" }
"""
PROCESS = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a run file, and no time for pictures."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("anyfleet.cli.run.draw", lambda *_, **__: None)
    yield tmp_path
    sys.modules.pop("own_part", None)


def written(line: str) -> None:
    """The user's module, with this line in it, as a new process would read it."""
    Path("own_part.py").write_text(OWN_PART.format(line=line))
    sys.modules.pop("own_part", None)
    importlib.invalidate_caches()
    shutil.rmtree("__pycache__", ignore_errors=True)


def command(*words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--allow", "own_part"])


def test_a_command_saves_the_run_shows_the_users_line_and_goes_on_when_mended(
    folder: Path,
) -> None:
    written("assert view.round_index < 2, 'a slip of mine'")
    words = ("run", "run.toml", "--out", "broken", "--allow", "own_part")
    first = subprocess.run(
        [sys.executable, "-m", "anyfleet.cli", *words],
        capture_output=True,
        text=True,
        env=PROCESS,
        check=False,
    )
    assert first.returncode == 1
    assert "assert view.round_index < 2, 'a slip of mine'" in first.stderr  # the user's own frame
    told = first.stderr.strip().splitlines()[-1]
    assert told == (
        "Raised by select=Mine() in round 3. The run so far is safe (2 of 3 rounds): mend this, "
        "then anyfleet resume broken --allow own_part"
    )
    written("pass")
    for more in ("resume broken", "run run.toml --out whole"):
        done = command(*more.split())
        assert done.exit_code == 0, done.output
    for name in ("rounds.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (folder / "broken" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_a_command_tells_of_a_wrong_result_without_a_traceback(folder: Path) -> None:
    written("return {0, 1}")
    told = command("run", "run.toml", "--out", "broken")
    assert told.exit_code == 1
    assert isinstance(told.exception, SystemExit)
    assert "Error: select=Mine() returned the set {0, 1} for an array in round 1" in told.output
    assert "(0 of 3 rounds): mend this, then anyfleet resume broken" in told.output


@pytest.mark.parametrize("error", ["FileExistsError('mine')", "BadName('mine')"])
def test_errors_of_a_part_are_never_taken_for_ours(folder: Path, error: str) -> None:
    written(f"from anyfleet.errors import BadName; raise {error}")
    told = command("run", "run.toml", "--out", "broken")
    assert type(told.exception).__name__ == error.partition("(")[0]
    assert note(told.exception).startswith("Raised by select=Mine() in round 1.")
