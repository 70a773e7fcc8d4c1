"""The state of a real fleet between two rounds."""

from dataclasses import dataclass

from anyfleet.arrays import Floats
from anyfleet.core.orders import Cohort


@dataclass(frozen=True, eq=False)
class FleetState:
    """The state of a real fleet between two rounds, for checkpoints."""

    run_id: int  # of Flower's run, which a server that takes over has to stop
    now: float  # seconds since the start of the run
    next_order: int  # orders from this number on are issued anew, whatever devices did with them
    losses: Floats  # that each device reported last
    under_way: tuple[Cohort, ...]  # single orders that are to be sent again
    offered: tuple[Cohort, ...]  # single orders from whose menus devices have not chosen
