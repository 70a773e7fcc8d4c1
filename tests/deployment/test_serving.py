"""Who is waited for before a run begins, and before one that had begun goes on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anyfleet.cli import fleet_serve
from anyfleet.cli.fleet_serve import Deployment
from anyfleet.deployment.serving import Served, Service, Work
from anyfleet.runtime.flower.fleet import FlowerFleet
from anyfleet.runtime.flower.fleet_state import FleetState
from tests.helpers import small
from tests.helpers.near_fleet import NearPost, NearRoster

TASK = small.task()
SLOW = 30.0  # seconds after which a wait counts as one without end


class Stopped(Exception):
    """The test has seen enough."""


def served(ready: list[int], enrolled: int) -> Served:
    """A fleet that has so many devices ready, one look after the other, then as in the last."""

    def look() -> int:
        return ready.pop(0) if len(ready) > 1 else ready[0]

    fleet: Any = SimpleNamespace(ready=look, start_clock=lambda: None)
    rows = [SimpleNamespace(revoked="")] * enrolled
    roster: Any = SimpleNamespace(enrolled=lambda: rows, trouble="")
    folder: Any = SimpleNamespace(path=Path("fleet"))
    return Served(folder, fleet, link=None, enrolment=roster, run=Path(), rounds=3)  # type: ignore[arg-type]


def gathered(found: Served, count: int, patience: float) -> list[int]:
    end, seen = time.monotonic() + SLOW, []
    for there in found.gather(count, patience):
        assert time.monotonic() < end, found.doing
        seen.append(there)
    return seen


@pytest.mark.parametrize("count", [0, 3], ids=["all enrolled", "three"])
def test_a_device_that_stays_away_is_not_waited_for_without_end(count: int) -> None:
    found = served([0, 0, 2], enrolled=3)
    seen = gathered(found, count, 0.5)
    assert seen[:3] == [0, 0, 2]
    assert len(seen) > 3  # the third had its time to come
    assert found.doing == "playing"


def test_one_device_at_least_is_waited_for() -> None:
    assert gathered(served([0, 0, 0, 0, 1], enrolled=2), 0, 0.001)[:5] == [0, 0, 0, 0, 1]


def test_a_run_that_begins_waits_for_all() -> None:
    found = served([1, 1, 1, 1, 2], enrolled=2)
    assert [*found.gather(0)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_resumed_run_waits_for_and_tells(
    resumed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, float]] = []
    works: list[Work] = []

    def gather(count: int, patience: float) -> Iterator[int]:
        asked.append((count, patience))
        raise Stopped

    @contextmanager
    def serving(folder: object, service: object, work: Work) -> Iterator[Any]:
        works.append(work)
        yield SimpleNamespace(gather=gather, metrics=-1)

    monkeypatch.setattr(fleet_serve, "serving", serving)
    saved = FleetState(7, 80.0, 112, np.zeros(0), (), ())
    state: Any = SimpleNamespace(fleet=saved, record=SimpleNamespace(round_index=27))
    world = SimpleNamespace(declared=SimpleNamespace(counting="flops"))
    experiment = SimpleNamespace(limits=None, rounds=100)
    prepared: Any = SimpleNamespace(task=TASK, world=world, experiment=experiment)
    address = SimpleNamespace(address="localhost:1")
    folder: Any = SimpleNamespace(path=tmp_path, device_file=lambda: address)
    service = Service(fleet="fleet", run="run", wait_for=0, absence=12.0)
    deployment = Deployment(
        folder, service, prepared, tmp_path, "run", (), state if resumed else None, resumed
    )
    with pytest.raises(Stopped):
        fleet_serve._play(deployment, record=lambda: None)  # type: ignore[arg-type, return-value]
    assert asked == [(0, 12.0 if resumed else float("inf"))]
    assert works[0].done == (28 if resumed else 0)


def test_a_status_tells_the_rounds_that_are_done_before_the_first_new_one() -> None:
    fleet = FlowerFleet(NearPost(), TASK, NearRoster(), run="a run", bundle="", round_index=28)
    assert fleet.status().round_index == 28
