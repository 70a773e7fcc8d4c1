"""What schedules read out of a view."""

from collections.abc import Iterable

from anyfleet.core.messages import Kind
from anyfleet.core.view import OrderStatus, View

LOOK_AGAIN = 60.0  # seconds until absent devices are looked for again


def training(flights: Iterable[OrderStatus]) -> tuple[OrderStatus, ...]:
    """Those that were asked to train; a survey flies beside them."""
    return tuple(flight for flight in flights if flight.kind in (Kind.TRAIN, Kind.HOLD))


def begun(view: View) -> bool:
    """Whether this step has already asked somebody to train."""
    flights = (*view.under_way, *view.replied, *view.failed, *view.declined)
    return bool(training(view.of_this_round(flights)))


def end_of_patience(view: View, patience: float, *, asked: bool) -> float:
    """When a step gives up; while nobody could be asked, when to try it again."""
    end = view.started + patience
    return end if asked else min(end, view.now + LOOK_AGAIN)
