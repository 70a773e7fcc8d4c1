"""The report of a study: tables on the screen, results.csv, results.json, results.tex, a picture.

For equal records it is the same, byte for byte; runs come in the order in which they are given.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import typer
from rich.console import Console

from anyfleet.analysis.comparison import Axis, Comparison, Goal, compare
from anyfleet.analysis.equal_budgets import UNITS, Resource
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.result_files import results_csv, results_json
from anyfleet.analysis.summaries import Runs
from anyfleet.analysis.units import quantity
from anyfleet.cli.latex import latex_table
from anyfleet.cli.run import picture
from anyfleet.cli.screen import show
from anyfleet.cli.tables import (
    Sheet,
    drawn,
    ends,
    learned,
    shortfalls,
    targets,
    width_title,
    widths,
)
from anyfleet.store.disk import write
from anyfleet.world import World

_OF: Mapping[Resource, str] = MappingProxyType(
    {"flops": "", "time": " of simulated time", "energy": "", "bytes": " of traffic"}
)
_INTERVALS = (
    "± is half the width of the 95 % confidence interval over seeds (Student's t); a single seed "
    "has none, nor has a mean of some seeds only."
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
    """Show what came of runs, and write it into a folder; `planned` is the number of all runs.

    With a world, the picture has its devices, too.
    """
    found, partial = compare(runs, goal), _partial(runs, planned)
    if partial:
        show(screen, partial)
    if not found.metrics:
        show(screen, "No run is finished: there is nothing to compare yet.")
        return
    for line, sheet, notes in _tables(found):
        if line:
            show(screen, f"\n{line}")
        if sheet is not None:
            screen.print(drawn(sheet, screen.width))
        for note in notes:
            show(screen, note)
    for line in _reading(found):
        show(screen, f"\n{line}")
    write(folder / "results.csv", results_csv(found))
    write(folder / "results.json", results_json(found, planned))
    write(folder / "results.tex", _latex(found, partial, title).encode())
    file = folder / "comparison.png"
    equal, over = found.amounts, goal.over
    picture(file, found.runs, screen=screen, world=world, title=title, equal=equal, over=over)


def _partial(runs: Runs, planned: int | None) -> str:
    """Return that not all runs are finished, or ""."""
    finished = sum(map(len, runs.values()))
    return f"Partial: {finished} of {planned} runs." if planned not in (None, finished) else ""


def _tables(found: Comparison) -> Iterator[tuple[str, Sheet | None, Sequence[str]]]:
    """Yield every table with the line above it, and the lines below it."""
    where = "" if found.goal.width is None else f" at width {found.goal.width:g}"
    yield "", ends(found), ()
    narrow = widths(found)
    if narrow is not None:
        yield width_title(found), narrow, ()
    if math.isnan(found.target):
        yield _no_target(found), None, ()
    else:
        metric = found.metrics[0]
        named = f"{metric.name} " if metric != Metric() else ""
        yield f"To reach {named}{metric.told(found.target)}{where}:", targets(found), ()
    for resource, lessons in found.lessons.items():
        amount = found.amounts[resource]
        notes = [*shortfalls(lessons)]
        if not amount:
            notes.append("One of the runs spent none of it: give an amount with --budget.")
        told = f"For {quantity(amount, UNITS[resource])}{_OF[resource]}{where}:"
        yield told, learned(found, resource), notes


def _no_target(found: Comparison) -> str:
    """Return why there is no target that all runs reach."""
    if len(found.metrics) == 1:
        return "No target is compared: not every run was evaluated, or its scores are NaN."
    measured = {name: found.metric(name) for name in found.runs}
    told = "; ".join(f"{name}: {metric.name}" for name, metric in measured.items() if metric)
    return f"No target is compared: runs are measured by different metrics ({told})."


def _reading(found: Comparison) -> Iterator[str]:
    """Yield how the tables are to be read."""
    most = max(map(len, found.runs.values()))
    if most > 1:
        others = [name for name in found.runs if name != found.reference]
        shared = any(len(found.common_seeds(name)) > 1 for name in others)
        paired = f" Rows “… − {found.reference}” are mean differences over common seeds."
        yield _INTERVALS + (paired if shared else "")
    elif len(found.runs) > 1:
        yield "One seed a run: no intervals, and no differences."


def _latex(found: Comparison, partial: str, title: str) -> str:
    """Return where runs ended and what the target cost, as two LaTeX tables."""
    about = [title, partial, _INTERVALS if max(map(len, found.runs.values())) > 1 else ""]
    rest = " ".join(f"{text.rstrip('.')}." for text in about if text)
    made = [latex_table(ends(found), f"Where the runs ended. {rest}".strip())]
    for line, sheet, _ in _tables(found):
        if line and sheet is not None:
            made.append(latex_table(sheet, f"{line.rstrip(':')}. {rest}".strip()))
    return "\n".join(made)


# --- goals, and those that runs cannot have -----------------------------------------------------


def axes(words: Sequence[str]) -> tuple[Axis, ...]:
    """Return the axes of these names, each once; raise BadParameter for another name."""
    known: dict[str, Axis] = {name: name for name in get_args(Axis)}
    unknown = [repr(word) for word in words if word not in known]
    if unknown:
        raise typer.BadParameter(
            f"may be {', '.join(known)}; got {', '.join(unknown)}.", param_hint="--x"
        )
    return tuple(dict.fromkeys(known[word] for word in words))


def need_metric(goal: Goal, metrics: Mapping[str, Sequence[str]]) -> None:
    """Raise BadParameter unless every run file, given with its metrics, has that of the goal."""
    lacking = {name: known for name, known in metrics.items() if goal.metric not in known}
    if goal.metric is not None and lacking:
        told = "; ".join(f"{name} has {', '.join(known)}" for name, known in lacking.items())
        message = f"is not a metric of every file: got {goal.metric!r}, but {told}."
        raise typer.BadParameter(message, param_hint="--metric")


def need_reference(goal: Goal, names: Sequence[str]) -> None:
    """Raise BadParameter for a reference that is none of the runs."""
    if goal.reference is not None and goal.reference not in names:
        message = f"must be one of {', '.join(names)}; got {goal.reference!r}."
        raise typer.BadParameter(message, param_hint="--reference")
