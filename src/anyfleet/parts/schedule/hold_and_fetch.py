"""Everybody trains, few upload: results wait on the devices until the server asks for some."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anyfleet.config.number_values import Unbounded
from anyfleet.core.messages import Kind
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Flight, Request, View


@dataclass(frozen=True)
class TwoPhase(Schedule):
    """Devices train and hold their results; then those upload whom the selection names.

    `select.Largest` names some, any other selection all. Both phases wait for everybody. A device
    that is away when results are fetched is passed over; when all are, or nobody could be asked,
    the step ends empty after `patience` seconds.
    """

    patience: Unbounded = 60.0
    staleness: ClassVar[int] = 0

    wants: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset({"held"})

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise ValueError(f"TwoPhase.patience must be positive seconds, got {self.patience}.")

    def start(self, view: View) -> tuple[Request, ...]:
        if view.flying:
            return ()
        if not (view.arrived or view.lost or view.declined):
            return (Request(kind=Kind.HOLD),)
        if self._fetching(view):
            return ()
        held = tuple(flight.order for flight in _there(view))
        # The selection names some of them, and with them the devices.
        return (Request(kind=Kind.FETCH, of=held),) if held else ()

    def ready(self, view: View) -> bool:
        if view.flying:
            return False
        if self._fetching(view):
            return True
        if _there(view):
            return False  # what they hold is fetched first, however long the training took
        nobody = bool(view.lost) and not _held(view)
        return nobody or view.now >= view.started + self.patience

    def alarm(self, view: View) -> float | None:
        return None if view.flying else view.started + self.patience

    def enough(self, view: View) -> int:
        return max(1, len(view.flying))

    def drop(self, view: View) -> tuple[int, ...]:
        return ()

    def later(self, view: View) -> tuple[int, ...]:
        return ()

    def _fetching(self, view: View) -> bool:
        flights = (*view.flying, *view.arrived, *view.lost)
        return any(flight.kind == Kind.FETCH for flight in flights)


def _held(view: View) -> tuple[Flight, ...]:
    return tuple(flight for flight in view.arrived if flight.kind == Kind.HOLD)


def _there(view: View) -> tuple[Flight, ...]:
    """Those with a result that can be asked for it now."""
    held = _held(view)
    free = view.free(np.array([flight.device for flight in held], dtype=np.int64))
    return tuple(flight for flight, there in zip(held, free, strict=True) if there)
