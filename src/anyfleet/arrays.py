"""Structs of arrays: the base of everything that has one entry for each order or device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import compress, pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_INDEX = "index"
_DENSE = 8  # numbers below this times their count are looked up in a table, not sorted


def listed(index: str) -> Any:
    """Return the field of a list that rows share; the field `index` has each row's number in it.

    What many rows have in common is listed once, as their slices and the models that they are sent.
    A number of -1 stands for nothing. A list that is an array has, at its number, the first of as
    many entries as the row has.
    """
    return field(metadata={_INDEX: index})


@dataclass(frozen=True, eq=False)
class Arrays:
    """A struct of arrays: every field that is an array, a tensor or a tuple has one entry per row.

    All rows share the other fields, and what is `listed`. The first field has one entry per row,
    and `len` counts them.
    """

    def __len__(self) -> int:
        for first in self.__dict__.values():
            return len(first)
        return 0

    def take(self, rows: Sequence[int] | Ints | Flags) -> Self:
        """Return the given rows, in the given order; flags pick the rows that are true."""
        index = np.asarray(rows)
        if index.dtype == bool:
            index = index.nonzero()[0]
        if len(index) == len(self) and every(index == np.arange(len(index))):
            return self  # all of them; nothing is ever written into a struct
        return _taken(self, index.astype(np.int64, copy=False))

    @property
    def astray(self) -> str:
        """The field of numbers that count past the end of their list, or ""."""
        for name, index in _names(type(self)):
            found = self.__dict__[name]
            if index and isinstance(found, tuple):
                numbers = self.__dict__[index]
                if len(numbers) and not -1 <= numbers.min() <= numbers.max() < len(found):
                    return index
        return ""

    def having(self, **columns: Any) -> Self:
        """Return the same rows with other columns, as `dataclasses.replace` does but faster."""
        values, found, names = self.__dict__, object.__new__(type(self)), _names(type(self))
        found.__dict__.update({name: values[name] for name, _ in names}, **columns)
        if len(found.__dict__) > len(names):
            raise TypeError(
                f"{type(self).__name__} has not all of the columns {', '.join(columns)}"
            )
        return found

    def put(self, rows: Ints, other: Self) -> Self:
        """Return the struct with the rows of another one in place of these, which ascend."""
        if len(rows) == len(self):
            return other
        index = np.arange(len(self))
        index[rows] = len(self) + np.arange(len(rows))
        return join([self, other]).take(index)

    def pruned(self) -> Self:
        """Return the same rows, without what is listed but named by no row."""
        found: dict[str, Any] = {}
        for name, numbers in _names(type(self)):
            value = self.__dict__[name]
            if type(value) is np.ndarray:
                continue
            if isinstance(value, Arrays):
                if (pruned := value.pruned()) is not value:
                    found[name] = pruned
            elif numbers and value:
                index, named = self.__dict__[numbers], np.zeros(len(value), dtype=bool)
                named[index[index >= 0]] = True
                if not named.all():
                    found[name] = tuple(compress(value, named.tolist()))
                    found[numbers] = np.where(index < 0, -1, np.cumsum(named)[index] - 1)
        return self.having(**found) if found else self

    def rows(self) -> list[Self]:
        """Return every row as a struct of one row; much cheaper than `take` row by row."""
        count = len(self)
        values = (
            [getattr(self, name)] * count if numbers else _split(getattr(self, name), count)
            for name, numbers in _names(type(self))
        )
        return [type(self)(*row) for row in zip(*values, strict=True)]


B = TypeVar("B", bound=Arrays)


def _named(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return the names of the fields of a struct, of a list with the field of its numbers."""
    return tuple((f.name, f.metadata.get(_INDEX, "")) for f in fields(kind))


_names: Callable[[Any], tuple[tuple[str, str], ...]] = lru_cache(maxsize=256)(_named)


def _split(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, Arrays):
        return value.rows()
    if isinstance(value, tuple):
        return [(entry,) for entry in value]
    if isinstance(value, np.ndarray | Tensor):
        return [value[row : row + 1] for row in range(count)]
    return [value] * count


def _taken(struct: B, rows: Ints) -> B:
    # Structs are picked from all the time: it saves most of that not to set field after field.
    found = object.__new__(type(struct))
    picked, values = found.__dict__, struct.__dict__
    for name, numbers in _names(type(struct)):
        value = values[name]
        if type(value) is np.ndarray and not numbers:
            picked[name] = value[rows]
        else:
            picked[name] = value if numbers else _pick(value, rows)
    return found


def _pick(value: Any, rows: Ints) -> Any:
    if isinstance(value, Tensor):
        return value[torch.from_numpy(rows)]  # of a NumPy array torch would make a list
    if isinstance(value, Arrays):
        return _taken(value, rows)
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, tuple):
        return tuple(map(value.__getitem__, rows.tolist()))
    return value


def join(batches: Sequence[B]) -> B:
    """Return the rows of all structs in one; fields that rows share are those of the first.

    What is listed in several of them is listed once. Structs without rows do not count.
    """
    batches = [batch for batch in batches if len(batch)] or batches[:1]
    first = batches[0]
    if len(batches) == 1:
        return first
    joined: dict[str, Any] = {}
    for name, numbers in _names(type(first)):
        values = [batch.__dict__[name] for batch in batches]
        if numbers:
            index = [batch.__dict__[numbers] for batch in batches]
            joined[name], joined[numbers] = _merged(values, index)
        elif name not in joined:
            joined[name] = _concatenate(values)
    return first.having(**joined)


def _merged(lists: Sequence[Any], index: Sequence[Ints]) -> tuple[Any, Ints]:
    """Return one list for several, without repetitions, and the numbers of all rows in it."""
    if all(each is lists[0] for each in lists):
        return lists[0], np.concatenate(index)
    if isinstance(lists[0], np.ndarray):
        starts = np.cumsum([0, *map(len, lists)])
        moved = [rows + start for rows, start in zip(index, starts, strict=False)]
        return np.concatenate(lists), np.concatenate(moved)
    places: dict[Any, int] = {}
    merged: list[Any] = []
    numbers = []
    for entries, rows in zip(lists, index, strict=True):
        keys = [_key(entry) for entry in entries]
        for key, entry in zip(keys, entries, strict=True):
            if key not in places:
                places[key] = len(merged)
                merged.append(entry)
        # The last one stands for the number -1.
        at = np.array([*(places[key] for key in keys), -1], dtype=np.int64)
        numbers.append(at[rows])
    return tuple(merged), np.concatenate(numbers)


def _key(entry: Any) -> Any:
    """Return what is equal for entries that are the same.

    Values are compared: those of a resumed run are others than those that are made anew. What holds
    tensors is known by its identity.
    """
    try:
        hash(entry)
    except TypeError:
        return (id(entry),)
    return entry


def _concatenate(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Arrays):
        return join(values)
    if isinstance(first, tuple):
        return tuple(entry for value in values for entry in value)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    return first


def distinct(values: Sequence[Any]) -> tuple[tuple[Any, ...], Ints]:
    """Return what occurs among hashable values, each once, and the number of every value in it."""
    places: dict[Any, int] = {}
    index = [places.setdefault(value, len(places)) for value in values]
    return tuple(places), np.array(index, dtype=np.int64)


def grouped(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the first row of each different combination of numbers, and every row's combination.

    Combinations are numbered as they appear; NaN equals NaN.
    """
    code, most = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        if len(column) and not every(column == column[0]):
            number, count = _numbered(column)
            code, most = code * count + number, most * count
            if most > _DENSE * len(code):
                values, code = np.unique(code, return_inverse=True)
                most = len(values)
    if not code.any():
        return np.arange(min(1, len(code))), code
    rows = np.arange(len(code))
    table = np.empty(most, dtype=np.int64)
    table[code[::-1]] = rows[::-1]  # what is written last stays: the first row of each code
    first = (table[code] == rows).nonzero()[0]
    table[code[first]] = rows[: len(first)]
    return first, table[code]


def _numbered(column: NDArray[Any]) -> tuple[Ints, int]:
    """Return numbers from 0 that are equal where values are, and a number above all of them."""
    if column.dtype.kind == "i":
        low, high = int(column.min()), int(column.max())
        if high - low < _DENSE * len(column):  # nothing to sort
            return column - low, high - low + 1
    values, number = np.unique(column, return_inverse=True)
    return number, len(values)


def alike(*columns: NDArray[Any]) -> list[Ints]:
    """Return the rows in which all columns have the same values, group by group, ascending."""
    first, index = grouped(*columns)
    rows = np.arange(len(index)) if len(first) < 2 else index.argsort(kind="stable")
    ends = np.bincount(index).cumsum().tolist() if len(first) > 1 else [len(index)]
    return [rows[start:end] for start, end in pairwise([0, *ends]) if end > start]


def every(flags: Flags) -> bool:
    """Return whether all flags are true; counting a few of them is much faster than `all`."""
    return bool(np.count_nonzero(flags) == flags.size)


def among(values: Ints, ascending: Ints) -> Flags:
    """Return which of the values are among others, which ascend."""
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    at = np.minimum(ascending.searchsorted(values), len(ascending) - 1)
    found: Flags = ascending[at] == values
    return found
