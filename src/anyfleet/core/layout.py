"""How tensors lie in a message: what both ends know before it is sent, and what a codec packs.

A tensor travels as a row of entries, column by column of the model's width, so that whatever part
of a message arrives is its leading columns (specification §1.9). Codecs work on stacks [devices,
entries] of such rows; they never see the shape of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Self

import torch
from torch import Tensor, dtype
from torch.nn.functional import pad

from anyfleet import rng
from anyfleet.core.messages import Params
from anyfleet.elastic import Blueprint, Slice, cut, paste, within


def dense(tree: Params, slice_: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return the sub-model `slice_` of a tree, contiguous in memory as a receiver has it.

    A view into a large tensor holds the same numbers in other strides. A sum over it may then round
    otherwise, and a simulated device would differ from a real one.
    """
    return {name: part.contiguous() for name, part in cut(tree, slice_, blueprint).items()}


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """The order in which the entries of one tensor travel."""

    shape: tuple[int, ...]
    ends: tuple[int, ...]  # where each column ends, in entries; the last one ends the tensor
    positions: Tensor | None = None  # the entry at each place; None: as they lie in memory

    @cached_property
    def entries(self) -> int:
        """The number of entries of the tensor."""
        return self.ends[-1]

    @property
    def unit(self) -> int:
        """The number of entries that belong together: a kernel of a convolution has several."""
        return max(1, prod(self.shape[2:])) if len(self.shape) > 2 else 1

    def begins(self, column: int) -> int:
        """Return where a column begins, in entries."""
        return self.ends[column - 1] if column else 0


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """What sender and receiver both know: the tensors, how they travel, and shared randomness."""

    tensors: Mapping[str, TensorLayout]
    dtype: dtype  # of the tensors
    key: Tensor  # int64 for every device: the address of what both ends draw alike

    @classmethod
    def of(cls, tree: Params, seed: int = 0) -> Self:
        """Return the layout of stacked tensors [devices, …] that travel in one column.

        It is for trying a codec without a run: every device gets a key of its own from `seed`.
        """
        first = next(iter(tree.values()))
        tensors = {
            name: TensorLayout(tuple(value.shape[1:]), (value[0].numel(),))
            for name, value in tree.items()
        }
        keys = rng.fold(rng.root(seed, "layout"), torch.arange(len(first)))
        return cls(tensors, first.dtype, keys)

    @property
    def columns(self) -> int:
        """The number of columns of a whole message."""
        return max((len(tensor.ends) for tensor in self.tensors.values()), default=1)

    @property
    def entries(self) -> int:
        """The number of entries of all tensors together."""
        return sum(tensor.entries for tensor in self.tensors.values())

    def flattened(self, tree: Params) -> dict[str, Tensor]:
        """Return stacked tensors [devices, …] as rows [devices, entries] in travelling order.

        Names that are absent stay absent.
        """
        return {
            name: _in_order(tree[name].reshape(tree[name].shape[0], tensor.entries), tensor)
            for name, tensor in self.tensors.items()
            if name in tree
        }

    def unflattened(self, rows: Params) -> dict[str, Tensor]:
        """Return rows [devices, entries] as stacked tensors: the inverse of `flattened`."""
        return {
            name: each.reshape(each.shape[0], *self.tensors[name].shape)
            for name, each in self.in_memory_order(rows).items()
        }

    def in_memory_order(self, rows: Params) -> dict[str, Tensor]:
        """Return rows [devices, entries] with their entries as the tensors have them in memory."""
        return {
            name: _as_in_memory(rows[name], tensor)
            for name, tensor in self.tensors.items()
            if name in rows
        }

    def delivered(self, columns: int | None) -> dict[str, Tensor]:
        """Return 1 for entries of the leading `columns` and 0 for the others, as rows of one.

        The result is empty when all columns came (None: all).
        """
        if columns is None or columns >= self.columns:
            return {}
        return {
            name: _leading_flags(tensor, columns, self) for name, tensor in self.tensors.items()
        }


def _in_order(rows: Tensor, tensor: TensorLayout) -> Tensor:
    if tensor.positions is None:
        return rows
    return rows.index_select(1, _positions(tensor, rows.device))


def _as_in_memory(rows: Tensor, tensor: TensorLayout) -> Tensor:
    if tensor.positions is None:
        return rows
    return torch.empty_like(rows).index_copy_(1, _positions(tensor, rows.device), rows)


@lru_cache(maxsize=256)
def _positions(tensor: TensorLayout, device: torch.device) -> Tensor:
    # They go to an accelerator once, not with every message.
    return torch.empty(0) if tensor.positions is None else tensor.positions.to(device)


def _leading_flags(tensor: TensorLayout, columns: int, like: MessageLayout) -> Tensor:
    flags = torch.zeros(1, tensor.entries, dtype=like.dtype, device=like.key.device)
    flags[:, : tensor.begins(columns)] = 1
    return flags


@dataclass(frozen=True, eq=False)
class Symbols:
    """What a codec packs: tensors between numbers and bytes, stacked by device.

    `quantisation_levels` are whole numbers [devices, entries] that are entropy-coded, 0 where
    nothing is kept. `scales` [devices, scales] say what they mean. `kept` flags say which units
    travel (a name that is absent travels whole). `numbers` [devices, entries] travel as they are.
    """

    numbers: Params = field(default_factory=dict)
    quantisation_levels: Params = field(default_factory=dict)
    kept: Params = field(default_factory=dict)
    scales: Params = field(default_factory=dict)
    columns: int | None = None  # how many leading columns are there; None: all

    def scale(self, name: str, count: int = 1) -> Tensor:
        """Return the first `count` scales of a tensor, [devices, count].

        Scales that a message did not bring are 0: a cut message lacks some, a forged one any.
        """
        scales = self.scales.get(name, torch.zeros(1, 0))
        return pad(scales, (0, max(0, count - scales.shape[1])))[:, :count]

    def row(self, row: int) -> "Symbols":
        """Return the symbols of one device, as a stack of one."""
        return Symbols(
            numbers=_row(self.numbers, row),
            quantisation_levels=_row(self.quantisation_levels, row),
            kept=_row(self.kept, row),
            scales=_row(self.scales, row),
            columns=self.columns,
        )

    def take(self, places: Tensor) -> "Symbols":
        """Return the symbols of the devices at these places of the stack."""
        return Symbols(
            numbers=_taken(self.numbers, places),
            quantisation_levels=_taken(self.quantisation_levels, places),
            kept=_taken(self.kept, places),
            scales=_taken(self.scales, places),
            columns=self.columns,
        )

    def leading(self, columns: int) -> "Symbols":
        """Return what is left of the symbols when only so many columns come through."""
        return replace(self, columns=columns)


def _taken(tree: Params, places: Tensor) -> dict[str, Tensor]:
    return {name: rows.index_select(0, places.to(rows.device)) for name, rows in tree.items()}


def _row(tree: Params, row: int) -> dict[str, Tensor]:
    return {name: rows[row : row + 1] for name, rows in tree.items()}


@lru_cache(maxsize=64)
def tensor_layouts(
    names: tuple[str, ...], slice_: Slice, grid: tuple[int, float], blueprint: Blueprint
) -> Mapping[str, TensorLayout]:
    """Return how tensors of a slice travel; `grid` is the number of columns and their width."""
    local, (count, column_width) = blueprint.local(slice_), grid
    shapes = {name: local.shape(name) for name in names}
    if count == 1:
        return {name: TensorLayout(shape, (prod(shape),)) for name, shape in shapes.items()}
    # The column of every entry: painted from the widest sub-model to the narrowest.
    found = {
        name: torch.full(shape, count - 1, dtype=torch.int16) for name, shape in shapes.items()
    }
    for column in reversed(range(count - 1)):
        part = within(slice_, (column + 1) * column_width, blueprint)
        small = blueprint.local(slice_).local(part)
        paint = {n: torch.full(small.shape(n), column, dtype=torch.int16) for n in names}
        found = paste(paint, found, part, local)
    return {name: _by_column(shapes[name], found[name].flatten(), count) for name in names}


def _by_column(shape: tuple[int, ...], column: Tensor, count: int) -> TensorLayout:
    ends = torch.bincount(column.long(), minlength=count).cumsum(0)
    return TensorLayout(shape, tuple(ends.tolist()), torch.argsort(column, stable=True))
