"""Orders under way, and the state of a simulated fleet between two events."""

from collections.abc import Mapping
from dataclasses import dataclass

from anyfleet.arrays import Floats
from anyfleet.core.memories import Remembered, SavedMemories
from anyfleet.core.messages import Charges
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.runtime.simulated.clock import Clock
from anyfleet.runtime.simulated.failures import PossibleFailure
from anyfleet.runtime.simulated.phases import OrderTiming, Phase
from anyfleet.runtime.simulated.transfers import Transfer
from anyfleet.world.quantities import When


@dataclass(frozen=True, eq=False)
class Pending:
    """An order under way: its phases, its charges if it is completed, and how it ends."""

    sent_order: Cohort  # as the server submitted it, before a link lost columns of it
    timing: OrderTiming
    phases: tuple[Phase, ...]  # download and compute; with the upload once the reply is known
    transfer: Transfer
    charges: Charges
    failure: PossibleFailure | None = None  # the earliest one known so far
    reply: Replies | None = None
    remembered: Remembered | None = None  # what the device keeps once it has finished
    refused_by_server: str = ""  # the reason, or ""
    refused_by_device: str = ""  # the reason, or ""

    @property
    def order(self) -> Cohort:
        """The order as the device received it."""
        return self.timing.order

    @property
    def when(self) -> When:
        """The time at which the order was submitted."""
        return self.timing.when


@dataclass(frozen=True, eq=False)
class SimulatedState:
    """The state of a simulated fleet between two events, for checkpoints."""

    clock: Clock
    round_index: int
    pending: Mapping[int, Pending]
    memories: SavedMemories
    batteries: tuple[Floats, Floats]
    losses: Floats
