import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from anyfleet.evidence.collection import evidence_page
from anyfleet.evidence.items import Case, Claim, Column, Item, Scale
from anyfleet.evidence.measured import Found, amount_of, score_at
from anyfleet.evidence.pages import Standing, item_page, told_gain
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


def test_a_target_that_both_miss_says_nothing() -> None:
    never = [run([0.1] * 4, seconds=each) for each in (1.0, 1.0, 1.0)]
    slow = [run([0.1] * 4, seconds=each) for each in (2.0, 2.0, 2.0)]
    found = judged(item("seconds"), never, slow)
    assert (found.word, found.gain) == ("undecided (scale)", None)
    assert "new missed the target in 3 of 3 runs" in found.why
    one = judged(item("seconds"), [AT[0], AT[0], never[0]], [AT[1], AT[1], slow[0]])
    assert one.gain is not None
    assert one.gain.mean == pytest.approx(2.0)  # the seed in which both miss it does not count


def test_a_method_that_misses_the_target_gains_nothing() -> None:
    never = [run([0.1] * 4, seconds=1.0)] * 3  # 4 s in all, where the other has it after 6 s
    found = judged(item("seconds"), never, [AT[2]] * 3)
    assert found.word == "not reproduced"
    assert found.gain is not None
    assert (found.gain.mean, found.gain.most, found.gain.least) == (1.0, True, False)
    assert told_gain(found.gain) == "≤ × 1 (1 to 1)"


def test_a_gain_that_is_at_least_its_number_decides_for_no_loss() -> None:
    """Who misses the target may have spent little until the end of its run."""
    never = [run([0.1] * 4, seconds=1.0)] * 3  # 4 s in all, where the better one has it after 6 s
    found = judged(item("seconds"), [AT[2]] * 3, never)
    assert found.word == "undecided (scale)"
    assert "gains are at least these; old missed the target in 3 of 3 runs" in found.why
    assert not found.below
    assert found.gain is not None
    assert told_gain(found.gain) == "≥ × 0.667 (0.667 to 0.667)"


def test_a_gain_that_is_at_most_its_number_decides_for_no_gain() -> None:
    late = run([0.1, 0.1, 0.1, 0.6], seconds=1e6)
    found = judged(item("seconds"), [AT[0], AT[0], AT[0], AT[0], AT[4]], [late] * 5)
    assert found.gain is not None
    assert found.gain.most
    assert found.word == "undecided (scale)"
    hardly = judged(item("seconds"), [*[AT[0]] * 40, AT[4]], [late] * 41)
    assert hardly.gain is not None
    assert hardly.gain.low > 1.0
    assert (hardly.word, hardly.above) == ("undecided (scale)", False)
    assert hardly.why.startswith("the interval lies above no gain, but of gains that are at most")


def test_a_target_that_only_the_other_misses_is_a_gain() -> None:
    found = judged(item("rounds", 2.0), [AT[0]] * 3, [AT[4]] * 3)
    assert found.word == "reproduced"
    assert found.gain is not None
    assert found.gain.mean == 4.0
    assert found.why.endswith("old missed the target in 3 of 3 runs")


def test_an_interval_with_gains_and_losses_decides_nothing() -> None:
    """It may exclude what the paper claims all the same."""
    old = [run([0.5 + each]) for each in (0.0, 0.01, 0.03)]
    found = judged(item("best", 0.2), [run([0.51])] * 3, old)
    assert found.word == "undecided (scale)"
    assert found.why == "the interval holds gains and losses, none as large as the paper's"


def test_devices_are_those_of_the_better_method() -> None:
    cells = {
        ("case", name): CellResult(
            *("x", "case", name, 4, devices, "a machine", "2026-11-17", "abc", 1.0),
            dict(enumerate(runs)),
        )
        for name, devices, runs in (("new", 10, [AT[0]] * 3), ("old", 1, [AT[1]] * 3))
    }
    (found,) = verdicts(item(), Found(cells))
    assert found.word == "reproduced"


def test_a_lead_may_be_larger_by_one_score_than_by_another() -> None:
    def both(whole: float, quarter: float) -> Series:
        scores: dict[str, tuple[float | None, ...]] = {"": (whole,), "0.25": (quarter,)}
        return Series((1,), scores, (1.0,), (1.0,), (1.0,), (1.0,))

    claim = Claim("", "new", ("old",), "score@0.25", ("case",), more_than="score")
    asked = item(claims=(claim,))
    new = [both(0.7, 0.6 + each / 100) for each in range(3)]
    old = [both(0.6, 0.3 + each / 100) for each in range(3)]
    found = judged(asked, new, old)
    assert (found.word, found.claimed) == ("reproduced", None)
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.2)  # 30 points against 10
    assert judged(asked, old, new).word == "not reproduced"


def test_a_method_may_be_about_as_good_as_another() -> None:
    claim = Claim("", "new", ("old",), "best", ("case",), within=0.02)
    old = [run([0.5 + each / 1000]) for each in range(3)]
    close, worse = [run([0.49])] * 3, [run([0.4])] * 3
    found = judged(item(claims=(claim,)), close, old)
    assert (found.word, found.claimed) == ("reproduced", None)
    assert found.why == "the interval lies above a loss of 2 points"
    assert judged(item(claims=(claim,)), worse, old).word == "not reproduced"


def test_printed_numbers_of_other_data_claim_a_direction_only() -> None:
    claim = Claim("", "new", ("old",), "rounds", ("case",), "direction only")
    assert paper_gain(item(), claim, "old") is None


def diagnosed(norms: Mapping[str, float], loss: float) -> Series:
    kept = {"norms": (norms, norms), "loss": (loss, loss)}
    return Series((1,), {"": (0.5,)}, (1.0,), (1.0,), (1.0,), (1.0,), diagnostics=kept)


def test_claims_may_be_about_diagnostics_of_which_less_is_better() -> None:
    claim = Claim("", "new", ("old",), "loss", ("case",))
    asked = item(claims=(claim,), diagnostics=("loss", "norms"))
    new, old = ([diagnosed({}, loss + n / 100) for n in range(3)] for loss in (0.1, 0.5))
    found = judged(asked, new, old)
    assert found.word == "reproduced"
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.4)
    assert judged(asked, old, new).word == "not reproduced"
    before = judged(asked, [AT[0]] * 3, old)  # a result file that has no losses
    assert (before.word, before.gain) == ("not run", None)
    assert "lack the diagnostic loss" in before.why


def test_a_claim_about_a_diagnostic_may_be_about_the_last_round() -> None:
    def falling(*losses: float) -> Series:
        kept = {"loss": losses}
        return Series((1,), {"": (0.5,)}, (1.0,), (1.0,), (1.0,), (1.0,), diagnostics=kept)

    claim = Claim("", "new", ("old",), "loss", ("case",))
    asked = item(claims=(claim,), diagnostics=("loss",))
    new, old = [falling(9.0, 0.1 + n / 100) for n in range(3)], [falling(1.0, 0.5)] * 3
    assert judged(asked, new, old).word == "not reproduced"
    last = judged(replace_claim(asked, last=True), new, old)
    assert last.word == "reproduced"
    assert last.gain is not None
    assert last.gain.mean == pytest.approx(0.39)


def replace_claim(asked: Item, **more: Any) -> Item:
    return dataclasses.replace(asked, claims=(dataclasses.replace(asked.claims[0], **more),))


def test_a_diagnostic_may_be_smaller_for_one_group_of_devices_than_for_another() -> None:
    claim = Claim("", "new", ("new",), "norms", ("case",), groups=("even", "odd"))
    groups = {"even": range(2), "odd": range(2, 4)}
    asked = item(claims=(claim,), diagnostics=("norms",), groups=groups)
    new = [diagnosed({"0": 1.0, "1": 2.0, "3": 4.0 + n}, 0.1) for n in (0.0, 0.1, 0.2)]
    found = judged(asked, new, new)
    assert (found.word, found.claim.against("new")) == ("reproduced", "new, odd")
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(2.6)


def test_the_best_variant_counts_in_every_case() -> None:
    best = {"old": ("old, n=1", "old, n=2")}
    methods = {name: Column(name, {}) for name in ("new", *best["old"])}
    asked = item(methods=methods, best=best)
    cells = {
        ("case", name): cell("case", name, dict.fromkeys(range(3), AT[place]))
        for name, place in (("new", 0), ("old, n=1", 3), ("old, n=2", 1))
    }
    (found,) = verdicts(asked, Found(cells))
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(2.0)  # not 4: the second variant is faster
    page = item_page(Standing(asked, None, Found(cells), (found,)))
    assert "| 1 / **1 ± 0** | 2 / **2 ± 0** (n=2) |" in page
    one = {key: value for key, value in cells.items() if key != ("case", "old, n=1")}
    (lacking,) = verdicts(asked, Found(one, missing=(("case", "old, n=1"),)))
    assert lacking.word == "not run"
    (stale,) = verdicts(asked, Found(one, stale=(("case", "old, n=1"),)))
    assert stale.why == "results are stale"


def test_a_smaller_scale_decides_nothing() -> None:
    new, old = [AT[0]] * 3, [AT[1]] * 3
    assert judged(item(), new[:2], old[:2]).why == "2 seeds of 3"
    fewer = judged(item(), new, old, rounds=3)
    assert (fewer.word, fewer.why) == ("undecided (scale)", "3 rounds of 4")
    assert judged(item(paper=Scale(None, 10, 3)), new, old, rounds=3).word == "reproduced"
    larger = judged(item(paper=Scale(4, 20, 3)), new, old)
    assert larger.why == "10 devices of 20"
    little = judged(item(smaller="a small network"), new, old)
    assert (little.word, little.why) == ("undecided (scale)", "a small network")


def test_a_baseline_must_have_the_accuracy_of_the_paper() -> None:
    new, old = [AT[0]] * 3, [AT[1]] * 3
    assert judged(item(baseline="new"), new, old).word == "baseline not matched"  # 60 %, not 50 %
    near = [run([0.1, 0.51, 0.6, 0.6])] * 3
    assert judged(item(baseline="old"), new, near).word == "reproduced"
    swinging = [run([0.51, 0.1, 0.6, 0.6])] * 3  # the best until then counts
    assert judged(item(baseline="old"), new, swinging).word != "baseline not matched"


def test_a_baseline_whose_runs_end_at_the_target_may_match_or_not() -> None:
    """After the printed rounds it may have far more than the paper's accuracy."""
    case = Case("case", target=0.5, paper={"rounds": {"new": 1.0, "old": 4.0}})
    asked = item(baseline="old", cases={"case": case})
    ended, goes_on = [run([0.1, 0.51])] * 3, [run([0.1, 0.51, 0.51, 0.51])] * 3
    found = judged(asked, [AT[0]] * 3, ended)
    assert found.word == "undecided (scale)"
    assert found.why == "case: old has 50 % long before the paper's 4 rounds, where its runs ended"
    assert judged(asked, [AT[0]] * 3, goes_on).word == "direction only"
    assert judged(asked, [AT[0]] * 3, [run([0.1, 0.6])] * 3).word == "baseline not matched"


def test_a_baseline_that_was_not_run_is_missing() -> None:
    methods = {name: Column(name, {}) for name in ("new", "old", "usual")}
    case = Case("case", target=0.5, paper={"rounds": {"new": 1.0, "old": 2.0, "usual": 3.0}})
    asked = item(baseline="usual", cases={"case": case}, methods=methods)
    found = judged(asked, [AT[0]] * 3, [AT[1]] * 3)
    assert (found.word, found.why) == ("not run", "1 of 3 cells were not run")
    elsewhere = {**methods, "usual": Column("usual", {}, cases=())}
    asked = item(baseline="usual", cases={"case": case}, methods=elsewhere)
    assert judged(asked, [AT[0]] * 3, [AT[1]] * 3).word == "reproduced"


def test_seeds_count_that_have_a_gain() -> None:
    cells = {
        ("case", "new"): cell("case", "new", dict.fromkeys(range(3), AT[0])),
        ("case", "old"): cell("case", "old", dict.fromkeys(range(2, 5), AT[1])),
    }
    (found,) = verdicts(item(), Found(cells))
    assert (found.word, found.why) == ("undecided (scale)", "1 seed of 3")
    some = judged(item(), [AT[0], AT[0], AT[4]], [AT[1], AT[1], AT[4]])
    assert some.why.startswith("2 seeds of 3; new missed the target in 1 of 3 runs")


def test_a_baseline_without_an_evaluation_until_then_does_not_match() -> None:
    late = Series((3,), {"": (0.5,)}, (6.0,), (6.0,), (6.0,), (6.0,))
    found = judged(item(baseline="old"), [AT[0]] * 3, [late] * 3)
    assert found.word == "baseline not matched"


def test_a_baseline_is_not_judged_by_what_is_left_of_it() -> None:
    """Nobody trains FedAvg's model to be cut."""
    cut = {"best@0.5": {"old": 0.9}}
    asked = item("best", 0.1, baseline="old", cases={"case": Case("case", paper=cut)})
    new = [run([0.71])] * 3
    half: dict[str, tuple[float | None, ...]] = {"": (0.6,), "0.5": (0.1,)}
    old = [Series((1,), half, (1.0,), (1.0,), (1.0,), (1.0,))] * 3
    assert judged(asked, new, old).word == "reproduced"


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


# --- pages ----------------------------------------------------------------------------------------


def standing(asked: Item, new: Sequence[Series], old: Sequence[Series]) -> Standing:
    cells = {
        ("case", name): replace(cell("case", name, dict(enumerate(runs))), digest=name)
        for name, runs in (("new", new), ("old", old))
    }
    there = Found(cells)
    return Standing(asked, None, there, verdicts(asked, there))


def test_a_claim_that_fails_names_the_experiment_in_which_it_holds() -> None:
    fails = standing(item(), [AT[2]] * 3, [AT[1]] * 3)
    assert "new is better (against old): cause not found." in item_page(fails)
    experiment = standing(item(explains="papers/table"), [AT[0]] * 3, [AT[1]] * 3)
    page = item_page(fails, [experiment])
    told = "it holds in [title](table.md), new against old: × 2 (2 to 2)."
    assert f"new is better (against old): {told}" in page
    assert "Why claims fail" not in item_page(experiment)


def test_an_opponent_of_an_experiment_may_stand_for_another() -> None:
    fails = standing(item(), [AT[2]] * 3, [AT[1]] * 3)
    claim = Claim("", "new", ("old, slower",), "rounds", ("case",))
    names = ("new", "old, slower")
    for stands_for, told in (("old", "it holds in"), ("", "cause not found")):
        methods = {name: Column(name, {}, stands_for=stands_for) for name in names}
        asked = item(explains="papers/table", methods=methods, claims=(claim,))
        cells = {
            ("case", name): cell("case", name, dict.fromkeys(range(3), AT[place]))
            for name, place in zip(names, (0, 1), strict=True)
        }
        experiment = Standing(asked, None, Found(cells), verdicts(asked, Found(cells)))
        assert f"new is better (against old): {told}" in item_page(fails, [experiment])


def test_an_experiment_on_another_case_does_not_answer_a_claim() -> None:
    fails = standing(item(), [AT[2]] * 3, [AT[1]] * 3)
    claim = Claim("", "new", ("old",), "rounds", ("other",))
    cases = {name: Case(name, target=0.5) for name in ("case", "other")}
    asked = item(explains="papers/table", cases=cases, claims=(claim,))
    cells = {
        ("other", name): cell("other", name, dict.fromkeys(range(3), AT[place]))
        for name, place in (("new", 0), ("old", 1))
    }
    experiment = Standing(asked, None, Found(cells), verdicts(asked, Found(cells)))
    assert "cause not found" in item_page(fails, [experiment])


def test_the_collection_says_how_each_item_was_run() -> None:
    asked = item(paper=Scale(None, 10, 3))
    page = evidence_page([standing(asked, [AT[0]] * 3, [AT[1]] * 3)])
    (row,) = [line for line in page.splitlines() if line.startswith("| papers/table |")]
    assert "4 rounds, 10 devices, 3 seeds | rounds not given, 10 devices, 3 runs" in row
    assert "| a machine | 2026-11-17 | abc | 2.0 min | `anyfleet reproduce papers/table` |" in row


def test_the_main_claims_are_told_first() -> None:
    ours = replace_item(standing(item(), [AT[0]] * 3, [AT[1]] * 3), "thesis/table_3_1")
    little = standing(item(explains="thesis/table_3_1"), [AT[2]] * 3, [AT[1]] * 3)
    page = evidence_page([ours, little])
    (row,) = [line for line in page.splitlines() if line.startswith("| FedAdp needs fewer rounds")]
    assert "| [Table 1](evidence/thesis/table_3_1.md): 1 reproduced |" in row
    assert "| [title](evidence/papers/table.md): 1 not reproduced |" in row
    assert "1 claim (1 reproduced) of the documents." in page
    assert "1 claim (1 not reproduced) of our experiments on them." in page


def test_main_claims_say_how_those_stand_that_are_not_decided() -> None:
    small = item(smaller="a small network")
    ours = replace_item(standing(small, [AT[0]] * 3, [AT[1]] * 3), "thesis/table_3_1")
    other = replace_item(standing(small, [AT[2]] * 3, [AT[1]] * 3), "thesis/figure_3_2")
    page = evidence_page([ours, other])
    (row,) = [line for line in page.splitlines() if line.startswith("| FedAdp needs fewer rounds")]
    assert "table_3_1.md): 1 undecided (scale) (1 ahead) <br>" in row
    assert "figure_3_2.md): 1 undecided (scale) (1 behind) |" in row


def test_main_claims_leave_out_what_is_about_something_else() -> None:
    methods = {name: Column(name, {}) for name in ("FedPNS", "FedAvg", "BN2")}
    claims = tuple(
        Claim("", better, ("BN2",), "rounds", ("case",)) for better in ("FedPNS", "FedAvg")
    )
    asked = item(methods=methods, claims=claims)
    cells = {
        ("case", name): cell("case", name, dict.fromkeys(range(3), AT[place]))
        for name, place in (("FedPNS", 0), ("FedAvg", 1), ("BN2", 2))
    }
    found = Standing(asked, None, Found(cells), verdicts(asked, Found(cells)))
    page = evidence_page([replace_item(found, "thesis/figure_4_6")])
    (row,) = [line for line in page.splitlines() if line.startswith("| FedPNS converges faster")]
    assert "figure_4_6.md): 1 reproduced |" in row


def replace_item(found: Standing, name: str) -> Standing:
    return dataclasses.replace(found, item=dataclasses.replace(found.item, name=name))


def test_an_item_that_was_not_run_says_what_it_takes() -> None:
    asked = Standing(item(), None, Found({}), verdicts(item(), Found({})), 2, 72e15)
    assert "Ours: not run. All of it takes about 7.2e+16 FLOP: 1,000 h of one core" in item_page(
        asked
    )
    assert "not run (takes 1,000 h)" in evidence_page([asked])


def test_the_numbers_of_the_document_keep_their_digits() -> None:
    case = Case("case", target=0.5, paper={"seconds": {"new": 1064.8, "old": 1121.8}})
    asked = item("seconds", cases={"case": case})
    page = item_page(standing(asked, [AT[0]] * 3, [AT[1]] * 3))
    assert "| 1,064.8 s / **2 s ± 0 s** | 1,121.8 s / **4 s ± 0 s** |" in page


def test_a_page_without_numbers_of_the_document_says_so() -> None:
    asked = item("best", cases={"case": Case("case")}, explains="papers/other", about="What it is.")
    page = item_page(standing(asked, [run([0.6] * 4)] * 3, [run([0.5] * 3)] * 3))
    assert "An experiment of ours on [papers/other](other.md).\n\nWhat it is.\n" in page
    assert "| case | **60.00 % ± 0.00 %** | **50.00 % ± 0.00 %**, ended early |" in page
    assert "The document does not print these numbers; ours are in bold" in page


def test_a_page_names_accuracies_far_from_the_printed_ones() -> None:
    case = Case("case", paper={"best": {"new": 0.5, "old": 0.49}})
    page = item_page(
        standing(item("best", cases={"case": case}), [run([0.6])] * 3, [run([0.5])] * 3)
    )
    head, _, rest = page.partition("More than 2 points from the document's numbers:\n\n")
    assert head != page
    assert rest.startswith("- case, new: best accuracy 10.0 points above\n\n")


def test_a_gain_that_is_smaller_than_claimed_names_experiments_with_a_larger_one() -> None:
    falls_short = standing(item(), [AT[1]] * 3, [AT[2]] * 3)
    assert "Why claims fail or fall short" in item_page(falls_short)
    larger = standing(item(explains="papers/table"), [AT[0]] * 3, [AT[3]] * 3)
    page = item_page(falls_short, [larger])
    assert "(against old): the gain is larger in [title](table.md), new against old: × 4" in page
    same = standing(item(explains="papers/table"), [AT[1]] * 3, [AT[2]] * 3)
    assert "(against old): cause not found." in item_page(falls_short, [same])


def test_a_baseline_that_does_not_match_names_experiments_in_which_it_does() -> None:
    wrong = standing(item(baseline="new"), [AT[0]] * 3, [AT[1]] * 3)
    assert "(against old): cause not found." in item_page(wrong)
    better = standing(item(explains="papers/table"), [AT[0]] * 3, [AT[1]] * 3)
    told = "the baseline matches in [title](table.md), new against old: × 2 (2 to 2)."
    assert told in item_page(wrong, [better])
