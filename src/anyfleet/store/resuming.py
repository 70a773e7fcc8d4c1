"""Opens the folder of a run that did not end, as it stood at its last good checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from anyfleet import config
from anyfleet.core.objectives import Task
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, State, build, from_source, populate
from anyfleet.runtime import Simulated
from anyfleet.store import checkpoint, environment
from anyfleet.store.disk import EMPTY, Damaged, Lock, Log, refuse_links, write
from anyfleet.store.recording import FILES, LOGS, Past
from anyfleet.store.run_folder import describe, orders_of, rounds_of
from anyfleet.world import World


@dataclass(frozen=True)
class Terms:
    """How a run may be resumed: to which round, with whose code, and whether exactly."""

    rounds: int | None = None  # None: as many as it was to have
    allow: tuple[str, ...] = ()
    not_identical: bool = False


@dataclass(frozen=True, eq=False)
class Reopened:
    """A run that can go on: `play(experiment, task, resume=past.state)`."""

    experiment: Experiment
    task: Task
    past: Past
    every: int | None  # steps between checkpoints, as recorded
    remarks: tuple[str, ...]  # what whoever resumes it should know


def finished(folder: str | Path, terms: Terms) -> bool:
    """Whether a run ended with all of its steps; nothing is changed."""
    folder = Path(folder)
    _refuse_links(folder)
    try:
        summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=_Summary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    done = summary.result.steps if summary.ended == "finished" and summary.result else 0
    planned = terms.rounds or config.read(folder / "config.toml").data.get("rounds")
    return bool(done == planned)


class _Result(msgspec.Struct):
    steps: int


class _Summary(msgspec.Struct):
    ended: str
    result: _Result | None


def reopen(folder: str | Path, terms: Terms) -> Reopened:
    """The run in a folder. Its logs are cut back to what the checkpoint knows.

    Threads and precision become those that were recorded. Whatever else has changed since, and
    would make other numbers, is refused unless the terms allow it.
    """
    folder = Path(folder)
    _refuse_links(folder)
    recorded = environment.read(folder)
    if recorded.checkpoint_every == 0:
        raise StoreError(
            f"{folder} was run without checkpoints, so it cannot be resumed. Run it again: "
            f"anyfleet run {folder / 'config.toml'}"
        )
    lock = Lock(folder)
    try:
        return _reopened(folder, terms, recorded, lock)
    except BaseException:
        lock.release()
        raise


def _refuse_links(folder: Path) -> None:
    """Refuse a folder that would make us read or write somewhere else, before anything is done.

    A stranger may have made it. The folder itself may be a link: whoever resumes it named it.
    """
    parts = [f".{name}.part" for name in FILES]
    written = (*parts, *LOGS, "lock")
    refuse_links(folder, [*FILES, *written], written)
    checkpoint.refuse_linked(folder)


def _reopened(
    folder: Path, terms: Terms, recorded: environment.Environment, lock: Lock
) -> Reopened:
    changes = [] if terms.rounds is None else [f"rounds={terms.rounds}"]
    source = config.read(folder / "config.toml", changes, terms.allow)
    if recorded.home and Path(recorded.home).is_dir():
        source = replace(source, folder=Path(recorded.home))
    environment.adopt(recorded.conditions)
    experiment = from_source(source)
    task = build(experiment)
    now = environment.observe(experiment, task)
    found = environment.differences(recorded.conditions, now)
    digest = environment.digest(source.data)
    if digest != recorded.config:
        found = ("config.toml: changed since the run began", *found)
    if found and not terms.not_identical:
        raise StoreError(_refusal(folder, found))
    last = _last(folder, experiment, task, source.allow)
    if last.progress.step > experiment.rounds:
        raise StoreError(f"{folder} has {last.progress.step} steps already: --rounds is too low.")
    past = _cut_back(folder, lock, last)
    if found:
        changed = (*recorded.changes, environment.Change(last.progress.step, found))
        new = msgspec.structs.replace(recorded, config=digest, conditions=now, changes=changed)
        environment.record(folder, new)
    if terms.rounds is not None:
        write(folder / "config.toml", describe(experiment, source.allow).encode())
    differing = [f"Not identical from here on: {'; '.join(found)}."] if found else []
    remarks = (*last.remarks, *differing)
    return Reopened(experiment, task, past, recorded.checkpoint_every, remarks)


def _refusal(folder: Path, found: Sequence[str]) -> str:
    listed = "".join(f"\n  {each}" for each in found)
    return (
        f"{folder} cannot be resumed so that it equals the uninterrupted run:{listed}\n"
        "Restore that, or accept other numbers from here on with --not-identical."
    )


class _Last(NamedTuple):
    """A checkpoint, and what is wrong with newer ones."""

    progress: checkpoint.Progress
    state: State | None
    remarks: tuple[str, ...]


def _last(folder: Path, experiment: Experiment, task: Task, allow: Sequence[str]) -> _Last:
    """The newest checkpoint that is whole, or the beginning where there is none yet."""
    remarks: list[str] = []
    for path in checkpoint.found(folder):
        try:
            progress = checkpoint.examine(path)
            _check_logs(folder, progress)
        except StoreError as error:
            remarks.append(f"{error} Going on from the checkpoint before it.")
            continue
        world = populate(experiment, task)
        try:
            state = checkpoint.load(path, task, world, allow)
            _try_out(state, experiment, task, world)
            return _Last(progress, state, tuple(remarks))
        except Damaged as error:
            remarks.append(f"{path}: {error} Going on from the checkpoint before it.")
    if remarks:
        raise StoreError(
            "no checkpoint can be used:\n  " + "\n  ".join(remarks) + "\nTo begin again, remove "
            f"{folder / 'checkpoints'} and resume."
        )
    return _Last(checkpoint.Progress(), None, ("There is no checkpoint yet: it begins again.",))


def _try_out(state: State, experiment: Experiment, task: Task, world: World) -> None:
    """Raise an error if a fleet cannot go on from a state; nothing is kept."""
    try:
        Simulated(task, world, experiment.seed).restore(state.fleet)
    except Exception as error:  # what was put together by hand can fail in any way
        raise Damaged(f"its fleet cannot go on: {error!r}.") from error


def _check_logs(folder: Path, progress: checkpoint.Progress) -> None:
    for name, mark in progress.logs.items():
        if name not in LOGS:
            raise StoreError(f"{name} is no log of a run.")
        if not Log(folder / name, mark).fits():
            raise StoreError(f"{folder / name} is damaged.")


def _cut_back(folder: Path, lock: Lock, last: _Last) -> Past:
    logs = {name: Log(folder / name, last.progress.logs.get(name, EMPTY)) for name in LOGS}
    points = rounds_of(logs["rounds.jsonl"].rows(), folder / "rounds.jsonl")
    orders_of(logs["ledger.jsonl"].rows(), folder / "ledger.jsonl")
    for log in logs.values():
        log.cut()
    return Past(lock, last.progress, points, last.state)
