"""How long a round waits when devices do not reply or cannot be asked."""

from anyfleet.core.slots import LOOK_AGAIN
from anyfleet.core.view import View


def end_of_patience(view: View, patience: float, *, asked: bool) -> float:
    """Return the time at which the round gives up; sooner while nobody could be asked.

    Then devices that were absent are looked for again.
    """
    end = view.started + patience
    return end if asked else min(end, view.now + LOOK_AGAIN)
