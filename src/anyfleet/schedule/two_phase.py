"""Everybody trains, few upload: results wait on the devices until the server asks for some."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anyfleet.types import Kind, measured
from anyfleet.view import Flight, Request, View


@dataclass(frozen=True)
class TwoPhase:
    """Devices train and hold their results; then the `keep` with the largest `measure` upload.

    Both phases wait for everybody. A device that is away when results are fetched is passed over;
    when all are, or nobody could be asked, the step ends empty after `patience` seconds.
    """

    keep: int
    measure: str = "norm"
    patience: float = 60.0
    staleness: ClassVar[int] = 0
    gives: ClassVar[frozenset[str]] = frozenset({"held"})

    def __post_init__(self) -> None:
        if self.keep < 1 or not self.patience > 0:
            raise ValueError(
                f"TwoPhase needs keep >= 1 and patience > 0, got {self.keep} and {self.patience}."
            )

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({self.measure})

    def start(self, view: View) -> tuple[Request, ...]:
        if view.flying:
            return ()
        if not (view.arrived or view.lost or view.declined):
            return (Request(kind=Kind.HOLD),)
        if self._fetching(view):
            return ()
        best = sorted(_there(view), key=self._rank)[: self.keep]
        if not best:
            return ()
        return (
            Request(
                kind=Kind.FETCH,
                devices=tuple(flight.device for flight in best),
                of=tuple(flight.order for flight in best),
            ),
        )

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

    def _rank(self, flight: Flight) -> tuple[bool, float, int]:
        value = measured(flight.report, self.measure)
        # Largest first, ties by device, a norm that is not a number last.
        broken = math.isnan(value)
        return (broken, 0.0 if broken else -value, flight.device)

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
