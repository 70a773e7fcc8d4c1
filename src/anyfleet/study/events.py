"""What happens in a study: runs begin, advance by a round, and end."""

from dataclasses import dataclass
from typing import Literal

from anyfleet.study.plan import PlannedRun

How = Literal["finished", "stopped", "failed", "died"]


@dataclass(frozen=True)
class Begun:
    """A run that begins, or goes on after some rounds."""

    run: PlannedRun
    rounds: int  # that it has already


@dataclass(frozen=True)
class Advanced:
    """A run that has one more round."""

    run: PlannedRun
    rounds: int  # that it has now
    metric: str
    score: float  # NaN: not evaluated
    time: float  # simulated seconds
    seconds: float  # of this machine, since the result before


@dataclass(frozen=True)
class Ended:
    """A run that is over for now: finished, stopped from outside, failed, or with a dead process.

    `told` says why it has not finished; `trace` is the traceback of an error in a user's code.
    """

    run: PlannedRun
    how: How
    told: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Noted:
    """A warning of a run, for people."""

    text: str


Event = Begun | Advanced | Ended | Noted
