"""FedPMT's Table II: the recipe has all of its numbers, and each is computed exactly."""

from pathlib import Path

import pytest

from anyfleet.errors import ConfigError
from anyfleet.evidence import read_item
from anyfleet.evidence.calculations import calculated
from anyfleet.evidence.operations import operations

ITEM = read_item(Path(__file__).resolve().parents[2] / "recipes" / "fedpmt" / "table_2.toml")
PRINTED = {
    (case.name, method): number
    for case in ITEM.cases.values()
    for method, number in case.paper["operations"].items()
}


def test_every_number_of_the_table_is_exact() -> None:
    assert calculated(ITEM) == PRINTED


def test_the_recipe_has_all_numbers_of_the_table() -> None:
    methods = [method for _, method in PRINTED]
    assert methods.count("FedPMT") == 13
    assert methods.count("FedDrop") == 10
    # One of each network, as FedPMT's paper prints it.
    assert PRINTED["FCNN, full", "FedPMT"] == 15_305_968
    assert PRINTED["CNN-MNIST, without Conv1", "FedDrop"] == 1_593_950
    assert PRINTED["CNN-CIFAR10, without Conv1, Conv2 and Fc1", "FedPMT"] == 16_077_200


@pytest.mark.parametrize(
    ("rule", "counted"),
    [("paper", 28_068_800), ("declared", 32_428_000), ("per_batch", 159_013_600)],
)
def test_other_rules_count_otherwise(rule: str, counted: int) -> None:
    step = {"network": "cnn_cifar", "batch": 20, "rule": rule}
    assert operations("FedPMT", {"FedPMT": step}) == counted


def test_a_method_without_parameters_has_no_number() -> None:
    assert operations("FedDrop", {"FedPMT": {"network": "fcnn", "batch": 12}}) is None


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {"network": "fcnn", "batch": 0, "trained": 6, "keep": 1.5}
    with pytest.raises(ConfigError) as caught:
        operations("FedPMT", {"FedPMT": wrong})
    assert [problem.message for problem in caught.value.problems] == [
        "batch must be at least 1, got 0.",
        "trained must lie in 1 … 5, got 6.",
        "keep must lie in (0, 1], got 1.5.",
    ]
    with pytest.raises(ConfigError, match="network"):
        operations("FedPMT", {"FedPMT": {"network": "vgg9", "batch": 12}})
