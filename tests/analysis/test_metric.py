"""What a run is measured by: which metric, which way is better, how it is written."""

import math

import pytest

from anyfleet.analysis.metric import Metric, main_metric


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["accuracy"], "accuracy"),
        (["f1", "accuracy"], "accuracy"),
        (["rmse", "mae"], "rmse"),
        (["mae", "rmse"], "mae"),
        ([], "loss"),
    ],
)
def test_accuracy_comes_first_then_the_tasks_own_order_then_the_loss(
    names: list[str], found: str
) -> None:
    assert main_metric(names) == found


@pytest.mark.parametrize(
    "name",
    ["loss", "rmse", "MSE", "val_mae", "perplexity", "word_error_rate", "wer", "log-loss", "nll"],
)
def test_less_is_better_by_the_words_of_a_name(name: str) -> None:
    metric = Metric(name)
    assert metric.less
    assert metric.best([3.0, math.nan, 2.0, 5.0]) == 2.0
    assert metric.worst([3.0, 2.0, 5.0]) == 5.0
    assert metric.reaches(2.0, 2.0)
    assert metric.reaches(1.9, 2.0)
    assert not metric.reaches(2.1, 2.0)
    assert not metric.reaches(math.nan, 2.0)


@pytest.mark.parametrize("name", ["accuracy", "f1", "auc", "top5", "power", "lossless", "bleu"])
def test_otherwise_more_is_better(name: str) -> None:
    metric = Metric(name)
    assert not metric.less
    assert metric.best([0.3, math.nan, 0.2, 0.5]) == 0.5
    assert metric.worst([0.3, 0.2, 0.5]) == 0.2
    assert metric.reaches(0.5, 0.5)
    assert not metric.reaches(0.4, 0.5)
    assert not metric.reaches(math.nan, 0.5)


def test_what_nobody_measured_is_neither_best_nor_worst() -> None:
    assert math.isnan(Metric().best([]))
    assert math.isnan(Metric().best([math.nan]))
    assert math.isnan(Metric().worst([]))
    assert math.isnan(Metric().worst([0.5, math.nan]))


def test_only_accuracies_are_shares() -> None:
    assert Metric("accuracy").told(0.7126) == "71.3 %"
    assert Metric("balanced_accuracy").head == "balanced_accuracy %"
    assert (Metric("f1").told(0.7126), Metric("f1").head, Metric("f1").scale) == (
        "0.7126",
        "f1",
        1.0,
    )
    assert Metric("rmse").told(123456.0) == "1.235e+05"
    assert Metric("rmse").told(math.nan) == "–"


def test_a_value_that_just_misses_another_has_the_digits_to_tell() -> None:
    loss, accuracy = Metric("loss"), Metric("accuracy")
    assert loss.apart(2.2904, 2.29) == "2.2904"
    assert loss.apart(2.5, 2.29) == loss.told(2.5) == "2.5"
    assert loss.apart(2.29, 2.29) == "2.29"
    assert accuracy.apart(0.79996, 0.8) == "79.996 %"
    assert accuracy.apart(0.7, 0.8) == "70.0 %"
    assert loss.apart(math.nan, 2.29) == "–"
