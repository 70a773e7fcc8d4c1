"""Measures of runs: what a target cost, or where a run ended, by case, method and seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anyfleet.analysis.metric import Metric
from anyfleet.evidence.items import Case, Column, Item, digest, is_cost, is_score
from anyfleet.evidence.results import CellResult, Results, Series
from anyfleet.experiment import Experiment

Key = tuple[str, str]  # a case and a method
Cells = Mapping[str, tuple[str, CellResult]]  # by digest, each with the item it is a result of


@dataclass(frozen=True)
class Amount:
    """The measure of one run; a cost that was not reached is all that the run spent."""

    value: float
    reached: bool = True


@dataclass(frozen=True)
class Found:
    """The cells of an item that were run, those that are stale, and those that are missing."""

    cells: Mapping[Key, CellResult]
    stale: tuple[Key, ...] = ()
    missing: tuple[Key, ...] = ()
    digests: Mapping[Key, str] = field(default_factory=dict)  # of the item's experiments
    shared: Mapping[Key, str] = field(default_factory=dict)  # the items that cells are results of


def found(
    item: Item,
    results: Results | None,
    experiments: Mapping[Key, Experiment] | None = None,
    elsewhere: Cells | None = None,
) -> Found:
    """Return which experiments of an item have results that fit its recipe.

    What its own result file lacks may be among the cells of other items, `elsewhere`.
    """
    made = item.experiments() if experiments is None else experiments
    cells: dict[Key, CellResult] = {}
    stale: list[Key] = []
    missing: list[Key] = []
    shared: dict[Key, str] = {}
    known = {} if results is None else results.cells
    names = {key for cell in known.values() for key in cell.places()}
    digests = {key: digest(experiment) for key, experiment in made.items()}
    for key in made:
        cell = known.get(digests[key])
        owner, other = (elsewhere or {}).get(digests[key], ("", None))
        if cell is not None:
            cells[key] = cell
        elif other is not None and owner != item.name and serves(item, other):
            cells[key], shared[key] = other, owner
        elif key in names:
            stale.append(key)
        else:
            missing.append(key)
    return Found(cells, tuple(stale), tuple(missing), digests, shared)


def serves(item: Item, cell: CellResult) -> bool:
    """Return whether a result has the diagnostics that an item asks for."""
    asked = set(item.diagnostics)
    return all(asked <= set(run.diagnostics) for run in cell.runs.values())


def amounts(case: Case, cell: CellResult, measure: str) -> dict[int, Amount]:
    """Return a measure of every seed of an experiment; without evaluations there is none."""
    return {
        seed: amount
        for seed, run in cell.runs.items()
        if (amount := amount_of(run, measure, case.target)) is not None
    }


def amount_of(run: Series, measure: str, target: float | None) -> Amount | None:
    """Return a measure of a run; None if it was not evaluated, or not at that width."""
    metric, (kind, _, width) = Metric(run.metric), measure.partition("@")
    if width not in run.scores or not run.rounds:
        return None
    scores = run.values(width)
    if not is_cost(measure):
        return Amount(scores[-1] if kind == "score" else metric.best(scores))
    assert target is not None  # every case has one where costs are measured
    first = next((n for n, score in enumerate(scores) if metric.reaches(score, target)), None)
    spent = getattr(run, kind)
    return Amount(float(spent[-1 if first is None else first]), first is not None)


def score_at(run: Series, measure: str, amount: float) -> float:
    """Return the score of the last evaluation that a run paid with so much of a cost."""
    spent = getattr(run, measure)
    within = [score for cost, score in zip(spent, run.values(), strict=True) if cost <= amount]
    return within[-1] if within else math.nan


def best_until(run: Series, measure: str, amount: float) -> float:
    """Return the best score of the evaluations that a run paid with so much of a cost."""
    spent = zip(getattr(run, measure), run.values(), strict=True)
    return Metric(run.metric).best(score for cost, score in spent if cost <= amount)


# --- diagnostics ----------------------------------------------------------------------------------


def summary(value: Any, group: range | None) -> float:
    """Return a diagnostic of a round as one number for a group of devices; NaN: it has none.

    It is the mean over the devices of the group, the sum over blocks of the model, or how many of
    the group are listed. None is the group of all devices.
    """
    if isinstance(value, Mapping):
        known = [v for key, v in value.items() if group is None or int(key) in group]
        return mean([each for each in known if each is not None])
    if isinstance(value, list | tuple):
        if any(isinstance(each, float) for each in value):
            return math.fsum(value)
        return float(sum(group is None or each in group for each in value))
    return math.nan if value is None else float(value)


def by_round(run: Series, name: str, group: range | None) -> list[float]:
    """Return a diagnostic of all rounds that have it, as numbers for a group of devices."""
    values = (summary(each, group) for each in run.diagnostics.get(name, ()))
    return [each for each in values if not math.isnan(each)]


def diagnosed(
    cell: CellResult, name: str, group: range | None = None, *, last: bool = False
) -> dict[int, Amount]:
    """Return the mean of all rounds of a diagnostic, for every seed whose run kept it.

    With `last` it is the diagnostic of the last round that has it.
    """
    rounds = {seed: by_round(run, name, group) for seed, run in cell.runs.items()}
    kept = {seed: values[-1:] if last else values for seed, values in rounds.items() if values}
    return {seed: Amount(mean(values)) for seed, values in kept.items()}


def mean(values: list[float]) -> float:
    """Return the mean of numbers, NaN without any."""
    return math.fsum(values) / len(values) if values else math.nan


# --- variants of a method -------------------------------------------------------------------------


def best_variant(item: Item, there: Found, case: Case, method: str, measure: str) -> str | None:
    """Return the variant of a method whose mean by a measure is best; None until all were run.

    It is chosen by the same runs that it is then judged by, which favours it.
    """
    known = {*there.cells, *there.stale, *there.missing}
    names = [name for name in item.best[method] if (case.name, name) in known]
    cells = [there.cells.get((case.name, name)) for name in names]
    if not names or not all(cell is not None and cell.runs for cell in cells):
        return None
    return max(names, key=lambda name: _worth(case, there.cells[case.name, name], measure))


def _worth(case: Case, cell: CellResult, measure: str) -> float:
    """Return how good the runs of a cell are by a measure, more being better."""
    if not (is_cost(measure) or is_score(measure)):  # a diagnostic
        found = -mean([each.value for each in diagnosed(cell, measure).values()])
    else:
        values = [each.value for each in amounts(case, cell, measure).values()]
        found = (-1 if is_cost(measure) else 1) * mean(values)
    return -math.inf if math.isnan(found) else found


def with_best(item: Item, there: Found, measure: str) -> Found:
    """Return what was found, with the best variant by a measure in place of each such method."""
    cells, stale, missing = dict(there.cells), [*there.stale], [*there.missing]
    for case in item.cases.values():
        for method, names in item.best.items():
            keys = [(case.name, name) for name in names]
            best = best_variant(item, there, case, method, measure)
            if best is not None:
                cells[case.name, method] = there.cells[case.name, best]
            elif any(key in there.stale for key in keys):
                stale.append((case.name, method))
            elif any(key in there.missing for key in keys):
                missing.append((case.name, method))
    return replace(there, cells=cells, stale=tuple(stale), missing=tuple(missing))


def label(case: Case, column: Column) -> str:
    """Return the name of an experiment of an item."""
    return f"{case.name}, {column.name}"
