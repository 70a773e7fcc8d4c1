from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from anyfleet.evidence.items import Case, Claim, Column, Item, Scale
from anyfleet.evidence.measured import Found
from anyfleet.evidence.pages import Standing, item_page
from anyfleet.evidence.results import CellResult, Series
from anyfleet.evidence.sensitivity import gains, smoothed, with_own_targets
from anyfleet.evidence.verdicts import verdicts


def run(scores: Sequence[float], metric: str = "accuracy") -> Series:
    spent = tuple(float(number + 1) for number in range(len(scores)))
    rounds = tuple(range(1, len(scores) + 1))
    return Series(rounds, {"": tuple(scores)}, spent, spent, spent, spent, metric=metric)


def standing(new: Series, old: Series, *, by: str = "rounds", printed: bool = False) -> Standing:
    paper = {"rounds": {"new": 1.0, "old": 2.0}} if printed else {}
    asked = Item(
        "papers/figure",
        "title",
        "Figure 1",
        Scale(4, 10, 1),
        2,
        (by,),
        {"case": Case("case", target=0.5, paper=paper)},
        {name: Column(name, {}) for name in ("new", "old")},
        (Claim("new is better", "new", ("old",), by, ("case",)),),
    )
    cells = {
        ("case", name): CellResult(
            *(name, "case", name, 4, 10, "a machine", "2026-11-17", "abc", 1.0),
            dict.fromkeys(range(2), series),
        )
        for name, series in (("new", new), ("old", old))
    }
    return Standing(asked, None, Found(cells), verdicts(asked, Found(cells)))


NEW, OLD = run([0.41, 0.46, 0.5, 0.51]), run([0.1, 0.2, 0.41, 0.51])


def test_gains_are_those_to_other_targets_from_the_same_runs() -> None:
    found = standing(NEW, OLD)
    (verdict,) = found.verdicts
    known = gains(found.item, found.there, verdict)
    assert [None if each is None else round(each.mean, 3) for each in known] == [
        *(3.0, 2.0, 1.333),  # to 40, 45 and 50 %
        None,  # nobody has 52 %
    ]


def test_a_page_has_them_where_the_target_is_ours() -> None:
    page = item_page(standing(NEW, OLD))
    row = "| new is better | old | × 3 (3 to 3) | × 2 (2 to 2) | × 1.33 (1.33 to 1.33) | – |"
    assert row in page
    assert "## With another target" not in item_page(standing(NEW, OLD, printed=True))
    assert "## With another target" not in item_page(standing(NEW, OLD, by="best"))


def test_only_shares_are_shifted() -> None:
    found = standing(run([9.0, 0.4], "perplexity"), run([9.0, 9.0], "perplexity"))
    assert not [*with_own_targets(found.item, found.there, found.verdicts)]


def test_a_target_may_have_to_be_reached_by_the_mean_of_some_evaluations() -> None:
    swinging, steady = run([0.6, 0.0, 0.4, 0.7, 0.7, 0.7, 0.7]), run([0.5] * 7)
    found = standing(swinging, steady)
    (verdict,) = found.verdicts
    assert verdict.gain is not None
    assert verdict.gain.mean == 1.0  # both in the first round
    (smooth,) = smoothed(found.item, found.there, 5)
    assert smooth.gain is not None
    assert smooth.gain.mean == pytest.approx(5 / 6)  # 0.48 in round 5, 0.5 in round 6
    (missed,) = smoothed(found.item, found.there, 8)  # more evaluations than there are
    assert missed.gain is None


def test_runs_that_ended_at_the_target_tell_nothing_of_what_comes_after_it() -> None:
    """Otherwise the method that ends there would lose to the one that goes on."""
    ended, on = run([0.1, 0.6]), run([0.1, 0.1, 0.1, *[0.6] * 5])
    found = standing(ended, on)
    (verdict,) = found.verdicts
    assert verdict.gain is not None
    assert verdict.gain.mean == 2.0
    (smooth,) = smoothed(found.item, found.there, 2)
    assert smooth.gain is None
    assert gains(found.item, found.there, verdict)[-2:] == [verdict.gain, verdict.gain]
    shifted = standing(run([0.1, 0.51]), on)
    assert gains(shifted.item, shifted.there, shifted.verdicts[0])[-1] is None  # to 52 %
    # A seed that happens to be beyond it would stand for all.
    cells = dict(shifted.there.cells)
    lucky = {0: run([0.1, 0.51]), 1: run([0.1, 0.6])}
    cells["case", "new"] = replace(cells["case", "new"], runs=lucky)
    (verdict,) = verdicts(shifted.item, Found(cells))
    assert [each is None for each in gains(shifted.item, Found(cells), verdict)] == [
        *(False, False, False, True)
    ]


def test_a_variant_that_goes_on_does_not_stand_for_one_that_ended() -> None:
    asked = Item(
        *("papers/figure", "title", "Figure 1", Scale(4, 10, 1), 2, ("rounds",)),
        {"case": Case("case", target=0.5)},
        {name: Column(name, {}) for name in ("new, a", "new, b", "old")},
        (Claim("new is better", "new", ("old",), "rounds", ("case",)),),
        best={"new": ("new, a", "new, b")},
    )
    series = {
        "new, a": run([0.1, 0.6]),
        "new, b": run([0.1] * 8),
        "old": run([*[0.1] * 4, *[0.6] * 4]),
    }
    cells = {
        ("case", name): CellResult(
            *(name, "case", name, 4, 10, "a machine", "2026-11-17", "abc", 1.0),
            dict.fromkeys(range(2), each),
        )
        for name, each in series.items()
    }
    (verdict,) = verdicts(asked, Found(cells))
    assert verdict.gain is not None
    assert verdict.gain.mean == 2.5
    (smooth,) = smoothed(asked, Found(cells), 2)
    assert smooth.gain is None


def test_a_page_tells_what_a_smoothed_curve_says() -> None:
    both = item_page(standing(run([0.6] * 7), run([0.1, *[0.65] * 6])))
    assert "| new is better | old | × 2 (2 to 2) | × 1 (1 to 1): not reproduced | – |" in both
    page = item_page(standing(run([0.6] * 7), run([0.1, 0.1, *[0.65] * 5])))
    row = "| new is better | old | × 3 (3 to 3) | × 1.2 (1.2 to 1.2) | – |"
    assert row in page


def test_a_claim_that_fails_by_the_first_evaluation_may_hold_by_their_mean() -> None:
    swinging = run([0.6, *[0.1] * 9, *[0.6] * 10])
    page = item_page(standing(run([0.1, 0.1, *[0.6] * 18]), swinging))
    told = "it holds in runs in which the mean of 5 evaluations has to reach the target: × 2.33"
    assert told in page
