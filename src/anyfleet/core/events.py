"""Events: what comes in at the server while it waits."""

from dataclasses import dataclass

from anyfleet.arrays import Arrays, Ints
from anyfleet.core.check_in import OrderChoices
from anyfleet.core.messages import Charges
from anyfleet.core.stacks import Replies


@dataclass(frozen=True, eq=False)
class Failures(Arrays):
    """Orders to which no reply will come, one row each. Normal events, not exceptions."""

    order: Ints
    reason: tuple[str, ...]
    charges: Charges  # what was spent until then


@dataclass(frozen=True, eq=False)
class Events:
    """What came in at the server: replies with their charges, failures and choices, or None."""

    replies: Replies | None = None
    charges: Charges | None = None  # of the replies
    failures: Failures | None = None
    choices: OrderChoices | None = None  # what devices chose from menus that they were offered
    free: int = 0  # devices that are free now, where nothing was under way because none was

    def __len__(self) -> int:
        found = (self.replies, self.failures, self.choices)
        return sum(len(each) for each in found if each is not None) + self.free
