"""`anyfleet compare`: several run files, each with several seeds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import msgspec
import typer
from rich.console import Console

from anyfleet import config
from anyfleet.analysis.equal_budgets import Resource, Within, common_amount, quantity, within
from anyfleet.analysis.metric import Metric, main_metric
from anyfleet.analysis.plots import Runs
from anyfleet.analysis.summaries import ToTarget, common_score, metric_of, summarise, to_target
from anyfleet.cli.remarks import over_seeds, warnings
from anyfleet.cli.run import (
    Built,
    Means,
    all_prepared,
    folder_for,
    one_engine,
    picture,
    record,
    several,
    subfolder,
)
from anyfleet.cli.screen import console
from anyfleet.cli.tables import (
    by_width,
    learned,
    metrics_of,
    shortfalls,
    table,
    targets,
    width_title,
)
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import Experiment, RoundRecord, assemble, from_source
from anyfleet.store import Origin, Recording, read_ledger
from anyfleet.store.disk import write

_OF: Mapping[Resource, str] = MappingProxyType(
    {"flops": "", "time": " of simulated time", "energy": "", "bytes": " of traffic"}
)


@dataclass(frozen=True)
class Entry:
    """A run file that was read."""

    experiment: Experiment
    allow: tuple[str, ...]
    home: Path  # the folder of the file


@dataclass(frozen=True)
class Goal:
    """What runs are compared by: a target score at a width, and equal budgets of resources.

    Without a target it is the best score that all reach; without a budget, what all runs spent.
    """

    target: float | None = None
    width: float | None = None
    equal: tuple[Resource, ...] = ()
    budget: float | None = None  # of the only resource


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
    _need_target(agreed.metrics, goal)
    folder = folder_for(out, "compare")
    named = {name: entry.experiment for name, entry in entries.items()}
    chosen = one_engine(named, agreed.built, screen)
    screen.print(f"Folder: {folder}", markup=False, soft_wrap=True)
    runs: dict[str, list[Sequence[RoundRecord]]] = {name: [] for name in entries}
    wrong: dict[str, list[list[str]]] = {name: [] for name in entries}
    with several(folder, screen, allow):
        for name, prepared in all_prepared(_schedule(chosen, seeds), agreed.built):
            experiment, task = prepared.experiment, prepared.task
            label = f"{name}/seed-{experiment.seed}"
            inner, entry = subfolder(folder, label), entries[name]
            origin = Origin(task, entry.home)
            recording = Recording(inner, experiment, entry.allow, origin=origin)
            records = record(prepared, recording, screen=screen, name=label)
            runs[name].append(records)
            wrong[name].append(warnings(experiment, task, records, read_ledger(inner)))
    screen.print()
    found = _compared(runs, goal)
    _show(found, runs, goal, screen)
    for line in over_seeds(wrong):
        screen.print(line, markup=False, soft_wrap=True)
    write(folder / "results.json", _results(found, runs))
    picture(folder / "comparison.png", runs, screen=screen, equal=found.amounts)


@dataclass(frozen=True)
class Comparison:
    """What was found about several runs: by name, one entry for each seed."""

    common: float  # score that all reach; NaN if they are measured by different metrics
    target: float
    costs: Mapping[str, Sequence[ToTarget]]
    amounts: Mapping[Resource, float]
    lessons: Mapping[Resource, Mapping[str, Sequence[Within]]]


def _compared(runs: Runs, goal: Goal) -> Comparison:
    everybody = [records for group in runs.values() for records in group]
    target = common_score(everybody, goal.width) if goal.target is None else goal.target
    amounts = {
        each: common_amount(everybody, each) if goal.budget is None else goal.budget
        for each in goal.equal
    }
    return Comparison(
        common=common_score(everybody),
        target=target,
        costs={
            name: [to_target(records, target, goal.width) for records in group]
            for name, group in runs.items()
        },
        amounts=amounts,
        lessons={
            each: {
                name: [within(records, each, amount, goal.width) for records in group]
                for name, group in runs.items()
            }
            for each, amount in amounts.items()
        },
    )


def _show(found: Comparison, runs: Runs, goal: Goal, screen: Console) -> None:
    where = "" if goal.width is None else f" at width {goal.width:g}"
    metrics = metrics_of(runs)
    screen.print(table(runs, found.common, screen.width))
    narrow = by_width(runs, screen.width)
    if narrow is not None:
        screen.print(f"\n{width_title(runs)}", markup=False)
        screen.print(narrow)
    if math.isnan(found.target):
        screen.print(f"\n{_no_target(runs, metrics)}", markup=False, soft_wrap=True)
    else:
        named = f"{metrics[0].name} " if metrics[0] != Metric() else ""
        told = f"To reach {named}{metrics[0].told(found.target)}{where}:"
        screen.print(f"\n{told}", markup=False)
        screen.print(targets(found.costs, screen.width))
    for resource, lessons in found.lessons.items():
        amount = found.amounts[resource]
        screen.print(f"\nFor {quantity(amount, resource)}{_OF[resource]}{where}:", markup=False)
        screen.print(learned(lessons, screen.width))
        for line in shortfalls(lessons):
            screen.print(line, markup=False)
        if not amount:
            screen.print("One of the runs spent none of it: give an amount with --budget.")


def _no_target(runs: Runs, metrics: Sequence[Metric]) -> str:
    """Return why there is no target that all runs reach."""
    if len(metrics) == 1:
        return "No target is compared: not every run was evaluated, or its scores are NaN."
    told = "; ".join(f"{name}: {metric_of(group[0]).name}" for name, group in runs.items())
    return f"No target is compared: runs are measured by different metrics ({told})."


def _results(found: Comparison, runs: Runs) -> bytes:
    """Return the comparison as JSON, run by run."""
    results = {
        name: [
            {
                **asdict(summarise(records)),
                "to_target": found.costs[name][number],
                "within": {each: told[name][number] for each, told in found.lessons.items()},
            }
            for number, records in enumerate(group)
        ]
        for name, group in runs.items()
    }
    return msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n"


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
