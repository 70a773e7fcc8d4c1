"""Resuming: the folder of a run is opened as it stood at its last good checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from anyfleet import config
from anyfleet.core.objectives import Task
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, State, assemble, from_source
from anyfleet.runtime import Simulated
from anyfleet.runtime.flower.fleet_state import FleetState
from anyfleet.runtime.simulated.execution import absent
from anyfleet.store import checkpoint, environment
from anyfleet.store.disk import EMPTY, Damaged, Lock, Log, refuse_links, write
from anyfleet.store.recording import Past
from anyfleet.store.run_folder import FILES, LOGS, describe, orders_of, read_rounds, rounds_of
from anyfleet.world import World


@dataclass(frozen=True)
class Terms:
    """How a run may be resumed: up to which round, with whose code, and whether identically."""

    rounds: int | None = None  # None: as many as the run was to have
    allow: tuple[str, ...] = ()
    not_identical: bool = False


@dataclass(frozen=True, eq=False)
class Reopened:
    """A run that can go on: `play(experiment, task, resume=past.state)`."""

    experiment: Experiment
    task: Task
    world: World
    past: Past
    every: int | None  # rounds between checkpoints, as recorded
    remarks: tuple[str, ...]  # for the person who resumes it


def finished(folder: str | Path, terms: Terms) -> bool:
    """Return whether a run ended with all of its rounds or at its score; change nothing."""
    folder = Path(folder)
    _refuse_links(folder)
    try:
        summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=_Summary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    done = summary.result.rounds if summary.ended == "finished" and summary.result else 0
    planned = terms.rounds or config.read(folder / "config.toml").data.get("rounds")
    return bool(done == planned) or (done > 0 and at_its_score(folder))


def at_its_score(folder: Path) -> bool:
    """Return whether the last round of a run reached the score at which the run ends."""
    stop_at, records = config.read(folder / "config.toml").data.get("stop_at"), read_rounds(folder)
    if not isinstance(stop_at, int | float) or not records:  # a table stands for None
        return False
    return records[-1].reaches(stop_at)


class _Result(msgspec.Struct):
    rounds: int


class _Summary(msgspec.Struct):
    ended: str
    result: _Result | None


def reopen(folder: str | Path, terms: Terms) -> Reopened:
    """Open the run in a folder, and cut its logs back to the last good checkpoint.

    Threads and precision become those that were recorded. Raise StoreError if anything else has
    changed since that would make other numbers, unless the terms allow it.
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
    """Raise StoreError for a folder whose files lie elsewhere, before anything is done.

    A stranger may have made it. The folder itself may be a link: the user named it.
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
    if gone := absent(experiment.device):
        raise StoreError(
            f"{folder} cannot be resumed here: device {gone} To go on with other numbers, change "
            f"`device` in {folder / 'config.toml'} and resume with --not-identical."
        )
    task, world = assemble(experiment)
    now = environment.observe(experiment, task)
    found = environment.differences(recorded.conditions, now)
    digest = environment.digest(source.data)
    if digest != recorded.config:
        found = ("config.toml: changed since the run began", *found)
    if found and not terms.not_identical:
        raise StoreError(_refusal(folder, found))
    last = _last(folder, task, world, source.allow)
    if last.progress.rounds > experiment.rounds:
        raise StoreError(
            f"{folder} already has {last.progress.rounds} rounds. Give --rounds at least as many."
        )
    if found and last.state and (experiment.engine, experiment.device) != ("auto", "auto"):
        # The configuration names another engine or device now, perhaps.
        last = last._replace(state=replace(last.state, execution=None))
    past = _cut_back(folder, lock, last)
    if found:
        changed = (*recorded.changes, environment.Change(last.progress.rounds, found))
        new = msgspec.structs.replace(recorded, config=digest, conditions=now, changes=changed)
        environment.record(folder, new)
    if terms.rounds is not None:
        write(folder / "config.toml", describe(experiment, source.allow).encode())
    differing = [f"Not identical from here on: {'; '.join(found)}."] if found else []
    remarks = (*last.remarks, *differing)
    return Reopened(experiment, task, world, past, recorded.checkpoint_every, remarks)


def _refusal(folder: Path, found: Sequence[str]) -> str:
    listed = "".join(f"\n  {each}" for each in found)
    return (
        f"{folder} cannot be resumed so that it equals the uninterrupted run:{listed}\n"
        "Restore that, or accept other numbers from here on: --not-identical."
    )


class _Last(NamedTuple):
    """The last good checkpoint, and remarks on newer ones."""

    progress: checkpoint.Progress
    state: State | None
    remarks: tuple[str, ...]


def _last(folder: Path, task: Task, world: World, allow: Sequence[str]) -> _Last:
    """Return the newest checkpoint that can be used, or the beginning if there is none."""
    remarks: list[str] = []
    for path in checkpoint.found(folder):
        try:
            progress = checkpoint.examine(path)
            _check_logs(folder, progress)
        except StoreError as error:
            remarks.append(f"{error} Going on from the checkpoint before it.")
            continue
        try:
            state = checkpoint.load(path, task, world, allow)
            _try_out(state, task, world)
            return _Last(progress, state, tuple(remarks))
        except Damaged as error:
            remarks.append(f"{path}: {error} Going on from the checkpoint before it.")
    if remarks:
        raise StoreError(
            "no checkpoint can be used:\n  " + "\n  ".join(remarks) + "\nTo begin again, remove "
            f"{folder / 'checkpoints'} and resume."
        )
    return _Last(
        checkpoint.Progress(), None, ("There is no checkpoint yet: the run begins again.",)
    )


def _try_out(state: State, task: Task, world: World) -> None:
    """Raise Damaged if a simulated fleet cannot go on from a state; keep nothing."""
    if isinstance(state.fleet, FleetState):
        return  # real devices decide for themselves
    try:
        Simulated(task, world).restore(state.fleet)
    except Exception as error:  # a state that somebody made by hand can fail in any way
        raise Damaged(f"its fleet cannot go on: {error!r}.") from error


def _check_logs(folder: Path, progress: checkpoint.Progress) -> None:
    for name, mark in progress.logs.items():
        if name not in LOGS:
            raise StoreError(f"{name} is not a log of a run.")
        if not Log(folder / name, mark).fits():
            raise StoreError(f"{folder / name} is damaged.")


def _cut_back(folder: Path, lock: Lock, last: _Last) -> Past:
    logs = {name: Log(folder / name, last.progress.logs.get(name, EMPTY)) for name in LOGS}
    records = rounds_of(logs["rounds.jsonl"].rows(), folder / "rounds.jsonl")
    orders_of(logs["ledger.jsonl"].rows(), folder / "ledger.jsonl")
    for log in logs.values():
        log.cut()
    return Past(lock, last.progress, records, last.state)
