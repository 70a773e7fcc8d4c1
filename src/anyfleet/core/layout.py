"""What both ends of a message know before it is sent, and what a codec makes of its tensors.

A tensor travels as a lane: its entries one after the other, column by column of the model's width,
so that whatever part of a stream arrives is the leading columns (specification §1.9). Codecs work on
lanes with one row per device; they never see the shape of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, dtype

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
    """How one tensor travels."""

    shape: tuple[int, ...]
    ends: tuple[int, ...]  # where each column ends, in entries; the last one ends the tensor
    positions: Tensor | None = None  # which entry comes at each place; None: as they lie in memory

    @property
    def entries(self) -> int:
        return self.ends[-1]

    @property
    def unit(self) -> int:
        """Entries that belong together: a kernel of a convolution, else each for itself."""
        return max(1, prod(self.shape[2:])) if len(self.shape) > 2 else 1

    def begins(self, column: int) -> int:
        return self.ends[column - 1] if column else 0


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """What sender and receiver both know: which tensors, how they travel, and shared randomness."""

    tensors: Mapping[str, TensorLayout]
    dtype: dtype  # of the tensors
    key: Tensor  # int64 per row

    @property
    def columns(self) -> int:
        return max((len(lane.ends) for lane in self.tensors.values()), default=1)

    def flattened(self, tree: Params) -> dict[str, Tensor]:
        """The tensors, stacked by row, as rows of entries in the order in which they travel."""
        return {
            name: self._laid(tree[name].reshape(len(tree[name]), -1), lane)
            for name, lane in self.tensors.items()
        }

    def unflattened(self, rows: Params) -> dict[str, Tensor]:
        """The inverse of `laid`."""
        return {name: self._shaped(rows[name], lane) for name, lane in self.tensors.items()}

    @staticmethod
    def _laid(rows: Tensor, lane: TensorLayout) -> Tensor:
        return rows if lane.positions is None else rows[:, lane.positions.to(rows.device)]

    @staticmethod
    def _shaped(rows: Tensor, lane: TensorLayout) -> Tensor:
        if lane.positions is not None:
            rows = torch.empty_like(rows).index_copy_(1, lane.positions.to(rows.device), rows)
        return rows.reshape(len(rows), *lane.shape)


@dataclass(frozen=True, eq=False)
class Symbols:
    """Tensors between numbers and bytes, stacked by row, entries as they travel.

    `numbers` hold what is sent as it is; `levels` whole numbers that are coded, with `kept` flags
    per unit (absent: all) and 0 where a unit is not kept, and `scales` that say what levels mean.
    """

    numbers: Params = field(default_factory=dict)
    quantisation_levels: Params = field(default_factory=dict)
    kept: Params = field(default_factory=dict)
    scales: Params = field(default_factory=dict)
    columns: int | None = None  # how many leading columns are there; None: all

    def row(self, row: int) -> "Symbols":
        """Those of one device."""
        return Symbols(
            numbers=_row(self.numbers, row),
            quantisation_levels=_row(self.quantisation_levels, row),
            kept=_row(self.kept, row),
            scales=_row(self.scales, row),
            columns=self.columns,
        )

    def leading(self, columns: int) -> "Symbols":
        """What is left of them when only so many columns come through."""
        return replace(self, columns=columns)


def _row(tree: Params, row: int) -> dict[str, Tensor]:
    return {name: rows[row : row + 1] for name, rows in tree.items()}


@lru_cache(maxsize=64)
def tensor_layouts(
    names: tuple[str, ...], slice_: Slice, grid: tuple[int, float], blueprint: Blueprint
) -> Mapping[str, TensorLayout]:
    """How tensors of a slice travel in so many columns of such a width of the whole model."""
    local, (count, width) = blueprint.local(slice_), grid
    shapes = {name: local.shape(name) for name in names}
    if count == 1:
        return {name: TensorLayout(shape, (prod(shape),)) for name, shape in shapes.items()}
    # Which column every entry is in: painted from the widest to the narrowest.
    found = {
        name: torch.full(shape, count - 1, dtype=torch.int16) for name, shape in shapes.items()
    }
    for column in reversed(range(count - 1)):
        part = within(slice_, (column + 1) * width, blueprint)
        small = blueprint.local(slice_).local(part)
        paint = {n: torch.full(small.shape(n), column, dtype=torch.int16) for n in names}
        found = paste(paint, found, part, local)
    return {name: _lane(shapes[name], found[name].flatten(), count) for name in names}


def _lane(shape: tuple[int, ...], column: Tensor, count: int) -> TensorLayout:
    ends = torch.bincount(column.long(), minlength=count).cumsum(0)
    return TensorLayout(shape, tuple(ends.tolist()), torch.argsort(column, stable=True))
