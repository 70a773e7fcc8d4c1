"""`anyfleet run` and `anyfleet resume`: experiments on the screen and on disk at once."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import typer
from rich.console import Console

from anyfleet import config
from anyfleet.analysis.comparison import Axis, Goal, compare
from anyfleet.analysis.equal_budgets import Resource
from anyfleet.analysis.plots import NoPictures, NothingToDraw, draw
from anyfleet.analysis.summaries import Runs, summarise, taken_apart
from anyfleet.cli.remarks import remarks
from anyfleet.cli.screen import (
    SIMULATED,
    console,
    errors,
    progress,
    put_event,
    put_line,
    show,
    silent,
)
from anyfleet.cli.tables import apart, drawn, ends, width_title, widths
from anyfleet.errors import StoreError
from anyfleet.experiment import Prepared, RoundRecord, State, from_source, prepare
from anyfleet.stopping import exit_code
from anyfleet.store import (
    Origin,
    Recording,
    Terms,
    at_its_score,
    claim,
    finished,
    fresh,
    read_ledger,
    read_rounds,
    reopen,
)
from anyfleet.study.events import Advanced, Begun, Ended, Noted
from anyfleet.study.plan import PlannedRun
from anyfleet.world import World

RUNS = Path("runs")


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


def record(run: "Run") -> tuple[RoundRecord, ...]:
    """Play a run into its folder, from its beginning or from a state; show its progress."""
    prepared, recording, state = run.prepared, run.recording, run.state
    done, rounds = state.record.round_index + 1 if state else 0, prepared.experiment.rounds
    with progress(errors(), run.name, rounds, done, run.clock) as shown, recording:
        for result in prepared.play(state):
            recording.append(result)
            shown(result.record)
    return tuple(recording.records)


def record_as_json(run: "Run", out: TextIO) -> None:
    """Play a run into its folder; write lines of JSON as a study of this single run does."""
    folder, experiment = run.recording.folder, run.prepared.experiment
    planned = PlannedRun(run.name, experiment.seed, experiment.rounds, folder)
    put_event(out, Begun(planned, len(run.recording.records)), folder=str(folder))
    last = time.monotonic()
    try:
        with redirect_stdout(sys.stderr), run.recording:
            for result in run.prepared.play(run.state):
                run.recording.append(result)
                before, last = last, time.monotonic()
                told = result.record
                scored = (told.metric, told.score, told.time)
                put_event(out, Advanced(planned, told.round_index + 1, *scored, last - before))
    except KeyboardInterrupt as stop:
        put_event(out, Ended(planned, "stopped", f"to go on: {resumption(folder, run.allow)}"))
        put_result(out, folder, None)
        raise typer.Exit(exit_code(stop)) from stop
    except Exception as error:
        put_event(out, Ended(planned, "failed", f"{type(error).__name__}: {error}"))
        put_result(out, folder, None)
        raise
    put_event(out, Ended(planned, "finished"))
    put_result(out, folder, run.recording.records)


def put_result(out: TextIO, folder: Path, records: Sequence[RoundRecord] | None) -> None:
    """Write the last line of JSON of a single run; without records it is not finished."""
    results = None if records is None else summarise(records)
    finished = 0 if records is None else 1
    put_line(out, "result", folder=str(folder), finished=finished, planned=1, results=results)


def picture(
    file: Path,
    runs: Runs,
    *,
    screen: Console,
    world: World | None = None,
    title: str = "",
    equal: Mapping[Resource, float] | None = None,
    over: Sequence[Axis] = (),
    clock: str = SIMULATED,
) -> None:
    """Draw runs; if that is impossible, say why: a run is worth having without a picture."""
    try:
        draw(file, runs, world=world, title=title, equal=equal, over=over, clock=clock)
    except (NoPictures, NothingToDraw, StoreError) as missing:
        screen.print(f"({missing})", markup=False)
    else:
        screen.print(f"Picture: {file}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Writing:
    """Where a run is written, how often it has a checkpoint, and whether it is told as JSON."""

    out: Path | None = None
    every: int | None = None
    json: bool = False


def run_file(
    file: Path, overrides: Sequence[str], *, allow: Sequence[str], means: Means, writing: Writing
) -> None:
    """Run a run file; everything is checked and built before a folder is made."""
    screen = silent() if writing.json else console()
    source = config.read(file, means.overrides(overrides), allow)
    prepared = prepare(from_source(source))
    folder = folder_for(writing.out, file.stem)
    again = resumption(folder, source.allow)
    show(screen, f"{file.stem}: {prepared.execution}")
    show(screen, f"Run folder: {folder} (if it stops: {again})")
    origin = Origin(prepared.task, file.resolve().parent)
    every = writing.every
    recording = Recording(folder, prepared.experiment, source.allow, origin=origin, every=every)
    run = Run(prepared, recording, file.stem, allow=source.allow)
    if writing.json:
        record_as_json(run, sys.stdout)
    else:
        perform(run, screen)


def why_finished(folder: Path) -> str:
    """Return why a run in a folder does not go on."""
    if at_its_score(folder):
        return f"{folder} has reached the score at which it ends (stop_at in its config.toml)."
    return f"{folder} has all of its rounds. For more, say how many: --rounds N"


def resumption(folder: Path, allow: Sequence[str]) -> str:
    """Return the command that resumes a run or a study, with the packages whose code it uses."""
    return f"anyfleet resume {folder}" + "".join(f" --allow {name}" for name in allow)


@dataclass(frozen=True, eq=False)
class Run:
    """A run that is about to begin, or to be resumed from a state."""

    prepared: Prepared
    recording: Recording
    name: str
    state: State | None = None
    allow: tuple[str, ...] = ()  # packages whose code it uses
    clock: str = SIMULATED  # which time its seconds are of


def perform(run: Run, screen: Console) -> None:
    """Play a run into its folder, and show what came out."""
    folder, experiment = run.recording.folder, run.prepared.experiment
    try:
        records = record(run)
    except KeyboardInterrupt as stop:
        done, planned = len(read_rounds(folder)), experiment.rounds
        show(screen, f"Stopped after {done} of {planned} rounds. Everything so far is in {folder}.")
        show(screen, f"To go on: {resumption(folder, run.allow)}")
        raise typer.Exit(exit_code(stop)) from stop
    runs = {run.name: {experiment.seed: records}}
    found = compare(runs, Goal(target=math.nan))  # a single run has no target
    screen.print(drawn(ends(found, run.clock), screen.width))
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
    picture(folder / "curves.png", runs, screen=screen, clock=run.clock)


def resume_run(folder: Path, terms: Terms, *, every: int | None, json: bool = False) -> None:
    """Resume a run from its last good checkpoint; do nothing if it has ended by itself."""
    screen = silent() if json else console()
    if finished(folder, terms):
        show(screen, why_finished(folder))
        if json:
            put_result(sys.stdout, folder, read_rounds(folder))
        return
    run = reopen(folder, terms)
    for remark in run.remarks:
        show(screen, remark)
        if json:
            put_event(sys.stdout, Noted(remark))
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
    again = Run(prepared, recording, name, run.past.state, terms.allow)
    if json:
        record_as_json(again, sys.stdout)
    else:
        perform(again, screen)
