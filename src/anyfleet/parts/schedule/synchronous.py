"""Rounds that wait for all."""

from dataclasses import dataclass

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View


@dataclass(frozen=True)
class Synchronous(Schedule):
    """Rounds that wait for every device that was asked.

    No reply is late; an order that fails is waited for until its failure is known. When no device
    could be asked (all offline, all declined) the round ends empty after `patience` seconds.
    """

    patience: Unbounded = 60.0  # seconds after which a round without orders ends

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise ValueError(f"Synchronous.patience must be positive seconds, got {self.patience}.")

    def start(self, view: View) -> tuple[Request, ...]:
        return () if view.issued else (Request(),)

    def ready(self, view: View) -> bool:
        if view.under_way:
            return False
        tried = bool(view.replied or view.failed)
        return tried or view.now >= view.started + self.patience

    def alarm(self, view: View) -> float | None:
        return None if view.under_way else view.started + self.patience

    def enough(self, view: View) -> int:
        return max(1, len(view.under_way))
