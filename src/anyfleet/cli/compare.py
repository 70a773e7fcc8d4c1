"""`anyfleet compare`: several run files, each with several seeds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import typer

from anyfleet import config
from anyfleet.analysis.comparison import Goal
from anyfleet.analysis.equal_budgets import Resource
from anyfleet.analysis.metric import Metric, main_metric
from anyfleet.cli.remarks import over_seeds, warnings
from anyfleet.cli.report import need_metric, need_reference, report
from anyfleet.cli.run import (
    Built,
    Means,
    all_prepared,
    folder_for,
    one_engine,
    record,
    several,
    subfolder,
)
from anyfleet.cli.screen import console
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import Experiment, RoundRecord, assemble, from_source
from anyfleet.store import Origin, Recording, read_ledger


@dataclass(frozen=True)
class Entry:
    """A run file that was read."""

    experiment: Experiment
    allow: tuple[str, ...]
    home: Path  # the folder of the file


def resources(words: Sequence[str]) -> tuple[Resource, ...]:
    """Return the resources of these names, each once; raise BadParameter for another name."""
    known: dict[str, Resource] = {name: name for name in get_args(Resource)}
    unknown = [repr(word) for word in words if word not in known]
    if unknown:
        raise typer.BadParameter(
            f"may be {', '.join(known)}; got {', '.join(unknown)}.", param_hint="--equal"
        )
    return tuple(dict.fromkeys(known[word] for word in words))


def compare_files(
    words: Sequence[str],
    *,
    seeds: int,
    allow: Sequence[str],
    out: Path | None,
    means: Means,
    goal: Goal,
) -> None:
    """Run every file with every seed, and compare; seeds count up from the file's own."""
    files, overrides = split(words)
    _need_budget(goal)
    entries, screen = read_all(files, means.overrides(overrides), allow), console()
    _need_width(entries, goal)
    agreed = need_agreement(entries)
    known = {name: (*task.metrics, "loss") for name, (task, _) in agreed.built.items()}
    need_metric(goal, known)
    need_reference(goal, list(entries))
    _need_target(agreed.metrics, goal)
    folder = folder_for(out, "compare")
    named = {name: entry.experiment for name, entry in entries.items()}
    chosen = one_engine(named, agreed.built, screen)
    screen.print(f"Folder: {folder}", markup=False, soft_wrap=True)
    runs: dict[str, dict[int, Sequence[RoundRecord]]] = {name: {} for name in entries}
    wrong: dict[str, list[list[str]]] = {name: [] for name in entries}
    with several(folder, screen, allow):
        for name, prepared in all_prepared(_schedule(chosen, seeds), agreed.built):
            experiment, task = prepared.experiment, prepared.task
            label = f"{name}/seed-{experiment.seed}"
            inner, entry = subfolder(folder, label), entries[name]
            origin = Origin(task, entry.home)
            recording = Recording(inner, experiment, entry.allow, origin=origin)
            records = record(prepared, recording, screen=screen, name=label)
            runs[name][experiment.seed] = records
            wrong[name].append(warnings(experiment, task, records, read_ledger(inner)))
    screen.print()
    report(folder, runs, goal, screen)
    for line in over_seeds(wrong):
        screen.print(line, markup=False, soft_wrap=True)


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


def _need_width(entries: Mapping[str, Entry], goal: Goal) -> None:
    missing = [
        Problem(f"{name}: widths", f"has no {goal.width:g}, which --width asks for; add it.")
        for name, entry in entries.items()
        if goal.width is not None and goal.width not in entry.experiment.widths
    ]
    if missing:
        raise ConfigError(missing)


def split(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return run files, and `key=value` overrides of all of them."""
    overrides = [word for word in words if "=" in word and not _there(word)]
    files = [Path(word) for word in words if word not in overrides]
    if not files:
        raise typer.BadParameter("no run file is given; name at least one.")
    return files, overrides


def _there(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):  # too long, or not a file name
        return False


def read_all(
    files: Sequence[Path], overrides: Sequence[str], allow: Sequence[str]
) -> Mapping[str, Entry]:
    """Return all run files by name; raise ConfigError with the problems of all at once."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            source = config.read(file, overrides, allow)
            entries[_free(file, entries)] = Entry(
                from_source(source), source.allow, file.resolve().parent
            )
        except ConfigError as error:
            problems += [Problem(f"{file}: {p.path}", p.message) for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return entries


@dataclass(frozen=True, eq=False)
class Agreement:
    """What is known of run files before the first of them runs."""

    metrics: Mapping[str, Metric]  # by file
    built: Mapping[str, Built]  # for the first seed, by file


def need_agreement(entries: Mapping[str, Entry]) -> Agreement:
    """Return what files come to; raise ConfigError if a task, its fleet and its details disagree.

    So that is found before the first of them runs.
    """
    problems: list[Problem] = []
    metrics: dict[str, Metric] = {}
    built: dict[str, Built] = {}
    for name, entry in entries.items():
        experiment = entry.experiment
        try:
            task, world = assemble(experiment)
        except ConfigError as error:
            problems += [Problem(f"{name}: {p.path}", p.message) for p in error.problems]
            continue
        metrics[name] = Metric(main_metric(task.metrics))
        built[name] = task, world
    if problems:
        raise ConfigError(problems)
    return Agreement(metrics, built)


def _need_target(metrics: Mapping[str, Metric], goal: Goal) -> None:
    """Raise BadParameter for a target that the metric of the files cannot have."""
    if goal.target is None:
        return
    if goal.metric is not None:
        metrics = dict.fromkeys(metrics, Metric(goal.metric))
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


def _free(file: Path, taken: Mapping[str, Entry]) -> str:
    """Return the name of a file without its suffix, numbered if another file has the same."""
    names = (file.stem if n == 1 else f"{file.stem}-{n}" for n in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def _schedule(named: Mapping[str, Experiment], seeds: int) -> Iterator[tuple[str, Experiment]]:
    """Yield experiments seed by seed, so that files with the same task can share it."""
    for extra in range(seeds):
        for name, experiment in named.items():
            yield name, replace(experiment, seed=experiment.seed + extra)
