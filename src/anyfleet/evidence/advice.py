"""Advice for a fleet: the methods that did best in the cases of the comparison most like it.

The answer is computed from the rows of the comparison and from nothing else. Cases are ordered by
how far their facts are from those of the fleet, and the nearest count. A method is judged by its
mean gain over the reference in these cases: for equal time and bytes, and for equal energy where
the fleet has limits of energy. Methods that the library refuses in one of the cases, and methods
that train the whole model where some devices cannot hold it, are no candidates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anyfleet.evidence.comparison import Comparison, Row
from anyfleet.evidence.fleet_facts import FleetFacts

CANDIDATES = 3
FAR = 1.0  # a fleet farther than this from all cases is unlike any of them
_NEAR = 0.25  # cases at most so much farther than the nearest count too
_MOST = 4  # cases
# How far apart two fleets are, in units of "the data are skewed here and alike there".
_PER_DROP_OUT = 5.0
_PER_LOST_COLUMN = 10.0
_PER_DECADE = 0.5  # of the spread of speeds, and of the seconds of an upload


@dataclass(frozen=True)
class Candidate:
    """A method to try: its mean gain over the reference, and the rows that say so."""

    method: str
    gain: float  # of score
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Advice:
    """An answer: the cases most like a fleet, the budgets that count, and the best methods."""

    facts: FleetFacts
    cases: tuple[str, ...]
    away: float  # distance of the nearest case
    budgets: tuple[str, ...]
    candidates: tuple[Candidate, ...]  # the best first


def advise(facts: FleetFacts, comparison: Comparison) -> Advice:
    """Return the methods that did best in the cases most like a fleet, at most three."""
    cases = nearest(facts, comparison)
    away = min((distance(facts, comparison.cases[case].facts) for case in cases), default=math.inf)
    budgets = ("seconds", "bytes", "joules") if facts.limited_energy else ("seconds", "bytes")
    allowed = comparison.sub_models if facts.too_small else comparison.methods
    found = [
        candidate
        for method in allowed
        if (candidate := _judged(method, comparison, cases, budgets)) is not None
    ]
    found.sort(key=lambda each: -each.gain)
    return Advice(facts, cases, away, budgets, tuple(found[:CANDIDATES]))


def nearest(facts: FleetFacts, comparison: Comparison) -> tuple[str, ...]:
    """Return the cases that are most like a fleet, the nearest first."""
    away = {name: distance(facts, case.facts) for name, case in comparison.cases.items()}
    order = sorted(away, key=lambda name: away[name])
    least = min(away.values(), default=0.0)
    return tuple(name for name in order if away[name] <= least + _NEAR)[:_MOST]


def distance(one: FleetFacts, other: FleetFacts) -> float:
    """Return how far apart two fleets are, 0 for equal facts; what is not known does not count."""
    return math.fsum(_differences(one, other))


def _differences(one: FleetFacts, other: FleetFacts) -> Iterator[float]:
    yield _PER_DROP_OUT * abs(one.drop_outs - other.drop_outs)
    yield _PER_LOST_COLUMN * abs(one.lost_columns - other.lost_columns)
    yield _PER_DECADE * abs(math.log10(one.spread / other.spread))
    if one.upload and other.upload:
        yield _PER_DECADE * abs(math.log10(one.upload / other.upload))
    if one.skewed is not None and other.skewed is not None:
        yield float(one.skewed != other.skewed)


def _judged(
    method: str, comparison: Comparison, cases: Sequence[str], budgets: Sequence[str]
) -> Candidate | None:
    """Return a method with its mean gain; None where a row has no number."""
    rows = tuple(row for case in cases if (row := comparison.of(case).get(method)) is not None)
    gains = [
        gain.mean
        for row in rows
        for budget in budgets
        if (gain := row.gains.get(budget)) is not None and gain.mean is not None
    ]
    if len(gains) < len(cases) * len(budgets) or not gains:
        return None
    return Candidate(method, math.fsum(gains) / len(gains), rows)
