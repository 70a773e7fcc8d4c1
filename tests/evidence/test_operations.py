"""FedPMT's Table II: the recipe has all of its numbers, and each is computed exactly."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from anyfleet.errors import ConfigError
from anyfleet.evidence.operations import operations

ITEM = Path(__file__).resolve().parents[2] / "recipes" / "fedpmt" / "table_2.toml"
CASES: dict[str, Any] = tomllib.loads(ITEM.read_text(encoding="utf-8"))["cases"]
CELLS = [
    pytest.param(case["calculate"][method], printed, id=f"{name}: {method}")
    for name, case in CASES.items()
    for method, printed in case["paper"]["operations"].items()
]


@pytest.mark.parametrize(("parameters", "printed"), CELLS)
def test_every_number_of_the_table_is_exact(parameters: dict[str, Any], printed: int) -> None:
    assert operations(parameters) == printed


def test_the_recipe_has_all_numbers_of_the_table() -> None:
    printed = [case["paper"]["operations"] for case in CASES.values()]
    assert sum("FedPMT" in row for row in printed) == 13
    assert sum("FedDrop" in row for row in printed) == 10
    assert [row.keys() for row in printed] == [case["calculate"].keys() for case in CASES.values()]


def test_other_rules_count_otherwise() -> None:
    full = {"network": "cnn_cifar", "batch": 20}
    assert operations(full) == 28_068_800
    assert operations(full | {"rule": "declared"}) == 32_428_000
    assert operations(full | {"rule": "per_batch"}) == 159_013_600


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        operations({"network": "fcnn", "batch": 0, "trained": 6, "keep": 1.5})
    assert [problem.message for problem in caught.value.problems] == [
        "batch must be at least 1, got 0.",
        "trained must lie in 1 … 5, got 6.",
        "keep must lie in (0, 1], got 1.5.",
    ]
    with pytest.raises(ConfigError, match="network"):
        operations({"network": "vgg9", "batch": 12})
