"""Virtual time."""

import numpy as np
import pytest

from anyfleet.runtime.simulated.clock import Clock, Event


def test_events_come_in_order_and_ties_in_order_of_scheduling() -> None:
    clock = Clock()
    for time, order in ((2.0, 0), (1.0, 1), (2.0, 2), (1.0, 3)):
        clock.schedule(time, Event("trained", order))
    popped = [clock.pop(None) for _ in range(4)]
    assert [event.order for event in popped if event] == [1, 3, 0, 2]
    assert clock.now == 2.0
    assert clock.pop(None) is None


def test_time_stops_where_it_is_told() -> None:
    clock = Clock()
    clock.schedule(5.0, Event("trained", 0))
    assert clock.pop(3.0) is None
    assert clock.now == 3.0
    assert clock.pop(5.0) == Event("trained", 0)
    assert clock.now == 5.0


def test_times_are_plain_numbers() -> None:
    clock = Clock()
    clock.schedule(np.float64(5.0), Event("trained", 0))
    for until in (np.float64(3.0), None):
        clock.pop(until)
        assert type(clock.now) is float


def test_forgotten_orders_do_not_come_back_and_a_copy_is_independent() -> None:
    clock = Clock()
    for order in range(4):
        clock.schedule(float(order), Event("trained", order))
    copy = clock.copy()
    clock.cancel({0, 2})
    assert [e.order for e in iter(lambda: clock.pop(None), None)] == [1, 3]
    assert [e.order for e in iter(lambda: copy.pop(None), None)] == [0, 1, 2, 3]


def test_the_past_cannot_be_scheduled() -> None:
    clock = Clock(now=4.0)
    with pytest.raises(ValueError, match="already 4"):
        clock.schedule(3.0, Event("trained", 0))
