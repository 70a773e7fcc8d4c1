"""Sensitivity: how much a claim about costs depends on the target, and on when it is reached.

Runs are evaluated on their way, so that what another target would have cost is known without
running anything again; and so is what it would have cost if the mean of some evaluations counted,
as in a smoothed curve, instead of a single one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from anyfleet.analysis.metric import Metric
from anyfleet.evidence.items import COSTS, Claim, Item, is_cost
from anyfleet.evidence.measured import Found, Key, amount_of, with_best
from anyfleet.evidence.results import CellResult, Series
from anyfleet.evidence.verdicts import Gain, Verdict, gain_of, verdicts

SHIFTS = (-0.10, -0.05, 0.0, 0.02)  # of the target
WINDOWS = (5, 20)  # evaluations whose mean reaches it


def gains(item: Item, there: Found, verdict: Verdict) -> list[Gain | None]:
    """Return the gain of a claim at each of the shifted targets; None where nobody knows one."""
    claim, found = verdict.claim, with_best(item, there, verdict.claim.by)
    items = [_shifted(item, shift) for shift in SHIFTS]
    return [gain_of(each, _decided(each, found), claim, verdict.other) for each in items]


def with_own_targets(item: Item, there: Found, known: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts about costs to a target that the document does not print."""
    for verdict in about_costs(there, known):
        if not _prints(item, verdict.claim):
            yield verdict


def about_costs(there: Found, known: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts about costs to a target."""
    for verdict in known:
        if is_cost(verdict.claim.by) and verdict.gain and _shares(there, verdict.claim):
            yield verdict


def smoothed(item: Item, there: Found, window: int) -> tuple[Verdict, ...]:
    """Return the verdicts of an item if the mean of so many evaluations had to reach a target."""
    cells = {
        key: structs.replace(cell, runs={n: _smooth(run, window) for n, run in cell.runs.items()})
        for key, cell in there.cells.items()
    }
    return verdicts(item, _decided(item, replace(there, cells=cells)))


def _decided(item: Item, there: Found) -> Found:
    """Return what was found, without the runs of cells in which one ended before the target.

    A run that ends at the target of its recipe has nothing after it: it might have reached another
    one. Those that have by chance would favour their method.
    """
    cells = {
        key: cell
        if all(_goes_on(item, key, cell, run) for run in cell.runs.values())
        else structs.replace(cell, runs={})
        for key, cell in there.cells.items()
    }
    return replace(there, cells=cells)


def _goes_on(item: Item, key: Key, cell: CellResult, run: Series) -> bool:
    """Return whether a run reaches the target of its case, or has all of its rounds."""
    target = item.cases[key[0]].target
    amount = amount_of(run, "rounds", target) if target is not None else None
    return amount is None or amount.reached or cell.whole(run)


def _smooth(run: Series, window: int) -> Series:
    """Return a run with the mean of the last evaluations in place of each; the first have none."""
    scores = {
        width: tuple(
            math.fsum(values[end - window : end]) / window for end in range(window, len(values) + 1)
        )
        for width in run.scores
        for values in [run.values(width)]
    }
    spent = {name: getattr(run, name)[window - 1 :] for name in COSTS}
    return structs.replace(run, scores=scores, **spent)


def _prints(item: Item, claim: Claim) -> bool:
    """Return whether the document prints what the target cost in one of the cases."""
    return any(claim.by in item.cases[name].paper for name in claim.cases)


def _shares(there: Found, claim: Claim) -> bool:
    """Return whether the runs of a claim are measured by a share, such as accuracy."""
    cells = [there.cells.get((name, claim.better)) for name in claim.cases]
    runs = [run for cell in cells if cell is not None for run in cell.runs.values()]
    return bool(runs) and all(Metric(run.metric).share for run in runs)


def _shifted(item: Item, shift: float) -> Item:
    """Return the item with the targets of all cases shifted."""
    cases = {
        name: case if case.target is None else replace(case, target=case.target + shift)
        for name, case in item.cases.items()
    }
    return replace(item, cases=cases)
