"""Writes a run into its folder while it goes on, so that it can go on after any end."""

import platform
import signal
import threading
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import safetensors.torch
import torch

import anyfleet
from anyfleet.analysis.summaries import summarise
from anyfleet.core.objectives import Task
from anyfleet.elastic.tracing.aliases import complete
from anyfleet.errors import AnyfleetWarning, BadReturn, StoreError
from anyfleet.experiment import Experiment, RoundRecord, RoundResult, State
from anyfleet.papers import bibliography, papers_of
from anyfleet.store import checkpoint, environment
from anyfleet.store.disk import EMPTY, DiskError, Lock, Log, force_folder, told, write
from anyfleet.store.encode import require_writable
from anyfleet.store.run_folder import describe
from anyfleet.tracebacks import during, ordinal, quoted, remedied

LOGS = ("ledger.jsonl", "rounds.jsonl")
# What else lies in a run folder, each written as a whole.
FILES = (
    "config.toml",
    "curves.png",
    "environment.json",
    "model.safetensors",
    "papers.bib",
    "summary.json",
)
SHARE = 0.05  # of the time, at most, goes into checkpoints where nobody says how often


def fresh(parent: str | Path, name: str) -> Path:
    """A new folder `name`, or `name-2`, `name-3`, …, the first that is not there."""
    parent, number = Path(parent), 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            with told(path):
                path.mkdir(parents=True)
                force_folder(path.parent)
        except FileExistsError:
            number += 1
        else:
            return path


def claim(path: str | Path) -> Path:
    """This very folder, made if need be; an error when something is in it."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already and not empty: name another, or remove it.")
    with told(path):
        path.mkdir(parents=True, exist_ok=True)
        force_folder(path.parent)
    return path


@dataclass(frozen=True)
class Origin:
    """Where a run comes from: its task, and the folder of its run file."""

    task: Task | None = None
    home: Path | None = None


@dataclass(frozen=True)
class Past:
    """What a resumed run has already: a lock, and how it stood at its last good checkpoint."""

    lock: Lock
    progress: checkpoint.Progress
    points: tuple[RoundRecord, ...]
    state: State | None  # None: it begins again


UNKNOWN = Origin()


class Recording:
    """Writes a run into its folder, step by step. Use it in a `with`.

    However the block ends, by itself, by Ctrl-C or by an error, all steps so far are there, and
    so is the model after the last of them. When the process is killed, the run can be resumed from
    its last checkpoint: `every` so many steps there is one (0: never), or without that number as
    often as they take at most a twentieth of the time.
    """

    def __init__(
        self,
        folder: str | Path,
        experiment: Experiment,
        allow: Sequence[str] = (),
        *,
        origin: Origin = UNKNOWN,
        every: int | None = None,
        past: Past | None = None,
    ) -> None:
        self.folder = folder = Path(folder)
        self._experiment, self._every = experiment, every
        self._allow = tuple(allow)
        self._lock = Lock(folder) if past is None else past.lock
        self._began = time.monotonic()
        progress = past.progress if past else checkpoint.Progress()
        self._logs = {name: Log(folder / name, progress.logs.get(name, EMPTY)) for name in LOGS}
        self._marks = {name: log.mark for name, log in self._logs.items()}  # those of the state
        self._before, self._saved = progress.seconds, progress.step
        self._free = 0.0  # when the time for another checkpoint has been earned
        self.points: list[RoundRecord] = list(past.points) if past else []
        self._state = past.state if past else None
        self._aliases = origin.task.blueprint.aliases if origin.task else {}
        if past is None:
            try:
                self._head(describe(experiment, allow), origin)
            except BaseException:
                self._lock.release()
                raise

    def _head(self, text: str, origin: Origin) -> None:
        """What was run, and under which conditions."""
        if (self.folder / environment.FILE).exists():  # another process was quicker
            raise StoreError(f"{self.folder} has a run already: name another folder, or resume it.")
        write(self.folder / "config.toml", text.encode())
        # The code that the configuration names may be elsewhere when the run is cited.
        papers = bibliography(papers_of(self._experiment.method))
        write(self.folder / "papers.bib", papers.encode())
        found = environment.Environment(
            environment.FORMAT,
            environment.digest(tomllib.loads(text)),
            str(origin.home or ""),
            environment.observe(self._experiment, origin.task),
            self._every,
        )
        # Last: a folder that has it can be resumed.
        environment.record(self.folder, found)

    def append(self, moment: RoundResult) -> None:
        """Take in a step; it survives this process when this returns.

        A step whose states cannot be written is refused where they come from: the run is safe up to
        the step before.
        """
        if self._every != 0:
            self._check_states(moment)
        with _undisturbed():
            self._write_down(moment)
            self._marks = {name: log.mark for name, log in self._logs.items()}
            self._state, self._aliases = moment.state, moment.aliases
            self.points.append(moment.record)
            if self._due(moment.record.round_index + 1):
                self._save(moment.state)

    def _check_states(self, moment: RoundResult) -> None:
        """Raise BadReturn for a policy whose state no checkpoint could hold."""
        for slot, state in moment.round.snapshot.states.items():
            part, index = getattr(self._experiment.method, slot), moment.round.index
            with during(slot, part, round_index=index):
                try:
                    require_writable({"states": {slot: state}}, checkpoint.SURROUNDINGS)
                except StoreError as error:
                    raise BadReturn(
                        f"{slot}={quoted(part)} returned a state in round {ordinal(index)} that "
                        f"cannot be kept: {error}"
                    ) from error

    def _write_down(self, moment: RoundResult) -> None:
        """In all logs or in none: the state before it, which is kept then, has no such lines."""
        try:
            self._logs["ledger.jsonl"].append(moment.round.ledger.as_dicts())
            self._logs["rounds.jsonl"].append([moment.record])
        except BaseException:
            for name, log in self._logs.items():
                log.go_back(self._marks[name])
            raise

    def _due(self, step: int) -> bool:
        if self._every is None:
            return time.monotonic() >= self._free
        return self._every > 0 and step % self._every == 0

    def _save(self, state: State) -> None:
        began = time.monotonic()
        for log in self._logs.values():
            log.force()
        step = state.record.round_index + 1
        progress = checkpoint.Progress(step, self._seconds(), self._marks)
        checkpoint.save(self.folder, state, progress)
        self._saved, now = step, time.monotonic()
        self._free = now + (now - began) / SHARE

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        ended = "finished" if kind is None else "failed"
        with self._released(), _undisturbed(), self._explained():
            try:
                stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
                self._close("interrupted" if stopped else ended)
            except StoreError:
                if kind is None:  # what broke the run tells more than what follows from it
                    raise
            if error is not None:
                remedied(error, self._remedy())
            if isinstance(error, DiskError):
                raise error  # only now is known what is safe

    def _close(self, ended: str) -> None:
        if self._state is not None:
            snapshot = self._state.snapshot
            tree = {**snapshot.params, **snapshot.buffers}
            named = complete(tree, self._aliases)
            plain = {name: value.detach().contiguous().clone() for name, value in named.items()}
            write(self.folder / "model.safetensors", safetensors.torch.save(plain))
        summary = {
            "ended": ended,
            "anyfleet": anyfleet.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "seed": self._experiment.seed,
            "wall_seconds": self._seconds(),
            "result": summarise(self.points) if self.points else None,
        }
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        write(self.folder / "summary.json", text + b"\n")
        behind = self._state is not None and self._state.record.round_index + 1 != self._saved
        if self._state is not None and behind and self._every != 0:
            self._save_last(self._state)

    def _save_last(self, state: State) -> None:
        """Save how the run ended; a run that has all its steps is worth having without that."""
        try:
            self._save(state)
        except DiskError:
            raise
        except StoreError as error:
            if state.record.round_index + 1 < self._experiment.rounds:
                raise
            told = f"The last checkpoint of {self.folder} cannot be written: {error}"
            lost = "All results are there, but the run cannot be continued with more rounds."
            warnings.warn(f"{told} {lost}", AnyfleetWarning, stacklevel=2)

    def _remedy(self) -> str:
        """Return what is safe after an error of the run, and how to go on."""
        saved, rounds = self._saved, self._experiment.rounds
        allowed = "".join(f" --allow {package}" for package in self._allow)
        if self._every == 0:
            return (
                f"{len(self.points)} of {rounds} rounds are in {self.folder}, without a checkpoint "
                f"to go on from: mend this, then run it again."
            )
        safe = f"The run so far is safe ({saved} of {rounds} rounds)"
        return f"{safe}: mend this, then anyfleet resume {self.folder}{allowed}"

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Says with an error of the disk what is safe, and how to go on."""
        try:
            yield
        except DiskError as error:
            if self._every == 0 and not self._saved:
                again = f"anyfleet run {self.folder / 'config.toml'}"
                raise DiskError(f"{error}, then run it again: {again}") from error
            raise DiskError(
                f"{error}, then go on with: anyfleet resume {self.folder}\n"
                f"{self._saved} of {self._experiment.rounds} steps are safe there."
            ) from error

    @contextmanager
    def _released(self) -> Iterator[None]:
        """Others may use the folder afterwards."""
        try:
            yield
        finally:
            self._lock.release()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds back Ctrl-C and SIGTERM until the block is done; only the main thread gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda *event: caught.append(event)) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0][0])
