"""Playing runs of a study in this process: each into its folder, from where it stands."""

import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anyfleet.core.objectives import Task
from anyfleet.errors import AnyfleetError, BadReturn, StoreError
from anyfleet.experiment import Experiment, Prepared, RoundResult, State, prepare
from anyfleet.store import (
    Origin,
    Recording,
    Terms,
    at_its_score,
    finished,
    read_ledger,
    read_rounds,
    reopen,
)
from anyfleet.store.disk import force_folder, refuse_links, told
from anyfleet.store.environment import FILE as ENVIRONMENT
from anyfleet.study import remarks
from anyfleet.study.events import Advanced, Begun, Ended, Event, Noted
from anyfleet.study.plan import PlannedRun, Study
from anyfleet.together import FailedRuns, play_together
from anyfleet.tracebacks import note, raised_inside
from anyfleet.world import World

Events = Generator[Event, None, None]
Built = tuple[Task, World]  # of an experiment
MOST_TOGETHER = 16  # runs of equal shape, on an accelerator


def complete(folder: Path, run: PlannedRun) -> bool:
    """Return whether a run has ended by itself and has been closed; change nothing.

    Raise StoreError for a run that somebody made longer.
    """
    home = folder / run.folder
    if not (home / ENVIRONMENT).is_file() or not finished(home, Terms()):
        return False
    rounds = len(read_rounds(home))
    if rounds > run.rounds:
        raise StoreError(
            f"{home} has {rounds} rounds, but the study compares runs of {run.rounds}. Move it "
            "elsewhere, and the study plays it again."
        )
    whole = rounds == run.rounds or at_its_score(home)
    return whole and remarks.kept(home) is not None


def stop(events: Events, why: KeyboardInterrupt) -> None:
    """Let the runs of a study that are under way end as Ctrl-C ends a run: everything is kept."""
    with suppress(KeyboardInterrupt, StopIteration):
        events.throw(why)


@dataclass(frozen=True, eq=False)
class _Opened:
    """A run whose folder is open."""

    run: PlannedRun
    prepared: Prepared
    recording: Recording
    state: State | None


class Player:
    """Whoever plays the runs of a study one after the other, and keeps the task between them.

    What is `built` already for some runs is used for them.
    """

    def __init__(
        self,
        folder: Path,
        study: Study,
        terms: Terms,
        built: Mapping[PlannedRun, Built] | None = None,
    ) -> None:
        self._folder, self._study, self._terms = folder, study, terms
        self._built = dict(built or {})
        self._tasks = {run.task: task for run, (task, _) in self._built.items()}

    def play(self, runs: Sequence[PlannedRun]) -> Events:
        """Play runs together; yield what happens. An error of theirs ends them, and is told."""
        ended: set[PlannedRun] = set()
        try:
            yield from self._play(runs, ended)
        except Exception as error:  # noqa: BLE001 - a user's part may fail in any way: others go on
            failed = [run for run in runs if run not in ended]
            yield from (Ended(run, "failed", *_told(error)) for run in failed)

    def _play(self, runs: Sequence[PlannedRun], ended: set[PlannedRun]) -> Events:
        opened: list[_Opened] = []
        errors: dict[int, Exception] = {}  # of single runs, by number
        with ExitStack() as stack:
            for run in runs:
                try:
                    each, told = self._open(run)
                except Exception as error:  # the others can be played all the same
                    if len(runs) == 1:
                        raise
                    ended.add(run)
                    yield Ended(run, "failed", *_told(error))
                    continue
                stack.push(partial(_closed, each.recording, errors, len(opened)))
                opened.append(each)
                yield from (Noted(f"{run}: {text}") for text in told)
                yield Begun(run, len(each.recording.records))
            last = [time.monotonic()] * len(opened)  # result of each, or its beginning
            results = play_together(
                [each.prepared for each in opened], [each.state for each in opened]
            )
            try:
                for number, result in results:
                    opened[number].recording.append(result)
                    before, last[number] = last[number], time.monotonic()
                    yield _advanced(opened[number].run, result, last[number] - before)
            except FailedRuns as failed:
                errors.update(failed.errors)
        for number, each in enumerate(opened):
            try:
                if number not in errors:
                    self._close(each)
            except Exception as error:  # noqa: BLE001 - a user's loss may fail in any way
                errors[number] = error
            ended.add(each.run)
            if number in errors:
                yield Ended(each.run, "failed", *_told(errors[number]))
            else:
                yield Ended(each.run, "finished")

    def _open(self, run: PlannedRun) -> tuple[_Opened, tuple[str, ...]]:
        """Open the folder of a run, new or as it stands, with remarks."""
        folder, cell = self._folder / run.folder, self._study.cells[run.name]
        if (folder / ENVIRONMENT).is_file():
            return self._reopen(run, folder)
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(self._folder, [str(run.folder.parent), str(run.folder)])
            force_folder(folder.parent)
        prepared = self._prepared(run, cell.of(run.seed))
        origin = Origin(prepared.task, cell.home)
        recording = Recording(folder, prepared.experiment, cell.allow, origin=origin)
        return _Opened(run, prepared, recording, None), ()

    def _reopen(self, run: PlannedRun, folder: Path) -> tuple[_Opened, tuple[str, ...]]:
        found = reopen(folder, self._terms)
        try:
            state = found.past.state
            prepared = prepare(found.experiment, found.task, world=found.world, resume=state)
        except BaseException:
            found.past.lock.release()
            raise
        recording = Recording(
            folder,
            found.experiment,
            self._terms.allow,
            origin=Origin(found.task),
            past=found.past,
            every=found.every,
        )
        return _Opened(run, prepared, recording, state), found.remarks

    def _prepared(self, run: PlannedRun, experiment: Experiment) -> Prepared:
        """Return a run ready to begin, with the task of the run before it if that is the same.

        Other tasks are forgotten: they may be large.
        """
        _, world = self._built.pop(run, (None, None))
        prepared = prepare(experiment, self._tasks.get(run.task), world=world)
        if run.task not in self._tasks:
            self._tasks, self._built = {run.task: prepared.task}, {}
        return prepared

    def _close(self, each: _Opened) -> None:
        """Write down what went wrong in a run that has ended by itself."""
        folder, prepared = each.recording.folder, each.prepared
        records, ledger = read_rounds(folder), read_ledger(folder)
        wrong = remarks.warnings(prepared.experiment, prepared.task, records, ledger)
        remarks.keep(folder, wrong)


def _closed(
    recording: Recording,
    errors: Mapping[int, Exception],
    number: int,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: Any,
) -> None:
    """Close the folder of a run that ended by its own error, by that of all, or by itself."""
    own = errors.get(number, error)
    recording.__exit__(type(own) if own is not None else kind, own, trace)


def _advanced(run: PlannedRun, result: RoundResult, seconds: float) -> Advanced:
    record = result.record
    return Advanced(run, record.round_index + 1, record.metric, record.score, record.time, seconds)


def _told(error: Exception) -> tuple[str, str]:
    """Return an error in a line or two, and its traceback unless Anyfleet raised it on purpose."""
    expected = isinstance(error, AnyfleetError) and (
        isinstance(error, BadReturn) or not raised_inside(error)
    )
    under = note(error)
    text = f"{error}" if expected else f"{type(error).__name__}: {error}"
    lines = "\n".join(filter(None, (text, under)))
    if expected:
        return lines, ""
    notes = getattr(error, "__notes__", [])
    error.__notes__ = [each for each in notes if each != under]
    return lines, "".join(traceback.format_exception(error))


# --- which runs can be played together ------------------------------------------------------------


def grouped(study: Study, runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Return runs in groups of equal shape: they differ only in seeds and in numbers of the method.

    They may stand at different rounds: each goes on from its own.
    """
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(shape(study.cells[run.name].data()), []).append(run)
    return [
        group[first : first + MOST_TOGETHER]
        for group in groups.values()
        for first in range(0, len(group), MOST_TOGETHER)
    ]


def shape(data: Mapping[str, Any]) -> str:
    """Return a text that is the same for experiments of equal shape."""
    rest = {key: value for key, value in data.items() if key not in ("seed", "method")}
    return repr((rest, _without_numbers(data["method"])))


def _without_numbers(value: Any) -> Any:
    """Return plain data without its numbers; those in lists stay: widths decide shapes.

    Numbers that keep runs apart all the same, such as the size of a batch, are seen by whoever
    trains them.
    """
    if isinstance(value, Mapping):
        return {key: _without_numbers(item) for key, item in value.items()}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number" if number else value
