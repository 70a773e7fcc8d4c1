"""What becomes of orders: what a runtime tells of them, and what it charges."""

from dataclasses import dataclass, fields

import numpy as np

from anyfleet.arrays import Batch, Floats, Ints
from anyfleet.core.messages import Updates


@dataclass(frozen=True, eq=False)
class Charges(Batch):
    """What the runtime charged for orders."""

    order: Ints
    flops: Floats
    down: Floats  # bits
    up: Floats  # bits
    download: Floats  # seconds
    compute: Floats  # seconds
    upload: Floats  # seconds
    download_joules: Floats
    compute_joules: Floats
    upload_joules: Floats
    began: Floats  # seconds since the start of the run
    delivered_down: Floats  # share of the model's columns that came through
    delivered_up: Floats


@dataclass(frozen=True, eq=False)
class Events:
    """What a runtime has to tell: answers with their charges, and orders without an answer."""

    updates: Updates | None = None
    charges: Charges | None = None
    lost: tuple["Lost", ...] = ()

    def __len__(self) -> int:
        return len(self.lost) + (0 if self.updates is None else len(self.updates))


@dataclass(frozen=True, eq=False)
class Lost:
    """An order that will not be answered. A normal event, not an exception."""

    order: int
    reason: str
    charges: Charges  # what was spent before it was lost


def no_charges(order: int, now: float) -> Charges:
    """Of an order that was never sent."""
    zero = np.zeros(1)
    spent = {f.name: zero for f in fields(Charges)}
    return Charges(**{**spent, "order": np.array([order]), "began": np.array([now])})
