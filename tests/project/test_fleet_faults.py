"""The script that torments a real fleet: what it draws, and what it writes."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tools import fleet_faults
from tools.fleet_faults import (
    DUE,
    KINDS,
    LIES,
    PAGE,
    Account,
    Fault,
    joined,
    killed,
    next_fault,
    row,
    rows_of,
    table,
)


def test_all_lies_are_told_before_one_comes_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_faults, "wait", lambda *given: None)
    device = SimpleNamespace(home=tmp_path, told=lambda: 0, number=3)
    rig: Any = SimpleNamespace(
        devices=[None, None, None, device],
        lies=[],
        look=lambda: 1,
        failures=lambda number, since: [],
        status=lambda: SimpleNamespace(sent_again={}),
    )
    luck, told, silent = random.Random(0), list[str](), set[str]()
    for _ in range(3 * len(LIES)):
        with fleet_faults.lied(rig, luck) as wanted:
            told.append(wanted.what)
            if wanted.told is None:
                silent.add(wanted.what)
    for begin in range(0, len(told), len(LIES)):
        assert set(told[begin : begin + len(LIES)]) == set(LIES)
    assert silent == {"another's order"}


@pytest.mark.parametrize("seed", range(20))
def test_server_and_superlink_are_killed_in_the_first_quarter(seed: int) -> None:
    luck, due, came = random.Random(seed), [*DUE], dict[Fault, float]()
    for number in range(5, 200, 4):
        fault = next_fault(number / 200, luck, due, [*DUE, killed], [killed, joined])
        came[fault] = number / 200
    assert not due
    assert all(came[fault] < 0.25 for fault in DUE)


def test_rows_of_kinds_that_are_not_run_again_stay() -> None:
    before = rows_of(PAGE.read_text())
    assert [*before] == [*KINDS]
    assert all(line.count("|") == 9 for line in before.values())
    found = Account("node lies", tries=2, seconds=[1.0, 2.0], commit="abc1234, 2026-01-01")
    found.faults = {"NaN": 1, "1e30": 1}
    new = row(vars(found))
    assert new.startswith("| node lies (1 1e30, 1 NaN) | 2 | 0 | 0 | 1.5 s, 2.0 s |")
    assert new.endswith("| – | abc1234, 2026-01-01 |")
    text = "<!-- faults begins -->\n" + table({**before, "node lies": new})
    assert rows_of(text + "<!-- faults ends -->") == {**before, "node lies": new}
