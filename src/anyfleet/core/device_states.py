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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays, Flags, Ints, alike, join, listed
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_tables import (
    EMPTY_TABLE,
    NO_NUMBERS,
    DeviceNumbers,
    DeviceTable,
    RowIndex,
    on_device,
)
from anyfleet.core.messages import ChooserState, Params
from anyfleet.core.objectives import Task
from anyfleet.core.ordered_stacks import base
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Norm
from anyfleet.core.stacks import Replies, picked
from anyfleet.elastic import Slice, cut_stack, place

OWN = "own"  # names the device's own parameters and statistics
SENT = "sent"  # names what the last reply brought of a residual
LIMIT = 2 << 30  # bytes of all tables beyond which new rows lie in files
_SHARE = 4  # of an accelerator's memory, tables may have one part in so many
# Bytes of a block, in all tables, beyond which to merge it costs more than it saves: an accelerator
# copies fast, and every block that is read is a call.
_LARGE, _LARGE_ELSEWHERE = 1 << 25, 1 << 30

T = TypeVar("T")
Tables = Mapping[str, Mapping[str, DeviceTable]]  # by purpose and name
StackedRows = tuple[Ints, Params]  # devices, and their rows of tables, [devices, …]


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
    held_index: Ints  # the number of a result that waits to be fetched; -1: as before
    held_row: Ints  # of each order in its result
    slices: tuple[Slice, ...] = listed("slice_index")
    stacks: tuple[Keepsakes, ...] = listed("stack_index")
    held: tuple[Replies, ...] = listed("held_index")

    @classmethod
    def of(
        cls,
        orders: Cohort,
        *,
        stack: Keepsakes | None = None,
        chooser: Sequence[ChooserState | None] = (),
        held: Replies | None = None,
        fetched: bool = False,
    ) -> "Remembered":
        """Return what the devices of these orders keep; by default all is as before.

        `held` has a reply to each of the orders.
        """
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
            held_index=np.full(count, -1 if held is None else 0),
            held_row=np.arange(count),
            slices=orders.slices,
            stacks=() if stack is None else (stack,),
            held=() if held is None else (held,),
        )

    @property
    def nothing(self) -> bool:
        """Whether all devices keep what they had before."""
        same = not (self.stacks or self.held or self.fetched.any())
        return same and self.chooser.count(None) == len(self.chooser)


@dataclass(frozen=True, eq=False)
class SavedStates:
    """The states of a fleet as a value, for checkpoints."""

    tables: Tables
    choosers: Mapping[int, ChooserState]
    held: Replies
    last_sent_order: DeviceNumbers

    def fits(self, task: Task) -> bool:
        """Return whether devices can go on with these states, which may come from a file."""
        whole = {**task.params, **task.buffers}
        tables = [each for names in self.tables.values() for each in names.items()]
        devices = self.held.device
        if not ((devices >= 0) & (devices < task.devices)).all():
            return False
        return self.last_sent_order.sound and all(
            base(name) in whole and table.fits(whole[base(name)]) for name, table in tables
        )


class DeviceStates:
    """The states of a fleet: tables of tensors, states of choosers, and held results.

    `limit` is the number of bytes of all tables beyond which new rows lie in files, so that memory
    grows with what is trained together and not with the fleet. Unless it is given, it is `LIMIT`,
    or a part of the memory of the accelerator that the tables are on.
    """

    def __init__(self, task: Task, *, limit: int | None = None) -> None:
        self._task = task
        self._initial = {**task.params, **task.buffers}
        self._device = next(iter(task.params.values())).device
        self._limit = _limit_on(self._device) if limit is None else limit
        self._large = _LARGE if self._device.type == "cpu" else _LARGE_ELSEWHERE
        self._tables: dict[str, dict[str, DeviceTable]] = {}
        self._choosers: dict[int, ChooserState] = {}
        self._held = Replies.none()
        self._last_sent_order = NO_NUMBERS

    # -- single devices

    def state(self, device: int) -> DeviceState:
        """Return what one device keeps."""
        alone = np.array([device])
        found = {
            purpose: {name: rows[0] for name, rows in self._read(purpose, tables, alone).items()}
            for purpose, tables in self._tables.items()
        }
        return DeviceState(
            tensors={purpose: tensors for purpose, tensors in found.items() if tensors},
            held=self._held_on(device),
            chooser=self.chooser(device),
            last_sent_order=int(self._last_sent_order.of(alone)[0]),
        )

    def adopt(self, device: int, state: DeviceState) -> None:
        """Let a device, of which nothing is known yet, keep this."""
        alone = np.array([device])
        for purpose, tensors in state.tensors.items():
            self._write(purpose, [(alone, {name: value[None] for name, value in tensors.items()})])
        if state.held is not None:
            self._held = join([self._held, replace(state.held, device=alone)])
        if state.chooser:
            self._choosers[device] = state.chooser
        if state.last_sent_order >= 0:
            order = np.array([state.last_sent_order])
            self._last_sent_order = self._last_sent_order.changed(alone, order)

    def chooser(self, device: int) -> ChooserState:
        """Return what the chooser of a device has learned; {} at first."""
        return self._choosers.get(device, {})

    def choosers(self, devices: Ints) -> list[ChooserState]:
        """Return what the choosers of these devices have learned; {} at first."""
        nothing: ChooserState = {}
        return list(map(self._choosers.get, devices.tolist(), repeat(nothing)))

    def _held_on(self, device: int) -> Replies | None:
        """Return the result that waits on a device, or None."""
        found = self._held.take(self._held.device == device).pruned()
        return found if len(found) else None

    # -- stacks

    def own(self, names: Iterable[str], devices: Ints) -> dict[str, Tensor]:
        """Return the devices' own values of tensors of the whole model, [devices, …].

        Until a device has trained, its own is the initial model. Names are absent if that is so for
        all devices.
        """
        return self._read(OWN, names, devices)

    def held(self, orders: Cohort) -> tuple[Flags, Replies]:
        """Return which orders fetch a result that waits on their devices, and these results."""
        waiting, wanted = self._held.take(np.argsort(self._held.order)), orders.held_order
        if not len(waiting):
            return np.zeros(len(orders), dtype=bool), waiting
        at = np.minimum(np.searchsorted(waiting.order, wanted), len(waiting) - 1)
        there = (waiting.order[at] == wanted) & (waiting.device[at] == orders.device)
        return there, waiting.take(at[there])

    def residual(self, orders: Cohort, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the residuals of the sub-models that orders ask for, [devices, …].

        Names of which no device has any are absent.
        """
        blueprint, job, found = self._task.blueprint, orders.job, []
        groups = alike(orders.slice_index)
        for rows in groups:
            some = orders.take(rows)
            slice_ = some.slice_of(0)
            own = job.norm.own_names(blueprint, slice_)
            tables = {n: own.get(n, n) for n in names}
            whole = self._owed(job.uplink.state_name, list(tables.values()), some)
            known = {n: whole[table] for n, table in tables.items() if table in whole}
            found.append(cut_stack(known, slice_, blueprint))
        if len(groups) == 1:
            return found[0]
        residuals: dict[str, Tensor] = {}
        for rows, part in zip(groups, found, strict=True):
            for n, value in part.items():
                if n not in residuals:
                    residuals[n] = value.new_zeros(len(orders), *value.shape[1:])
                residuals[n][on_device(rows, value.device)] = value
        return residuals

    def _owed(
        self, purpose: str, names: Sequence[str], orders: Cohort | Remembered
    ) -> dict[str, Tensor]:
        """Return what devices have left of tensors, with all of a reply that never arrived."""
        left, lost = self._read(purpose, names, orders.device), self._unacknowledged(orders)
        if not lost.any():
            return left
        for index, some in _together(self._tables.get(SENT, {}), names):
            again = np.flatnonzero(lost & index.has(orders.device))
            for name, unsent in self._read(SENT, some, orders.device[again]).items():
                if name not in left:
                    left[name] = self._blanks(purpose, name, len(orders))
                left[name].index_add_(0, on_device(again, unsent.device), unsent)
        return left

    def _unacknowledged(self, orders: Cohort | Remembered) -> Flags:
        """Return which devices do not know that their last reply was counted."""
        lost: Flags = self._last_sent_order.of(orders.device) != orders.acknowledged
        return lost

    def commit(self, remembered: Remembered) -> None:
        """Let devices keep what they remember of orders, now that their training has ended."""
        self._choosers |= _given(remembered.device, remembered.chooser)
        self._hold(remembered)
        kept: dict[str, list[StackedRows]] = {}
        for rows in alike(remembered.stack_index, remembered.slice_index):
            some = remembered.take(rows)
            if some.stack_index[0] >= 0:
                for purpose, stack in self._kept(some):
                    kept.setdefault(purpose, []).append(stack)
        sent = np.array([*(bool(stack.purpose) for stack in remembered.stacks), False])
        told = remembered.take(sent[remembered.stack_index])
        self._last_sent_order = self._last_sent_order.changed(told.device, told.order)
        for purpose, stacks in kept.items():
            self._write(purpose, stacks)

    def _hold(self, remembered: Remembered) -> None:
        """Let devices hold new results, and none any more that they have sent."""
        new, held = remembered.held_index >= 0, self._held
        gone = np.isin(held.device, remembered.device[new | remembered.fetched])
        if gone.any():
            # What is held may wait for long: of stacks that lose a device only the others stay.
            touched = np.isin(held.stack_index, held.stack_index[gone])
            held = join([held.take(~touched), held.take(touched & ~gone).compact()])
        parts = [
            remembered.held[remembered.held_index[rows[0]]].take(remembered.held_row[rows])
            for rows in (np.flatnonzero(new)[some] for some in alike(remembered.held_index[new]))
        ]
        if parts or held is not self._held:
            self._held = join([held, *parts]).pruned()

    def _kept(self, some: Remembered) -> Iterator[tuple[str, StackedRows]]:
        """Yield what devices of one stack and slice keep of their tensors, by purpose."""
        stack, slice_ = some.stacks[some.stack_index[0]], some.slices[some.slice_index[0]]
        yield OWN, (some.device, self._pasted(OWN, stack.own, some, slice_))
        if not stack.purpose:
            return
        own, purpose = stack.norm.own_names(self._task.blueprint, slice_), stack.purpose
        left, sent = (
            {own.get(n, n): value for n, value in tree.items()} for tree in (stack.left, stack.sent)
        )
        before, lost = self._tables.get(SENT, {}), self._unacknowledged(some)
        for index, names in _together(before, [n for n in before if n not in left]):
            # What did not arrive is left to send again, also where this order asked for nothing.
            again = some.take(lost & index.has(some.device))
            yield purpose, (again.device, self._owed(purpose, names, again))
        yield purpose, (some.device, self._pasted(purpose, left, some, slice_))
        yield SENT, (some.device, self._pasted(SENT, sent, some, slice_))
        self._forget([n for n in before if n not in sent], some.device)

    def _pasted(
        self, purpose: str, values: Params, some: Remembered, slice_: Slice
    ) -> dict[str, Tensor]:
        """Return rows of tables with the values of a stack written where the slice lies."""
        rows = _rows_at(values, some.place)
        cut = [name for name, value in values.items() if not self._covers(name, value, slice_)]
        onto: dict[str, Tensor] = {}
        if purpose == OWN:
            onto = self._read(OWN, cut, some.device)
        elif purpose != SENT:  # what was sent before is over
            onto = self._owed(purpose, cut, some)
        for name in cut:
            whole = onto[name] if name in onto else self._blanks(purpose, name, len(some))
            at = place(base(name), slice_, self._task.blueprint, str(whole.device))
            whole[(slice(None), *at)] = rows[name]
            rows[name] = whole
        return rows

    def _covers(self, name: str, value: Tensor, slice_: Slice) -> bool:
        """Return whether a stack of tensors is the rows of a table: the slice has all of them."""
        blank, plain = self._blank(OWN, name), base(name)
        at = place(plain, slice_, self._task.blueprint, str(value.device))
        same = value.shape[1:] == blank.shape and value.dtype == blank.dtype
        return same and all(isinstance(each, slice) for each in at)

    # -- tables

    @cached_property
    def _zeros(self) -> Params:
        return {n: value.new_zeros(()).expand_as(value) for n, value in self._initial.items()}

    def _blank(self, purpose: str, name: str) -> Tensor:
        """Return what a device has that has no row: the initial model, and of all else nothing."""
        return (self._initial if purpose == OWN else self._zeros)[base(name)]

    def _blanks(self, purpose: str, name: str, count: int) -> Tensor:
        blank = self._blank(purpose, name)
        return blank.repeat(count, *(1,) * blank.ndim)

    def _read(self, purpose: str, names: Iterable[str], devices: Ints) -> dict[str, Tensor]:
        """Return rows of tables, as new tensors; names of which no device has one are absent."""
        tables, found = self._tables.get(purpose, {}), {}
        for index, some in _together(tables, names):
            rows = index.find(devices)
            if rows is not None:
                rows = rows.on(self._device)
                for name in some:
                    found[name] = tables[name].read(rows, self._blank(purpose, name))
        return found

    def _write(self, purpose: str, stacks: Sequence[StackedRows]) -> None:
        """Write rows of stacks of different devices: all of a name are one block of its table."""
        in_file, tables = self._in_files, self._tables.setdefault(purpose, {})
        writers: dict[str, list[int]] = {}
        for number, (_, rows) in enumerate(stacks):
            for name in rows:
                writers.setdefault(name, []).append(number)
        together: dict[tuple[RowIndex, tuple[int, ...]], list[str]] = {}
        for name, numbers in writers.items():
            key = tables.get(name, EMPTY_TABLE).index, tuple(numbers)
            together.setdefault(key, []).append(name)
        for (index, parts), names in together.items():
            devices = np.concatenate([stacks[n][0] for n in parts])
            row = sum(self._blank(OWN, name).nbytes for name in names)
            change = index.written(devices, self._large // max(1, row)).on(self._device)
            for name in names:
                new = [stacks[n][1][name] for n in parts]
                table = tables.get(name, EMPTY_TABLE)
                tables[name] = table.changed(change, new, in_file=in_file)

    def _forget(self, names: Iterable[str], devices: Ints) -> None:
        """Let devices have no rows of what they sent, of these names."""
        tables = self._tables.get(SENT, {})
        for index, some in _together(tables, names):
            if index.has(devices).any():
                change, in_file = index.without(devices).on(self._device), self._in_files
                for name in some:
                    tables[name] = tables[name].changed(change, (), in_file=in_file)

    @property
    def bytes(self) -> int:
        """The size of all tables, those in files included."""
        tables = (table for names in self._tables.values() for table in names.values())
        return sum(block.nbytes for table in tables for block in table.blocks)

    @property
    def _in_files(self) -> bool:
        return self.bytes > self._limit

    # -- checkpoints

    def save(self) -> SavedStates:
        """Return the states as they are now; tables are values, so none is copied."""
        tables = {purpose: dict(names) for purpose, names in self._tables.items()}
        return SavedStates(tables, dict(self._choosers), self._held, self._last_sent_order)

    def restore(self, saved: SavedStates) -> None:
        """Go back to what `save` returned."""
        self._tables = {purpose: dict(names) for purpose, names in saved.tables.items()}
        self._choosers, self._held = dict(saved.choosers), saved.held
        self._last_sent_order = saved.last_sent_order


def _limit_on(device: torch.device) -> int:
    """Return how many bytes tables may have on a device of torch."""
    if device.type != "cuda":
        return LIMIT
    return int(torch.cuda.get_device_properties(device).total_memory) // _SHARE


def _together(
    tables: Mapping[str, DeviceTable], names: Iterable[str]
) -> Iterable[tuple[RowIndex, list[str]]]:
    """Return the names that have tables, those whose rows lie alike together."""
    found: dict[RowIndex, list[str]] = {}
    for name in names:
        if name in tables:
            found.setdefault(tables[name].index, []).append(name)
    return found.items()


def _rows_at(values: Params, places: Ints) -> dict[str, Tensor]:
    """Return the rows of stacks at these places; stacks themselves if that is all, in order."""
    first = next(iter(values.values()), None)
    if first is None or np.array_equal(places, np.arange(len(first))):
        return dict(values)
    return picked(values, on_device(places, first.device))


def _given(devices: Ints, values: tuple[T | None, ...]) -> dict[int, T]:
    """Return what there is, by device."""
    if values.count(None) == len(values):
        return {}
    pairs = zip(devices.tolist(), values, strict=True)
    return {device: value for device, value in pairs if value is not None}
