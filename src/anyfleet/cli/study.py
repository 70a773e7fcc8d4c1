"""Studies on the command line: `compare`, `sweep` and `demo` begin one or go on with it."""

import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, get_args

import msgspec
import torch
import typer
from rich.console import Console

from anyfleet.analysis.comparison import Goal
from anyfleet.analysis.equal_budgets import Resource
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import Runs
from anyfleet.cli.remarks import over_seeds
from anyfleet.cli.report import need_metric, need_reference, report
from anyfleet.cli.run import RUNS, resumption
from anyfleet.cli.screen import console, errors, put_event, put_line, show, silent, study_progress
from anyfleet.errors import AnyfleetWarning, ConfigError, Problem, StoreError
from anyfleet.stopping import exit_code
from anyfleet.store import Terms, fresh
from anyfleet.store.disk import Lock
from anyfleet.study import (
    Cell,
    Means,
    PlannedRun,
    Study,
    assemble_all,
    conduct,
    processes,
    results,
    settle,
    standing,
    stop,
)
from anyfleet.study.events import Ended, Event, Noted
from anyfleet.study.playing import Built
from anyfleet.study.state_file import (
    claim,
    differences,
    grown,
    holds_study,
    in_use,
    occupied,
    read,
    record,
)
from anyfleet.study.workers import Crew, await_imports, hired
from anyfleet.world import World

_NUMBERS = re.compile(r"\d+")
_LOOKED_AT = 20  # folders of studies, for one that was left unfinished


@dataclass(frozen=True)
class Manner:
    """The manner in which a command carries out a study: where, in how many processes, how told."""

    out: Path | None = None
    jobs: int | None = None  # None: as many as there are cores for
    json: bool = False
    terms: Terms = field(default_factory=Terms)


@dataclass(frozen=True, eq=False)
class OpenStudy:
    """A study that this process alone may write, and where it is told."""

    folder: Path
    study: Study
    lock: Lock
    manner: Manner
    built: Mapping[PlannedRun, Built] = field(default_factory=dict)
    crew: Crew = field(default_factory=list)
    out: TextIO = field(default_factory=lambda: sys.stdout)

    @property
    def screen(self) -> Console:
        """The screen for tables; it shows nothing where lines of JSON are wanted."""
        return silent() if self.manner.json else console()


def jobs_of(text: str) -> int | None:
    """Return how many processes an option asks for; None for "auto"."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        told = f'must be "auto" or a number of processes from 1 on, got {text!r}.'
        raise typer.BadParameter(told, param_hint="--jobs")
    return int(text)


def resources(words: Sequence[str]) -> tuple[Resource, ...]:
    """Return the resources of these names, each once; raise BadParameter for another name."""
    known: dict[str, Resource] = {name: name for name in get_args(Resource)}
    unknown = [repr(word) for word in words if word not in known]
    if unknown:
        raise typer.BadParameter(
            f"may be {', '.join(known)}; got {', '.join(unknown)}.", param_hint="--equal"
        )
    return tuple(dict.fromkeys(known[word] for word in words))


# --- opening ------------------------------------------------------------------------------------


@contextmanager
def opened(study: Study, manner: Manner) -> Iterator[OpenStudy]:
    """Begin a study in a new folder, or go on with it where its folder holds this very study.

    The study there may have fewer seeds: they are added. Without a folder, it goes on in one of
    those that were made so before, if that holds this study unfinished. Everything is checked
    before a folder is made. Raise StoreError if the folder holds another study, or if another
    process plays it.
    """
    torch.set_num_threads(study.threads)
    _need_budget(study.goal)
    need_reference(study.goal, list(study.cells))
    _need_width(study.cells, study.goal)
    if manner.out is None and (begun := _unfinished(study, manner.terms)) is not None:
        told = f"Going on with {begun}, which holds this study unfinished; --out NEW begins anew."
        show(errors(), told)
        manner = replace(manner, out=begun)
    if manner.out is not None and holds_study(manner.out):
        with reopened(manner, study.goal, asked=study) as found:
            yield found
        return
    if manner.out is not None and occupied(manner.out):
        claim(manner.out)  # which says why not
    with hired(_crew_size(study, manner)) as crew:
        assembled = assemble_all(study)
        await_imports(crew)
        settled = settle(study, assembled)
        _need_metric(settled.study)
        _refuse_jobs(settled.study, manner)
        folder = fresh(RUNS, study.kind) if manner.out is None else manner.out
        lock = claim(folder)
        try:
            record(folder, settled.study)
            yield OpenStudy(folder, settled.study, lock, manner, settled.built, crew)
        finally:
            lock.release()


def _unfinished(study: Study, terms: Terms) -> Path | None:
    """Return the newest folder of `fresh` that holds this very study and has runs left, or None.

    A folder that another process writes into, or that cannot be read, is none.
    """
    folders = [folder for folder in RUNS.glob(f"{study.kind}*") if holds_study(folder)]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[:_LOOKED_AT]:
        with suppress(StoreError, ConfigError, OSError):
            there = read(folder, terms.allow)
            same = there.kind == study.kind and not any(differences(there, study))
            same = same and not any(differences(study, there))  # nor other seeds
            if same and not in_use(folder) and standing(folder, there).left:
                return folder
    return None


def _crew_size(study: Study, manner: Manner) -> int:
    """Return how many processes a new study will use; 0 where it may have none but this one."""
    jobs = processes(study.threads) if manner.jobs is None else manner.jobs
    count = min(jobs, len(study.runs()))
    return count if count > 1 and not torch.cuda.is_available() else 0


@contextmanager
def reopened(
    manner: Manner, goal: Goal | None = None, *, asked: Study | None = None
) -> Iterator[OpenStudy]:
    """Go on with the study in the folder of the manner; a goal replaces the one that it has.

    If a study is asked for, the one there may have fewer seeds, which are added. Raise StoreError
    if its runs differ otherwise.
    """
    folder = manner.out
    assert folder is not None  # the caller knows which study
    lock = Lock(folder)
    try:
        there = study = read(folder, manner.terms.allow)
        if asked is not None:
            study = grown(folder, there, asked)
        torch.set_num_threads(study.threads)
        _refuse_jobs(study, manner)
        if goal is not None and goal != study.goal:
            study = replace(study, goal=goal)
            _need_budget(goal)
            need_reference(goal, list(study.cells))
            _need_width(study.cells, goal)
            _need_metric(study)
        # When nothing can be refused any more.
        if study.goal != there.goal or study.runs() != there.runs():
            record(folder, study)
        yield OpenStudy(folder, study, lock, manner)
    finally:
        lock.release()


def _refuse_jobs(study: Study, manner: Manner) -> None:
    """Raise BadParameter for processes on an accelerator, which runs of equal shape share."""
    on_gpu = [name for name, cell in study.cells.items() if _on_gpu(cell)]
    if manner.jobs is not None and manner.jobs > 1 and len(on_gpu) == len(study.cells):
        told = "is for a CPU: on a GPU, runs of equal shape are played together in one process."
        raise typer.BadParameter(told, param_hint="--jobs")


def _on_gpu(cell: Cell) -> bool:
    return cell.experiment.device.startswith("cuda")


# --- playing and telling ------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What has become of a study for now: all that is finished, and who stopped the rest."""

    runs: Runs
    wrong: Mapping[str, Sequence[Sequence[str]]]  # warnings by name, one list for each seed
    planned: int
    stopped: KeyboardInterrupt | None = None

    @property
    def finished(self) -> int:
        """The number of runs that are finished."""
        return sum(map(len, self.runs.values()))

    @property
    def complete(self) -> bool:
        """True if all runs are finished."""
        return self.finished == self.planned


def play(opened: OpenStudy) -> Outcome:
    """Play what is left of a study, and show it on the standard error or as lines of JSON."""
    folder, study, manner = opened.folder, opened.study, opened.manner
    for line in (*study.executions, f"Folder: {folder}"):
        show(opened.screen, line)
    there = standing(folder, study)
    planned = len(there.finished) + len(there.left)
    screen = errors()
    if there.finished:
        played = f"{len(there.finished)} of {planned} runs are finished already"
        show(screen, f"{played}; {len(there.left)} to play.")
    jobs = processes(study.threads) if manner.jobs is None else manner.jobs
    events = conduct(folder, study, Means(jobs, manner.terms), opened.built, opened.crew)
    stopped: KeyboardInterrupt | None = None
    traces, noted = set[str](), set[str]()
    quiet = silent() if manner.json else screen
    try:
        with _unmixed(manner), study_progress(quiet, there.left, len(there.finished)) as tell:
            for event in events:
                if isinstance(event, Noted) and event.text in noted:
                    continue  # of another process, which built the same task
                if isinstance(event, Noted):
                    noted.add(event.text)
                _attend(event, traces)
                tell(event)
                if manner.json:
                    put_event(opened.out, event)
    except KeyboardInterrupt as why:
        show(screen, "Stopping: the runs under way are closed.")
        stop(events, why)
        stopped = why
    return Outcome(*results(folder, study), planned, stopped)


@contextmanager
def _unmixed(manner: Manner) -> Iterator[None]:
    """Keep what a user's part prints out of lines of JSON."""
    if not manner.json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def _attend(event: Event, traces: set[str]) -> None:
    """Print what a run notes, as a warning, and the traceback of an error, each once."""
    if isinstance(event, Noted):
        warnings.warn(event.text, AnyfleetWarning, stacklevel=2)
    elif isinstance(event, Ended) and event.trace:
        alike = _NUMBERS.sub("", event.trace)  # that of another seed says nothing new
        if alike not in traces:
            typer.echo(event.trace, err=True, nl=False)
        traces.add(alike)


def tell(
    opened: OpenStudy, outcome: Outcome, *, world: World | None = None, title: str = ""
) -> None:
    """Show and write what the finished runs of a study have come to."""
    screen, study = opened.screen, opened.study
    if not outcome.finished:
        show(screen, f"None of the {outcome.planned} runs is finished.")
        return
    show(screen, "")
    planned = None if outcome.complete else outcome.planned
    report(
        opened.folder, outcome.runs, study.goal, screen, planned=planned, world=world, title=title
    )
    for line in over_seeds(outcome.wrong):
        show(screen, line)


def conclude(
    opened: OpenStudy, outcome: Outcome, results: bytes | None = None, again: str = ""
) -> None:
    """Say how to go on if runs are left; exit with a code that says so, too.

    `results` is what the last line of JSON holds; None: what `tell` has written. `again` is the
    command that goes on, if it is not `resume`.
    """
    folder = opened.folder
    again = again or resumption(folder, opened.manner.terms.allow)
    if opened.manner.json:
        if results is None:
            results = (folder / "results.json").read_bytes() if outcome.finished else b"null"
        found = msgspec.Raw(msgspec.json.format(results, indent=-1))
        put_line(
            opened.out,
            "result",
            folder=str(folder),
            finished=outcome.finished,
            planned=outcome.planned,
            results=found,
        )
    if outcome.complete:
        return
    show(opened.screen, f"{outcome.finished} of {outcome.planned} runs are finished.")
    show(opened.screen, f"To go on: {again}")
    raise typer.Exit(exit_code(outcome.stopped) if outcome.stopped else 1) from outcome.stopped


def show_comparison(opened: OpenStudy) -> None:
    """Play what is left of a comparison, and show its tables."""
    outcome = play(opened)
    tell(opened, outcome)
    conclude(opened, outcome)


# --- is the goal one that the runs can have? ----------------------------------------------------


def _need_budget(goal: Goal) -> None:
    if goal.budget is None:
        return
    if len(goal.equal) != 1:
        named = f"got --equal {' --equal '.join(goal.equal)}" if goal.equal else "got no --equal"
        raise typer.BadParameter(
            f"is an amount of one resource: give one --equal with it; {named}.",
            param_hint="--budget",
        )
    if not 0 < goal.budget < math.inf:
        raise typer.BadParameter(
            f"must be a number above 0, got {goal.budget}.", param_hint="--budget"
        )


def _need_width(cells: Mapping[str, Cell], goal: Goal) -> None:
    missing = [
        Problem(f"{name}: widths", f"has no {goal.width:g}, which --width asks for; add it.")
        for name, cell in cells.items()
        if goal.width is not None and goal.width not in cell.experiment.widths
    ]
    if missing:
        raise ConfigError(missing)


def _need_metric(study: Study) -> None:
    """Raise BadParameter for a metric that the tasks lack, and for a target it cannot have."""
    goal = study.goal
    need_metric(goal, {name: cell.metrics for name, cell in study.cells.items()})
    metrics = {name: Metric(goal.metric or cell.metrics[0]) for name, cell in study.cells.items()}
    _need_target(metrics, goal)


def _need_target(metrics: Mapping[str, Metric], goal: Goal) -> None:
    """Raise BadParameter for a target that the metric of the files cannot have."""
    if goal.target is None:
        return
    if len(set(metrics.values())) > 1:
        told = ", ".join(f"{name} by {metric.name}" for name, metric in metrics.items())
        raise typer.BadParameter(
            f"is a value of one metric, but the files are measured by different ones: {told}. "
            "Compare them without a target, or apart.",
            param_hint="--target",
        )
    (metric,) = set(metrics.values())
    if math.isnan(goal.target) or (metric.share and not 0 <= goal.target <= 1):
        raise typer.BadParameter(
            f"must be a share from 0 to 1 ({metric.name}: 0.8 is 80 %), got {goal.target:g}."
            if metric.share
            else f"must be a number ({metric.name}), got {goal.target:g}.",
            param_hint="--target",
        )
