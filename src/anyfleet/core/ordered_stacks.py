"""Ordered stacks: updates whose tensors have equal shapes, in one order however they came.

Sums of floats depend on the order of their terms, and replies come in stacks of any size. An
ordered stack has all updates of one slice, row by row in ascending order, however they were
stacked: what is computed of it depends neither on who replied first nor on how many devices were
trained together. Updates whose slices nobody else has (an extraction that draws for each device)
are in one ordered stack for each shape of slice, so that none is a single device among thousands.

Everything here is done a block at a time: no temporary tensor is larger than one tensor of a stack.
Sums are made for all tensors of a slice side by side, and placed in the whole model together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Floats, Ints, alike, distinct, every
from anyfleet.core.messages import Params
from anyfleet.core.stacks import (
    Stack,
    block_numbers,
    flattened,
    in_one_pass,
    joint,
    lengths,
    row_blocks,
    row_lengths,
)
from anyfleet.elastic import Blueprint, Slice, place
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.elastic.slicing import indices_along

_INDEXED = 1 / 64  # of a block: up to so many entries of a slice the position of each is kept


@lru_cache(maxsize=4096)
def base(name: str) -> str:
    """Return the name in the blueprint of a tensor that the server keeps per width."""
    return name.partition("@")[0]


class WholeModel(NamedTuple):
    """Tensors of the whole model, flat and side by side."""

    names: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    sizes: list[int]  # entries of each of them
    spans: dict[str, slice]  # where each of them lies
    entries: int

    def part(self, flat: Tensor, name: str) -> Tensor:
        """Return the tensor of a name, a view of all of them."""
        return flat[self.spans[name]].view(self.shapes[name])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return all tensors by name, views of all of them."""
        parts = zip(self.shapes.items(), flat.split_with_sizes(self.sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}


@lru_cache(maxsize=64)
def whole_model(names: tuple[str, ...], blueprint: Blueprint) -> WholeModel:
    """Return where the tensors of these names lie, side by side."""
    shapes = {name: blueprint.shape(base(name)) for name in names}
    sizes = [*map(prod, shapes.values())]
    ends = [0, *accumulate(sizes)]
    spans = dict(zip(names, map(slice, ends, ends[1:]), strict=True))
    return WholeModel(names, shapes, sizes, spans, ends[-1])


@lru_cache(maxsize=32)
def _positions(
    own: tuple[str, ...], names: tuple[str, ...], slice_: Slice, blueprint: Blueprint, device: str
) -> Tensor:
    """Return where the tensors `own` of a slice lie among those of the whole model, all flat."""
    whole = whole_model(names, blueprint)
    with plain_tensors():
        every = torch.arange(whole.entries, device=device)
        places = ((name, place(base(name), slice_, blueprint, device)) for name in own)
        return torch.cat([whole.part(every, name)[where].flatten() for name, where in places])


_MANY = 4  # runs for each stack: they are fragments
_SHORT = 2**14  # numbers of a run: shorter ones are put together
_MANY_COORDINATES = 2**16  # enough programs of a kernel to keep an accelerator busy


class _Run(NamedTuple):
    """Neighbouring places of a stack, whose updates are neighbours in an ordered stack, too."""

    stack: Stack
    start: int
    stop: int

    def of(self, value: Tensor) -> Tensor:
        """Return these places of a tensor of the stack; the tensor itself where they are all."""
        if self.stop - self.start == value.shape[0]:
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
    def masks(self) -> dict[str, Tensor]:
        """Which entries each row trained, [rows, entries]; of an absent tensor it trained all."""
        found = {}
        for name, value in self.tree.items() if self.runs[0].stack.masks else ():
            if base(name) in self.runs[0].stack.masks:
                parts = [run.of(run.stack.masks[base(name)]) for run in self.runs]
                flags = (parts[0] if len(parts) == 1 else torch.cat(parts)) > 0
                found[name] = flattened(flags.expand(-1, *value.shape[1:])).to(value.device)
        return found

    @cached_property
    def joint(self) -> Tensor | None:
        """All changes side by side, [rows, entries], 0 where not trained; None if it were large."""
        first = next(iter(self.tree.values()), None)
        if first is None or len(self.rows) * sum(self.sizes.values()) > block_numbers(first):
            return None
        alone = len(self.runs) == 1 and len(self.rows) == first.shape[0]
        came = dict(self.tree) if alone else {name: self._came(name) for name in self.tree}
        for name, mask in self.masks.items():
            came[name] = came[name] * mask.view(came[name].shape)
        together = joint(came)
        return None if together is None else self._scaled(together)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of entries of every tensor."""
        return {name: value.shape[1:].numel() for name, value in self.tree.items()}

    # -- tensors, [rows, entries]

    def values(self, name: str) -> Tensor:
        """Return the change of a tensor; entries that were not trained may be anything."""
        return self._scaled(flattened(self._came(name)))

    def _trained(self, name: str) -> Tensor:
        """Return the change of a tensor, 0 where it was not trained."""
        return masked(self.values(name), self.masks.get(name))

    def _came(self, name: str) -> Tensor:
        """Return a tensor as it came, [rows, …]."""
        if len(self.runs) == 1:
            return self.runs[0].of(self.tree[name])
        if not self._fragments:
            return torch.cat([run.of(run.stack.trees["delta"][name]) for run in self.runs])
        first = self.tree[name]
        found = first.new_empty((len(self.rows), *first.shape[1:]))
        for stack, places, own in self._fragments:
            value, at = stack.trees["delta"][name], torch.from_numpy(own).to(first.device)
            chosen = torch.from_numpy(places).to(value.device)
            found.index_copy_(0, at, value.index_select(0, chosen))
        return found

    @cached_property
    def _fragments(self) -> tuple[tuple[Stack, Ints, Ints], ...]:
        """Each stack with its places and the rows that they are; none if runs are long.

        Replies of several cohorts that arrive in turn make runs of an update or two: a call for
        each stack is cheaper then than one for each run.
        """
        own: dict[int, list[tuple[_Run, int]]] = {}
        begin = 0
        for run in self.runs:
            own.setdefault(id(run.stack), []).append((run, begin))
            begin += run.stop - run.start
        if len(self.runs) < _MANY * len(own):
            return ()
        return tuple(
            (
                runs[0][0].stack,
                np.concatenate([np.arange(run.start, run.stop) for run, _ in runs]),
                np.concatenate([at + np.arange(run.stop - run.start) for run, at in runs]),
            )
            for runs in own.values()
        )

    def _scaled(self, found: Tensor) -> Tensor:
        """Return the rows of a tensor times their factors."""
        if every(self.factors == 1):
            return found
        factors = torch.from_numpy(self.factors).to(found.device, non_blocking=True)
        scaled = torch.empty_like(found)
        for some in row_blocks(len(found), found):
            scaled[some] = (found[some].double() * factors[some, None]).to(found)
        return scaled

    # -- one number for each row

    def norms(self) -> list[Tensor]:
        """Return lengths [rows] of pieces of what each row trained: of all of it, if it is one."""
        if self.joint is not None:
            return [row_lengths(self.joint)]
        return [lengths({name: self._trained(name)}) for name in self.tree]

    def counts(self) -> list[Tensor]:
        """Return how many entries each row trained of every tensor that is masked, [rows]."""
        return [mask.sum(dim=1, dtype=torch.float64) for mask in self.masks.values()]

    def lengths_of(self, name: str, value: Tensor) -> Tensor:
        """Return the length of a tensor of the whole model, over what each row trained of it."""
        mask = self.masks.get(name)
        if mask is None and self.shared:
            return lengths({name: self._cut(name, value)}).expand(len(self.rows))
        found = []
        for some in row_blocks(len(self.rows), self.tree[name]):
            part = self._cut(name, value, some)
            found.append(lengths({name: masked(part, None if mask is None else mask[some])}))
        return torch.cat(found)

    def dots(self, name: str, value: Tensor) -> Tensor:
        """Return the inner product of each row's change with a tensor of the whole model."""
        values = self._trained(name)
        return torch.cat(
            [
                (values[some].double() * self._cut(name, value, some)).sum(dim=1)
                for some in row_blocks(len(values), values)
            ]
        )

    def _cut(self, name: str, value: Tensor, some: slice = slice(None)) -> Tensor:
        """Return what rows have of a tensor of the whole model; one row if all have the same."""
        if self.shared:
            return value[self._place(name, value)].reshape(1, -1)
        at = self._own_positions(name, some)
        return value.flatten().index_select(0, at.flatten()).view(at.shape)

    # -- one number for each coordinate

    @property
    def together(self) -> bool:
        """Whether all rows trained the same coordinates."""
        return self.shared and not self.masks

    def sums(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of all changes, side by side, for rows of one slice."""
        if self.joint is not None:
            return weighted_sum([self.joint], weights)
        return torch.cat([weighted_sum(self._parts(name), weights) for name in self.tree])

    def _parts(self, name: str) -> list[Tensor]:
        """Return the change of a tensor in parts, 0 where it was not trained; rows follow rows."""
        if name in self.masks or not (self.factors == 1).all():
            return [self._trained(name)]
        if self._fragments and len(self.rows) * self.sizes[name] < _SHORT * len(self.runs):
            return [flattened(self._came(name))]
        return [flattened(run.of(run.stack.trees["delta"][name])) for run in self.runs]

    def masses(self, names: tuple[str, ...], weights: Tensor, total: float) -> Tensor:
        """Return the sums of the weights of those who trained each entry, for rows of one slice.

        `total` is the sum of all weights.
        """
        sizes = [self.sizes[name] for name in names]
        found = weights.new_full((sum(sizes),), total)
        parts = dict(zip(names, found.split_with_sizes(sizes), strict=True))
        for name in self.masks.keys() & parts.keys():
            weighted_sum([self.masks[name]], weights, out=parts[name])
        return found

    def add_sums(self, target: Tensor, whole: WholeModel, weights: Tensor) -> None:
        """Add the weighted sums of all changes to the whole model, in place."""
        if self.shared and self.tree:
            self._put(target, whole, tuple(self.tree), self.sums(weights))
            return
        for name in self.tree:
            self._scatter(whole.part(target, name), name, self._trained(name), weights)

    def add_masses(
        self, target: Tensor, whole: WholeModel, weights: Tensor, known: Floats | Ints
    ) -> None:
        """Add to each coordinate of the whole model the weights of who trained it, in place.

        `known` are the weights on the host.
        """
        names = tuple([name for name in self.tree if name in whole.spans])
        if self.shared and names:
            masses = self.masses(names, weights, known.sum().item())
            self._put(target, whole, names, masses)
            return
        for name in names:
            self._scatter(whole.part(target, name), name, self.masks.get(name), weights)

    def _put(
        self, target: Tensor, whole: WholeModel, names: tuple[str, ...], values: Tensor
    ) -> None:
        """Add tensors of the slice of all rows, side by side, to the whole model, in place."""
        slice_, on = self.slices[0], str(values.device)
        if not slice_.keep and whole.names == names:
            target += values
        elif len(values) <= _INDEXED * block_numbers(values):
            # No position is there twice, so that there is only one order to add in.
            at = _positions(names, whole.names, slice_, self.blueprint, on)
            target.index_add_(0, at, values)
        else:
            parts = values.split_with_sizes([self.sizes[name] for name in names])
            for name, part in zip(names, parts, strict=True):
                own = whole.part(target, name)
                own[self._place(name, own)] += part.view(self.tree[name].shape[1:])

    def _scatter(self, target: Tensor, name: str, what: Tensor | None, weights: Tensor) -> None:
        """Add [rows, entries] times their weights, or weights alone, where each row's slice is."""
        flat = target.view(-1)
        for some in row_blocks(len(self.rows), self.tree[name]):
            at, own = self._own_positions(name, some), weights[some, None]
            _add_at(flat, at, own.expand_as(at) if what is None else what[some].to(own) * own)

    def _place(self, name: str, like: Tensor) -> tuple[slice | Tensor, ...]:
        return place(base(name), self.slices[0], self.blueprint, str(like.device))

    def _along(self, name: str) -> tuple[Tensor, ...]:
        """Return which coordinates are kept along each dimension: [rows or 1, kept]."""
        device = str(self.tree[name].device)
        return indices_along(base(name), self.slices, self.blueprint, device)

    def _own_positions(self, name: str, some: slice) -> Tensor:
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
        whole, runs = np.arange(len(places)), _runs(stack_index, places, stacks)
        return (OrderedStack(whole, tuple(slices), runs, factors, blueprint),)
    used, kinds = np.bincount(stack_index).nonzero()[0], np.zeros(len(stacks), dtype=np.int64)
    kinds[used] = distinct([_kind(stacks[number]) for number in used.tolist()])[1]
    kinds = kinds[stack_index]
    different, number = distinct(slices)
    label = kinds * max(1, len(different)) + number[slice_index]
    label = _with_those_alone(label, kinds, different, number[slice_index])
    found = []
    for own in alike(label):
        mine = number[slice_index[own]]
        shared = mine[:1] if (mine == mine[0]).all() else mine
        runs = _runs(stack_index[own], places[own], stacks)
        several = tuple([different[each] for each in shared.tolist()])
        found.append(OrderedStack(own, several, runs, factors[own], blueprint))
    return tuple(found)


def _kind(stack: Stack) -> tuple[object, ...]:
    """Return a key that is equal for stacks whose tensors can be put together."""
    tree = stack.trees.get("delta", {})
    return *[(name, value.shape[1:]) for name, value in tree.items()], frozenset(stack.masks)


def _with_those_alone(label: Ints, kinds: Ints, slices: Sequence[Slice], number: Ints) -> Ints:
    """Return the labels, but one and the same for all lonely rows whose slices have one shape."""
    lonely = np.flatnonzero(np.bincount(label)[label] == 1)
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
    apart = (stack_index[1:] != stack_index[:-1]) | (places[1:] != places[:-1] + 1)
    bounds = [0, *(apart.nonzero()[0] + 1).tolist(), len(places)]
    numbers, firsts = stack_index[bounds[:-1]].tolist(), places[bounds[:-1]].tolist()
    each = zip(numbers, firsts, pairwise(bounds), strict=True)
    return tuple(_Run(stacks[number], at, at + end - start) for number, at, (start, end) in each)


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
        name = self.name
        tensors = [(stack.values(name), stack.masks.get(name)) for stack in self.stacks]
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
            flags = own.new_ones((1, 1), dtype=torch.bool) if mask is None else mask[:, part]
            return own, flags
        entry, there = stack.found_at(self.name, part.start, part.stop)
        trained = there if mask is None else there & _taken(mask, entry)
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


def weighted_sum(parts: Sequence[Tensor], weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of rows times their weights, in the type of the weights.

    Rows come in parts, one after the other, which are never put together. The products are laid out
    row by row whatever the layout of the values, and no matrix product is used: the sum has the
    same bits for the same numbers.
    """
    (count,), entries = weights.shape, parts[0].shape[1]
    found = weights.new_empty(entries) if out is None else out
    if entries >= _MANY_COORDINATES and in_one_pass(parts):
        from anyfleet.elastic.execution import kernels

        total = weights.new_empty(entries, dtype=torch.float64)
        theirs = weights.split_with_sizes([len(part) for part in parts])
        for i, (part, weight) in enumerate(zip(parts, theirs, strict=True)):
            kernels.add_weighted(part, weight, total, further=i > 0)
        return found.copy_(total)
    width = max(1, min(block_numbers(weights) // count, entries))
    if width >= entries and len(parts) == 1:
        together = weights.new_empty(count, entries)
        torch.mul(parts[0], weights[:, None], out=together)
        return torch.sum(together, dim=0, out=found)
    products, sizes = weights.new_empty(count * width), [len(part) for part in parts]
    own = weights[:, None].split_with_sizes(sizes)
    for start in range(0, entries, width):
        end = min(start + width, entries)
        block = products[: count * (end - start)].view(count, -1)
        for part, weight, rows in zip(parts, own, block.split_with_sizes(sizes), strict=True):
            torch.mul(part[:, start:end], weight, out=rows)
        torch.sum(block, dim=0, out=found[start:end])
    return found


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values with 0 where they were not trained."""
    return values if mask is None else values * mask


def _add_at(target: Tensor, at: Tensor, values: Tensor) -> None:
    """Add values at positions that may repeat, in place and in the order of the values."""
    if target.is_cuda:
        # This sorts the positions; adding as the threads come would not give the same bits twice.
        target.index_put_((at.flatten(),), values.flatten(), accumulate=True)
    else:
        target.index_add_(0, at.flatten(), values.flatten())
