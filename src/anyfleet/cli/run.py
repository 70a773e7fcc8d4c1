"""`anyfleet run` and `anyfleet resume`: experiments on the screen and on disk at once."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer
from rich.console import Console

from anyfleet import config
from anyfleet.analysis.comparison import Axis, Goal, compare
from anyfleet.analysis.equal_budgets import Resource
from anyfleet.analysis.plots import NoPictures, NothingToDraw, draw
from anyfleet.analysis.summaries import Runs, taken_apart
from anyfleet.cli.remarks import remarks
from anyfleet.cli.screen import console, progress, show
from anyfleet.cli.stopping import exit_code
from anyfleet.cli.tables import apart, drawn, ends, width_title, widths
from anyfleet.core.objectives import Task
from anyfleet.errors import StoreError
from anyfleet.experiment import (
    Experiment,
    Prepared,
    RoundRecord,
    State,
    from_source,
    prepare,
    prospect,
)
from anyfleet.runtime.simulated.engine_choice import choose
from anyfleet.runtime.simulated.execution import execution_of
from anyfleet.store import (
    Origin,
    Recording,
    Terms,
    claim,
    finished,
    fresh,
    read_ledger,
    read_rounds,
    reopen,
)
from anyfleet.store.environment import FILE
from anyfleet.world import World

RUNS = Path("runs")
Built = tuple[Task, World]  # of an experiment


@dataclass(frozen=True)
class Means:
    """The means by which commands carry runs out: threads of torch, its device, and the engine."""

    threads: int = 1
    device: str | None = None  # None: as the run file says
    engine: str | None = None

    def overrides(self, others: Sequence[str] = ()) -> list[str]:
        """Return what changes a run file accordingly, and `others`, after setting torch's threads.

        The others come last, so that they may have keys of the engine. Raise BadParameter if they
        name the device or the engine, too.
        """
        torch.set_num_threads(self.threads)  # first, since they decide which engine is the fastest
        keys = [word.partition("=")[0].strip() for word in others]
        changes = []
        for name, value in (("device", self.device), ("engine", self.engine)):
            if value is None:
                continue
            for key in keys:
                if key in (name, f"{name}.use"):
                    told = f"{key}=… names it, too; keep one of them."
                    raise typer.BadParameter(told, param_hint=f"--{name}")
            table = name == "engine" and value != "auto"
            changes.append(f'{name}={{ use = "{value}" }}' if table else f'{name}="{value}"')
        return [*changes, *others]


def folder_for(out: Path | None, name: str) -> Path:
    """Make the folder to write into."""
    return fresh(RUNS, name) if out is None else claim(out)


def subfolder(folder: Path, name: str) -> Path:
    """Make the folder of one run among several."""
    return claim(folder / name.lower())


def all_prepared(
    named: Iterable[tuple[str, Experiment]], built: Mapping[str, Built]
) -> Iterator[tuple[str, Prepared]]:
    """Yield each experiment ready to begin; neighbours with the same task share it.

    What is `built` already is for the first experiment of that name.
    """
    last: Prepared | None = None
    left = dict(built)
    for name, experiment in named:
        task, world = left.pop(name, (None, None))
        if last and (last.experiment.task, last.experiment.seed) == (
            experiment.task,
            experiment.seed,
        ):
            task = last.task
        last = prepare(experiment, task, world=world)
        yield name, last


def one_engine(
    named: Mapping[str, Experiment], built: Mapping[str, Built], screen: Console
) -> dict[str, Experiment]:
    """Return experiments that are compared, all with the same engine unless they name one.

    Choose it for those that are `built`, and show how these are carried out: in one line if they
    all are so, else one by one.
    """
    prospects = [
        prospect(named[name], *each) for name, each in built.items() if named[name].engine == "auto"
    ]
    chosen, why = choose(prospects) if prospects else (None, "")
    told: dict[str, str] = {}
    found: dict[str, Experiment] = {}
    for name, experiment in named.items():
        engine, reason = experiment.engine, ""
        if engine == "auto":
            assert chosen is not None  # it is built
            engine, reason = chosen, why
        found[name] = replace(experiment, engine=engine)
        if name in built:
            told[name] = str(execution_of(built[name][0], engine, reason))
    if len(set(told.values())) == 1:
        told = {"All": next(iter(told.values()))}
    for name, text in told.items():
        show(screen, f"{name}: {text}")
    return found


def record(
    prepared: Prepared,
    recording: Recording,
    *,
    screen: Console,
    name: str,
    state: State | None = None,
) -> tuple[RoundRecord, ...]:
    """Play an experiment into a folder, from its beginning or from a state."""
    done = state.record.round_index + 1 if state else 0
    with progress(screen, name, prepared.experiment.rounds, done) as shown, recording:
        for result in prepared.play(state):
            recording.append(result)
            shown(result.record)
    return tuple(recording.records)


def picture(
    file: Path,
    runs: Runs,
    *,
    screen: Console,
    world: World | None = None,
    title: str = "",
    equal: Mapping[Resource, float] | None = None,
    over: Sequence[Axis] = (),
) -> None:
    """Draw runs; if that is impossible, say why: a run is worth having without a picture."""
    try:
        draw(file, runs, world=world, title=title, equal=equal, over=over)
    except (NoPictures, NothingToDraw, StoreError) as missing:
        screen.print(f"({missing})", markup=False)
    else:
        screen.print(f"Picture: {file}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Writing:
    """Where a run is written, and how often it has a checkpoint."""

    out: Path | None = None
    every: int | None = None


def run_file(
    file: Path, overrides: Sequence[str], *, allow: Sequence[str], means: Means, writing: Writing
) -> None:
    """Run a run file; everything is checked and built before a folder is made."""
    screen = console()
    source = config.read(file, means.overrides(overrides), allow)
    prepared = prepare(from_source(source))
    folder = folder_for(writing.out, file.stem)
    again = resumption(folder, source.allow)
    show(screen, f"{file.stem}: {prepared.execution}")
    show(screen, f"Run folder: {folder} (if it stops: {again})")
    origin = Origin(prepared.task, file.resolve().parent)
    every = writing.every
    recording = Recording(folder, prepared.experiment, source.allow, origin=origin, every=every)
    perform(Run(prepared, recording, file.stem, allow=source.allow), screen)


def resumption(folder: Path, allow: Sequence[str]) -> str:
    """Return the command that resumes a run, with the packages whose code it uses."""
    return f"anyfleet resume {folder}" + "".join(f" --allow {name}" for name in allow)


@contextmanager
def several(folder: Path, screen: Console, allow: Sequence[str] = ()) -> Iterator[None]:
    """Say at Ctrl-C where the runs of a comparison are, and how to finish one that is open."""
    try:
        yield
    except KeyboardInterrupt as stop:
        inner = sorted(mark.parent for mark in folder.rglob(FILE))
        show(screen, f"Stopped. Everything so far is in {folder}.")
        for each in inner:
            if not finished(each, Terms()):
                show(screen, f"To finish this run: {resumption(each, allow)}")
        show(screen, "The comparison itself cannot be resumed: for its tables, run it again.")
        raise typer.Exit(exit_code(stop)) from stop


@dataclass(frozen=True, eq=False)
class Run:
    """A run that is about to begin, or to be resumed from a state."""

    prepared: Prepared
    recording: Recording
    name: str
    state: State | None = None
    allow: tuple[str, ...] = ()  # packages whose code it uses


def perform(run: Run, screen: Console) -> None:
    """Play a run into its folder, and show what came out."""
    folder, experiment = run.recording.folder, run.prepared.experiment
    try:
        records = record(run.prepared, run.recording, screen=screen, name=run.name, state=run.state)
    except KeyboardInterrupt as stop:
        done, planned = len(read_rounds(folder)), experiment.rounds
        show(screen, f"Stopped after {done} of {planned} rounds. Everything so far is in {folder}.")
        show(screen, f"To go on: {resumption(folder, run.allow)}")
        raise typer.Exit(exit_code(stop)) from stop
    runs = {run.name: {experiment.seed: records}}
    found = compare(runs, Goal(target=math.nan))  # a single run has no target
    screen.print(drawn(ends(found), screen.width))
    narrow = widths(found)
    if narrow is not None:
        show(screen, f"\n{width_title(found)}")
        screen.print(drawn(narrow, screen.width))
    details = taken_apart(records)
    if details:
        show(screen, "\nAccuracy at the end in %, of groups and devices on their own test data:")
        screen.print(apart(details, screen.width))
        screen.print()
    for remark in remarks(experiment, run.prepared.task, records, read_ledger(folder)):
        show(screen, remark)
    picture(folder / "curves.png", runs, screen=screen)


def resume_folder(folder: Path, terms: Terms, *, every: int | None) -> None:
    """Resume a run from its last good checkpoint; do nothing if it has all of its rounds."""
    screen = console()
    if finished(folder, terms):
        show(screen, f"{folder} has all of its rounds. For more, say how many: --rounds N")
        return
    run = reopen(folder, terms)
    for remark in run.remarks:
        show(screen, remark)
    prepared = prepare(run.experiment, run.task, world=run.world, resume=run.past.state)
    name = folder.resolve().name
    show(screen, f"{name}: {prepared.execution}")
    done, rounds = run.past.progress.rounds, run.experiment.rounds
    show(screen, f"Run folder: {folder} (goes on after {done} of {rounds} rounds)")
    every = run.every if every is None else every
    recording = Recording(
        folder,
        run.experiment,
        terms.allow,
        origin=Origin(run.task),
        past=run.past,
        every=every,
    )
    perform(Run(prepared, recording, name, run.past.state, terms.allow), screen)
