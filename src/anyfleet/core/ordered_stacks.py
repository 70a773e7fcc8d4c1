"""Ordered stacks: updates whose tensors have equal shapes, in one order however they came.

Sums of floats depend on the order of their terms, and replies come in stacks of any size. An
ordered stack has all updates of one slice, row by row in ascending order, however they were
stacked: what is computed of it depends neither on who replied first nor on how many devices were
trained together. Updates whose slices nobody else has (an extraction that draws for each device)
are in one ordered stack for each shape of slice, so that none is a single device among thousands.

Everything here is done a block at a time: no temporary tensor is larger than one tensor of a stack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Floats, Ints, alike, distinct
from anyfleet.core.messages import Params
from anyfleet.core.stacks import Stack, block_numbers, flattened, joint, lengths, row_blocks
from anyfleet.elastic import Blueprint, Slice, place
from anyfleet.elastic.slicing import indices_along


def base(name: str) -> str:
    """Return the name in the blueprint of a tensor that the server keeps per width."""
    return name.partition("@")[0]


class _Run(NamedTuple):
    """Neighbouring places of a stack, whose updates are neighbours in an ordered stack, too."""

    stack: Stack
    start: int
    stop: int

    def of(self, value: Tensor) -> Tensor:
        """Return these places of a tensor of the stack; the tensor itself where they are all."""
        if self.stop - self.start == len(value):
            return value
        return value[self.start : self.stop]


@dataclass(frozen=True, eq=False)
class OrderedStack:
    """Updates of one slice, or of slices that have one shape and are each its row's alone."""

    rows: Ints  # of the updates, ascending
    slices: tuple[Slice, ...]  # the slice of all rows, or one for each row
    runs: tuple[_Run, ...]  # where the tensors are, in the order of the rows
    factors: Floats  # by which each update is multiplied
    blueprint: Blueprint

    @property
    def shared(self) -> bool:
        """Whether all rows have one slice."""
        return len(self.slices) == 1

    @property
    def tree(self) -> Params:
        """The first tensors, which say what names and shapes all have."""
        return self.runs[0].stack.trees["delta"]

    @cached_property
    def masked(self) -> tuple[str, ...]:
        """The tensors of which rows may have trained only some entries."""
        masks = self.runs[0].stack.masks
        return tuple(name for name in self.tree if base(name) in masks) if masks else ()

    @cached_property
    def joint(self) -> Tensor | None:
        """All changes side by side, [rows, entries], 0 where not trained; None if it were large."""
        first = next(iter(self.tree.values()), None)
        entries = sum(value[0].numel() for value in self.tree.values())
        if first is None or len(self.rows) * entries > block_numbers(first):
            return None
        came = {name: self._came(name) for name in self.tree}
        for name in self.masked:
            came[name] = masked(flattened(came[name]), self.mask(name))
        together = joint(came)
        return None if together is None else self._scaled(together)

    def whole(self, name: str) -> Tensor:
        """Return a tensor of zeros like those of a name, in the shape of the whole model."""
        return self.tree[name].new_zeros(self.blueprint.shape(base(name)))

    # -- tensors, [rows, entries]

    def values(self, name: str) -> Tensor:
        """Return the change of a tensor; entries that were not trained may be anything."""
        return self._scaled(flattened(self._came(name)))

    def _came(self, name: str) -> Tensor:
        """Return a tensor as it came, [rows, …]."""
        parts = [run.of(run.stack.trees["delta"][name]) for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _scaled(self, found: Tensor) -> Tensor:
        """Return the rows of a tensor times their factors."""
        if (self.factors == 1).all():
            return found
        scaled, factors = torch.empty_like(found), torch.from_numpy(self.factors).to(found.device)
        for some in row_blocks(len(found), found):
            scaled[some] = (found[some].double() * factors[some, None]).to(found)
        return scaled

    def mask(self, name: str) -> Tensor | None:
        """Return 1 where a tensor was trained and 0 where not; None: all of it was."""
        if base(name) not in self.runs[0].stack.masks:
            return None
        shape = self.tree[name].shape[1:]
        parts = [run.of(run.stack.masks[base(name)]) for run in self.runs]
        mask = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flattened(mask.expand(-1, *shape)).to(self.tree[name].device)

    # -- one number for each row

    def norms(self) -> list[Tensor]:
        """Return lengths [rows] of pieces of what each row trained: of all of it, if it is one."""
        if self.joint is not None:
            return [lengths({"": self.joint})]
        return [self.lengths(name) for name in self.tree]

    def lengths(self, name: str) -> Tensor:
        """Return the Euclidean length of what each row trained of a tensor."""
        values, mask = self.values(name), self.mask(name)
        found = [
            lengths({name: _masked(values, mask, some)}) for some in row_blocks(len(values), values)
        ]
        return torch.cat(found)

    def counts(self, name: str) -> Tensor:
        """Return how many entries of a tensor that is masked each row trained."""
        mask = self.mask(name)
        assert mask is not None
        return (mask > 0).sum(dim=1, dtype=torch.float64)

    def lengths_of(self, name: str, value: Tensor) -> Tensor:
        """Return the length of a tensor of the whole model, over what each row trained of it."""
        mask = self.mask(name)
        if mask is None and self.shared:
            return lengths({name: self._cut(name, value)}).expand(len(self.rows))
        found = []
        for some in row_blocks(len(self.rows), self.tree[name]):
            part = self._cut(name, value, some)
            found.append(lengths({name: part if mask is None else part * mask[some].to(part)}))
        return torch.cat(found)

    def dots(self, name: str, value: Tensor) -> Tensor:
        """Return the inner product of each row's change with a tensor of the whole model."""
        values, mask = self.values(name), self.mask(name)
        return torch.cat(
            [
                (_masked(values, mask, some).double() * self._cut(name, value, some)).sum(dim=1)
                for some in row_blocks(len(values), values)
            ]
        )

    def _cut(self, name: str, value: Tensor, some: slice = slice(None)) -> Tensor:
        """Return what rows have of a tensor of the whole model; one row if all have the same."""
        if self.shared:
            return value[self._place(name, value)].reshape(1, -1)
        at = self._positions(name, some)
        return value.flatten().index_select(0, at.flatten()).view(at.shape)

    # -- one number for each coordinate

    @property
    def together(self) -> bool:
        """Whether all rows trained the same coordinates, and their sums are `sums`."""
        return self.shared and not self.masked and self.joint is not None

    def sums(self, weights: Floats) -> dict[str, Tensor]:
        """Return the weighted sums of all tensors, in the coordinates of the slice.

        {} unless all rows have one slice and `joint` is there.
        """
        if not self.shared or self.joint is None:
            return {}
        shapes = [value.shape[1:] for value in self.tree.values()]
        flat = weighted_sum(self.joint, torch.from_numpy(weights).to(self.joint))
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        each = zip(self.tree, parts, shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in each}

    def placed(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor of the slice of all rows in the whole model, zero besides."""
        if not self.slices[0].keep:
            return value
        target = self.whole(name)
        target[self._place(name, target)] = value
        return target

    def put(self, target: Tensor, name: str, value: Tensor) -> None:
        """Add a tensor of the slice of all rows to one of the whole model, in place."""
        target[self._place(name, target)] += value

    def add(self, target: Tensor, name: str, what: Tensor | None, weights: Floats | Ints) -> None:
        """Add to a tensor of the whole model, in place, the weighted sum of [rows, entries].

        Without `what`, the weights alone are added where a row has the coordinate.
        """
        if self.shared and what is None:
            target[self._place(name, target)] += weights.sum().item()
            return
        shares = torch.from_numpy(weights).to(target)
        if self.shared:
            assert what is not None
            self.put(target, name, weighted_sum(what, shares).view(self.tree[name].shape[1:]))
            return
        flat = target.view(-1)
        for some in row_blocks(len(self.rows), self.tree[name]):
            at, own = self._positions(name, some), shares[some, None]
            _scatter(flat, at, own.expand_as(at) if what is None else what[some].to(own) * own)

    def _place(self, name: str, like: Tensor) -> tuple[slice | Tensor, ...]:
        return place(base(name), self.slices[0], self.blueprint, str(like.device))

    def _along(self, name: str) -> tuple[Tensor, ...]:
        """Return which coordinates are kept along each dimension: [rows or 1, kept]."""
        device = str(self.tree[name].device)
        return indices_along(base(name), self.slices, self.blueprint, device)

    def _positions(self, name: str, some: slice) -> Tensor:
        """Return where the entries of some rows lie in the flat tensor of the whole model."""
        shape, rows = self.blueprint.shape(base(name)), len(range(len(self.rows))[some])
        at = torch.zeros(rows, 1, dtype=torch.int64, device=self.tree[name].device)
        for size, kept in zip(shape, self._along(name), strict=True):
            own = kept if len(kept) == 1 else kept[some]
            at = (at[:, :, None] * size + own[:, None]).flatten(1)
        return at

    def found_at(self, name: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return where flat coordinates of the whole model lie among the entries, and if they do.

        Both are [rows, coordinates]; or [1, coordinates], if all rows have one slice.
        """
        shape, kept = self.blueprint.shape(base(name)), self._along(name)
        at = torch.arange(start, stop, device=self.tree[name].device)
        entry, there = torch.zeros_like(at)[None], torch.ones_like(at, dtype=torch.bool)[None]
        stride = int(np.prod(shape, dtype=np.int64))
        for size, own in zip(shape, kept, strict=True):
            stride //= size
            index = torch.arange(own.shape[1], device=own.device).expand_as(own)
            inverse = own.new_full((len(own), size), -1).scatter(1, own, index)
            along = inverse[:, at // stride % size]
            entry, there = entry * own.shape[1] + along, there & (along >= 0)
        return torch.where(there, entry, 0), there


def ordered_stacks(
    rows: tuple[Ints, Ints, Ints],
    stacks: Sequence[Stack],
    slices: Sequence[Slice],
    factors: Floats,
    blueprint: Blueprint,
) -> tuple[OrderedStack, ...]:
    """Return updates by their slices, in the order of their first rows.

    `rows` are the number of each update's stack, its place in it, and the number of its slice.
    """
    stack_index, places, slice_index = rows
    if len(stacks) == len(slices) == 1 and len(places):
        every, runs = np.arange(len(places)), _runs(stack_index, places, stacks)
        return (OrderedStack(every, tuple(slices), runs, factors, blueprint),)
    used, kind = np.unique(stack_index, return_inverse=True)
    kinds = distinct([_kind(stacks[number]) for number in used])[1][kind]
    different, number = distinct(slices)
    label = kinds * max(1, len(different)) + number[slice_index]
    label = _with_those_alone(label, kinds, different, number[slice_index])
    found = []
    for own in alike(label):
        mine = number[slice_index[own]]
        shared = mine[:1] if (mine == mine[0]).all() else mine
        runs = _runs(stack_index[own], places[own], stacks)
        several = tuple(different[each] for each in shared.tolist())
        found.append(OrderedStack(own, several, runs, factors[own], blueprint))
    return tuple(found)


def _kind(stack: Stack) -> tuple[object, ...]:
    """Return a key that is equal for stacks whose tensors can be put together."""
    tree = stack.trees.get("delta", {})
    return *((name, value.shape[1:]) for name, value in tree.items()), frozenset(stack.masks)


def _with_those_alone(label: Ints, kinds: Ints, slices: Sequence[Slice], number: Ints) -> Ints:
    """Return the labels, but one and the same for all lonely rows whose slices have one shape."""
    _, inverse, count = np.unique(label, return_inverse=True, return_counts=True)
    lonely = np.flatnonzero(count[inverse] == 1)
    if len(lonely) < 2:
        return label
    shapes = [
        (kind, *((axis, len(indices)) for axis, indices in slices[own].keep))
        for kind, own in zip(kinds[lonely].tolist(), number[lonely].tolist(), strict=True)
    ]
    new = label.copy()
    new[lonely] = int(label.max()) + 1 + distinct(shapes)[1]
    return new


def _runs(stack_index: Ints, places: Ints, stacks: Sequence[Stack]) -> tuple[_Run, ...]:
    """Return where rows are, with neighbours together."""
    breaks = np.flatnonzero((np.diff(stack_index) != 0) | (np.diff(places) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.append(starts[1:], len(places)) - 1
    triples = zip(
        stack_index[starts].tolist(), places[starts].tolist(), places[ends].tolist(), strict=True
    )
    return tuple(_Run(stacks[number], first, last + 1) for number, first, last in triples)


# --- several slices, coordinate by coordinate -------------------------------------------------


@dataclass(frozen=True, eq=False)
class Aligned:
    """One tensor of several ordered stacks, in coordinates that all of them have in common.

    They are the entries of their slice where all have the same indices, else the coordinates of
    the whole model.
    """

    name: str
    stacks: tuple[OrderedStack, ...]

    @cached_property
    def rows(self) -> Ints:
        """The rows that have the tensor, in the order of the blocks."""
        return np.concatenate([stack.rows for stack in self.stacks])

    @cached_property
    def alike(self) -> bool:
        """Whether all rows have the same indices."""
        return (
            all(each.shared for each in self.stacks)
            and len({each.slices[0].keep for each in self.stacks}) == 1
        )

    @cached_property
    def complete(self) -> bool:
        """Whether all rows trained the same coordinates."""
        some = any(base(self.name) in each.runs[0].stack.masks for each in self.stacks)
        return self.alike and not some

    @cached_property
    def entries(self) -> int:
        """The number of coordinates."""
        first = self.stacks[0]
        if self.alike:
            return first.tree[self.name][0].numel()
        return int(np.prod(first.blueprint.shape(base(self.name)), dtype=np.int64))

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield coordinates, what all rows changed there, and who trained them (None: everybody).

        The change is 0 where it was not trained.
        """
        tensors = [(stack.values(self.name), stack.mask(self.name)) for stack in self.stacks]
        width = max(1, block_numbers(tensors[0][0]) // len(self.rows))
        for start in range(0, self.entries, width):
            part = slice(start, min(start + width, self.entries))
            pairs = zip(self.stacks, tensors, strict=True)
            found = [self._block(stack, *own, part) for stack, own in pairs]
            values = torch.cat([own for own, _ in found]) if len(found) > 1 else found[0][0]
            if self.complete:
                yield part, values, None
            else:
                there = torch.cat([flags.expand_as(own) for own, flags in found])
                yield part, torch.where(there, values, 0.0), there

    def _block(
        self, stack: OrderedStack, values: Tensor, mask: Tensor | None, part: slice
    ) -> tuple[Tensor, Tensor]:
        if self.alike:
            own = values[:, part]
            flags = own.new_ones((1, 1), dtype=torch.bool) if mask is None else mask[:, part] > 0
            return own, flags
        entry, there = stack.found_at(self.name, part.start, part.stop)
        trained = there if mask is None else there & (_taken(mask, entry) > 0)
        return _taken(values, entry), trained

    def placed(self, flat: Tensor) -> Tensor:
        """Return a tensor of the whole model with these numbers at the coordinates."""
        stack = self.stacks[0]
        target = flat.new_zeros(stack.blueprint.shape(base(self.name)))
        if not self.alike:
            return flat.reshape(target.shape)
        where = place(base(self.name), stack.slices[0], stack.blueprint, str(flat.device))
        target[where] = flat.reshape(stack.tree[self.name].shape[1:])
        return target


def _taken(values: Tensor, entry: Tensor) -> Tensor:
    """Return entries of every row: the same of all, or for each its own."""
    if len(entry) == 1:
        return values.index_select(1, entry[0])
    return values.gather(1, entry)


# --- reductions of [rows, entries] ------------------------------------------------------------


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of rows times their weights, in the precision of the weights.

    The products are laid out row by row whatever the layout of the values, and no matrix product
    is used: the sum has the same bits for the same numbers.
    """
    rows, entries = values.shape
    found = weights.new_empty(entries)
    width = max(1, min(block_numbers(weights) // rows, entries))
    products = weights.new_empty(rows * width)
    for start in range(0, entries, width):
        part = values[:, start : start + width]
        block = products[: part.numel()].view(part.shape)
        torch.mul(part, weights[:, None], out=block)
        torch.sum(block, dim=0, out=found[start : start + width])
    return found


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values with 0 where they were not trained."""
    return values if mask is None else values * mask.to(values)


def _masked(values: Tensor, mask: Tensor | None, some: slice) -> Tensor:
    return masked(values[some], None if mask is None else mask[some])


def _scatter(target: Tensor, at: Tensor, values: Tensor) -> None:
    """Add values at positions that may repeat, in place and in the order of the values."""
    if target.is_cuda:
        # This sorts the positions; adding as the threads come would not give the same bits twice.
        target.index_put_((at.flatten(),), values.flatten(), accumulate=True)
    else:
        target.index_add_(0, at.flatten(), values.flatten())
