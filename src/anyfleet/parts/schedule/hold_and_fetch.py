"""Everybody trains, few upload: results wait on the devices until the server asks for some."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anyfleet.config.number_values import Unbounded
from anyfleet.core.messages import Kind
from anyfleet.core.signals import HeldResults, Signal
from anyfleet.core.slots import Schedule
from anyfleet.core.view import OrderStatus, Request, View


@dataclass(frozen=True)
class HoldAndFetch(Schedule):
    """Devices train and hold their results; then those upload whom the selection names.

    `select.Largest` names some, any other selection all. Both phases wait for everybody. A device
    that is away when results are fetched is passed over; when all are, or nobody could be asked,
    the step ends empty after `patience` seconds.
    """

    patience: Unbounded = 60.0
    staleness: ClassVar[int] = 0

    reports: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[Signal]] = frozenset({HeldResults()})

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise ValueError(
                f"HoldAndFetch.patience must be positive seconds, got {self.patience}."
            )

    def start(self, view: View) -> tuple[Request, ...]:
        if view.under_way:
            return ()
        if not (view.replied or view.failed or view.declined):
            return (Request(kind=Kind.HOLD),)
        if self._fetching(view):
            return ()
        held = tuple(flight.order for flight in _there(view))
        # The selection names some of them, and with them the devices.
        return (Request(kind=Kind.FETCH, held_orders=held),) if held else ()

    def ready(self, view: View) -> bool:
        if view.under_way:
            return False
        if self._fetching(view):
            return True
        if _there(view):
            return False  # what they hold is fetched first, however long the training took
        nobody = bool(view.failed) and not _held(view)
        return nobody or view.now >= view.started + self.patience

    def alarm(self, view: View) -> float | None:
        return None if view.under_way else view.started + self.patience

    def enough(self, view: View) -> int:
        return max(1, len(view.under_way))

    def drop(self, view: View) -> tuple[int, ...]:
        return ()

    def later(self, view: View) -> tuple[int, ...]:
        return ()

    def _fetching(self, view: View) -> bool:
        flights = (*view.under_way, *view.replied, *view.failed)
        return any(flight.kind == Kind.FETCH for flight in flights)


def _held(view: View) -> tuple[OrderStatus, ...]:
    return tuple(flight for flight in view.replied if flight.kind == Kind.HOLD)


def _there(view: View) -> tuple[OrderStatus, ...]:
    """Those with a result that can be asked for it now."""
    held = _held(view)
    free = view.free(np.array([flight.device for flight in held], dtype=np.int64))
    return tuple(flight for flight, there in zip(held, free, strict=True) if there)
