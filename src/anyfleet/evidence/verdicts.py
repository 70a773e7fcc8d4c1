"""Verdicts: does a claim of a paper hold in our runs? `RULE` says how that is decided."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from anyfleet.analysis.intervals import Estimate, estimate
from anyfleet.evidence.items import Case, Claim, Item, is_cost, is_score
from anyfleet.evidence.measured import (
    Amount,
    Found,
    amount_of,
    amounts,
    best_until,
    diagnosed,
    with_best,
)
from anyfleet.evidence.results import Series

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
difference: of scores, or of a diagnostic that should be lower (its mean of all rounds). It is taken
seed by seed over the cases of the claim (the geometric mean of ratios, the mean of differences),
and has a 95 % interval over seeds. A run that misses its target counts with all that it spent: its
cost is at least that. Where both methods miss it, nobody knows a gain, and the case does not count
for that seed. Where only the better one misses it, there is no gain: a ratio above 1 counts as 1.

The verdict is, the first that fits:

- **not run**: results are missing or stale.
- **undecided (scale)**: fewer rounds or devices than the paper's, fewer seeds than five and than
  the paper's, or a single one; a smaller network or less data; or no gain is known; or the interval
  holds gains as well as losses.
- **baseline not matched**: data and network are fully given, and the accuracy of the baseline
  differs from the paper's by more than two points.
- **reproduced**: the interval lies above no gain, and reaches the gain that the paper claims.
- **direction only**: it lies above no gain, and below what the paper claims.
- **not reproduced**: no part of it lies above no gain.

Where a paper claims a direction only, no gain takes the place of its gain. Where it says that two
methods are about equal, a loss of two points of accuracy does. Where it reports a method with the
best of several settings, the variant counts that is best by the measure of the claim in each case,
chosen by the same runs, which favours it.
"""
ENOUGH_SEEDS = 5
MATCHED = 0.02  # of accuracy
_FEWEST = 2  # seeds with an interval
_EXACT = 1e-9  # relative, of calculated numbers


Kind = Literal["ratio", "points", "plain"]  # of costs; a difference of scores, of diagnostics


@dataclass(frozen=True)
class Gain:
    """A gain over seeds as people read it: a ratio, or a difference."""

    mean: float
    low: float
    high: float
    kind: Kind
    within: float = 0.0  # a loss that the claim allows

    @property
    def none(self) -> float:
        """The gain of two methods that are equally good, less the loss that the claim allows."""
        return 1.0 if self.kind == "ratio" else -self.within


@dataclass(frozen=True)
class Verdict:
    """What has become of a claim against one other method."""

    claim: Claim
    other: str
    word: Word
    why: str
    gain: Gain | None = None
    claimed: float | None = None  # gain, as the paper has it

    @property
    def above(self) -> bool:
        """Whether the interval lies above no gain, at whatever scale."""
        return self.gain is not None and self.gain.low > self.gain.none


def verdicts(item: Item, there: Found) -> tuple[Verdict, ...]:
    """Return a verdict for every claim of an item, against each of the other methods."""
    return tuple(
        _verdict(item, with_best(item, there, claim.by), claim, other)
        for claim in item.claims
        for other in claim.than
    )


def gain_of(item: Item, there: Found, claim: Claim, other: str) -> Gain | None:
    """Return the gain of a claim over the seeds that all of its runs have; None without any."""
    gains = _gains(item, there, claim, other, claim.by)
    if claim.more_than is not None:
        less = _gains(item, there, claim, other, claim.more_than)
        gains = {seed: gain - less[seed] for seed, gain in gains.items() if seed in less}
    values = [gains[seed] for seed in sorted(gains)]
    return _readable(estimate(values), claim) if values else None


def _gains(item: Item, there: Found, claim: Claim, other: str, by: str) -> dict[int, float]:
    """Return the mean gain over the cases of a claim, by seed; of costs its logarithm."""
    rows = [
        _sides(item, there, claim, other, by, name)
        for name in claim.cases
        if (name, claim.better) in there.cells and (name, other) in there.cells
    ]
    seeds = sorted(set.intersection(*(set(side) for row in rows for side in row))) if rows else []
    gains: dict[int, float] = {}
    for seed in seeds:
        known = [
            gain
            for ours, theirs in rows
            if (gain := _gain(ours[seed], theirs[seed], kind_of(by))) is not None
        ]
        if known:
            gains[seed] = math.fsum(known) / len(known)
    return gains


def _sides(
    item: Item, there: Found, claim: Claim, other: str, by: str, case: str
) -> tuple[dict[int, Amount], dict[int, Amount]]:
    """Return a measure of the better method and of the other one in a case, by seed."""
    cells = there.cells[case, claim.better], there.cells[case, other]
    if by in item.diagnostics:
        groups = claim.groups and (item.groups[claim.groups[0]], item.groups[claim.groups[1]])
        first, second = groups or (None, None)
        return diagnosed(cells[0], by, first), diagnosed(cells[1], by, second)
    own = item.cases[case]
    return amounts(own, cells[0], by), amounts(own, cells[1], by)


def kind_of(measure: str) -> Kind:
    """Return how two amounts of a measure are compared."""
    if is_cost(measure):
        return "ratio"
    return "points" if is_score(measure) else "plain"


def paper_gain(item: Item, claim: Claim, other: str) -> float | None:
    """Return the gain that a paper claims, or that its numbers have; None: only a direction."""
    if isinstance(claim.gain, float):
        return claim.gain
    if claim.gain is not None or claim.more_than is not None or claim.within:
        return None
    found: list[float] = []
    for name in claim.cases:
        row = item.cases[name].paper.get(claim.by, {})
        ours, theirs = row.get(claim.better), row.get(other)
        if ours is not None and theirs is not None:
            gain = _gain(Amount(ours), Amount(theirs), kind_of(claim.by))
            found += [] if gain is None else [gain]
    if not found:
        return None
    mean = math.fsum(found) / len(found)
    return math.exp(mean) if is_cost(claim.by) else mean


def _gain(ours: Amount, theirs: Amount, kind: Kind) -> float | None:
    """Return a difference, or the logarithm of a ratio of costs; None: nobody knows."""
    if kind == "points":
        return ours.value - theirs.value
    if kind == "plain":
        return theirs.value - ours.value
    if not (ours.reached or theirs.reached) or not ours.value > 0 < theirs.value:
        return None
    gain = math.log(theirs.value / ours.value)
    return gain if ours.reached else min(gain, 0.0)


def _readable(found: Estimate, claim: Claim) -> Gain:
    mean, low, high = found.mean, found.low, found.high
    kind = kind_of(claim.by)
    if kind == "ratio":
        mean, low, high = math.exp(mean), math.exp(low), math.exp(high)
    return Gain(mean, low, high, kind, claim.within)


def _verdict(item: Item, there: Found, claim: Claim, other: str) -> Verdict:
    keys = [(name, method) for name in claim.cases for method in (claim.better, other)]
    claimed = paper_gain(item, claim, other)
    lacking = [key for key in keys if key not in there.cells]
    if lacking:
        stale = [key for key in lacking if key in there.stale]
        told = "results are stale" if stale else f"{len(lacking)} of {len(keys)} cells were not run"
        return Verdict(claim, other, "not run", told, None, claimed)
    if claim.by in item.diagnostics and not all(diagnosed(there.cells[k], claim.by) for k in keys):
        told = f"result files from before lack the diagnostic {claim.by}"
        return Verdict(claim, other, "not run", told, None, claimed)
    gain = gain_of(item, there, claim, other)
    word, why = _judged(item, there, claim, other, gain)
    missed = _missed(item, there, claim, (claim.better, other))
    return Verdict(claim, other, word, "; ".join((why, *missed)), gain, claimed)


def _judged(
    item: Item, there: Found, claim: Claim, other: str, gain: Gain | None
) -> tuple[Word, str]:
    claimed = paper_gain(item, claim, other)
    small = [*_smaller(item, there, claim, other)]
    if small:
        return "undecided (scale)", "; ".join(small)
    if wrong := [*_unmatched(item, there, claim)]:
        return "baseline not matched", "; ".join(wrong)
    if gain is None:
        return "undecided (scale)", "nobody knows a gain"
    reaches = gain.high >= (gain.none if claimed is None else claimed)
    none = f"a loss of {100 * gain.within:g} points" if gain.within else "no gain"
    if gain.low > gain.none:
        told = f"the interval lies above {none}"
        return ("reproduced", told) if reaches else ("direction only", f"{told}, below the paper's")
    if gain.high <= gain.none:
        return "not reproduced", f"no part of the interval lies above {none}"
    told = "the interval holds gains and losses"
    return "undecided (scale)", told if reaches else f"{told}, none as large as the paper's"


def _missed(item: Item, there: Found, claim: Claim, methods: Sequence[str]) -> Iterator[str]:
    """Yield for each method in how many runs it missed the target."""
    for method in methods if is_cost(claim.by) else ():
        found = [
            amount.reached
            for name in claim.cases
            for amount in amounts(item.cases[name], there.cells[name, method], claim.by).values()
        ]
        if not all(found):
            yield f"{method} missed the target in {found.count(False)} of {len(found)} runs"


def _smaller(item: Item, there: Found, claim: Claim, other: str) -> Iterator[str]:
    """Yield in which ways the runs are smaller than the paper's.

    Devices are those of the better method: another one may be a device that learns alone.
    """
    ours = [there.cells[name, claim.better] for name in claim.cases]
    cells = [*ours, *(there.cells[name, other] for name in claim.cases)]
    rounds, devices = min(cell.rounds for cell in cells), min(cell.devices for cell in ours)
    seeds = min(len(cell.runs) for cell in cells)
    if item.paper.rounds is not None and rounds < item.paper.rounds:
        yield f"{rounds} rounds of {item.paper.rounds}"
    if devices < item.paper.devices:
        yield f"{devices} devices of {item.paper.devices}"
    needed = max(_FEWEST, min(item.paper.seeds, ENOUGH_SEEDS))
    if seeds < needed:
        yield f"{seeds} seeds of {needed}"
    if item.smaller:
        yield item.smaller


def _unmatched(item: Item, there: Found, claim: Claim) -> Iterator[str]:
    """Yield the cases in which the accuracy of the baseline is not the paper's.

    Only scores of the whole model count: what is left of a model that nobody trained to be cut says
    little about a baseline.
    """
    if item.baseline is None:
        return
    for name in claim.cases:
        case, cell = item.cases[name], there.cells.get((name, item.baseline))
        for measure, row in case.paper.items() if cell is not None else ():
            printed = row.get(item.baseline)
            if printed is None or cell is None or "@" in measure:
                continue
            ours, theirs = _accuracy(case, cell.runs, measure, printed)
            if not abs(ours - theirs) <= MATCHED:  # nor where it is not known
                told = f"{item.baseline} has {100 * ours:.1f} % where the paper has "
                yield f"{name}: {told}{100 * theirs:.1f} %"
                break


def _accuracy(
    case: Case, runs: Mapping[int, Series], measure: str, printed: float
) -> tuple[float, float]:
    """Return our accuracy and the paper's at the same point of a run: the best one until then."""
    known = list(runs.values())
    if measure in ("rounds", "seconds") and case.target is not None:
        return estimate([best_until(run, measure, printed) for run in known]).mean, case.target
    if is_cost(measure):
        return printed, printed  # joules and bytes say nothing of an accuracy
    found = [amount_of(run, measure, case.target) for run in known]
    return estimate([each.value for each in found if each is not None]).mean, printed


def exactly(ours: float, theirs: float) -> bool:
    """Return whether a calculated number is that of the paper."""
    return math.isclose(ours, theirs, rel_tol=_EXACT)
