"""Comparisons: numbers by run and seed, their means, their differences, and what is missing."""

import csv
import json
import math
from dataclasses import replace
from io import StringIO

import pytest

from anyfleet.analysis.comparison import Goal, compare
from anyfleet.analysis.result_files import results_csv, results_json
from anyfleet.experiment import RoundRecord


def run(*accuracies: float, pace: float = 1.0) -> list[RoundRecord]:
    """A run whose rounds take `pace` seconds, twice as many joules, and bytes."""
    return [
        RoundRecord(
            round_index=k,
            time=pace * (k + 1),
            down=3e3 * (k + 1),
            up=1e3 * (k + 1),
            flops=1e6 * (k + 1),
            joules=2 * pace * (k + 1),
            replies=2,
            failures=k % 2,
            loss=0.5,
            on_devices=math.nan,
            scores={"accuracy": each, "loss": 1 - each, "accuracy@0.5": each / 2},
        )
        for k, each in enumerate(accuracies)
    ]


RUNS = {
    "fedavg": {0: run(0.5, 0.6), 1: run(0.4, 0.7), 2: run(0.5, 0.65)},
    "mine": {0: run(0.6, 0.7, pace=2.0), 1: run(0.5, 0.75, pace=2.5), 2: run(0.5, 0.72, pace=3.0)},
}


def test_means_and_differences_are_those_of_the_seeds() -> None:
    found = compare(RUNS)
    assert found.reference == "fedavg"
    assert found.target == 0.6
    mean = found.mean("score", "mine")
    assert mean.mean == pytest.approx(2.17 / 3)
    assert (mean.count, mean.of) == (3, 3)
    # 0.10, 0.05 and 0.07: deviation 0.02517, t 4.3027, root of 3.
    difference = found.difference("score", "mine")
    assert difference.mean == pytest.approx(0.22 / 3)
    assert difference.margin == pytest.approx(4.30265 * 0.0251661 / math.sqrt(3), rel=1e-4)
    assert found.difference("seconds", "mine").mean == pytest.approx(3.0)
    assert found.difference("score", "fedavg").mean == 0.0
    backwards = compare(RUNS, Goal(reference="mine"))
    assert backwards.difference("score", "fedavg").mean == pytest.approx(-0.22 / 3)


def test_any_metric_can_be_compared_by() -> None:
    found = compare(RUNS, Goal(metric="loss", target=0.31))
    assert [metric.name for metric in found.metrics] == ["loss"]
    assert found.mean("score", "fedavg").mean == pytest.approx(0.35)
    assert found.mean("metric_accuracy", "fedavg").mean == pytest.approx(0.65)
    assert [cost.spent is not None for cost in found.costs["fedavg"].values()] == [
        False,
        True,
        False,
    ]
    with pytest.raises(ValueError, match="no run was measured by 'mae'; there are accuracy, loss"):
        compare(RUNS, Goal(metric="mae"))


def test_a_missed_target_leaves_a_mean_without_an_interval() -> None:
    found = compare(RUNS, Goal(target=0.65))
    cost = found.mean("target_seconds", "fedavg")
    assert (cost.mean, cost.count, cost.of) == (2.0, 2, 3)
    assert math.isnan(cost.margin)
    difference = found.difference("target_seconds", "mine")
    # In seeds 1 and 2, in which both reached it: 5 and 6 seconds instead of 2.
    assert difference.mean == pytest.approx(3.5)
    assert (difference.count, difference.of) == (2, 3)
    assert math.isnan(difference.margin)


def test_a_partial_study_is_compared_over_common_seeds() -> None:
    runs = {"fedavg": RUNS["fedavg"], "mine": {1: RUNS["mine"][1], 2: RUNS["mine"][2]}, "late": {}}
    found = compare(runs, Goal(equal=("time",)))
    assert found.common_seeds("mine") == (1, 2)
    difference = found.difference("score", "mine")
    assert difference.mean == pytest.approx(0.06)
    assert (difference.count, difference.of) == (2, 2)
    assert not math.isnan(difference.margin)  # missing, but not because of what came out
    assert found.mean("score", "late").count == 0
    assert found.metric("late") is None
    nothing = compare({"late": {}})
    assert nothing.metrics == ()
    assert math.isnan(nothing.target)


def test_a_reference_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no run 'fedprox' to compare with; there are fedavg"):
        compare(RUNS, Goal(reference="fedprox"))


def test_scores_by_different_metrics_have_no_difference() -> None:
    other = [replace(each, metric="loss") for each in run(0.5)]
    found = compare({"a": {0: run(0.5), 1: run(0.6)}, "b": {0: other, 1: other}})
    assert found.difference("score", "b").count == 0
    assert found.difference("seconds", "b").count == 2


def test_broken_models_have_no_mean() -> None:
    found = compare({"a": {0: run(0.5), 1: run(math.nan)}})
    assert math.isnan(found.mean("score", "a").mean)


def test_a_csv_has_a_row_for_every_run() -> None:
    content = results_csv(compare(RUNS, Goal(target=0.65, equal=("energy",)))).decode()
    rows = list(csv.DictReader(StringIO(content)))
    assert [(row["run"], row["seed"]) for row in rows] == [
        (name, str(seed)) for name in RUNS for seed in range(3)
    ]
    first, second = rows[:2]
    assert (first["score"], first["metric_loss"], first["score@0.5"]) == ("0.6", "0.4", "0.3")
    assert (first["seconds"], first["joules"], first["bytes_down"]) == ("2", "4", "6000")
    assert first["target_seconds"] == ""  # missed
    assert second["target_seconds"] == "2"
    assert {row["target"] for row in rows} == {"0.65"}
    assert second["energy_score"] == "0.7"
    assert content == results_csv(compare(RUNS, Goal(target=0.65, equal=("energy",)))).decode()


def test_json_has_runs_means_and_differences() -> None:
    data = json.loads(results_json(compare(RUNS, Goal(target=0.65)), planned=9))
    assert (data["finished"], data["planned"]) == (6, 9)
    assert [each["seed"] for each in data["runs"]["mine"]] == [0, 1, 2]
    assert data["means"]["fedavg"]["target_seconds"] == {
        "mean": 2.0,
        "low": None,
        "high": None,
        "deviation": 0.0,
        "seeds": 2,
        "of": 3,
    }
    assert list(data["differences"]) == ["mine"]
    assert data["differences"]["mine"]["score"]["mean"] == pytest.approx(0.22 / 3)
