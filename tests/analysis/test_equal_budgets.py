"""What runs had learned for the same."""

import math
from dataclasses import replace
from typing import Any

import pytest

from anyfleet.analysis.equal_budgets import (
    Resource,
    Within,
    common_amount,
    ended_after,
    first_after,
    used,
    within,
)
from anyfleet.analysis.summaries import Spent
from anyfleet.experiment import RoundRecord


def point(step: int, accuracy: float = math.nan, **changes: Any) -> RoundRecord:
    """After k steps: k seconds, 2 k joules, 3 k bytes down, 4 k up and 5 k FLOP."""
    k = float(step + 1)
    scores = {} if math.isnan(accuracy) else {"accuracy": accuracy}
    base = RoundRecord(step, k, 3 * k, 4 * k, 5 * k, 2 * k, 2, 0, 0.5, math.nan, scores)
    return replace(base, **changes)


# Evaluated after 2, 4 and 5 seconds; the best is not the last.
RUN = (point(0), point(1, 0.3), point(2), point(3, 0.6), point(4, 0.5), point(5))
# What the second evaluation had taken of each, and the run as a whole.
FOURTH: dict[Resource, float] = {"flops": 20.0, "time": 4.0, "energy": 8.0, "bytes": 28.0}
WHOLE: dict[Resource, float] = {"flops": 30.0, "time": 6.0, "energy": 12.0, "bytes": 42.0}


@pytest.mark.parametrize("resource", FOURTH)
def test_the_last_evaluation_at_or_before_the_amount_counts(resource: Resource) -> None:
    amount = FOURTH[resource]
    found = within(RUN, resource, amount)
    assert (found.resource, found.amount, found.total) == (resource, amount, WHOLE[resource])
    assert (found.score, found.best, found.first) == (0.6, 0.6, amount / 2)
    assert found.spent == Spent(time=4.0, joules=8.0, bytes=28.0, flops=20.0, rounds=4)
    assert not found.ended
    short = within(RUN, resource, math.nextafter(amount, 0))
    assert (short.score, short.best) == (0.3, 0.3)
    assert short.spent is not None
    assert short.spent.rounds == 2


def test_the_last_state_and_the_best_until_then_are_told_apart() -> None:
    found = within(RUN, "time", 5.5)
    assert (found.score, found.best) == (0.5, 0.6)
    assert str(found) == "50.0 % (best 60.0 %)"


def test_a_run_that_ended_with_less_shows_its_last_state_and_says_so() -> None:
    assert not within(RUN, "energy", 12.0).ended
    found = within(RUN, "energy", 12.5)
    assert found.ended
    assert (found.score, found.total) == (0.5, 12.0)
    assert found.spent is not None
    assert (found.spent.joules, found.spent.rounds) == (10.0, 5)
    assert str(found) == "50.0 % (best 60.0 %), ended after 12 J"


def test_a_run_that_was_not_evaluated_by_then_says_when_it_was() -> None:
    found = within(RUN, "time", 1.9)
    assert found.spent is None
    assert not found.ended
    assert math.isnan(found.score)
    assert math.isnan(found.best)
    assert str(found) == "first evaluated after 2 s"
    never = within((point(0),), "time", 1.0)
    assert never.spent is None
    assert str(never) == "never evaluated"


def test_rounds_that_everybody_skips_cost_no_energy_and_still_count() -> None:
    skipped: dict[str, Any] = {"joules": 4.0, "down": 6.0, "up": 8.0, "flops": 10.0, "replies": 0}
    run = (*RUN[:2], point(2, 0.31, loss=math.nan, **skipped), point(3, 0.6))
    found = within(run, "energy", 4.0)
    assert (found.score, found.spent) == (0.31, Spent(3.0, 4.0, 14.0, 10.0, rounds=3))
    idle = tuple(replace(each, joules=0.0, flops=0.0) for each in RUN)
    assert common_amount([RUN, idle], "energy") == 0.0
    assert within(idle, "energy", 0.0).score == 0.5
    assert str(within(RUN, "energy", 0.0)) == "first evaluated after 4 J"


def test_what_was_learned_can_be_asked_for_at_a_width() -> None:
    scores = [{"accuracy": 0.9, "accuracy@0.5": half} for half in (0.4, 0.2)]
    run = tuple(replace(point(step), scores=each) for step, each in enumerate(scores))
    found = within(run, "time", 2.0, width=0.5)
    assert (found.score, found.best) == (0.2, 0.4)
    with pytest.raises(ValueError, match=r"width 0\.25 was not evaluated; .*accuracy@0\.5"):
        within(run, "time", 2.0, width=0.25)


def test_the_common_amount_is_the_most_that_every_run_used() -> None:
    runs = [RUN, RUN[:5], (point(0, 0.2), replace(point(8, 0.4), up=0.5, flops=0.5))]
    assert [common_amount(runs, each) for each in WHOLE] == [0.5, 5.0, 10.0, 27.5]
    assert not any(
        within(run, each, common_amount(runs, each)).ended for run in runs for each in WHOLE
    )
    assert math.isnan(common_amount([], "time"))


def test_slips_are_told() -> None:
    with pytest.raises(ValueError, match="one of flops, time, energy, bytes; got 'joules'"):
        used(RUN[0], "joules")  # type: ignore[arg-type]
    for amount in (-1.0, math.nan):
        with pytest.raises(ValueError, match="must be 0 or more"):
            within(RUN, "time", amount)


def test_several_runs_are_told_by_their_ends() -> None:
    def run(total: float, first: float) -> Within:
        return Within("time", 9.0, total, first, math.nan, math.nan, None)

    runs = [run(5.0, 2.0), run(4.0, math.nan), run(6.0, 3.0)]
    assert ended_after(runs) == "ended after 4 s to 6 s"
    assert ended_after(runs[:1] * 2) == "ended after 5 s"
    assert first_after(runs) == "first evaluated after 2 s to 3 s"


def test_errors_count_the_other_way() -> None:
    values = zip(RUN, (9.0, 0.7, 9.0, 0.4, 0.5, 9.0), strict=True)
    run = [replace(p, scores={"mae": v} if p.scores else {}, metric="mae") for p, v in values]
    found = within(run, "time", 5.5)
    assert (found.metric, found.score, found.best) == ("mae", 0.5, 0.4)
    assert math.isnan(found.accuracy)
    assert str(found) == "0.5 (best 0.4)"
