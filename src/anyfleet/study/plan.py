"""A study as a value: experiments by name, each with several seeds, and the folders of its runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from anyfleet import config
from anyfleet.analysis.comparison import Goal
from anyfleet.experiment import Experiment
from anyfleet.store.study_folders import study_folders


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: the name of its experiment, its seed, and how many rounds it is to have.

    `task` is the same text for runs that share a task. `folder` lies in the folder of the study.
    `seconds` tell which of several runs takes the longest.
    """

    name: str
    seed: int
    rounds: int
    folder: Path
    task: str = field(default="", repr=False)
    seconds: float = field(default=0.0, repr=False, compare=False)  # roughly; 0: not known

    def __str__(self) -> str:
        return f"{self.name}/seed-{self.seed}"


@dataclass(frozen=True)
class Cell:
    """One experiment of a study: a run file with settings, its seeds, and what belongs to it."""

    experiment: Experiment  # of the first seed
    seeds: tuple[int, ...]
    allow: tuple[str, ...] = ()  # packages whose code it may use
    home: Path | None = None  # the folder of its run file
    left_open: tuple[str, ...] = ()  # which of engine and device the run file left open
    metrics: tuple[str, ...] = ()  # of its task; the first is the one that it is measured by
    seconds: float = 0.0  # that a run of it takes, roughly; 0: not known

    def of(self, seed: int) -> Experiment:
        """Return the experiment with this seed."""
        return replace(self.experiment, seed=seed)

    def data(self) -> dict[str, Any]:
        """Return the experiment as plain data, with "auto" where the run file left something open.

        Studies are compared by it.
        """
        return {**written(self.experiment), **dict.fromkeys(self.left_open, "auto")}


@dataclass(frozen=True)
class Study:
    """Runs that are compared: all experiments with all of their seeds.

    `kind` is the command that made it. `threads` of torch decide the last bits of all results.
    """

    cells: Mapping[str, Cell]
    kind: str = "compare"
    threads: int = 1
    goal: Goal = field(default_factory=Goal)
    executions: tuple[str, ...] = ()  # how runs are carried out, for people

    def runs(self) -> tuple[PlannedRun, ...]:
        """Return all runs, seed by seed; those that share a task follow one another."""
        folders = study_folders(self.cells)
        most = max(len(cell.seeds) for cell in self.cells.values())
        tasks = {name: _task(cell.experiment) for name, cell in self.cells.items()}
        found = [
            PlannedRun(
                name,
                cell.seeds[number],
                cell.experiment.rounds,
                Path(folders[name]) / f"seed-{cell.seeds[number]}",
                f"{cell.seeds[number]} {tasks[name]}",
                cell.seconds,
            )
            for number in range(most)
            for name, cell in self.cells.items()
            if number < len(cell.seeds)
        ]
        first = {run.task: place for place, run in reversed(list(enumerate(found)))}
        return tuple(sorted(found, key=lambda run: first[run.task]))


def written(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment as plain data with all of its keys."""
    data: dict[str, Any] = config.dump(experiment, complete=True)
    return data


def _task(experiment: Experiment) -> str:
    """Return a text that is the same for equal tasks on the same device."""
    data = {"task": config.dump(experiment.task, complete=True), "device": experiment.device}
    return msgspec.json.encode(data, order="sorted").decode()
