"""Replays compute what the run computed whose arrivals they have, whatever its schedule."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from anyfleet.core.events import Events
from anyfleet.core.loop import run
from anyfleet.core.method import Method
from anyfleet.methods import fedavg
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.codec import Stc
from anyfleet.parts.plan import WidthMenu
from anyfleet.parts.schedule import Buffered
from anyfleet.runtime import Simulated
from anyfleet.runtime.replayed import Arrived, Differs, Replayed
from anyfleet.world import levels
from anyfleet.world.quantities import When
from tests.helpers import small

TASK = small.task()
WORLD = small.world(TASK, levels(speeds=(2e9, 2e7)))
PLAIN = fedavg(count=4, lr=0.1)
METHODS = {
    "synchronous": PLAIN,
    "asynchronous": replace(PLAIN, schedule=Buffered(4, 2)),
    "with residuals": replace(PLAIN, schedule=Buffered(4, 2), uplink=Stc(0.1)),
    "with menus": replace(PLAIN, plan=WidthMenu((1.0, 0.5)), choose=LargestInTime(0.02)),
}


class Observed(Simulated):
    """A simulated fleet that writes down what comes in."""

    def wait(self, until: float | None, enough: int) -> Events:
        events = super().wait(until, enough)
        self.arrivals = (*getattr(self, "arrivals", ()), Arrived.of(events, self.now()))
        return events


def replayed(arrivals: tuple[Arrived, ...]) -> Replayed:
    devices = np.arange(TASK.devices)
    always = WORLD.conditions(devices, When(0.0, 0), np.ones(len(devices), dtype=np.int64))
    return Replayed(TASK, WORLD.declared, always, arrivals)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_replay_computes_the_same_model(method: Method) -> None:
    fleet = Observed(TASK, WORLD)
    *_, expected = islice(run(method, TASK, fleet, 0), 4)
    *_, found = islice(run(method, TASK, replayed(fleet.arrivals), 0), 4)
    assert small.identical(found.params, expected.params)


def test_what_was_not_under_way_cannot_come_in() -> None:
    unknown = (Arrived(1.0, replies=(7,)),)
    with pytest.raises(Differs, match="order 7 came in"):
        list(islice(run(PLAIN, TASK, replayed(unknown), 0), 1))


def test_a_replay_ends_with_its_run() -> None:
    with pytest.raises(Differs, match="had ended"):
        list(islice(run(PLAIN, TASK, replayed(()), 0), 1))
