"""Asynchronous training with a buffer (FedBuff)."""

from dataclasses import dataclass

from anyfleet.view import Request, View


@dataclass(frozen=True)
class Buffered:
    """Keeps `concurrency` devices busy and steps after every `size` answers.

    When nobody answers for `patience` seconds the step is empty, so that time never stands still.
    """

    concurrency: int
    size: int
    staleness: int = 20
    patience: float = 3600.0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.size < 1:
            raise ValueError(
                "Buffered needs concurrency and size of at least 1, got "
                f"{self.concurrency} and {self.size}."
            )
        if self.staleness < 0 or not self.patience > 0:
            raise ValueError(
                "Buffered needs staleness >= 0 and patience > 0 seconds, got "
                f"{self.staleness} and {self.patience}."
            )

    def start(self, view: View) -> tuple[Request, ...]:
        free = min(self.concurrency - len(view.flying), len(view.idle))
        return (Request(count=free),) if free > 0 else ()

    def ready(self, view: View) -> bool:
        return len(view.arrived) >= self.size or view.now >= view.started + self.patience

    def alarm(self, view: View) -> float | None:
        return view.started + self.patience

    def enough(self, view: View) -> int:
        return 1

    def drop(self, view: View) -> tuple[int, ...]:
        return ()
