"""The comparison of all methods: a row for every case and method, from a result file.

A row says what a tuned method had learned for equal budgets of time, energy and bytes, and by how
much that is more than what the reference had learned, seed by seed. A budget is a share of what
the reference spends in its whole run with the same seed. `comparison.json` in the package holds the
rows for those who have no copy of the project.
"""

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files

import msgspec

from anyfleet.analysis.intervals import Estimate, estimate, paired_difference
from anyfleet.errors import ConfigError, StoreError
from anyfleet.evidence.fleet_facts import FleetFacts, facts_of
from anyfleet.evidence.items import Case, Column, Item
from anyfleet.evidence.measured import found, score_at
from anyfleet.evidence.results import CellResult, Results, Series
from anyfleet.evidence.tuning import Tuning, chosen, trials_of, tuned, tuning_of
from anyfleet.experiment import from_source

BUDGETS = ("seconds", "joules", "bytes")
NAME = "comparison/comparison"  # of the item
ROWS = "comparison.json"
_DIGITS = 5  # significant ones of every number


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A mean over seeds with its 95 % interval; None: not known."""

    mean: float | None
    low: float | None
    high: float | None


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A method in a case: what it had learned for each budget, and how much more than another."""

    case: str
    method: str
    refused: str = ""  # why the library does not run the method in this case
    trials: int = 0  # that chose the value
    value: float | None = None  # that they chose
    tried: float | None = None  # score at the end of the worst trial of that value
    final: Interval | None = None  # score at the end of the run
    scores: dict[str, Interval] = {}  # by budget
    gains: dict[str, Interval] = {}  # by budget: score minus that of the reference
    ended: tuple[str, ...] = ()  # budgets that a run of it did not use up
    minutes: float = 0.0  # of the machine, for all of its runs and trials


class CaseFacts(msgspec.Struct, frozen=True):
    """What is true of a case: its fleet and its data, and the budgets."""

    facts: FleetFacts
    budgets: dict[str, float]  # mean over seeds


class Comparison(msgspec.Struct, frozen=True):
    """All rows, and how they were found."""

    reference: str
    seeds: int
    rounds: int  # of the reference
    tuning: Tuning
    sub_models: tuple[str, ...]  # methods whose devices may hold less than the whole model
    cases: dict[str, CaseFacts]
    rows: tuple[Row, ...]

    def of(self, case: str) -> dict[str, Row]:
        """Return the rows of a case, by method."""
        return {row.method: row for row in self.rows if row.case == case}

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in the order of the item."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    def best(self, case: str, budget: str) -> Row | None:
        """Return the row of the method with the highest score for a budget; None without any."""
        known = [row for row in self.of(case).values() if score_of(row, budget) is not None]
        return max(known, key=lambda row: score_of(row, budget) or 0.0, default=None)


def score_of(row: Row, budget: str) -> float | None:
    """Return the mean score of a row for a budget; None if it is not known."""
    over = row.scores.get(budget)
    return None if over is None else over.mean


# --- from a result file ---------------------------------------------------------------------------


def compare(item: Item, results: Results, *, quick: bool = False) -> Comparison:
    """Return the comparison that a result file holds, or the results of a quick look.

    Cells that no longer fit the recipe do not count. Raise StoreError if the reference was not run
    in one of the cases that others were run in.
    """
    tuning, reference = tuning_of(item), item.baseline
    assert reference is not None  # tuning_of has seen to it
    values = chosen(item, results, quick=quick)
    best = tuned(item, values)
    cells = found(best, results, best.experiments(quick=quick)).cells
    rows: list[Row] = []
    cases: dict[str, CaseFacts] = {}
    for case in item.cases.values():
        own = {
            method: cells[case.name, tuning.tuned(method, value)]
            for (name, method), value in values.items()
            if name == case.name and (name, tuning.tuned(method, value)) in cells
        }
        if not own:
            continue
        if reference not in own:
            raise StoreError(f"{case.name}: {reference} was not run, which sets the budgets.")
        budgets = {
            each: {
                seed: tuning.budget * getattr(run, each)[-1]
                for seed, run in own[reference].runs.items()
            }
            for each in BUDGETS
        }
        means = {
            each: _short(estimate([*by_seed.values()]).mean) for each, by_seed in budgets.items()
        }
        source = item.source(case, item.methods[reference])
        cases[case.name] = CaseFacts(facts_of(source, item.name), means)
        for column in item.methods.values():
            if column.name in own:
                row = _row(case, column.name, own, reference, budgets)
                spent = own[column.name].minutes + _minutes(results, tuning, case, column)
                row = msgspec.structs.replace(
                    row,
                    trials=trials_of(item, quick=quick),
                    value=values[case.name, column.name],
                    tried=_tried(results, tuning, case, column, values[case.name, column.name]),
                    minutes=_short(spent),
                )
                rows.append(row)
            else:
                rows.append(Row(case.name, column.name, refused=_refusal(item, case, column)))
    seeds = [len(cell.runs) for cell in cells.values()]
    rounds = [cell.rounds for key, cell in cells.items() if key[1].startswith(f"{reference}, ")]
    return Comparison(
        reference,
        min(seeds, default=0),
        min(rounds, default=0),
        tuning,
        tuple(name for name, each in item.methods.items() if "widths" in each.run["method"]),
        cases,
        tuple(rows),
    )


def _row(
    case: Case,
    method: str,
    own: Mapping[str, CellResult],
    reference: str,
    budgets: Mapping[str, Mapping[int, float]],
) -> Row:
    runs, others = own[method].runs, own[reference].runs
    within = {each: _within(runs, each, amounts) for each, amounts in budgets.items()}
    theirs = {each: _within(others, each, amounts) for each, amounts in budgets.items()}
    seeds = sorted(set(runs) & set(others))
    return Row(
        case.name,
        method,
        final=_interval(estimate([run.values()[-1] for run in runs.values()])),
        scores={each: _interval(estimate([*within[each].values()])) for each in budgets},
        gains={
            each: _interval(paired_difference(within[each], theirs[each], seeds))
            for each in budgets
        },
        ended=tuple(
            each
            for each, amounts in budgets.items()
            if any(getattr(runs[seed], each)[-1] < amounts[seed] for seed in seeds)
        ),
    )


def _within(
    runs: Mapping[int, Series], budget: str, amounts: Mapping[int, float]
) -> dict[int, float]:
    """Return by seed what a run had learned for a budget; NaN before its first evaluation."""
    return {
        seed: score_at(runs[seed], budget, amount)
        for seed, amount in amounts.items()
        if seed in runs
    }


def _tried(
    results: Results, tuning: Tuning, case: Case, column: Column, value: float
) -> float | None:
    """Return the score with which the worst trial of a value ended."""
    name = tuning.trial(column.name, value)
    ends = [
        run.values()[-1]
        for cell in results.cells.values()
        if (cell.case, cell.method) == (case.name, name)
        for run in cell.runs.values()
    ]
    return _short(min(ends)) if ends and not any(map(math.isnan, ends)) else None


def _minutes(results: Results, tuning: Tuning, case: Case, column: Column) -> float:
    """Return how long the trials of a method in a case took."""
    names = [tuning.trial(column.name, value) for value in tuning.values]
    cells: Sequence[CellResult] = [*results.cells.values()]
    return sum(each.minutes for each in cells if each.case == case.name and each.method in names)


def _refusal(item: Item, case: Case, column: Column) -> str:
    """Return why a method has no numbers in a case: what the library says, or "not run"."""
    if column.cases is None or case.name in column.cases:
        return "not run"
    try:
        from_source(item.source(case, column))
    except ConfigError as error:
        return error.problems[0].message
    return "not compared"


def _interval(over: Estimate) -> Interval:
    return Interval(_known(over.mean), _known(over.low), _known(over.high))


def _known(value: float) -> float | None:
    return _short(value) if math.isfinite(value) else None


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


# --- the rows of the package ----------------------------------------------------------------------


def encode(comparison: Comparison) -> bytes:
    """Return a comparison as the text of `comparison.json`; equal ones give equal bytes."""
    return msgspec.json.encode(comparison, order="deterministic") + b"\n"


def known_rows() -> Comparison:
    """Return the comparison that is part of the package; raise StoreError if it has none."""
    file = files("anyfleet.evidence").joinpath(ROWS)
    try:
        return msgspec.json.decode(file.read_bytes(), type=Comparison)
    except FileNotFoundError as error:
        raise StoreError(
            "this copy of Anyfleet has no rows of the comparison. In a copy of the project run "
            "anyfleet reproduce comparison/comparison, then python -m tools.comparison."
        ) from error
    except msgspec.DecodeError as error:
        raise StoreError(f"{file} is damaged: {error}. Install Anyfleet again.") from error
