"""What people are told of a fleet: failures, orders sent again, and restarts of the SuperLink."""

from pathlib import Path

import pytest

from anyfleet.cli.fleet_serve import show_status
from anyfleet.deployment.fleet_folder import Address, make_fleet
from anyfleet.deployment.status import status_of, write_status
from anyfleet.runtime.flower.fleet import FleetStatus

STATUS = FleetStatus(
    now=9.0,
    round_index=3,
    devices=(),
    under_way=1,
    replies=7,
    failures={"went offline": 2},
    sent_again={"a reply of another node": 4},
    bytes_down=1e6,
    bytes_up=2e6,
    seconds={},
)


def test_all_troubles_of_a_fleet_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_fleet(tmp_path / "fleet", Address("localhost", 1))
    folder.bundle.mkdir()
    found = status_of(STATUS, run=tmp_path, doing="playing", rounds=5, gate={}, restarts=6)
    write_status(folder.path, found)
    assert show_status(folder.path, as_json=False) == 0
    told = capsys.readouterr().out
    assert "failed: 2 × went offline" in told
    assert "sent again: 4 × a reply of another node" in told
    assert "started again: 6 ×" in told
