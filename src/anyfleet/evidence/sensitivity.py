"""Sensitivity: how much a claim about costs depends on the target, where we chose the target.

Runs are evaluated on their way, so that what another target would have cost is known without
running anything again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from anyfleet.analysis.metric import Metric
from anyfleet.evidence.items import Claim, Item, is_cost
from anyfleet.evidence.measured import Found, with_best
from anyfleet.evidence.verdicts import Gain, Verdict, gain_of

SHIFTS = (-0.10, -0.05, 0.0, 0.02)  # of the target


def gains(item: Item, there: Found, verdict: Verdict) -> list[Gain | None]:
    """Return the gain of a claim at each of the shifted targets; None where nobody knows one."""
    claim, found = verdict.claim, with_best(item, there, verdict.claim.by)
    return [gain_of(_shifted(item, shift), found, claim, verdict.other) for shift in SHIFTS]


def with_own_targets(item: Item, there: Found, verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts about costs to a target that the document does not print."""
    for verdict in verdicts:
        claim = verdict.claim
        known = is_cost(claim.by) and verdict.gain is not None
        if known and not _prints(item, claim) and _shares(there, claim):
            yield verdict


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
