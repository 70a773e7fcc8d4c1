"""Structs of arrays: the base of everything that has one entry for each order or device."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Arrays:
    """A struct of arrays: every field that is an array, a tensor or a tuple has one entry per row.

    All rows share the other fields. The first field has one entry per row, and `len` counts them.
    """

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: Sequence[int] | Ints) -> Self:
        """Return the given rows, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        return replace(self, **{f.name: _pick(getattr(self, f.name), index) for f in fields(self)})

    def rows(self) -> list[Self]:
        """Return every row as a struct of one row; much cheaper than `take` row by row."""
        count = len(self)
        values = (_split(getattr(self, f.name), count) for f in fields(self))
        return [type(self)(*row) for row in zip(*values, strict=True)]


def _split(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, Arrays):
        return value.rows()
    if isinstance(value, tuple):
        return [(entry,) for entry in value]
    if isinstance(value, np.ndarray | Tensor):
        return [value[row : row + 1] for row in range(count)]
    return [value] * count


def _pick(value: Any, rows: Ints) -> Any:
    if isinstance(value, Arrays):
        return value.take(rows)
    if isinstance(value, tuple):
        return tuple(value[i] for i in rows)
    if isinstance(value, np.ndarray | Tensor):
        return value[rows]
    return value


B = TypeVar("B", bound=Arrays)


def join(batches: Sequence[B]) -> B:
    """Return the rows of all structs in one; fields that rows share are those of the first."""
    first = batches[0]
    if len(batches) == 1:
        return first
    joined = {}
    for f in fields(first):
        values = [getattr(batch, f.name) for batch in batches]
        joined[f.name] = _concatenate(values)
    return replace(first, **joined)


def _concatenate(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Arrays):
        return join(values)
    if isinstance(first, tuple):
        return tuple(entry for value in values for entry in value)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Tensor):
        return first.new_tensor([int(v) for value in values for v in value])
    return first
