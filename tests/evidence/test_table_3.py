"""FedPMT's Table III: a round takes 26.4 s with FedPMT, 26.5 s or 50 s with FedAvg.

Devices have 40 samples here instead of 500, and as much less time.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyfleet.evidence import read_item
from anyfleet.experiment import from_source, play
from anyfleet.runtime import Sequential
from tests.helpers.sets import write_cifar

ITEM = read_item(Path(__file__).resolve().parents[2] / "recipes" / "fedpmt" / "table_3.toml")
LESS = 40 / 500
DEADLINE = {"method": {"schedule": {"use": "Deadline", "seconds": 26.5 * LESS}}}


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("data")
    write_cifar(folder / "cifar-10-batches-bin", rows=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYFLEET_DATA", str(folder))
        yield


@pytest.mark.parametrize("division", ["iid, 50 %", "two classes, 50 %"])
@pytest.mark.parametrize(
    ("method", "over", "seconds", "replies"),
    [
        ("FedPMT", {}, 26.4, 10),
        ("FedPMT", DEADLINE, 26.4, 10),
        ("FedAvg", {}, 50.0, 10),
        ("FedAvg", DEADLINE, 26.5, 4),
    ],
)
def test_length_of_a_round(
    division: str, method: str, over: dict[str, Any], seconds: float, replies: int
) -> None:
    case, column = ITEM.cases[f"{division}, no deadline"], ITEM.methods[method]
    experiment = from_source(ITEM.source(case, column, quick=True, over=over))
    (result,) = play(replace(experiment, rounds=1, engine=Sequential(), device="cpu"))
    assert result.record.time / LESS == pytest.approx(seconds, rel=1e-12)
    assert result.record.replies == replies


def test_only_cases_with_a_deadline_have_one() -> None:
    for (name, method), experiment in ITEM.experiments().items():
        deadline = getattr(experiment.method.schedule, "seconds", None)
        closes = method == "FedAvg" and not name.endswith("no deadline")
        assert deadline == (26.5 if closes else None)
