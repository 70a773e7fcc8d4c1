"""The report on a study: tables on the screen, results and a picture in its folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.console import Console

from anyfleet.analysis import plots
from anyfleet.analysis.comparison import Goal, Runs
from anyfleet.analysis.equal_budgets import Resource, Within, common_amount, quantity, within
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import ToTarget, common_score, metric_of, summarise, to_target
from anyfleet.cli.run import picture
from anyfleet.cli.screen import show
from anyfleet.cli.tables import (
    by_width,
    learned,
    metrics_of,
    shortfalls,
    table,
    targets,
    width_title,
)
from anyfleet.store.disk import write
from anyfleet.world import World

_OF: Mapping[Resource, str] = MappingProxyType(
    {"flops": "", "time": " of simulated time", "energy": "", "bytes": " of traffic"}
)


def report(
    folder: Path,
    runs: Runs,
    goal: Goal,
    screen: Console,
    *,
    planned: int | None = None,
    world: World | None = None,
    title: str = "",
) -> None:
    """Show the tables of finished runs; write `results.json` and a picture into the folder.

    `planned` is the number of all runs if only a part of them is finished.
    """
    lists = {name: list(group.values()) for name, group in runs.items()}
    if planned is not None:
        show(screen, f"Partial: {sum(map(len, lists.values()))} of {planned} runs.")
    found = _compared(lists, goal)
    _show(found, lists, goal, screen)
    write(folder / "results.json", _results(found, lists))
    file = folder / "comparison.png"
    picture(file, lists, screen=screen, equal=found.amounts, world=world, title=title)


@dataclass(frozen=True)
class Comparison:
    """What was found about several runs: by name, one entry for each seed."""

    common: float  # score that all reach; NaN if they are measured by different metrics
    target: float
    costs: Mapping[str, Sequence[ToTarget]]
    amounts: Mapping[Resource, float]
    lessons: Mapping[Resource, Mapping[str, Sequence[Within]]]


def _compared(runs: plots.Runs, goal: Goal) -> Comparison:
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


def _show(found: Comparison, runs: plots.Runs, goal: Goal, screen: Console) -> None:
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


def _no_target(runs: plots.Runs, metrics: Sequence[Metric]) -> str:
    """Return why there is no target that all runs reach."""
    if len(metrics) == 1:
        return "No target is compared: not every run was evaluated, or its scores are NaN."
    told = "; ".join(f"{name}: {metric_of(group[0]).name}" for name, group in runs.items())
    return f"No target is compared: runs are measured by different metrics ({told})."


def _results(found: Comparison, runs: plots.Runs) -> bytes:
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
