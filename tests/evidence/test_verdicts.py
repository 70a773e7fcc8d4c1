import math
from collections.abc import Mapping, Sequence

import pytest

from anyfleet.evidence.items import Case, Claim, Column, Item, Scale
from anyfleet.evidence.measured import Found, amount_of, score_at
from anyfleet.evidence.results import CellResult, Series
from anyfleet.evidence.verdicts import Verdict, gain_of, paper_gain, verdicts

METHODS = {name: Column(name, {}) for name in ("new", "old")}


def run(scores: Sequence[float], seconds: float = 2.0) -> Series:
    count = len(scores)
    spent = tuple(seconds * (number + 1) for number in range(count))
    rounds = tuple(range(1, count + 1))
    return Series(rounds, {"": tuple(scores)}, spent, spent, spent, spent)


def cell(case: str, method: str, runs: Mapping[int, Series], *, rounds: int = 4) -> CellResult:
    place = ("x", case, method, rounds, 10, "a machine", "2026-11-17", "abc", 1.0)
    return CellResult(*place, dict(runs))


def item(by: str = "rounds", gain: float | None = None, **more: object) -> Item:
    paper = {"rounds": {"new": 1.0, "old": 2.0}}
    case = Case("case", target=0.5, paper=paper)
    claim = Claim("new is better", "new", ("old",), by, ("case",), gain)
    known: dict[str, object] = {
        "paper": Scale(4, 10, 3),
        "seeds": 3,
        "measures": (by,),
        "cases": {"case": case},
        "methods": METHODS,
        "claims": (claim,),
    }
    return Item("papers/table", "title", "Table 1", **{**known, **more})  # type: ignore[arg-type]


def judged(asked: Item, new: Sequence[Series], old: Sequence[Series], rounds: int = 4) -> Verdict:
    cells = {
        ("case", name): cell("case", name, dict(enumerate(runs)), rounds=rounds)
        for name, runs in (("new", new), ("old", old))
    }
    (found,) = verdicts(asked, Found(cells))
    return found


AT = {place: run([0.1] * place + [0.6] * (4 - place)) for place in range(5)}  # reached in place + 1


def test_costs_are_those_of_the_first_evaluation_that_reaches_the_target() -> None:
    found = amount_of(AT[1], "seconds", 0.5)
    assert found is not None
    assert (found.value, found.reached) == (4.0, True)
    missed = amount_of(AT[4], "rounds", 0.5)
    assert missed is not None
    assert (missed.value, missed.reached) == (4.0, False)
    best, last = (amount_of(run([0.1, 0.7, 0.6]), name, None) for name in ("best", "score"))
    assert best is not None
    assert last is not None
    assert (best.value, last.value) == (0.7, 0.6)
    assert amount_of(AT[1], "best@0.5", None) is None
    assert score_at(AT[1], "rounds", 1.0) == 0.1
    assert math.isnan(score_at(AT[1], "rounds", 0.5))


@pytest.mark.parametrize(
    ("new", "old", "word"),
    [
        ((0, 0, 0), (1, 1, 1), "reproduced"),  # twice as fast, as the paper's numbers say
        ((1, 1, 1), (2, 2, 2), "direction only"),  # × 1.5
        ((2, 2, 2), (1, 1, 1), "not reproduced"),
        ((1, 1, 1), (1, 1, 1), "not reproduced"),
        ((0, 3, 1), (3, 0, 1), "undecided (scale)"),  # anything may be
    ],
)
def test_the_interval_decides(new: Sequence[int], old: Sequence[int], word: str) -> None:
    found = judged(item(), [AT[place] for place in new], [AT[place] for place in old])
    assert found.word == word
    assert found.claimed == pytest.approx(2.0)


def test_a_smaller_scale_decides_nothing() -> None:
    new, old = [AT[0]] * 3, [AT[1]] * 3
    assert judged(item(), new[:2], old[:2]).why == "2 seeds of 3"
    fewer = judged(item(), new, old, rounds=3)
    assert (fewer.word, fewer.why) == ("undecided (scale)", "3 rounds of 4")
    larger = judged(item(paper=Scale(4, 20, 3)), new, old)
    assert larger.why == "10 devices of 20"


def test_a_baseline_must_have_the_accuracy_of_the_paper() -> None:
    new, old = [AT[0]] * 3, [AT[1]] * 3
    assert judged(item(baseline="new"), new, old).word == "baseline not matched"  # 60 %, not 50 %
    near = [run([0.1, 0.51, 0.6, 0.6])] * 3
    assert judged(item(baseline="old"), new, near).word == "reproduced"


def test_scores_are_compared_by_their_difference() -> None:
    asked = item("best", 0.1)
    old = [run([0.5 + seed / 100]) for seed in range(3)]
    new = [run([0.6 + seed / 100 + (0.001 * seed)]) for seed in range(3)]
    found = judged(asked, new, old)
    assert found.word == "reproduced"
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.101)
    assert judged(item("best", 0.3), new, old).word == "direction only"
    assert judged(item("best"), new, old).word == "reproduced"  # a direction is all that is claimed


def test_ratios_are_pooled_over_cases_by_their_geometric_mean() -> None:
    case = Case("case", target=0.5, paper={"rounds": {"new": 1.0, "old": 4.0}})
    other = Case("other", target=0.5, paper={"rounds": {"new": 2.0, "old": 2.0}})
    claim = Claim("", "new", ("old",), "rounds", ("case", "other"))
    asked = item(cases={"case": case, "other": other}, claims=(claim,))
    assert paper_gain(asked, claim, "old") == pytest.approx(2.0)
    cells = {
        (name, method): cell(name, method, dict.fromkeys(range(3), AT[place]))
        for name, method, place in (
            ("case", "new", 0),
            ("case", "old", 3),
            ("other", "new", 1),
            ("other", "old", 1),
        )
    }
    gain = gain_of(asked, Found(cells), claim, "old")
    assert gain is not None
    assert (gain.mean, gain.low, gain.high) == pytest.approx((2.0, 2.0, 2.0))


def test_what_was_not_run_has_no_verdict() -> None:
    (found,) = verdicts(item(), Found({}, missing=(("case", "new"), ("case", "old"))))
    assert (found.word, found.why) == ("not run", "2 of 2 cells were not run")
    (stale,) = verdicts(item(), Found({}, stale=(("case", "new"),)))
    assert stale.why == "results are stale"
