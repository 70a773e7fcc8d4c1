"""Events: what comes in at the server while it waits."""

from dataclasses import dataclass

from anyfleet.arrays import Arrays, Ints
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
    """What came in at the server: replies with their charges, and failures, or None."""

    replies: Replies | None = None
    charges: Charges | None = None  # of the replies
    failures: Failures | None = None

    def __len__(self) -> int:
        return sum(len(each) for each in (self.replies, self.failures) if each is not None)
