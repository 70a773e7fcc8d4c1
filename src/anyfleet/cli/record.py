"""Runs on the screen and on disk at once; what the commands share."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console

from anyfleet.analysis.equal_budgets import Resource
from anyfleet.analysis.plots import NoPictures, NothingToDraw, Runs, draw
from anyfleet.cli.screen import progress
from anyfleet.core.objectives import Task
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, RoundRecord, State, build, play
from anyfleet.store import Recording, claim, fresh
from anyfleet.world import World

RUNS = Path("runs")


def prepare(out: Path | None, name: str, threads: int) -> Path:
    """The folder to write into; and as many threads as were asked for."""
    torch.set_num_threads(threads)
    return fresh(RUNS, name) if out is None else claim(out)


def subfolder(folder: Path, name: str) -> Path:
    """A folder for one run of several."""
    return claim(folder / name.lower())


def built(named: Iterable[tuple[str, Experiment]]) -> Iterator[tuple[str, Experiment, Task]]:
    """Each experiment with its task; neighbours with the same task share it."""
    last: tuple[Experiment, Task] | None = None
    for name, experiment in named:
        if last and (last[0].task, last[0].seed) == (experiment.task, experiment.seed):
            task = last[1]
        else:
            task = build(experiment)
        last = experiment, task
        yield name, experiment, task


def record(
    experiment: Experiment,
    task: Task,
    recording: Recording,
    *,
    screen: Console,
    name: str,
    state: State | None = None,
) -> tuple[RoundRecord, ...]:
    """Plays an experiment into a folder, from its beginning or from a state."""
    done = state.record.round_index + 1 if state else 0
    with progress(screen, name, experiment.rounds, done) as show, recording:
        for moment in play(experiment, task, resume=state):
            recording.append(moment)
            show(moment.record)
    return tuple(recording.points)


def picture(
    file: Path,
    runs: Runs,
    *,
    screen: Console,
    world: World | None = None,
    title: str = "",
    equal: Mapping[Resource, float] | None = None,
) -> None:
    """Draws if it can: a run is worth having without a picture."""
    try:
        draw(file, runs, world=world, title=title, equal=equal)
    except (NoPictures, NothingToDraw, StoreError) as missing:
        screen.print(f"({missing})", markup=False)
    else:
        screen.print(f"Picture: {file}", markup=False, soft_wrap=True)
