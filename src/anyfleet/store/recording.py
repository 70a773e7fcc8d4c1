"""Recording: a run is written into its folder while it goes on, to be resumed after any end."""

import platform
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from anyfleet.stopping import stop_if_told, undisturbed
from anyfleet.store import checkpoint, environment
from anyfleet.store.disk import EMPTY, DiskError, Lock, Log, write
from anyfleet.store.run_folder import LOGS, describe
from anyfleet.store.serialisation import require_writable
from anyfleet.tracebacks import during, ordinal, quoted, remedied

TIME_SHARE = 0.05  # most of the time that checkpoints may take, if nobody says how often


@dataclass(frozen=True)
class Origin:
    """Where a run comes from: its task, and the folder of its run file."""

    task: Task | None = None
    home: Path | None = None


@dataclass(frozen=True)
class Past:
    """The past of a resumed run: its lock, and how it stood at its last good checkpoint."""

    lock: Lock
    progress: checkpoint.Progress
    records: tuple[RoundRecord, ...]
    state: State | None  # None: it begins again


UNKNOWN = Origin()


class Recording:
    """A run that is written into its folder, round by round. Use it in a `with`.

    However the block ends, by itself, by Ctrl-C or by an error, the folder has all rounds so far
    and the model after the last of them. After a kill, the run can be resumed from its last
    checkpoint. There is one after `every` so many rounds (0: never); without that number, as often
    as checkpoints take at most a twentieth of the time.
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
        self._marks = {name: log.mark for name, log in self._logs.items()}  # at the last round
        self._before, self._saved = progress.seconds, progress.rounds
        self._due_at = 0.0  # when the next checkpoint is due
        self.records: list[RoundRecord] = list(past.records) if past else []
        self._state = past.state if past else None
        self._aliases = origin.task.blueprint.aliases if origin.task else {}
        if past is None:
            try:
                self._head(describe(experiment, allow), origin)
            except BaseException:
                self._lock.release()
                raise

    def _head(self, text: str, origin: Origin) -> None:
        """Write what is run, and under which conditions."""
        if (self.folder / environment.FILE).exists():  # of another process
            raise StoreError(
                f"{self.folder} already has a run; choose another folder, or resume it."
            )
        write(self.folder / "config.toml", text.encode())
        # The code that the configuration names may be gone when the run is cited.
        papers = bibliography(papers_of(self._experiment.method))
        write(self.folder / "papers.bib", papers.encode())
        found = environment.Environment(
            environment.FORMAT,
            environment.digest(tomllib.loads(text)),
            str(origin.home or ""),
            environment.observe(self._experiment, origin.task),
            self._every,
        )
        # Written last: a folder that has it can be resumed.
        environment.record(self.folder, found)

    def append(self, result: RoundResult) -> None:
        """Write a round; when this returns, it survives the end of the process.

        Raise KeyboardInterrupt after that if the process was told to stop meanwhile. Raise
        BadReturn for a part whose state cannot be written; the run is then safe up to the round
        before.
        """
        if self._every != 0:
            self._check_states(result)
        with undisturbed():
            self._write_down(result)
            self._marks = {name: log.mark for name, log in self._logs.items()}
            self._state, self._aliases = result.state, result.aliases
            self.records.append(result.record)
            if self._due(result.record.round_index + 1):
                self._save(result.state)
        stop_if_told()

    def _check_states(self, result: RoundResult) -> None:
        """Raise BadReturn for a part whose state no checkpoint can hold."""
        for slot, state in result.round.snapshot.states.items():
            part, index = getattr(self._experiment.method, slot), result.round.index
            with during(slot, part, round_index=index):
                try:
                    require_writable({"states": {slot: state}}, checkpoint.SURROUNDINGS)
                except StoreError as error:
                    raise BadReturn(
                        f"{slot}={quoted(part)} returned a state in round {ordinal(index)} that "
                        f"cannot be kept: {error}"
                    ) from error

    def _write_down(self, result: RoundResult) -> None:
        """Write a round into all logs or none: the state before it knows no such lines."""
        try:
            self._logs["ledger.jsonl"].append(result.round.ledger.as_dicts())
            self._logs["rounds.jsonl"].append([result.record])
        except BaseException:
            for name, log in self._logs.items():
                log.go_back(self._marks[name])
            raise

    def _due(self, rounds: int) -> bool:
        if self._every is None:
            return time.monotonic() >= self._due_at
        return self._every > 0 and rounds % self._every == 0

    def _save(self, state: State) -> None:
        began = time.monotonic()
        for log in self._logs.values():
            log.force()
        rounds = state.record.round_index + 1
        progress = checkpoint.Progress(rounds, self._seconds(), self._marks)
        checkpoint.save(self.folder, state, progress)
        self._saved, now = rounds, time.monotonic()
        self._due_at = now + (now - began) / TIME_SHARE

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        ended = "finished" if kind is None else "failed"
        with self._released(), undisturbed(), self._explained():
            try:
                stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
                self._close("interrupted" if stopped else ended)
            except StoreError:
                if kind is None:  # otherwise the error that ended the run says more
                    raise
            if error is not None:
                remedied(error, self._remedy())
            if isinstance(error, DiskError):
                raise error  # again, because only now is known what is safe

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
            "execution": self._state.execution if self._state else None,
            "seed": self._experiment.seed,
            "wall_seconds": self._seconds(),
            "result": summarise(self.records) if self.records else None,
        }
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        write(self.folder / "summary.json", text + b"\n")
        behind = self._state is not None and self._state.record.round_index + 1 != self._saved
        if self._state is not None and behind and self._every != 0:
            self._save_last(self._state)

    def _save_last(self, state: State) -> None:
        """Save how the run ended; warn instead of failing if the run has all its rounds."""
        try:
            self._save(state)
        except DiskError:
            raise
        except StoreError as error:
            if not self._experiment.ends_after(state.record):
                raise
            told = f"The last checkpoint of {self.folder} cannot be written: {error}"
            then = "All results are there, but the run cannot be continued with more rounds."
            warnings.warn(f"{told} {then}", AnyfleetWarning, stacklevel=2)

    def _remedy(self) -> str:
        """Return which rounds are safe after an error, and how to go on."""
        saved, rounds = self._saved, self._experiment.rounds
        allowed = "".join(f" --allow {package}" for package in self._allow)
        if self._every == 0:
            return (
                f"{len(self.records)} of {rounds} rounds are in {self.folder}, without a "
                f"checkpoint to go on from: mend this, then run it again."
            )
        safe = f"The run so far is safe ({saved} of {rounds} rounds)"
        return f"{safe}: mend this, then anyfleet resume {self.folder}{allowed}"

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to an error of the disk which rounds are safe, and how to go on."""
        try:
            yield
        except DiskError as error:
            if self._every == 0 and not self._saved:
                again = f"anyfleet run {self.folder / 'config.toml'}"
                raise DiskError(f"{error}, then run it again: {again}") from error
            raise DiskError(
                f"{error}, then go on with: anyfleet resume {self.folder}\n"
                f"{self._saved} of {self._experiment.rounds} rounds are safe there."
            ) from error

    @contextmanager
    def _released(self) -> Iterator[None]:
        """Release the folder for other processes when the block ends."""
        try:
            yield
        finally:
            self._lock.release()
