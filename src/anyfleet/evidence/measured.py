"""Measures of runs: what a target cost, or where a run ended, by case, method and seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from anyfleet.analysis.metric import Metric
from anyfleet.evidence.items import Case, Column, Item, digest, is_cost
from anyfleet.evidence.results import CellResult, Results, Series
from anyfleet.experiment import Experiment

Key = tuple[str, str]  # a case and a method


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


def found(
    item: Item, results: Results | None, experiments: Mapping[Key, Experiment] | None = None
) -> Found:
    """Return which experiments of an item have results that fit its recipe."""
    made = item.experiments() if experiments is None else experiments
    cells: dict[Key, CellResult] = {}
    stale: list[Key] = []
    missing: list[Key] = []
    known = {} if results is None else results.cells
    names = {key for cell in known.values() for key in cell.places()}
    for key, experiment in made.items():
        cell = known.get(digest(experiment))
        if cell is not None:
            cells[key] = cell
        elif key in names:
            stale.append(key)
        else:
            missing.append(key)
    return Found(cells, tuple(stale), tuple(missing))


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


def label(case: Case, column: Column) -> str:
    """Return the name of an experiment of an item."""
    return f"{case.name}, {column.name}"
