"""The questions one asks of a finished run."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from anyfleet.analysis.breakdown import Breakdown
from anyfleet.analysis.summaries import (
    Spent,
    at_widths,
    best,
    by,
    common_score,
    evaluated,
    failure_counts,
    known_metrics,
    measured_by,
    summarise,
    taken_apart,
    to_target,
)
from anyfleet.core.ledger import Ledger
from anyfleet.experiment import RoundRecord


def point(
    step: int, accuracy: float = math.nan, *, lost: int = 0, half: float = 0.0
) -> RoundRecord:
    scores = {} if math.isnan(accuracy) else {"accuracy": accuracy, "loss": 1 - accuracy}
    return RoundRecord(
        round_index=step,
        time=10.0 * (step + 1),
        down=100.0 * (step + 1),
        up=50.0 * (step + 1),
        flops=1e6 * (step + 1),
        joules=20.0 * (step + 1),
        replies=2,
        failures=lost,
        loss=0.5,
        on_devices=math.nan,
        scores=scores | ({"accuracy@0.5": half} if half else {}),
    )


RUN = (point(0, 0.3), point(1), point(2, 0.6, lost=1), point(3, 0.5, lost=2), point(4))


def test_the_first_evaluation_at_or_above_the_target_counts() -> None:
    assert to_target(RUN, 0.3).spent == Spent(10.0, joules=20.0, bytes=150.0, flops=1e6, rounds=1)
    assert to_target(RUN, 0.6).spent == Spent(30.0, joules=60.0, bytes=450.0, flops=3e6, rounds=3)
    assert str(to_target(RUN, 0.6)) == "30 s, 60 J, 450 B, 3 rounds"


def test_a_target_that_was_missed_says_how_far_the_run_came() -> None:
    missed = to_target(RUN, 0.613)
    assert (missed.spent, missed.best) == (None, 0.6)
    assert str(missed) == "not reached (best 60.0 %)"
    assert str(to_target((point(0, 0.7126),), 0.8)) == "not reached (best 71.3 %)"
    assert str(to_target((point(0),), 0.1)) == "not reached (best –)"


def test_a_target_can_be_asked_for_at_a_width() -> None:
    run = (point(0, 0.9, half=0.2), point(1, 0.9, half=0.4))
    found = to_target(run, 0.4, width=0.5).spent
    assert found is not None
    assert found.rounds == 2
    assert to_target(run, 0.41, width=0.5).best == 0.4
    assert common_score([run], width=0.5) == 0.4
    with pytest.raises(ValueError, match=r"width 0\.25 was not evaluated; .*accuracy@0\.5"):
        to_target(run, 0.4, width=0.25)


def test_a_summary_has_the_last_and_the_best_evaluation_and_the_totals() -> None:
    summary = summarise(RUN)
    assert (summary.rounds, summary.accuracy, summary.best, summary.loss) == (5, 0.5, 0.6, 0.5)
    assert (summary.time, summary.down, summary.up, summary.failures) == (50.0, 500.0, 250.0, 3)
    assert summary.joules == 100.0
    assert summary.fairness is None


def test_a_summary_has_the_spread_over_devices_of_the_last_evaluation() -> None:
    early, late = (Breakdown(1.0, devices=(a, 0.5, math.nan)) for a in (0.1, 0.3))
    half = Breakdown(0.5, devices=(0.0, 0.0, 0.0))
    run = (replace(RUN[0], details=(early, half)), replace(RUN[2], details=(late, half)), RUN[4])
    assert taken_apart(run) == (late, half)
    fairness = summarise(run).fairness
    assert fairness is not None
    assert fairness.worst == 0.3
    assert fairness.mean == pytest.approx(0.4)
    grouped = replace(RUN[0], details=(Breakdown(1.0, groups={"a": 0.5}),))
    assert summarise((grouped,)).fairness is None


def test_a_run_that_was_never_evaluated_has_no_accuracy() -> None:
    points = (point(0), point(1))
    assert evaluated(points) == ()
    assert math.isnan(best(points))
    assert math.isnan(summarise(points).accuracy)
    assert math.isnan(common_score([RUN, points]))


def test_the_common_score_is_reached_by_every_run() -> None:
    runs = [RUN, (point(0, 0.4), point(1, 0.55))]
    assert common_score(runs) == 0.55
    assert all(to_target(points, 0.55).spent for points in runs)


def rmse(*values: float) -> tuple[RoundRecord, ...]:
    """A run that is measured by an error: of half its width, twice as much."""
    return tuple(
        replace(
            point(step),
            metric="rmse",
            scores={"loss": v**2, "rmse": v, "f1": 0.5, "rmse@1": v, "rmse@0.5": 2 * v},
        )
        for step, v in enumerate(values)
    )


def test_a_run_is_measured_by_the_metric_of_its_task() -> None:
    run = rmse(3.0, 1.0, 2.0)
    assert [each.score for each in run] == [3.0, 1.0, 2.0]
    assert math.isnan(run[0].accuracy)
    assert (run[0].at(0.5), run[0].widths) == (6.0, (1.0, 0.5))
    summary = summarise(run)
    assert (summary.metric, summary.score, summary.best) == ("rmse", 2.0, 1.0)
    assert summary.others == {"f1": 0.5}
    assert math.isnan(summary.accuracy)
    assert at_widths(run) == {1.0: 2.0, 0.5: 4.0}


def test_a_target_of_an_error_is_reached_from_above() -> None:
    run = rmse(3.0, 1.5, 1.0, 2.0)
    found = to_target(run, 1.5).spent
    assert found is not None
    assert found.rounds == 2
    missed = to_target(run, 0.5)
    assert (missed.spent, missed.best) == (None, 1.0)
    assert str(missed) == "not reached (best 1)"
    assert common_score([run, rmse(1.2)]) == 1.2
    assert math.isnan(common_score([run, RUN]))  # errors and accuracies have nothing in common


def test_an_evaluation_that_gave_no_number_is_one_nevertheless() -> None:
    run = rmse(3.0, 1.0, math.nan)
    assert len(evaluated(run)) == 3
    assert math.isnan(summarise(run).score)
    assert summarise(run).best == 1.0


def test_devices_that_were_asked_decide_the_accuracy() -> None:
    assert replace(RUN[0], on_devices=0.9).accuracy == 0.9


def test_a_run_can_be_measured_by_another_of_its_metrics() -> None:
    assert known_metrics(RUN) == ("accuracy", "loss")
    run = measured_by(RUN, "loss")
    assert summarise(run).score == 0.5
    assert (summarise(run).best, summarise(run).others) == (0.4, {"accuracy": 0.5})
    assert to_target(run, 0.4).spent == to_target(RUN, 0.6).spent
    assert measured_by(RUN, "accuracy") == RUN


def test_of_devices_own_models_no_other_metric_is_known() -> None:
    """The loss of the shared model says nothing about a run that trains none."""
    run = tuple(replace(each, on_devices=0.9) if each.scores else each for each in RUN)
    assert evaluated(run)
    assert not evaluated(measured_by(run, "loss"))


# --- the ledger -------------------------------------------------------------------------------


def entries(levels: list[int], lost: list[str]) -> Ledger:
    """Order i calculated i FLOP, for i joules, and moved 8 i bits down and 16 i up."""
    count = len(levels)
    order = np.arange(count, dtype=np.float64)
    rest = {f.name: np.zeros(count) for f in fields(Ledger)}
    told = {"flops": order, "compute_joules": order, "bits_down": 8 * order, "bits_up": 16 * order}
    texts = {"kind": ("train",) * count, "failure": tuple(lost)}
    return Ledger(**{**rest, **told, **texts, "level": np.array(levels)})  # type: ignore[arg-type]


LEDGER = entries(
    [1, 0, 1, 1], ["", "died", "out of memory: 9 of 5 bytes", "out of memory: 7 of 5 bytes"]
)


def test_the_ledger_adds_up_by_column() -> None:
    found = by(LEDGER, "level")
    assert list(found) == [0, 1]
    assert (found[0].orders, found[0].counted, found[0].joules) == (1, 0, 1.0)
    strong = found[1]
    assert (strong.orders, strong.counted, strong.joules, strong.flops) == (3, 1, 5.0, 5.0)
    assert (strong.down, strong.up) == (5.0, 10.0)


def test_losses_are_counted_by_reason_without_their_numbers() -> None:
    assert failure_counts(LEDGER) == {"out of memory": 2, "died": 1}
    assert list(failure_counts(LEDGER)) == ["out of memory", "died"]
    found = by(LEDGER, "failure")
    assert {reason: total.orders for reason, total in found.items()} == {
        "": 1,
        "died": 1,
        "out of memory": 2,
    }
    assert failure_counts(entries([0], [""])) == {}
