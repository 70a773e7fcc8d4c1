"""Tables of tensors with a row for each device that has one.

Rows that are written together are one block [rows, …], which is never written to again. So a table
is a value: whoever keeps one copies nothing. Its index says where the row of each device lies; all
tables that were always written together share one. A device that writes again leaves a dead row
behind. Blocks that are mostly dead, and many small blocks of about one size, are merged when rows
are written: there are few blocks and few dead rows, and a row is copied seldom.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays, Flags, Ints

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class DeviceNumbers(Arrays):
    """A number for each of some devices, not negative."""

    device: Ints  # ascending
    number: Ints

    def of(self, devices: Ints) -> Ints:
        """Return the numbers of these devices; -1 stands for none."""
        at, known = self._find(devices)
        found = np.full(len(devices), -1)
        found[known] = self.number[at[known]]
        return found

    def changed(self, devices: Ints, numbers: Ints) -> "DeviceNumbers":
        """Return the numbers with new ones for these devices, each of which is named once."""
        at, known = self._find(devices)
        number = self.number.copy()
        number[at[known]] = numbers[known]
        new = np.flatnonzero(~known)
        if not len(new):
            return DeviceNumbers(self.device, number)
        new = new[np.argsort(devices[new])]
        device = np.insert(self.device, at[new], devices[new])
        return DeviceNumbers(device, np.insert(number, at[new], numbers[new]))

    def without(self, devices: Ints) -> "DeviceNumbers":
        """Return the numbers of all but these devices."""
        at, known = self._find(devices)
        left = np.ones(len(self), dtype=bool)
        left[at[known]] = False
        return self.take(left)

    def _find(self, devices: Ints) -> tuple[Ints, Flags]:
        """Return where each device is, or belongs, and whether it is there."""
        at = np.searchsorted(self.device, devices)
        known = at < len(self)
        known[known] = self.device[at[known]] == devices[known]
        return at, known

    @property
    def sound(self) -> bool:
        """Whether they are what they must be, also when they come from a file."""
        if {(each.ndim, each.dtype.name) for each in (self.device, self.number)} != {(1, "int64")}:
            return False
        ascending = np.diff(self.device, prepend=-1) > 0
        return bool(ascending.all() and (self.number >= 0).all())


NO_NUMBERS = DeviceNumbers(_NONE, _NONE)


@dataclass(frozen=True, eq=False)
class LocatedRows:
    """Rows that are read together, and where they lie, block by block."""

    block: tuple[int, ...]  # the number of each block; -1: of devices that have no row
    count: tuple[int, ...]  # rows of each block
    row: tuple[Tensor, ...]  # of each block
    order: Tensor | None  # which of all rows is first, second, …; None: they are in order
    row_there: tuple[Tensor, ...]  # as `row`, on the accelerator that tables are on

    @classmethod
    def at(cls, place: Ints, start: Ints) -> "LocatedRows":
        """Return the rows at places counted through blocks that start there."""
        first, last = _block_at(np.array([place.min(), place.max()]), start).tolist()
        if first == last:
            only = (torch.from_numpy(place - start[first]),)
            return cls((first,), (len(place),), only, None, only)
        sorted_, block = place.argsort(), np.arange(first, last + 1)
        place = place[sorted_]
        ends = place.searchsorted(start[first + 1 : last + 1])
        count = np.diff(np.concatenate([[0], ends, [len(place)]]))
        some = count > 0
        block, count = block[some], count[some]
        counts, rows = tuple(count.tolist()), torch.from_numpy(place - start[block].repeat(count))
        row = torch.split_with_sizes(rows, counts)
        return cls(tuple(block.tolist()), counts, row, torch.from_numpy(sorted_.argsort()), row)

    def on(self, device: torch.device) -> "LocatedRows":
        """Return the same rows for tables on a device."""
        if device.type == "cpu":
            return self
        # One transfer for all blocks and tables.
        indices = self.row if self.order is None else (*self.row, self.order)
        moved = on_device(torch.cat(indices).numpy(), device)
        there = torch.split_with_sizes(moved, [len(each) for each in indices])
        order = None if self.order is None else there[-1]
        return replace(self, row_there=there[: len(self.row)], order=order)

    def __len__(self) -> int:
        return sum(self.count)

    def gather(self, blocks: Sequence[Tensor], out: Tensor) -> None:
        """Put the rows into `out`, block by block.

        The last tensor, with the number -1, is no block but the row of all who have none.
        """
        targets = torch.split_with_sizes(out, self.count)
        parts = zip(self.block, self.row, self.row_there, targets, strict=True)
        for number, here, there, target in parts:
            block = blocks[number]
            row = here if block.is_cpu else there
            if number < 0:
                target.copy_(block)
            elif block.device == out.device:
                torch.index_select(block, 0, row, out=target)
            else:
                target.copy_(block.index_select(0, row))


def on_device(numbers: Ints, device: torch.device) -> Tensor:
    """Return numbers of rows as a tensor on a device."""
    # The driver copies pageable memory before it returns: nobody need wait for the accelerator.
    return torch.from_numpy(numbers).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Where the rows of devices lie, in all tables that were always written together."""

    place: DeviceNumbers  # of each device's row, counted through all blocks there ever were
    start: Ints  # the place of the first row of each block, ascending
    size: Ints  # rows of each block
    live: Ints  # of these, rows that a device still has

    def has(self, devices: Ints) -> Flags:
        """Return which of these devices have a row."""
        return self.place.of(devices) >= 0

    def find(self, devices: Ints) -> LocatedRows | None:
        """Return where the rows of devices lie; None if no device has one."""
        place = self.place.of(devices)
        if (place < 0).all():
            return None
        return LocatedRows.at(place, self.start)

    def written(self, devices: Ints, large: int) -> "IndexChange":
        """Return what changes when these devices, each named once, get rows in a new block.

        Blocks of `large` rows or more are merged only if they are mostly dead.
        """
        return _tidied(_grown(replace(self, live=self._left(devices)), devices), large)

    def without(self, devices: Ints) -> "IndexChange":
        """Return what changes when these devices have no rows any more."""
        left = self._left(devices)
        return _tidied(replace(self, place=self.place.without(devices), live=left), large=0)

    def _left(self, devices: Ints) -> Ints:
        """Return how many rows of each block are live without those of these devices."""
        block = _block_at(self.place.of(devices), self.start)
        left: Ints = self.live - np.bincount(block[block >= 0], minlength=len(self.live))
        return left

    @property
    def sound(self) -> bool:
        """Whether it is what it must be, also when it comes from a file."""
        arrays = self.start, self.size, self.live
        if {(each.dtype.name, each.shape) for each in arrays} != {("int64", (len(self.start),))}:
            return False
        ends, block = self.start + self.size, _block_at(self.place.number, self.start)
        return (
            self.place.sound
            and bool((self.start >= np.append(0, ends[:-1])).all() and (self.start < ends).all())
            and bool((block >= 0).all() and (self.place.number < ends[block]).all())
            and np.array_equal(np.bincount(block, minlength=len(ends)), self.live)
        )


@dataclass(frozen=True, eq=False)
class IndexChange:
    """What becomes of the blocks of tables: some stay, and rows of others are one block behind."""

    index: RowIndex  # afterwards
    kept: Ints  # the numbers of blocks that stay; a new one counts
    merged: LocatedRows | None

    def on(self, device: torch.device) -> "IndexChange":
        """Return the same change for tables on a device."""
        return self if self.merged is None else replace(self, merged=self.merged.on(device))


def _block_at(place: Ints, start: Ints) -> Ints:
    """Return the block in which each place lies; -1 stands for none."""
    return np.searchsorted(start, place, side="right") - 1


def _grown(index: RowIndex, devices: Ints) -> RowIndex:
    """Return an index with a block of live rows behind the others."""
    begin = int(index.start[-1] + index.size[-1]) if len(index.start) else 0
    place = index.place.changed(devices, begin + np.arange(len(devices)))
    added = (index.start, begin), (index.size, len(devices)), (index.live, len(devices))
    return RowIndex(place, *(np.append(numbers, last) for numbers, last in added))


def _tidied(index: RowIndex, large: int) -> IndexChange:
    """Return what changes when blocks are merged that are mostly dead, or too many of one size."""
    size_class = np.frexp(index.live)[1] // 2  # the same within a factor of four
    small = index.size < large
    many = small & (np.bincount(size_class, small)[size_class] > 3)
    worn = many | (3 * index.live < index.size)
    kept = np.flatnonzero(~worn)
    if not worn.any():
        return IndexChange(index, kept, None)
    moving = np.flatnonzero(worn[_block_at(index.place.number, index.start)])
    moving = moving[index.place.number[moving].argsort()]  # one block after the other
    rows = LocatedRows.at(index.place.number[moving], index.start) if len(moving) else None
    grown = _grown(index, index.place.device[moving])
    left = np.append(~worn, len(moving) > 0)
    blocks = (each[left] for each in (grown.start, grown.size, grown.live))
    return IndexChange(RowIndex(grown.place, *blocks), kept, rows)


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """Rows of a tensor, by device, in blocks."""

    index: RowIndex
    blocks: tuple[Tensor, ...]

    def read(self, rows: LocatedRows, blank: Tensor) -> Tensor:
        """Return rows as a new tensor; `blank` is that of devices that have none."""
        if len(rows.block) == 1:
            block = self.blocks[rows.block[0]]
            (row,) = rows.row if block.is_cpu else rows.row_there
            return block.index_select(0, row).to(blank.device)
        found = blank.new_empty(len(rows), *blank.shape)
        rows.gather((*self.blocks, blank), found)
        return found if rows.order is None else found.index_select(0, rows.order)

    def changed(
        self, change: IndexChange, new: Sequence[Tensor], *, in_file: bool
    ) -> "DeviceTable":
        """Return the table after a change; all that is new is one block behind the others."""
        blocks = (*self.blocks, *([_joined(new)] if new else []))
        kept = [blocks[number] for number in change.kept]
        if in_file and len(self.blocks) in change.kept:
            kept[-1] = _room(len(kept[-1]), kept[-1], in_file=True).copy_(kept[-1])
        if change.merged is not None:
            kept.append(_room(len(change.merged), blocks[-1], in_file=in_file))
            change.merged.gather(blocks, kept[-1])
        return DeviceTable(change.index, tuple(kept))

    def fits(self, like: Tensor) -> bool:
        """Return whether it is a sound table of such tensors, also when it comes from a file."""
        expected = [((size, *like.shape), like.dtype) for size in self.index.size.tolist()]
        return self.index.sound and [(b.shape, b.dtype) for b in self.blocks] == expected


EMPTY_TABLE = DeviceTable(RowIndex(NO_NUMBERS, _NONE, _NONE, _NONE), ())


def _joined(stacks: Sequence[Tensor]) -> Tensor:
    """Return stacks as one block, which is the only one itself if there is no other."""
    joined = stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))
    # A part of something larger would keep all of it in memory.
    own = joined.is_contiguous() and joined.untyped_storage().nbytes() == joined.nbytes
    return joined if own else joined.clone(memory_format=torch.contiguous_format)


def _room(count: int, like: Tensor, *, in_file: bool) -> Tensor:
    """Return a block to be filled; one in a file is mapped into memory, and goes when it does."""
    shape = count, *like.shape[1:]
    if in_file:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path, size = str(Path(folder) / "rows"), math.prod(shape)
            return torch.from_file(path, shared=True, size=size, dtype=like.dtype).view(shape)
    return like.new_empty(shape)
