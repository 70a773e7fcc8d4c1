"""`anyfleet run`: a run file becomes a run folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from anyfleet import config
from anyfleet.analysis.summaries import best, taken_apart
from anyfleet.cli.closing import closing
from anyfleet.cli.details import apart
from anyfleet.cli.record import picture, prepare, record
from anyfleet.cli.screen import by_width, console, table, width_title
from anyfleet.cli.stopping import exit_code
from anyfleet.core.objectives import Task
from anyfleet.experiment import Experiment, State, build, from_source
from anyfleet.store import Origin, Recording, Terms, finished, read_ledger, read_rounds
from anyfleet.store.environment import FILE


@dataclass(frozen=True)
class Writing:
    """Where a run goes, with how many threads, and how often there is a checkpoint."""

    out: Path | None = None
    threads: int = 1
    every: int | None = None


def run_file(
    file: Path, overrides: Sequence[str], *, allow: Sequence[str], writing: Writing
) -> None:
    """Everything is checked and built before a folder is made."""
    screen = console()
    source = config.read(file, overrides, allow)
    experiment = from_source(source)
    task = build(experiment)
    folder = prepare(writing.out, file.stem, writing.threads)
    again = resumption(folder, source.allow)
    show(screen, f"Run folder: {folder} (should it stop: {again})")
    origin = Origin(task, file.resolve().parent)
    every = writing.every
    recording = Recording(folder, experiment, source.allow, origin=origin, every=every)
    perform(Run(experiment, task, recording, file.stem, allow=source.allow), screen)


def resumption(folder: Path, allow: Sequence[str]) -> str:
    """Return the command that goes on with a run, with the packages whose code it uses."""
    return f"anyfleet resume {folder}" + "".join(f" --allow {name}" for name in allow)


@contextmanager
def several(folder: Path, screen: Console, allow: Sequence[str] = ()) -> Iterator[None]:
    """Say at Ctrl-C where the runs of a comparison lie, and how to go on with one that is open."""
    try:
        yield
    except KeyboardInterrupt as stop:
        inner = sorted(mark.parent for mark in folder.rglob(FILE))
        show(screen, f"Stopped. Everything so far is in {folder}.")
        for each in inner:
            if not finished(each, Terms()):
                show(screen, f"To finish this run: {resumption(each, allow)}")
        show(screen, "The comparison itself cannot go on: for its tables, make it again.")
        raise typer.Exit(exit_code(stop)) from stop


@dataclass(frozen=True, eq=False)
class Run:
    """A run that is about to begin, or to go on from a state."""

    experiment: Experiment
    task: Task
    recording: Recording
    name: str
    state: State | None = None
    allow: tuple[str, ...] = ()  # packages whose code it uses


def perform(run: Run, screen: Console) -> None:
    """Plays a run into its folder, and tells what came out."""
    folder = run.recording.folder
    try:
        points = record(
            run.experiment,
            run.task,
            run.recording,
            screen=screen,
            name=run.name,
            state=run.state,
        )
    except KeyboardInterrupt as stop:
        done, planned = len(read_rounds(folder)), run.experiment.rounds
        show(screen, f"Stopped after {done} of {planned} steps. Everything so far is in {folder}.")
        show(screen, f"To go on: {resumption(folder, run.allow)}")
        raise typer.Exit(exit_code(stop)) from stop
    runs = {run.name: [points]}
    screen.print(table(runs, best(points), screen.width))
    narrow = by_width(runs, screen.width)
    if narrow is not None:
        show(screen, f"\n{width_title(runs)}")
        screen.print(narrow)
    details = taken_apart(points)
    if details:
        show(screen, "\nAccuracy at the end in %, of groups and devices on their own test data:")
        screen.print(apart(details, screen.width))
        screen.print()
    for remark in closing(run.experiment, run.task, points, read_ledger(folder)):
        show(screen, remark)
    picture(folder / "curves.png", runs, screen=screen)


def show(screen: Console, text: str) -> None:
    """A line that may be long, and is nothing but text."""
    screen.print(text, markup=False, soft_wrap=True)
