import math
from typing import Any

import pytest

from anyfleet import config
from anyfleet.core.ledger import Ledger
from anyfleet.evidence.diagnostics import table
from anyfleet.evidence.items import Case, Column, Item, Scale
from anyfleet.evidence.measured import Found, summary
from anyfleet.evidence.results import CellResult, Series, series
from anyfleet.experiment import from_source, prepare


@pytest.mark.parametrize(
    ("value", "group", "found"),
    [
        (0.5, None, 0.5),
        ({"0": 1.0, "1": 3.0, "7": 9.0}, range(2), 2.0),  # a number for each device
        ({"0": 1.0, "1": 3.0}, None, 2.0),
        ([4, 1], range(2), 1.0),  # a list of devices
        ([], range(2), 0.0),
        ([0.5, 0.25], None, 0.75),  # blocks of the model
    ],
)
def test_a_diagnostic_becomes_a_number_for_a_group(
    value: Any, group: range | None, found: float
) -> None:
    assert summary(value, group) == found


def test_what_a_round_lacks_is_not_a_number() -> None:
    assert math.isnan(summary(None, None))
    assert math.isnan(summary({"7": 1.0}, range(2)))


def test_the_page_has_a_row_for_each_group() -> None:
    norms = ({"0": 1.0, "1": 5.0}, {"0": 3.0}, {"1": 7.0})
    kept = {"norms": norms, "divergence": (1.0, 2.0, 4.5)}
    run = Series((1,), {"": (0.5,)}, (1.0,), (1.0,), (1.0,), (1.0,), diagnostics=kept)
    place = ("x", "case", "new", 4, 10, "a machine", "2026-11-18", "abc", 1.0)
    item = Item(
        *("papers/figure", "title", "Figure 1", Scale(4, 10), 1, ("score",)),
        cases={"case": Case("case")},
        methods={"new": Column("new", {})},
        diagnostics=("norms", "divergence", "other"),
        groups={"first": range(1), "second": range(1, 2)},
    )
    lines = [*table(item, Found({("case", "new"): CellResult(*place, {0: run})}))]
    assert [line for line in lines if line.startswith("| norms") or "divergence" in line] == [
        "| norms | case, new | first | 1 | 3 | 2 |",
        "| norms | case, new | second | 5 | 7 | 6 |",
        "| divergence | case, new | all | 1 | 4.5 | 2.5 |",
    ]
    assert not [*table(item, Found({}))]


def test_the_page_shows_a_diagnostic_of_every_device_over_rounds() -> None:
    widths = tuple({"0": 1.0, "1": 0.5 if number else None} for number in range(19))
    run = Series((1,), {"": (0.5,)}, (1.0,), (1.0,), (1.0,), (1.0,), diagnostics={"widths": widths})
    place = ("x", "case", "new", 19, 2, "a machine", "2026-11-18", "abc", 1.0)
    item = Item(
        *("papers/figure", "title", "Figure 1", Scale(4, 10), 1, ("score",)),
        cases={"case": Case("case")},
        methods={"new": Column("new", {})},
        diagnostics=("widths",),
    )
    lines = [*table(item, Found({("case", "new"): CellResult(*place, {0: run})}))]
    assert "### widths by device: case, new, seed 0" in lines
    assert lines[-1] == "| 1 | – |" + " 0.5 |" * 9  # ten of the nineteen rounds
    assert "| round 19 |" in next(line for line in lines if line.startswith("| device |"))


def test_result_files_keep_losses_and_what_devices_chose() -> None:
    source = {
        "rounds": 2,
        "task": {"use": "Embedded", "devices": 4, "limit": 60, "server": 0},
        "method": {"use": "heterofl", "widths": [1.0, 0.5], "count": 4},
        "fleet": {"use": "levels", "speeds": [2e9, 1e9]},
        "engine": {"use": "Sequential"},
    }
    played = [*prepare(from_source(config.Source(source))).play(None)]
    ledger = Ledger.from_dicts(row for each in played for row in each.round.ledger.as_dicts())
    records = [each.record for each in played]
    kept = series(records, ("loss", "test_loss", "widths", "other"), ledger).diagnostics
    assert kept["loss"] == pytest.approx([record.loss for record in records], rel=1e-5)
    assert all(loss > 0 for loss in kept["test_loss"])
    assert [sorted(each.values()) for each in kept["widths"]] == [[0.5, 0.5, 1.0, 1.0]] * 2
    assert kept["other"] == (None, None)
