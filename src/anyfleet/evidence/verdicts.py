"""Verdicts: does a claim of a paper hold in our runs? `RULE` says how that is decided."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from anyfleet.analysis.intervals import Estimate, estimate
from anyfleet.evidence.items import Case, Claim, Item, is_cost
from anyfleet.evidence.measured import Amount, Found, amount_of, amounts, score_at
from anyfleet.evidence.results import CellResult, Series

Word = Literal[
    "reproduced",
    "direction only",
    "not reproduced",
    "baseline not matched",
    "undecided (scale)",
    "not run",
]
RULE = """\
The gain of a claim is a ratio of costs, the other method's divided by that of the better one, or a
difference of scores. It is taken seed by seed over the cases of the claim (the geometric mean of
ratios, the mean of differences), and has a 95 % interval over seeds. A run that misses its target
counts with all that it spent.

The verdict is, the first that fits:

- **not run**: results are missing or stale.
- **undecided (scale)**: fewer rounds or devices than the paper's, or fewer seeds than five and than
  the paper's; or the interval holds both no gain and the gain that the paper claims.
- **baseline not matched**: data and network are fully given, and the accuracy of the baseline
  differs from the paper's by more than two points.
- **reproduced**: the interval lies above no gain, and reaches the gain that the paper claims.
- **direction only**: it lies above no gain, and below what the paper claims.
- **not reproduced**: it does not lie above no gain, and lies below what the paper claims.

Where a paper claims a direction only, no gain takes the place of its gain.
"""
ENOUGH_SEEDS = 5
MATCHED = 0.02  # of accuracy
_FEWEST = 2  # seeds with an interval
_EXACT = 1e-9  # relative, of calculated numbers


@dataclass(frozen=True)
class Gain:
    """A gain over seeds as people read it: a ratio, or a difference of scores."""

    mean: float
    low: float
    high: float
    ratio: bool

    @property
    def none(self) -> float:
        """The gain of two methods that are equally good."""
        return 1.0 if self.ratio else 0.0


@dataclass(frozen=True)
class Verdict:
    """What has become of a claim against one other method."""

    claim: Claim
    other: str
    word: Word
    why: str
    gain: Gain | None = None
    claimed: float | None = None  # gain, as the paper has it


def verdicts(item: Item, there: Found) -> tuple[Verdict, ...]:
    """Return a verdict for every claim of an item, against each of the other methods."""
    return tuple(
        _verdict(item, there, claim, other) for claim in item.claims for other in claim.than
    )


def gain_of(item: Item, there: Found, claim: Claim, other: str) -> Gain | None:
    """Return the gain of a claim over the seeds that all of its runs have; None without any."""
    rows = [
        (
            amounts(item.cases[name], there.cells[name, claim.better], claim.by),
            amounts(item.cases[name], there.cells[name, other], claim.by),
        )
        for name in claim.cases
        if (name, claim.better) in there.cells and (name, other) in there.cells
    ]
    if not rows:
        return None
    seeds = sorted(set.intersection(*(set(side) for row in rows for side in row)))
    ratio = is_cost(claim.by)
    values = [
        math.fsum(_gain(ours[seed], theirs[seed], ratio=ratio) for ours, theirs in rows) / len(rows)
        for seed in seeds
    ]
    return _readable(estimate(values), ratio=ratio) if values else None


def paper_gain(item: Item, claim: Claim, other: str) -> float | None:
    """Return the gain that a paper claims, or that its numbers have; None: only a direction."""
    if claim.gain is not None:
        return claim.gain
    found = []
    for name in claim.cases:
        row = item.cases[name].paper.get(claim.by, {})
        ours, theirs = row.get(claim.better), row.get(other)
        if ours is not None and theirs is not None:
            found.append(_gain(Amount(ours), Amount(theirs), ratio=is_cost(claim.by)))
    if not found:
        return None
    mean = math.fsum(found) / len(found)
    return math.exp(mean) if is_cost(claim.by) else mean


def _gain(ours: Amount, theirs: Amount, *, ratio: bool) -> float:
    if not ratio:
        return ours.value - theirs.value
    return math.log(theirs.value / ours.value) if ours.value > 0 < theirs.value else 0.0


def _readable(found: Estimate, *, ratio: bool) -> Gain:
    mean, low, high = found.mean, found.low, found.high
    if ratio:
        mean, low, high = math.exp(mean), math.exp(low), math.exp(high)
    return Gain(mean, low, high, ratio)


def _verdict(item: Item, there: Found, claim: Claim, other: str) -> Verdict:
    keys = [(name, method) for name in claim.cases for method in (claim.better, other)]
    claimed, gain = paper_gain(item, claim, other), gain_of(item, there, claim, other)
    lacking = [key for key in keys if key not in there.cells]
    if lacking or gain is None:
        stale = [key for key in lacking if key in there.stale]
        told = "results are stale" if stale else f"{len(lacking)} of {len(keys)} cells were not run"
        return Verdict(claim, other, "not run", told, gain, claimed)
    word, why = _judged(item, there, claim, keys, gain, claimed)
    return Verdict(claim, other, word, why, gain, claimed)


def _judged(
    item: Item,
    there: Found,
    claim: Claim,
    keys: Sequence[tuple[str, str]],
    gain: Gain,
    claimed: float | None,
) -> tuple[Word, str]:
    cells = [there.cells[key] for key in keys]
    small = [*_smaller(item, cells)]
    if small:
        return "undecided (scale)", "; ".join(small)
    if wrong := [*_unmatched(item, there, claim)]:
        return "baseline not matched", "; ".join(wrong)
    most = gain.none if claimed is None else claimed
    above, reaches = gain.low > gain.none, gain.high >= most
    if above:
        told = "the interval lies above no gain"
        return ("reproduced", told) if reaches else ("direction only", f"{told}, below the paper's")
    if not reaches or gain.high <= gain.none:
        return "not reproduced", "the interval does not lie above no gain"
    return "undecided (scale)", "the interval holds no gain as well as the paper's: more seeds"


def _smaller(item: Item, cells: Sequence[CellResult]) -> Iterator[str]:
    """Yield in which ways the runs are smaller than the paper's."""
    rounds, devices = min(cell.rounds for cell in cells), min(cell.devices for cell in cells)
    seeds = min(len(cell.runs) for cell in cells)
    if rounds < item.paper.rounds:
        yield f"{rounds} rounds of {item.paper.rounds}"
    if devices < item.paper.devices:
        yield f"{devices} devices of {item.paper.devices}"
    needed = max(_FEWEST, min(item.paper.seeds, ENOUGH_SEEDS))
    if seeds < needed:
        yield f"{seeds} seeds of {needed}"


def _unmatched(item: Item, there: Found, claim: Claim) -> Iterator[str]:
    """Yield the cases in which the accuracy of the baseline is not the paper's."""
    if item.baseline is None:
        return
    for name in claim.cases:
        case, cell = item.cases[name], there.cells.get((name, item.baseline))
        for measure, row in case.paper.items() if cell is not None else ():
            printed = row.get(item.baseline)
            if printed is None or cell is None:
                continue
            ours, theirs = _accuracy(case, cell.runs, measure, printed)
            if abs(ours - theirs) > MATCHED:
                told = f"{item.baseline} has {100 * ours:.1f} % where the paper has "
                yield f"{name}: {told}{100 * theirs:.1f} %"
                break


def _accuracy(
    case: Case, runs: Mapping[int, Series], measure: str, printed: float
) -> tuple[float, float]:
    """Return our accuracy and the paper's at the same point of a run."""
    known = list(runs.values())
    if measure in ("rounds", "seconds") and case.target is not None:
        return estimate([score_at(run, measure, printed) for run in known]).mean, case.target
    if is_cost(measure):
        return printed, printed  # joules and bytes say nothing of an accuracy
    found = [amount_of(run, measure, case.target) for run in known]
    return estimate([each.value for each in found if each is not None]).mean, printed


def exactly(ours: float, theirs: float) -> bool:
    """Return whether a calculated number is that of the paper."""
    return math.isclose(ours, theirs, rel_tol=_EXACT)
