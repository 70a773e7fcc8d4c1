"""Tuning: every method of an item has the same number of trials in every case.

An item with a table `[tuning]` is played twice: first its trials, some for each value of a setting,
with seeds of their own; then the item itself, in which every method has, case by case, the value
whose worst trial ended best. Both are items, so that all that plays and keeps items plays and keeps
them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import msgspec

from anyfleet import config
from anyfleet.analysis.metric import Metric
from anyfleet.errors import ConfigError, Problem
from anyfleet.evidence.items import Column, Item, setting, variant
from anyfleet.evidence.measured import Key, amount_of
from anyfleet.evidence.results import Results, Series


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trials of every method, and the budgets at which tuned methods are compared."""

    key: str  # of run files: the setting that is tried
    values: Annotated[tuple[float, ...], msgspec.Meta(min_length=2)]
    length: Annotated[float, msgspec.Meta(gt=0, lt=1)]  # of a trial, as a share of the run's rounds
    seed: int  # of the first trial of each value, and of no other run
    budget: Annotated[float, msgspec.Meta(gt=0, le=1)]  # of the baseline's spending: the budgets
    trials: Annotated[int, msgspec.Meta(ge=1)] = 1  # of each value, with seeds counted up

    @property
    def seeds(self) -> range:
        """The seeds of the trials of each value."""
        return range(self.seed, self.seed + self.trials)

    def trial(self, method: str, value: float) -> str:
        """Return the name of a trial among the methods of an item."""
        return f"{variant(method, self.key, value)} (trial)"

    def tuned(self, method: str, value: float) -> str:
        """Return the name of a tuned method."""
        return variant(method, self.key, value)


def tuning_of(item: Item) -> Tuning:
    """Return how the methods of an item are tuned; raise ConfigError if it does not say so well."""
    try:
        found = msgspec.convert(item.tuning, Tuning)
    except msgspec.ValidationError as error:
        raise ConfigError([Problem(f"{item.name}: tuning", f"{error}.")]) from error
    problems = []
    if item.baseline is None:
        problems.append(Problem(f"{item.name}: baseline", "must name a method: it sets budgets."))
    if "rounds" not in item.run:
        problems.append(Problem(f"{item.name}: run.rounds", "must be given: trials have a share."))
    runs = range(item.run.get("seed", 0), item.run.get("seed", 0) + item.seeds)
    if shared := [seed for seed in found.seeds if seed in runs]:
        told = f"{shared[0]} is the seed of a run; trials need others."
        problems.append(Problem(f"{item.name}: tuning.seed", told))
    if problems:
        raise ConfigError(problems)
    return found


def trials_of(item: Item, *, quick: bool = False) -> int:
    """Return how many trials each method has in a case; 0 where nothing is tuned."""
    if not item.tuning:
        return 0
    tuning = tuning_of(item)
    return len(tuning.values) * (1 if quick else tuning.trials)


def trials(item: Item) -> Item:
    """Return the trials of an item, as an item: a method for each value of each method."""
    tuning = tuning_of(item)
    columns = {
        tuning.trial(name, value): Column(
            tuning.trial(name, value),
            config.laid_over(
                column.run,
                setting(tuning.key, value),
                {"rounds": _rounds(item, column, tuning), "seed": tuning.seed},
            ),
            config.laid_over(column.quick, {"rounds": 1}),
            column.cases,
        )
        for name, column in item.methods.items()
        for value in tuning.values
    }
    return replace(item, methods=columns, baseline=None, seeds=tuning.trials, tuning={})


def _rounds(item: Item, column: Column, tuning: Tuning) -> int:
    """Return how many rounds the trials of a method have, a share of its own."""
    return max(1, int(tuning.length * column.run.get("rounds", item.run["rounds"])))


def chosen(item: Item, results: Results, *, quick: bool = False) -> dict[Key, float]:
    """Return for each case and method the value whose worst trial ended best, the first of equals.

    A trial that ended without a number counts as the worst. A method is left out of the cases in
    which some of its trials are missing; a quick look has one of each value.
    """
    tuning = tuning_of(item)
    seeds = tuning.seeds[:1] if quick else tuning.seeds
    scores = {
        (cell.case, cell.method): _score({seed: cell.runs[seed] for seed in seeds})
        for cell in results.cells.values()
        if set(seeds) <= set(cell.runs)
    }
    found: dict[Key, float] = {}
    for case, column in item.pairs():
        names = [(case.name, tuning.trial(column.name, value)) for value in tuning.values]
        if all(name in scores for name in names):
            tried = dict(zip(tuning.values, (scores[name] for name in names), strict=True))
            found[case.name, column.name] = max(tried, key=lambda value: tried[value])
    return found


def _score(runs: Mapping[int, Series]) -> float:
    """Return where the worst trial ended, more being better; minus infinity without a number."""
    ends = []
    for run in runs.values():
        found = amount_of(run, "score", None)
        sign = -1.0 if Metric(run.metric).less else 1.0
        ends.append(-math.inf if found is None or math.isnan(found.value) else sign * found.value)
    return min(ends, default=-math.inf)


def tuned(item: Item, values: Mapping[Key, float]) -> Item:
    """Return an item whose methods have, case by case, the values that their trials chose.

    There is a method for each value that one of the cases chose.
    """
    tuning = tuning_of(item)
    columns: dict[str, Column] = {}
    for name, column in item.methods.items():
        for value in tuning.values:
            cases = tuple(c for (c, m), best in values.items() if m == name and best == value)
            if cases:
                own = tuning.tuned(name, value)
                run = config.laid_over(column.run, setting(tuning.key, value))
                columns[own] = Column(own, run, column.quick, cases)
    return replace(item, methods=columns, baseline=None, tuning={})
