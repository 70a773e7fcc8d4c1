"""Orders under way, and the state of a fleet between two events."""

from collections.abc import Mapping
from dataclasses import dataclass

from anyfleet.arrays import Floats
from anyfleet.core.messages import Charges, DeviceState, Replies
from anyfleet.core.orders import Cohort
from anyfleet.runtime.simulated.clock import Clock
from anyfleet.runtime.simulated.failures import PossibleFailure
from anyfleet.runtime.simulated.phases import Phase, Phases
from anyfleet.runtime.simulated.transfers import Transfer
from anyfleet.world.quantities import When


@dataclass(frozen=True, eq=False)
class Pending:
    """An order under way: since when, what it will have cost, and how it ends."""

    asked: Cohort  # as submitted, before a link cut it
    phases: Phases  # how its parts go on
    passed_phases: tuple[Phase, ...]  # download and compute; then the upload, too
    transfer: Transfer
    charges: Charges
    failure: PossibleFailure | None = None  # how it ends without an answer, as far as is known
    reply: Replies | None = None
    state: DeviceState | None = None  # what the device will remember once it has finished
    refused: str = ""  # why the server takes no notice of its answer, if so
    unread: str = ""  # why the device took no notice of the order, if so

    @property
    def order(self) -> Cohort:
        return self.phases.order

    @property
    def when(self) -> When:
        return self.phases.when


@dataclass(frozen=True, eq=False)
class Saved:
    """The state of a simulated fleet between two events."""

    clock: Clock
    round_index: int
    pending: Mapping[int, Pending]
    states: Mapping[int, DeviceState]
    batteries: tuple[Floats, Floats]
    losses: Floats
