"""Orders under way as one table, and the state of a simulated fleet between two events."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints, listed
from anyfleet.core.check_in import OrderChoices
from anyfleet.core.device_states import Remembered, SavedStates
from anyfleet.core.messages import Charges
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies, Reports
from anyfleet.runtime.simulated.clock import Clock, Events
from anyfleet.runtime.simulated.failures import DETAILED, REASONS
from anyfleet.runtime.simulated.phases import ROUNDING, Phases, Progress
from anyfleet.runtime.simulated.transfers import Transfers


@dataclass(frozen=True, eq=False)
class Submitted:
    """A cohort as the server submitted it, and as it reached its devices."""

    sent: Cohort
    received: Cohort  # what links lost of it is missing


@dataclass(frozen=True, eq=False)
class UnderWay(Arrays):
    """The orders under way, one row for each, in the order in which they were submitted.

    The upload of an order that is carried out depends on the round in which its training ends. It
    is computed for the round under way, and again in the next if training has not ended by then.
    """

    id: Ints
    device: Ints
    cohort: Ints  # the number of its cohort
    row: Ints  # in its cohort
    began: Floats  # the second at which it was submitted
    round_index: Ints  # in which it was submitted
    battery: Floats  # joules in the battery then
    bit_rate_up: Floats  # then
    bit_rate_until: Floats  # the second until which time does not change it
    send_power: Floats  # watts
    active: Ints  # devices that use its band
    flops: Floats
    bits_down: Floats
    bits_up: Floats  # 0 before its upload begins
    transfer: Transfers
    download: Phases
    compute: Phases
    upload: Phases  # as it will be, once it is known
    upload_round: Ints  # for which the upload was computed, or -1
    uploading: Flags  # whether it has begun
    events: Events
    failed_after: Floats  # seconds from its beginning to its failure; infinite without one
    reason: Ints  # why it fails: a place among `REASONS`, or -1
    carried_out: Flags  # whether an engine did what it asks for
    replies: Replies  # any before that
    did_nothing: Flags  # whether its device refused it
    detail: Ints  # why it was refused, or does not fit into memory, or -1
    cohorts: tuple[Submitted, ...] = listed("cohort")
    details: tuple[str, ...] = listed("detail")

    def put_columns(self, rows: Ints, other: "UnderWay", *names: str) -> "UnderWay":
        """Return the orders with some columns of others in place of these rows.

        Most columns never change, and to put all of them takes long. Others list what these do.
        """
        if len(rows) == len(self):
            return other
        changed = {name: _put(getattr(self, name), rows, getattr(other, name)) for name in names}
        return self.having(**changed)

    def why(self) -> tuple[str, ...]:
        """Return why each order fails; "" where it does not."""
        told = zip(self.reason.tolist(), self.detail.tolist(), strict=True)
        return tuple(
            "" if reason < 0 else self.details[detail] if reason in DETAILED else REASONS[reason]
            for reason, detail in told
        )

    def charges(self, elapsed: Floats) -> Charges:
        """Return what each order has cost after so many seconds: the work done by then."""
        computing = self.download.seconds
        down = _progress(self.download, np.zeros(len(self)), elapsed)
        work = _progress(self.compute, computing, elapsed)
        up = _progress(self.upload, computing + self.compute.seconds, elapsed)
        up = Progress(*(np.where(self.uploading, each, 0.0) for each in up))
        return Charges(
            order=self.id,
            flops=self.flops * work.done,
            bits_down=self.bits_down * down.done,
            bits_up=self.bits_up * up.done,
            download_seconds=down.seconds,
            compute_seconds=work.seconds,
            upload_seconds=up.seconds,
            download_joules=down.joules,
            compute_joules=work.joules,
            upload_joules=up.joules,
            began=self.began,
            # A message that was cut off cannot be used at all.
            delivered_down=self.transfer.delivered_down * (down.done == 1),
            delivered_up=self.transfer.delivered_up * (up.done == 1),
        )


def _put(column: Any, rows: Ints, values: Any) -> Any:
    """Return a column with other values in these rows, which ascend; of a list, the other."""
    if isinstance(column, Arrays):
        return column.put(rows, values)
    if isinstance(column, tuple):
        return values
    found = column.copy()
    found[rows] = values
    return found


def _progress(phases: Phases, start: Floats, elapsed: Floats) -> Progress:
    """Return how far phases are so many seconds into their orders; they begin after `start`."""
    over = elapsed >= (start + phases.seconds) * (1 - ROUNDING)
    ends = phases.seconds, np.ones(len(phases)), phases.joules
    if over.all():
        return Progress(*ends)
    with np.errstate(invalid="ignore"):
        found = phases.progress_at(elapsed - start)
    begun = elapsed > start
    pairs = zip(ends, found, strict=True)
    return Progress(*(np.where(over, end, np.where(begun, now, 0.0)) for end, now in pairs))


@dataclass(frozen=True, eq=False)
class Told(Arrays):
    """What devices reported of their training; an accelerator may still be computing it."""

    device: Ints
    reports: Reports

    @property
    def losses(self) -> tuple[Ints, Floats]:
        """The devices that reported a loss, and these losses."""
        losses = self.reports.number("loss")
        known = ~np.isnan(losses)
        return self.device[known], losses[known]


@dataclass(frozen=True, eq=False)
class SimulatedState:
    """The state of a simulated fleet between two events, for checkpoints."""

    clock: Clock
    round_index: int
    under_way: UnderWay | None  # None: no order is
    choices: OrderChoices | None  # made and not yet told
    states: SavedStates
    remembered: Remembered | None  # what devices keep once their training has ended
    batteries: tuple[Floats, Floats]
    losses: Floats  # that each device reported last
    told: Told | None = None  # what devices reported since then; None: nothing
