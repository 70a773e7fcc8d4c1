"""The states of a fleet's devices: what they keep between visits.

The tensors that devices keep lie in tables, one for each purpose and name, with a row for each
device that has one, in the coordinates of the whole model: the next order may ask for another
sub-model. A stack of devices is read and written at once. What devices keep of an order waits in
`Remembered` until their training ends; only then is it committed. Tables that outgrow a limit go on
in files.

Codecs with error feedback add the residual of a device to its next update: the part of its updates
that no reply has brought to the server yet. A device learns with its next order whether its reply
was counted (`Cohort.acknowledged`); until then it keeps what it sent, too.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays, Flags, Ints, alike, listed
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import ChooserState, Params
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Norm
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Slice, cut_stack, place

OWN = "own"  # names the device's own parameters and statistics
SENT = "sent"  # names what the last reply brought of a residual
LIMIT = 2 << 30  # bytes of all tables beyond which new rows lie in files

T = TypeVar("T")
Rows = Mapping[int, Tensor]  # by device
Tables = Mapping[str, Mapping[str, Rows]]  # by purpose and name


@dataclass(frozen=True, eq=False)
class Keepsakes:
    """What the devices of a stack keep, in the coordinates of their sub-models: [devices, …]."""

    norm: Norm  # says which tensors a width has of its own
    own: Params = field(default_factory=dict)  # of their models
    purpose: str = ""  # of the residual (`Codec.state_name`), or ""
    left: Params = field(default_factory=dict)  # of their updates, left to send
    sent: Params = field(default_factory=dict)  # of their updates


@dataclass(frozen=True, eq=False)
class Remembered(Arrays):
    """What devices keep of orders that they carried out, until it is committed."""

    order: Ints
    device: Ints
    acknowledged: Ints  # as the order says
    fetched: Flags  # a held result was sent, so that none is held any more
    slice_index: Ints
    stack_index: Ints  # the number of each order's stack; -1: nothing is kept of its tensors
    place: Ints  # of each order in its stack
    chooser: tuple[ChooserState | None, ...]  # None: as before
    held: tuple[Replies | None, ...]  # a result that waits to be fetched; None: as before
    slices: tuple[Slice, ...] = listed("slice_index")
    stacks: tuple[Keepsakes, ...] = listed("stack_index")

    @classmethod
    def of(
        cls,
        orders: Cohort,
        *,
        stack: Keepsakes | None = None,
        chooser: Sequence[ChooserState | None] = (),
        held: Sequence[Replies | None] = (),
        fetched: bool = False,
    ) -> "Remembered":
        """Return what the devices of these orders keep; by default all is as before."""
        count = len(orders)
        return cls(
            order=orders.id,
            device=orders.device,
            acknowledged=orders.acknowledged,
            fetched=np.full(count, fetched),
            slice_index=orders.slice_index,
            stack_index=np.full(count, -1 if stack is None else 0),
            place=np.arange(count),
            chooser=tuple(chooser) or (None,) * count,
            held=tuple(held) or (None,) * count,
            slices=orders.slices,
            stacks=() if stack is None else (stack,),
        )


@dataclass(frozen=True, eq=False)
class SavedStates:
    """The states of a fleet as a value, for checkpoints."""

    tables: Tables
    choosers: Mapping[int, ChooserState]
    held: Mapping[int, Replies]
    last_sent_order: Mapping[int, int]


class DeviceStates:
    """The states of a fleet: tables of tensors, states of choosers, and held results.

    `limit` is the number of bytes of all tables beyond which new rows lie in files, so that memory
    grows with what is trained together and not with the fleet.
    """

    def __init__(self, task: Task, *, limit: int = LIMIT) -> None:
        self._task, self._limit = task, limit
        self._tables: dict[str, dict[str, dict[int, Tensor]]] = {}
        self._choosers: dict[int, ChooserState] = {}
        self._held: dict[int, Replies] = {}
        self._last_sent_order: dict[int, int] = {}
        self._in_files = False

    # -- single devices

    def state(self, device: int) -> DeviceState:
        """Return what one device keeps."""
        found = {
            purpose: {name: rows[device] for name, rows in tables.items() if device in rows}
            for purpose, tables in self._tables.items()
        }
        return DeviceState(
            tensors={purpose: tensors for purpose, tensors in found.items() if tensors},
            held=self._held.get(device),
            chooser=self.chooser(device),
            last_sent_order=self._last_sent_order.get(device, -1),
        )

    def adopt(self, device: int, state: DeviceState) -> None:
        """Let a device, of which nothing is known yet, keep this."""
        for purpose, tensors in state.tensors.items():
            for name, value in tensors.items():
                self._table(purpose, name)[device] = value
        if state.held is not None:
            self._held[device] = state.held
        if state.chooser:
            self._choosers[device] = state.chooser
        if state.last_sent_order >= 0:
            self._last_sent_order[device] = state.last_sent_order

    def chooser(self, device: int) -> ChooserState:
        """Return what the chooser of a device has learned; {} at first."""
        return self._choosers.get(device, {})

    def held(self, device: int) -> Replies | None:
        """Return the result that waits on a device, or None."""
        return self._held.get(device)

    # -- stacks

    def own(self, name: str, devices: Ints) -> Tensor | None:
        """Return the devices' own values of a tensor of the whole model, [devices, …].

        Until a device has trained, its own is the initial model. None if that is so for all.
        """
        return self._read(OWN, name, devices.tolist())

    def residual(self, orders: Cohort, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the residuals of the sub-models that orders ask for, [devices, …].

        Names of which no device has any are absent.
        """
        blueprint, job, found = self._task.blueprint, orders.job, []
        groups = alike(orders.slice_index)
        for rows in groups:
            some = orders.take(rows)
            slice_ = some.slice_of(0)
            own, lost = job.norm.own_names(blueprint, slice_), self._unacknowledged(some)
            purpose, devices = job.uplink.state_name, some.device.tolist()
            whole = {n: self._residual(purpose, own.get(n, n), devices, lost) for n in names}
            known = {n: value for n, value in whole.items() if value is not None}
            found.append(cut_stack(known, slice_, blueprint))
        if len(groups) == 1:
            return found[0]
        residuals: dict[str, Tensor] = {}
        for rows, part in zip(groups, found, strict=True):
            for n, value in part.items():
                if n not in residuals:
                    residuals[n] = value.new_zeros(len(orders), *value.shape[1:])
                residuals[n][torch.from_numpy(rows).to(value.device)] = value
        return residuals

    def _residual(
        self, purpose: str, name: str, devices: Sequence[int], lost: Sequence[int]
    ) -> Tensor | None:
        """Return what devices have left of a tensor, with all of a reply that never arrived.

        `lost` are the places of devices whose last reply may not have arrived.
        """
        left, sent = self._read(purpose, name, devices), self._tables.get(SENT, {}).get(name, {})
        again = [at for at in lost if devices[at] in sent]
        unsent = self._read(SENT, name, [devices[at] for at in again])
        if unsent is None:
            return left
        if left is None:
            left = self._blanks(purpose, name, len(devices))
        return left.index_add_(0, torch.tensor(again, device=left.device), unsent)

    def _unacknowledged(self, orders: Cohort | Remembered) -> list[int]:
        """Return the rows whose device does not know that its last reply was counted."""
        pairs = zip(orders.device.tolist(), orders.acknowledged.tolist(), strict=True)
        last = self._last_sent_order
        return [row for row, (device, order) in enumerate(pairs) if last.get(device, -1) != order]

    def commit(self, remembered: Remembered) -> None:
        """Let devices keep what they remember of orders, now that their training has ended."""
        self._in_files = self.bytes > self._limit
        for device in remembered.device[remembered.fetched].tolist():
            self._held.pop(device, None)
        devices = remembered.device.tolist()
        self._choosers |= _given(devices, remembered.chooser)
        self._held |= _given(devices, remembered.held)
        for rows in alike(remembered.stack_index, remembered.slice_index):
            some = remembered.take(rows)
            number = int(some.stack_index[0])
            if number >= 0:
                self._commit(some, some.stacks[number], some.slices[int(some.slice_index[0])])

    def _commit(self, some: Remembered, stack: Keepsakes, slice_: Slice) -> None:
        """Write what devices with one slice keep of their tensors."""
        devices = some.device.tolist()
        for name, value in stack.own.items():
            self._write(OWN, name, devices, self._pasted(OWN, name, name, value, some, slice_))
        if not stack.purpose:
            return
        own, purpose = stack.norm.own_names(self._task.blueprint, slice_), stack.purpose
        lost = self._unacknowledged(some)
        for name, rows in self._tables.get(SENT, {}).items():
            # What did not arrive is left to send again, also where this order asked for nothing.
            again = [devices[at] for at in lost if devices[at] in rows]
            left = self._residual(purpose, name, again, range(len(again)))
            if left is not None:
                self._write(purpose, name, again, left)
            for device in devices:
                rows.pop(device, None)
        for name, value in stack.left.items():
            table = own.get(name, name)
            left = self._pasted(purpose, table, name, value, some, slice_)
            self._write(purpose, table, devices, left)
        for name, value in stack.sent.items():
            table = own.get(name, name)
            sent = self._pasted(SENT, table, name, value, some, slice_)
            self._write(SENT, table, devices, sent)
        self._last_sent_order |= dict(zip(devices, some.order.tolist(), strict=True))

    def _pasted(
        self, purpose: str, table: str, name: str, value: Tensor, some: Remembered, slice_: Slice
    ) -> Tensor:
        """Return rows of a table with the values of a stack written where the slice lies."""
        rows = self._read(purpose, table, some.device.tolist())
        if rows is None:
            rows = self._blanks(purpose, table, len(some))
        at = place(name, slice_, self._task.blueprint, str(rows.device))
        places = torch.from_numpy(some.place).to(value.device)
        rows[(slice(None), *at)] = value.index_select(0, places)
        return rows

    # -- tables

    def _blank(self, purpose: str, name: str) -> Tensor:
        """Return what a device has that has no row: the initial model, and of all else nothing."""
        plain, task = name.partition("@")[0], self._task
        initial = task.params[plain] if plain in task.params else task.buffers[plain]
        return initial if purpose == OWN else torch.zeros_like(initial)

    def _blanks(self, purpose: str, name: str, count: int) -> Tensor:
        blank = self._blank(purpose, name)
        return blank.repeat(count, *(1,) * blank.ndim)

    def _table(self, purpose: str, name: str) -> dict[int, Tensor]:
        return self._tables.setdefault(purpose, {}).setdefault(name, {})

    def _read(self, purpose: str, name: str, devices: Sequence[int]) -> Tensor | None:
        """Return rows of a table, as new tensors; None if no device has one."""
        table = self._tables.get(purpose, {}).get(name)
        if not table:
            return None
        if not any(map(table.__contains__, devices)):
            return None
        blank = self._blank(purpose, name)
        rows = [table.get(device, blank) for device in devices]
        if blank.device.type != "cpu":  # rows in files are in the memory of the host
            rows = [row.to(blank.device) for row in rows]
        return torch.stack(rows)

    def _write(self, purpose: str, name: str, devices: Sequence[int], values: Tensor) -> None:
        rows = _in_file(values) if self._in_files else _separate(values)
        self._table(purpose, name).update(zip(devices, rows, strict=True))

    @property
    def bytes(self) -> int:
        """The size of all tables, those in files included."""
        tables = (rows for names in self._tables.values() for rows in names.values() if rows)
        return sum(len(rows) * next(iter(rows.values())).nbytes for rows in tables)

    # -- checkpoints

    def save(self) -> SavedStates:
        """Return the states as they are now; rows are never written to, so none is copied."""
        tables = {
            purpose: {name: dict(rows) for name, rows in names.items()}
            for purpose, names in self._tables.items()
        }
        return SavedStates(
            tables, dict(self._choosers), dict(self._held), dict(self._last_sent_order)
        )

    def restore(self, saved: SavedStates) -> None:
        """Go back to what `save` returned."""
        self._tables = {
            purpose: {name: dict(rows) for name, rows in names.items()}
            for purpose, names in saved.tables.items()
        }
        self._choosers, self._held = dict(saved.choosers), dict(saved.held)
        self._last_sent_order = dict(saved.last_sent_order)


def _given(devices: Sequence[int], values: Sequence[T | None]) -> dict[int, T]:
    """Return what there is, by device."""
    pairs = zip(devices, values, strict=True)
    return {device: value for device, value in pairs if value is not None}


def _separate(values: Tensor) -> tuple[Tensor, ...]:
    """Return rows each of which has memory of its own, that goes when the row does."""
    rows: Any = torch.unbind_copy(values)  # type: ignore[func-returns-value]
    return tuple(rows)


def _in_file(values: Tensor) -> tuple[Tensor, ...]:
    """Return rows in a file that is mapped into memory; it goes when the last of them does."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = str(Path(folder) / "rows")
        mapped = torch.from_file(path, shared=True, size=values.numel(), dtype=values.dtype)
    return mapped.view(values.shape).copy_(values).unbind(0)
