"""Settling a study before its first run: everything is built once, and one engine is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from anyfleet.analysis.metric import main_metric
from anyfleet.core.objectives import Task
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import assemble, prospect, warn_of_excess
from anyfleet.runtime.simulated.engine_choice import (
    SIDE_BY_SIDE,
    choose,
    expected_seconds,
    without_workers,
)
from anyfleet.runtime.simulated.execution import execution_of
from anyfleet.study.plan import Cell, PlannedRun, Study
from anyfleet.study.playing import Built
from anyfleet.world import World


@dataclass(frozen=True, eq=False)
class Settled:
    """A study whose engine and devices are named, and what was built for the first seeds."""

    study: Study
    built: Mapping[PlannedRun, Built]


@dataclass(frozen=True, eq=False)
class Assembled:
    """The tasks and fleets of the first seeds of a study, by name."""

    tasks: Mapping[str, Task]
    worlds: Mapping[str, World]


def assemble_all(study: Study) -> Assembled:
    """Return what the experiments of a study come to; equal tasks are built once.

    Raise ConfigError with all that does not fit, before anything runs.
    """
    keys = {(run.name, run.seed): run.task for run in study.runs()}
    tasks: dict[str, Task] = {}
    worlds: dict[str, World] = {}
    problems: list[Problem] = []
    for name, cell in study.cells.items():
        key = keys[name, cell.seeds[0]]
        shared = tasks.get(key)
        try:
            tasks[key], worlds[name] = assemble(cell.experiment, shared)
            if shared is not None:  # otherwise it is done when the task is built
                warn_of_excess(cell.experiment, worlds[name])
        except ConfigError as error:
            problems += [each.within(name) for each in error.problems]
    if problems:
        raise ConfigError(problems)
    own = {name: tasks[keys[name, cell.seeds[0]]] for name, cell in study.cells.items()}
    return Assembled(own, worlds)


def settle(study: Study, assembled: Assembled | None = None) -> Settled:
    """Return a study that can begin: all experiments fit together, all have the same engine.

    Experiments that name an engine keep it. What is `assembled` already is not built again.
    """
    there = assembled or assemble_all(study)
    own, worlds = there.tasks, there.worlds
    cells, told = _carried_out(study.cells, own, worlds)
    if len(set(told.values())) == 1:
        told = {"All": next(iter(told.values()))}
    lines = tuple(f"{name}: {text}" for name, text in told.items())
    settled = replace(study, cells=cells, executions=lines)
    first = [run for run in settled.runs() if run.seed == cells[run.name].seeds[0]]
    return Settled(settled, {run: (own[run.name], worlds[run.name]) for run in first})


def _carried_out(
    cells: Mapping[str, Cell], tasks: Mapping[str, Task], worlds: Mapping[str, World]
) -> tuple[dict[str, Cell], dict[str, str]]:
    """Return cells with their engines and devices, and how each is carried out, for people."""
    runs = {
        name: prospect(cell.experiment, tasks[name], worlds[name]) for name, cell in cells.items()
    }
    prospects = [runs[name] for name, cell in cells.items() if cell.experiment.engine == "auto"]
    # The cores are for runs: whether these are few or many at a time must not change results.
    several = sum(len(cell.seeds) for cell in cells.values()) > 1
    chosen, why = None, ""
    if prospects and several:
        chosen, why = choose(prospects, engines=without_workers(), equal=SIDE_BY_SIDE)
    elif prospects:
        chosen, why = choose(prospects)
    found: dict[str, Cell] = {}
    told: dict[str, str] = {}
    for name, cell in cells.items():
        engine, reason = cell.experiment.engine, ""
        if engine == "auto":
            assert chosen is not None  # for this one among others
            engine, reason = chosen, why
        execution = execution_of(tasks[name], engine, reason)
        device = cell.experiment.device
        if device == "auto":
            device = execution.device.partition(":")[0]
        metrics = tuple(tasks[name].metrics)
        first = main_metric(metrics)
        found[name] = replace(
            cell,
            experiment=replace(cell.experiment, engine=engine, device=device),
            metrics=tuple(dict.fromkeys((first, *metrics, "loss"))),
            seconds=expected_seconds(runs[name]),
        )
        told[name] = str(execution)
    return found, told
