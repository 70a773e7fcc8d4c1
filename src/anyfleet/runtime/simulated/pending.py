"""Orders under way, and the state of a fleet between two events."""

from collections.abc import Mapping
from dataclasses import dataclass

from anyfleet.arrays import Floats
from anyfleet.core.messages import Charges, Memory, Updates
from anyfleet.core.orders import Orders
from anyfleet.runtime.simulated.clock import Clock
from anyfleet.runtime.simulated.failures import Fate
from anyfleet.runtime.simulated.phases import Course, Courses
from anyfleet.runtime.simulated.transfers import Crossing
from anyfleet.world.quantities import When


@dataclass(frozen=True, eq=False)
class Pending:
    """An order under way: since when, what it will have cost, and how it ends."""

    asked: Orders  # as submitted, before a link cut it
    courses: Courses  # how its parts go on
    parts: tuple[Course, ...]  # download and compute; then the upload, too
    crossing: Crossing
    charges: Charges
    fate: Fate | None = None  # how it ends without an answer, as far as is known
    update: Updates | None = None
    memory: Memory | None = None  # what the device will remember once it has finished
    refused: str = ""  # why the server takes no notice of its answer, if so
    unread: str = ""  # why the device took no notice of the order, if so

    @property
    def order(self) -> Orders:
        return self.courses.order

    @property
    def when(self) -> When:
        return self.courses.when


@dataclass(frozen=True, eq=False)
class Saved:
    """The state of a simulated fleet between two events."""

    clock: Clock
    step: int
    pending: Mapping[int, Pending]
    memories: Mapping[int, Memory]
    batteries: tuple[Floats, Floats]
    losses: Floats
