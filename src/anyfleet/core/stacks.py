"""Stacks: the tensors of several devices whose sub-models have equal shapes.

Devices that were trained together stay together: their tensors have a leading axis with one place
for each of them, from training to aggregation. A reply names its stack and its place in it, so
that replies can be picked and joined without touching a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Arrays, Flags, Floats, Ints, alike, every, listed
from anyfleet.core.arriving import awaited
from anyfleet.core.layout import Symbols
from anyfleet.core.messages import Params, Report, Trees, measured
from anyfleet.elastic.execution.stacked_convolution import has_kernels

Reported = Mapping[str, NDArray[Any]]  # by name: [devices], or [devices, numbers] of a vector

# Numbers of a block: a processor keeps them in its cache, an accelerator wants many at once.
_CACHED, _RESIDENT = 1 << 19, 1 << 26
_NEIGHBOURS = 64  # numbers of a row whose squares are added in single precision
_SMALL = 1e-12  # a length below which squares may have vanished
_WORTH_A_KERNEL = 1 << 20  # numbers
_TWICE = 1 / 8  # of an accelerator's memory, that replies may take which are kept for longer
_NOTHING = np.empty(0)


@dataclass(frozen=True, eq=False)
class Stack:
    """What several devices send back; tensors and arrays have one place for each device."""

    trees: Trees = field(default_factory=dict)  # "delta" or "weights", and "buffers"
    symbols: Symbols | None = None  # the trained tree as the uplink codec compressed it
    masks: Params = field(default_factory=dict)  # 1 where trained; an absent name was trained whole
    kept: Params = field(default_factory=dict)  # 1 where the codec sent it; absent: sent whole
    report: Reported = field(default_factory=dict)  # the numbers that the devices measured
    known_lengths: Reported = field(default_factory=dict)  # by tree, measured before

    @classmethod
    def of_one(
        cls,
        trees: Trees,
        *,
        symbols: Symbols | None = None,
        masks: Params | None = None,
        kept: Params | None = None,
        report: Report | None = None,
    ) -> "Stack":
        """Return the stack of a single device, out of its own tensors and its own report."""
        return cls(
            trees={name: _stacked(tree) for name, tree in trees.items()},
            symbols=symbols,
            masks=_stacked(masks or {}),
            kept=_stacked(kept or {}),
            report={name: column(value) for name, value in (report or {}).items()},
        )

    @cached_property
    def lengths(self) -> dict[str, Tensor]:
        """The Euclidean length of each device's tensors, [devices], by tree: measured only once.

        Without those that are known. No accelerator is waited for.
        """
        known = self.known_lengths
        return {n: lengths(tree) for n, tree in self.trees.items() if tree and n not in known}

    def trees_of(self, place: int) -> dict[str, dict[str, Tensor]]:
        """Return the trees of the device at a place."""
        return {name: _at(tree, place) for name, tree in self.trees.items()}

    def masks_of(self, place: int) -> dict[str, Tensor]:
        """Return the masks of the device at a place."""
        return _at(self.masks, place)

    def kept_of(self, place: int) -> dict[str, Tensor]:
        """Return what the codec sent of the device at a place."""
        return _at(self.kept, place)

    def symbols_of(self, place: int) -> Symbols | None:
        """Return the symbols of the device at a place, as a stack of one."""
        return None if self.symbols is None else self.symbols.row(place)

    def report_of(self, place: int) -> dict[str, Any]:
        """Return the report of the device at a place: a number or a tuple of numbers by name."""
        return {name: _plain(values[place]) for name, values in self.report.items()}

    def take(self, places: NDArray[np.int64]) -> "Stack":
        """Return the stack of the devices at these places, with tensors of their own."""
        index = torch.from_numpy(places)
        return Stack(
            trees={name: picked(tree, index) for name, tree in self.trees.items()},
            symbols=None if self.symbols is None else self.symbols.take(index),
            masks=picked(self.masks, index),
            kept=picked(self.kept, index),
            report={name: values[places] for name, values in self.report.items()},
        )


@dataclass(frozen=True, eq=False)
class Reports(Arrays):
    """What devices reported: each row names a stack and a place in it, or nothing."""

    stack_index: Ints  # the number of each row's stack; -1: nothing was reported
    place: Ints  # of each row in its stack
    stacks: tuple[Reported, ...] = listed("stack_index")

    @classmethod
    def none(cls, count: int) -> "Reports":
        """Return the reports of devices that reported nothing."""
        return cls(np.full(count, -1), np.zeros(count, dtype=np.int64), ())

    @classmethod
    def of(cls, reports: Sequence[Report]) -> "Reports":
        """Return the reports of single devices."""
        alone = tuple({name: column(value) for name, value in each.items()} for each in reports)
        return cls(np.arange(len(alone)), np.zeros(len(alone), dtype=np.int64), alone)

    def report_of(self, row: int) -> dict[str, Any]:
        """Return the report of one device: a number or a tuple of numbers by name."""
        number = int(self.stack_index[row])
        reported = self.stacks[number] if number >= 0 else {}
        return {name: _plain(values[self.place[row]]) for name, values in reported.items()}

    def number(self, name: str) -> Floats:
        """Return the number that each device reported under a name; NaN where there is none."""
        if not any(name in told for told in self.stacks):
            return np.full(len(self), np.nan)
        columns = [_numbers(name, told[name]) if name in told else _NOTHING for told in self.stacks]
        found = gathered(columns, self.stack_index, self.place)
        return np.where(np.isfinite(found), found, np.nan)


@dataclass(frozen=True, eq=False)
class Replies(Arrays):
    """What devices send back to orders: columns of numbers, and the stacks that hold the rest."""

    order: Ints
    device: Ints
    samples: Ints
    bits: Floats  # uplink
    delivered_width: Floats  # of the model that came through the link; 1 unless the link failed
    stack_index: Ints  # the number of each reply's stack
    place: Ints  # of each reply in its stack
    stacks: tuple[Stack, ...] = listed("stack_index")

    @classmethod
    def of_one(
        cls,
        stack: Stack,
        *,
        order: int,
        device: int,
        samples: int,
        bits: float,
        delivered_width: float = 1.0,
    ) -> "Replies":
        """Return a single reply, whose tensors and numbers are those of a stack of one."""
        return cls(
            order=np.array([order]),
            device=np.array([device]),
            samples=np.array([samples]),
            bits=np.array([float(bits)]),
            delivered_width=np.array([float(delivered_width)]),
            stack_index=np.zeros(1, dtype=np.int64),
            place=np.zeros(1, dtype=np.int64),
            stacks=(stack,),
        )

    @classmethod
    def none(cls) -> "Replies":
        """Return no replies."""
        nothing, numbers = np.empty(0, dtype=np.int64), np.empty(0)
        return cls(nothing, nothing, nothing, numbers, numbers, nothing, nothing, ())

    def trees_of(self, row: int) -> dict[str, dict[str, Tensor]]:
        """Return the trees of one reply."""
        return self.stacks[int(self.stack_index[row])].trees_of(int(self.place[row]))

    def masks_of(self, row: int) -> dict[str, Tensor]:
        """Return the masks of one reply."""
        return self.stacks[int(self.stack_index[row])].masks_of(int(self.place[row]))

    def kept_of(self, row: int) -> dict[str, Tensor]:
        """Return what the codec sent of one reply."""
        return self.stacks[int(self.stack_index[row])].kept_of(int(self.place[row]))

    def symbols_of(self, row: int) -> Symbols | None:
        """Return the symbols of one reply, as a stack of one."""
        return self.stacks[int(self.stack_index[row])].symbols_of(int(self.place[row]))

    @cached_property
    def reports(self) -> Reports:
        """What the devices reported."""
        return Reports(self.stack_index, self.place, tuple(stack.report for stack in self.stacks))

    def report_of(self, row: int) -> dict[str, Any]:
        """Return the report of one reply: a number or a tuple of numbers by name."""
        return self.reports.report_of(row)

    def reported(self, name: str) -> Floats:
        """Return the number that each device reported under a name; NaN where there is none."""
        return self.reports.number(name)

    @property
    def awaited(self) -> bool:
        """Whether nobody would have to wait for a number that an accelerator still computes."""
        stacks = self.stacks
        return all(awaited(each.report) and awaited(each.known_lengths) for each in stacks)

    @cached_property
    def trained(self) -> Flags:
        """The replies that bring a training result."""
        results = [bool(s.trees.get("delta") or s.trees.get("weights")) for s in self.stacks]
        return np.array(results, dtype=bool)[self.stack_index]

    @cached_property
    def with_statistics(self) -> Flags:
        """The replies that bring statistics of normalisation."""
        found = [bool(stack.trees.get("buffers")) for stack in self.stacks]
        return np.array(found, dtype=bool)[self.stack_index]

    def compact(self) -> "Replies":
        """Return the replies with stacks that hold nothing but them, for what is kept for long."""
        if not len(self):
            return self.pruned()
        stacks: list[Stack] = []
        index, place = np.empty(len(self), dtype=np.int64), self.place.copy()
        for rows in alike(self.stack_index):
            index[rows], place[rows] = len(stacks), np.arange(len(rows))
            stacks.append(self.stacks[int(self.stack_index[rows[0]])].take(self.place[rows]))
        return self.having(stacks=tuple(stacks), stack_index=index, place=place)


def kept_twice(replies: Replies) -> bool:
    """Return whether an accelerator has room for the tensors of such replies once more."""
    trees = [tree for stack in replies.stacks for tree in stack.trees.values()]
    sizes = [v.numel() * v.element_size() for tree in trees for v in tree.values()]
    device = next((v.device for tree in trees for v in tree.values()), torch.device("cpu"))
    if device.type != "cuda":
        return True
    return sum(sizes) <= _TWICE * torch.cuda.get_device_properties(device).total_memory


def gathered(
    columns: Sequence[NDArray[Any]], stack_index: Ints, place: Ints, missing: float = np.nan
) -> NDArray[Any]:
    """Return what the column of each row's stack has at its place; columns may be empty."""
    counts = np.array([*map(len, columns), 0])  # the last one stands for the number -1
    there = counts[stack_index] > 0
    at = place if len(columns) == 1 else (counts.cumsum() - counts)[stack_index] + place
    if columns and every(there):
        whole: NDArray[Any] = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return whole[at]
    found = np.full(len(there), missing)
    if there.any():
        found[there] = np.concatenate(columns)[at[there]]
    return found


def lengths(tree: Params) -> Tensor:
    """Return the Euclidean length of every device's tensors, [devices], in double precision.

    Infinite or NaN where some entry is. It waits for no accelerator.
    """
    together = joint(tree)
    if together is not None:
        return row_lengths(together)
    found = []
    for value in tree.values():
        flat = flattened(value)
        parts = [row_lengths(flat[some]) for some in row_blocks(len(flat), flat)]
        found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return found[0] if len(found) == 1 else row_lengths(torch.stack(found, dim=1))


def row_lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean length of every row, in double precision.

    On a processor squares of up to 64 neighbours are added in single precision if the tensor has
    it, which is four times as fast and leaves nine digits.
    """
    if in_one_pass([rows]):
        from anyfleet.elastic.execution import kernels

        return kernels.row_lengths(rows)
    if not rows.is_cpu or rows.dtype != torch.float32 or rows.shape[1] < 2 * _NEIGHBOURS:
        return _length(rows)
    whole = rows.shape[1] // _NEIGHBOURS * _NEIGHBOURS
    near = rows[:, :whole].reshape(rows.shape[0], -1, _NEIGHBOURS)
    pieces = torch.linalg.vector_norm(near, dim=2)
    found = _length(torch.cat([pieces, rows[:, whole:]], dim=1))
    # Squares of very large and of very small numbers have no place in single precision.
    numbers = found.numpy()
    sure = (numbers > _SMALL) & (numbers < np.inf)
    return found if every(sure) else torch.where(torch.from_numpy(sure), found, _length(rows))


def _length(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return found


def in_one_pass(parts: Sequence[Tensor]) -> bool:
    """Return whether rows that come in these parts are added up by a kernel of ours.

    It reads them once. Torch makes a copy of them on an accelerator, of lengths even one in double
    precision, and adds that up; for few numbers this takes no longer.
    """
    return (
        parts[0].is_cuda
        and has_kernels()
        and sum([part.numel() for part in parts]) >= _WORTH_A_KERNEL
        and all(part.dtype == torch.float32 and part.stride(-1) == 1 for part in parts)
    )


def joint(tree: Params) -> Tensor | None:
    """Return all tensors side by side, [devices, entries], or None if a copy would be large.

    An operator on many small tensors takes as long as its calls.
    """
    values = [*tree.values()]
    first, numbers = values[0], sum([value.numel() for value in values])
    if not 0 < numbers <= block_numbers(first) or len({value.dtype for value in values}) > 1:
        return None
    flat = [value.flatten(1) if value.ndim > 1 else value[:, None] for value in values]
    return torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]


def flattened(stack: Tensor) -> Tensor:
    """Return a stack as [devices, entries]; the entries of a device are neighbours in memory."""
    flat = stack.reshape(stack.shape[0], stack.shape[1:].numel())
    return flat if flat.stride(1) == 1 else flat.contiguous()


def row_blocks(rows: int, like: Tensor) -> Iterator[slice]:
    """Yield the rows of a stack like this one in blocks, so that what is made of them is small."""
    height = max(1, block_numbers(like) // max(1, like.shape[1:].numel()))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def block_numbers(like: Tensor) -> int:
    """Return how many numbers a block should have where a tensor is."""
    return _RESIDENT if like.is_cuda else _CACHED


def column(value: Any) -> NDArray[Any]:
    """Return what one device reported under a name, as the array of a stack of one.

    What is no number stays an object, for the server to refuse.
    """
    numbers = value if isinstance(value, tuple) else (value,)
    try:
        if all(isinstance(number, Real) for number in numbers):
            return np.asarray([value], dtype=np.float64)
    except OverflowError:  # an integer of hundreds of digits
        pass
    odd = np.empty(1, dtype=object)
    odd[0] = value
    return odd


def _numbers(name: str, values: NDArray[Any]) -> Floats:
    """Return the numbers of a column in which every device has one; NaN for what is none."""
    if values.dtype == object:
        return np.array([measured({name: value}, name) for value in values])
    return values if values.ndim == 1 else _NOTHING


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return value.item() if isinstance(value, np.generic) else value


def _stacked(tree: Params) -> dict[str, Tensor]:
    return {name: value.unsqueeze(0) for name, value in tree.items()}


def _at(tree: Params, place: int) -> dict[str, Tensor]:
    return {name: value[place] for name, value in tree.items()}


def picked(tree: Params, index: Tensor) -> dict[str, Tensor]:
    """Return the rows of stacks with these numbers."""
    there = {device: index.to(device) for device in {value.device for value in tree.values()}}
    return {name: value.index_select(0, there[value.device]) for name, value in tree.items()}
