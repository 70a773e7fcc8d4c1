"""All train, few upload: results wait on the devices until the server fetches some of them."""

from dataclasses import dataclass
from typing import ClassVar

from anyfleet.config.number_values import Unbounded
from anyfleet.core.messages import Kind
from anyfleet.core.signals import HeldResults, Signal
from anyfleet.core.slots import Schedule
from anyfleet.core.view import OrderStatuses, Request, View


@dataclass(frozen=True)
class HoldAndFetch(Schedule):
    """Rounds in which devices train and hold their results, and the selection says who uploads.

    `select.Largest` picks some of them, any other selection all. The server waits for every
    device that it asked, both while they train and while they upload. A device that is absent
    when results are fetched is passed over. When all are absent, or no device could be asked,
    the round ends empty after `patience` seconds.
    """

    patience: Unbounded = 60.0  # seconds after which a round without results ends

    provides: ClassVar[frozenset[Signal]] = frozenset({HeldResults()})

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise ValueError(
                f"HoldAndFetch.patience must be positive seconds, got {self.patience}."
            )

    def start(self, view: View) -> tuple[Request, ...]:
        if view.under_way:
            return ()
        if not view.orders:
            return (Request(kind=Kind.HOLD),)
        if self._fetching(view):
            return ()
        held = _reachable(view).order
        # The selection picks some of them, and with them the devices.
        return (Request(kind=Kind.FETCH, held_orders=held),) if len(held) else ()

    def ready(self, view: View) -> bool:
        if view.under_way:
            return False
        if self._fetching(view):
            return True
        if _reachable(view):
            return False  # what they hold is fetched first, however long the training took
        nobody = bool(view.failed) and not _held(view)
        return nobody or view.now >= view.started + self.patience

    def alarm(self, view: View) -> float | None:
        return None if view.under_way else view.started + self.patience

    def enough(self, view: View) -> int:
        return max(1, len(view.under_way))

    def _fetching(self, view: View) -> bool:
        """Return whether results have been fetched in this round, or are being fetched."""
        return bool(view.orders.of_kind(Kind.FETCH))


def _held(view: View) -> OrderStatuses:
    """Return the orders whose results wait on their devices."""
    return view.replied.of_kind(Kind.HOLD)


def _reachable(view: View) -> OrderStatuses:
    """Return the orders whose results can be fetched now."""
    held = _held(view)
    return held.where(view.free(held.device))
