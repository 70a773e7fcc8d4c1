"""Verdicts: does a claim of a paper hold in our runs? `RULE` says how that is decided."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from anyfleet.analysis.intervals import estimate
from anyfleet.evidence.items import SCORES, Case, Claim, Item, is_cost, is_score
from anyfleet.evidence.measured import (
    Amount,
    Found,
    Key,
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
difference: of scores, or of a diagnostic that should be lower (its mean of all rounds, unless the
claim is about the last one). It is taken
seed by seed over the cases of the claim (the geometric mean of ratios, the mean of differences),
and has a 95 % interval over seeds. A run that misses its target counts with all that it spent: its
cost is at least that. Where both methods miss it, nobody knows a gain, and the case does not count
for that seed. Where only the other one misses it, the gain is at least its number (≥): that decides
for no loss. Where only the better one misses it, there is no gain: a ratio above 1 counts as 1, and
the gain is at most that (≤), which decides for no gain.

The verdict is, the first that fits:

- **not run**: results are missing or stale, or those of a baseline whose accuracy the paper prints.
- **undecided (scale)**: fewer rounds or devices than the paper's; fewer seeds with a gain than five
  and than the paper's, or a single one; a smaller network or less data; or the interval holds gains
  as well as losses, or bounds that decide nothing; or the runs of the baseline ended at the target
  before nine tenths of the cost that the paper prints, so that nobody knows whether it matches.
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
_NEARLY = 0.9  # of a printed cost: a run that goes on so far has the accuracy that it has there
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
    seeds: int = 1  # that have a gain
    least: bool = False  # at least this: the other method missed its target in some runs
    most: bool = False  # at most this: the better one missed it in some runs

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
        gain = self.gain
        return gain is not None and gain.low > gain.none and not gain.most

    @property
    def below(self) -> bool:
        """Whether no part of the interval lies above no gain, at whatever scale."""
        gain = self.gain
        return gain is not None and gain.high <= gain.none and not gain.least


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
        both = [seed for seed in gains if seed in less]
        gains = {seed: _Known(gains[seed].value - less[seed].value) for seed in both}
    found = [gains[seed] for seed in sorted(gains)]
    return _readable(found, claim) if found else None


class _Known(NamedTuple):
    """What is known of a gain, of costs of its logarithm: the number, or that it is a bound."""

    value: float
    least: bool = False
    most: bool = False


def _mean(found: Sequence[_Known]) -> _Known:
    """Return the mean of gains, which is a bound if one of them is."""
    value = math.fsum(each.value for each in found) / len(found)
    return _Known(value, any(each.least for each in found), any(each.most for each in found))


def _gains(item: Item, there: Found, claim: Claim, other: str, by: str) -> dict[int, _Known]:
    """Return the mean gain over the cases of a claim, by seed; of costs its logarithm."""
    rows = [
        _sides(item, there, claim, other, by, name)
        for name in claim.cases
        if (name, claim.better) in there.cells and (name, other) in there.cells
    ]
    seeds = sorted(set.intersection(*(set(side) for row in rows for side in row))) if rows else []
    gains: dict[int, _Known] = {}
    for seed in seeds:
        known = [
            gain
            for ours, theirs in rows
            if (gain := _gain(ours[seed], theirs[seed], kind_of(by))) is not None
        ]
        if known:
            gains[seed] = _mean(known)
    return gains


def _sides(
    item: Item, there: Found, claim: Claim, other: str, by: str, case: str
) -> tuple[dict[int, Amount], dict[int, Amount]]:
    """Return a measure of the better method and of the other one in a case, by seed."""
    cells = there.cells[case, claim.better], there.cells[case, other]
    if by in item.diagnostics:
        groups = claim.groups and (item.groups[claim.groups[0]], item.groups[claim.groups[1]])
        first, second = groups or (None, None)
        return (
            diagnosed(cells[0], by, first, last=claim.last),
            diagnosed(cells[1], by, second, last=claim.last),
        )
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
    found: list[_Known] = []
    for name in claim.cases:
        row = item.cases[name].paper.get(claim.by, {})
        ours, theirs = row.get(claim.better), row.get(other)
        if ours is not None and theirs is not None:
            gain = _gain(Amount(ours), Amount(theirs), kind_of(claim.by))
            found += [] if gain is None else [gain]
    if not found:
        return None
    mean = _mean(found).value
    return math.exp(mean) if is_cost(claim.by) else mean


def _gain(ours: Amount, theirs: Amount, kind: Kind) -> _Known | None:
    """Return a difference, or the logarithm of a ratio of costs; None: nobody knows."""
    if kind == "points":
        return _Known(ours.value - theirs.value)
    if kind == "plain":
        return _Known(theirs.value - ours.value)
    if not (ours.reached or theirs.reached) or not ours.value > 0 < theirs.value:
        return None
    gain = math.log(theirs.value / ours.value)
    return (
        _Known(gain, least=not theirs.reached) if ours.reached else _Known(min(gain, 0), most=True)
    )


def _readable(known: Sequence[_Known], claim: Claim) -> Gain:
    """Return a gain over seeds as people read it."""
    found, whole = estimate([each.value for each in known]), _mean(known)
    mean, low, high = found.mean, found.low, found.high
    kind = kind_of(claim.by)
    if kind == "ratio":
        mean, low, high = math.exp(mean), math.exp(low), math.exp(high)
    return Gain(mean, low, high, kind, claim.within, len(known), whole.least, whole.most)


def _verdict(item: Item, there: Found, claim: Claim, other: str) -> Verdict:
    methods = dict.fromkeys((claim.better, other))
    keys = [(name, method) for name in claim.cases for method in methods]
    keys += [key for key, _, _ in _printed(item, claim) if key not in keys]
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
    missed = _missed(item, there, claim, tuple(methods))
    return Verdict(claim, other, word, "; ".join((why, *missed)), gain, claimed)


def _judged(
    item: Item, there: Found, claim: Claim, other: str, gain: Gain | None
) -> tuple[Word, str]:
    claimed = paper_gain(item, claim, other)
    small = [*_smaller(item, there, claim, other, gain)]
    if small:
        return "undecided (scale)", "; ".join(small)
    wrong, unknown = _unmatched(item, there, claim)
    if wrong:
        return "baseline not matched", "; ".join(wrong)
    if unknown:
        return "undecided (scale)", "; ".join(unknown)
    assert gain is not None  # without one it has too few seeds
    reaches = gain.high >= (gain.none if claimed is None else claimed)
    none = f"a loss of {100 * gain.within:g} points" if gain.within else "no gain"
    if gain.low > gain.none:
        told = f"the interval lies above {none}"
        if gain.most:
            return "undecided (scale)", f"{told}, but of gains that are at most these"
        if reaches:
            return "reproduced", told
        return "direction only", f"{told}, below the paper's"
    if gain.high <= gain.none:
        told = f"no part of the interval lies above {none}"
        if gain.least:
            return "undecided (scale)", f"{told}, but gains are at least these"
        return "not reproduced", told
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


def _smaller(
    item: Item, there: Found, claim: Claim, other: str, gain: Gain | None
) -> Iterator[str]:
    """Yield in which ways the runs are smaller than the paper's.

    Devices are those of the better method: another one may be a device that learns alone.
    """
    ours = [there.cells[name, claim.better] for name in claim.cases]
    cells = [*ours, *(there.cells[name, other] for name in claim.cases)]
    rounds, devices = min(cell.rounds for cell in cells), min(cell.devices for cell in ours)
    seeds = 0 if gain is None else gain.seeds
    if item.paper.rounds is not None and rounds < item.paper.rounds:
        yield f"{rounds} rounds of {item.paper.rounds}"
    if devices < item.paper.devices:
        yield f"{devices} devices of {item.paper.devices}"
    needed = max(_FEWEST, min(item.paper.seeds, ENOUGH_SEEDS))
    if not seeds:
        yield "nobody knows a gain"
    elif seeds < needed:
        yield f"{seeds} seed{'s' if seeds > 1 else ''} of {needed}"
    if item.smaller:
        yield item.smaller


def _printed(item: Item, claim: Claim) -> Iterator[tuple[Key, str, float]]:
    """Yield what the paper prints of the baseline in the cases of a claim, by which measures.

    Only scores of the whole model count, and costs that tell one: what is left of a model that
    nobody trained to be cut says little about a baseline, and joules and bytes nothing.
    """
    if item.baseline is None:
        return
    pairs = {(case.name, column.name) for case, column in item.pairs()}
    for name in claim.cases:
        case, key = item.cases[name], (name, item.baseline)
        for measure, row in case.paper.items() if key in pairs else ():
            printed = row.get(item.baseline)
            at_a_cost = measure in ("rounds", "seconds") and case.target is not None
            if printed is not None and (measure in SCORES or at_a_cost):
                yield key, measure, printed


def _unmatched(item: Item, there: Found, claim: Claim) -> tuple[list[str], list[str]]:
    """Return the cases in which the accuracy of the baseline is not the paper's.

    The second list has those in which nobody knows, since runs ended before.
    """
    wrong: dict[Key, str] = {}
    unknown: dict[Key, str] = {}
    for key, measure, printed in _printed(item, claim):
        case, known = item.cases[key[0]], list(there.cells[key].runs.values())
        if not known:
            unknown[key] = f"{key[0]}: nobody knows what {key[1]} has"
            continue
        theirs = printed if case.target is None or measure in SCORES else case.target
        ours = _accuracy(case, known, measure, printed)
        early = [run for run in known if is_cost(measure) and _ended(run, measure, printed)]
        if not abs(ours - theirs) <= MATCHED:  # nor where it is not known
            told = f"{key[1]} has {100 * ours:.1f} % where the paper has {100 * theirs:.1f} %"
            wrong.setdefault(key, f"{key[0]}: {told}")
        elif early:
            told = f"{key[1]} has {100 * theirs:g} % long before the paper's {printed:,g} {measure}"
            unknown[key] = f"{key[0]}: {told}, where its runs ended"
    return list(wrong.values()), [told for key, told in unknown.items() if key not in wrong]


def _ended(run: Series, measure: str, printed: float) -> bool:
    """Return whether a run ended long before a cost that the paper prints."""
    spent = getattr(run, measure)
    return bool(spent) and spent[-1] < _NEARLY * printed


def _accuracy(case: Case, runs: Sequence[Series], measure: str, printed: float) -> float:
    """Return our accuracy at the end of runs, or the best one until a printed cost."""
    if is_cost(measure):
        return estimate([best_until(run, measure, printed) for run in runs]).mean
    found = [amount_of(run, measure, case.target) for run in runs]
    return estimate([each.value for each in found if each is not None]).mean


def exactly(ours: float, theirs: float) -> bool:
    """Return whether a calculated number is that of the paper."""
    return math.isclose(ours, theirs, rel_tol=_EXACT)
