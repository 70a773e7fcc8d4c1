"""The largest entries of rows, the places of flags, and sums of groups.

On the host numpy is several times faster than torch; elsewhere tensors stay where they are, and
nothing has a size that depends on numbers, so nobody waits for an accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.messages import Params

_SPARSE = 24  # numbers for each that occurs, from which on sorting is faster than counting
_PLACES, _MOST_COPIES = 1 << 23, 256  # of counts on an accelerator


def on_host(tensor: Tensor) -> bool:
    """Return whether numbers can be read at once, without waiting for an accelerator."""
    return tensor.device.type == "cpu"


def still_left(flags: Tensor) -> Tensor:
    """Return the places of set flags [devices]: all that codecs ever wait for.

    A search reads who is left in it, and the others are not tried again.
    """
    return where_set(flags) if on_host(flags) else flags.nonzero()[:, 0]


Array = Any  # of numpy on the host, where calls of torch take longer; elsewhere a tensor


def array_of(tensor: Tensor) -> Array:
    """Return a tensor on the host as an array of numpy, another one as it is."""
    return tensor.numpy() if on_host(tensor) else tensor


def library_of(array: Array) -> Any:
    """Return numpy or torch, whose names for what follows are the same."""
    return np if isinstance(array, np.ndarray) else torch


def log2(array: Array) -> Array:
    """Return binary logarithms, as torch has them: those of numpy differ in the last bit."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array).log2().numpy()
    return array.log2()


_KINDS = {torch.float32: np.float32, torch.float64: np.float64}


def as_numbers(flags: Tensor, dtype: torch.dtype) -> Tensor:
    """Return flags as 0 and 1; numpy makes them several times faster than torch."""
    if dtype not in _KINDS or not on_host(flags):
        return flags.to(dtype)
    return torch.from_numpy(flags.numpy().astype(_KINDS[dtype]))


@dataclass(frozen=True, eq=False)
class Chosen:
    """Entries of a stack that flags [devices, entries] choose.

    On the host only these are looked at, one after the other. Elsewhere all are, as nobody waits
    for how many are chosen.
    """

    flags: Tensor
    where: Tensor | None  # the places of set flags, on the host

    @classmethod
    def of(cls, flags: Tensor) -> "Chosen":
        """Return what flags choose."""
        return cls(flags, where_set(flags) if on_host(flags) else None)

    def values(self, rows: Tensor) -> Tensor:
        """Return the entries of rows that are looked at."""
        return rows if self.where is None else rows.reshape(-1).index_select(0, self.where)

    def everywhere(self, values: Tensor) -> Tensor:
        """Return values at their places in the stack, and 0 where nothing is chosen."""
        if self.where is None:
            none = values.new_zeros(())
            return torch.where(self.flags, values, none)
        found = values.new_zeros(self.flags.numel())
        return found.index_copy_(0, self.where, values).view(self.flags.shape)

    @cached_property
    def row(self) -> Tensor:
        """The row of every entry that is looked at, on the host."""
        assert self.where is not None
        return self.where // max(1, self.flags.shape[1])

    def of_row(self, values: Tensor) -> Tensor:
        """Return for every entry that is looked at the value of its row."""
        return values[:, None] if self.where is None else values.index_select(0, self.row)


# --- rows side by side --------------------------------------------------------------------------


class Parts(NamedTuple):
    """Parts of rows that lie side by side: tensors, or columns of them."""

    begins: Tensor  # [parts]
    ends: Tensor
    sizes: Tensor
    number: Tensor  # [entries]: the part of every entry
    before: Tensor  # [parts]: the last entry before every part, or the first of all
    last: Tensor  # [parts]: the last entry of every part, or of one before it


@lru_cache(maxsize=256)
def parts(sizes: tuple[int, ...], device: torch.device) -> Parts:
    """Return parts of so many entries; they are found once, and copied to an accelerator once."""
    every = torch.tensor(sizes, dtype=torch.int64)
    ends = every.cumsum(0)
    number = torch.arange(len(sizes)).repeat_interleave(every)
    begins = ends - every
    each = begins, ends, every, number, (begins - 1).clamp(min=0), (ends - 1).clamp(min=0)
    return Parts(*(tensor.to(device) for tensor in each))


def widths(rows: Params) -> tuple[int, ...]:
    """Return how many entries the rows of every tensor have."""
    return tuple(each.shape[1] for each in rows.values())


def joined(rows: Params) -> Tensor:
    """Return the rows of all tensors side by side; there must be some.

    It is read only: views that `split` made lie side by side already, and are not copied.
    """
    values = list(rows.values())
    if len(values) == 1:
        return values[0]
    if not _side_by_side(values):
        return torch.cat(values, dim=1)
    first, total = values[0], sum(each.shape[1] for each in values)
    return first.as_strided((len(first), total), first.stride())


def _side_by_side(values: Sequence[Tensor]) -> bool:
    """Return whether the rows of tensors follow each other in memory."""
    first, last = values[0], values[-1]
    row, size = first.stride(), first.element_size()
    # Rows that stand alone are seen first: most are, and this is asked often.
    if row[0] < sum(each.shape[1] for each in values):
        return False
    follow = all(
        one.data_ptr() + size * one.shape[1] == two.data_ptr() and two.stride() == row
        for one, two in pairwise(values)
    )
    return follow and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()


def pieces(rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return parts of rows that have so many entries, as views."""
    found: tuple[Tensor, ...] = torch.split(rows, list(sizes), dim=1)
    return found


def split(rows: Tensor, like: Params) -> dict[str, Tensor]:
    """Return the rows of every tensor, as views: the inverse of `joined`."""
    return dict(zip(like, pieces(rows, widths(like)), strict=True))


def spread(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return for every entry the value [devices, parts] of its part."""
    return torch.as_tensor(_spread(array_of(values), parts(sizes, values.device)))


def _spread(values: Array, known: Parts) -> Array:
    if isinstance(values, Tensor):
        return values.index_select(1, known.number)
    return values.repeat(known.sizes.numpy(), axis=1)


def counted_parts(chosen: Chosen, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return how many flags of every part of every row are set, [devices, parts].

    Beside them stands the place after the last set flag of each part; 0 if none is.
    """
    flags = chosen.flags
    known, shape = parts(sizes, flags.device), (len(flags), len(sizes))
    if chosen.where is None:
        running, until, counts = _running(flags, known)
        # The running count is reached first where the last flag is.
        # In the type of the many, which would be copied into the other's.
        last = torch.searchsorted(running, until.to(running.dtype)) + 1 - known.begins
        return counts, last * (counts > 0)
    where = chosen.where.numpy()
    begins = np.arange(shape[0])[:, None] * flags.shape[1] + known.begins.numpy()
    until = np.searchsorted(where, (begins + known.sizes.numpy()).ravel())
    counts = np.diff(until, prepend=0).reshape(shape)
    last = np.append(where, 0)[until - 1].reshape(shape) + 1 - begins
    return torch.from_numpy(counts), torch.from_numpy(last * (counts > 0))


def numbered(
    flags: Tensor, sizes: tuple[int, ...], slots: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the slots of set flags when each part has so many, and how many are set.

    The first set flag of a part has the first slot of it, and so on; not on the host.
    """
    known = parts(sizes, flags.device)
    running, until, counts = _running(flags, known)
    first = parts(slots, flags.device).begins - 1 - (until - counts)
    return running + _spread(first, known), counts


def _running(flags: Array, known: Parts) -> tuple[Array, Array, Array]:
    """Return how many flags are set up to every entry, up to the end of parts, and in parts."""
    begins, ends, before, last = map(array_of, (known.begins, known.ends, known.before, known.last))
    running = library_of(flags).cumsum(flags, 1, dtype=library_of(flags).int32)
    if not flags.shape[1]:
        none = 0 * ends + running.sum(axis=1)[:, None]
        return running, none, none
    # In 64 bits, as who asks for counts may multiply them.
    until = running[:, last] * ends.clip(0, 1)
    return running, until, until - running[:, before] * begins.clip(0, 1)


# --- the largest --------------------------------------------------------------------------------


def largest(sizes: Tensor, count: Tensor | int, ascending: Tensor | None = None) -> Tensor:
    """Return flags of exactly `count` of the largest of every row, ties to the lower index.

    Sizes are 0 or more. NaN counts as the largest, so that nobody takes it for an update of zeros.
    Whoever asks several times sorts once (`ascending`).
    """
    every = sizes.shape[1]
    if isinstance(count, int):
        return largest_parts(sizes, (every,), (count,))
    if not every:
        return torch.ones_like(sizes, dtype=torch.bool)
    wanted = count.clamp(0, every)[:, None]
    # Where everything is wanted, any edge will do.
    place = (every - wanted).clamp(max=every - 1)
    edge = (in_order(sizes) if ascending is None else ascending).gather(1, place)
    # Where nothing is wanted, no size should reach it: equal ones need a second look.
    edge = torch.where(wanted > 0, edge, torch.inf)
    return _from_edge(_comparable(sizes), edge, wanted, (every,))


def largest_parts(sizes: Tensor, within: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """Return flags of exactly so many of the largest of every part of every row, as `largest`."""
    if all(count >= every for count, every in zip(counts, within, strict=True)):
        return torch.ones_like(sizes, dtype=torch.bool)
    known = _comparable(sizes)
    wanted = parts(tuple(map(min, counts, within)), known.device).sizes
    return _from_edge(known, _edges(known, within, counts), wanted, within)


def largest_nonzero_parts(
    sizes: Tensor, within: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    """Return flags of the largest of every part of every row that are not 0.

    These are at most so many of each part. An update that is mostly 0 has many equal ones at its
    edge, and nobody need tell which of them come first.
    """
    known = _comparable(sizes)
    edge = _edges(known, within, counts)
    # From the smallest size on that is not 0.
    raised = torch.where(edge > 0, edge, edge.nextafter(torch.ones_like(edge)))
    if on_host(known):
        bound = _bound(raised.numpy(), parts(within, known.device))
        single = np.count_nonzero(known.numpy() == bound) == np.count_nonzero(edge.numpy())
        if single:
            return torch.from_numpy(known.numpy() >= bound)
    wanted = parts(tuple(map(min, counts, within)), known.device).sizes
    return _of_equal_the_first(known, raised, wanted, within)


def _edges(known: Tensor, within: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """Return the smallest of the largest sizes of every part, so many of each; 0 for all."""
    edges = [
        _ranked(part, count) if count < part.shape[1] else part.new_zeros(len(part), 1)
        for part, count in zip(pieces(known, within), counts, strict=True)
    ]
    return torch.cat(edges, dim=1)


def _from_edge(known: Tensor, edge: Tensor, wanted: Tensor, within: tuple[int, ...]) -> Tensor:
    """Return flags of so many sizes of each part from its edge on, of equal ones the first."""
    if on_host(known):
        found = known.numpy() >= _bound(edge.numpy(), parts(within, known.device))
        if np.count_nonzero(found) == int(wanted.expand(edge.shape).sum()):
            return torch.from_numpy(found)
    return _of_equal_the_first(known, edge, wanted, within)


def _of_equal_the_first(
    known: Tensor, edge: Tensor, wanted: Tensor, within: tuple[int, ...]
) -> Tensor:
    """Return what `_from_edge` does, where more sizes may equal an edge than are wanted."""
    of, sizes, most = parts(within, known.device), array_of(known), array_of(wanted)
    bound = _bound(array_of(edge), of)
    found, level = sizes >= bound, sizes == bound
    running, until, counts = _running(level, of)
    more = _running(found, of)[2] - counts
    # As many of those at the edge as are left when all above it are taken.
    last = _bound(until - counts + (most - more), of)
    return torch.as_tensor(found & (~level | (running <= last)))


def _bound(values: Array, known: Parts) -> Array:
    """Return for every entry the value of its part; one part needs none of its own for each."""
    return values if len(known.ends) == 1 else _spread(values, known)


def in_order(sizes: Tensor) -> Tensor:
    """Return the sizes of every row in ascending order, for `largest`."""
    known = _comparable(sizes)
    if not on_host(known):
        return known.sort(dim=1).values
    return torch.from_numpy(np.sort(known.numpy(), axis=1))


def _comparable(sizes: Tensor) -> Tensor:
    return sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _ranked(sizes: Tensor, count: int) -> Tensor:
    """Return the smallest of the `count` largest sizes of every row, [rows, 1]."""
    if not on_host(sizes):
        return sizes.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    place = sizes.shape[1] - count
    return torch.from_numpy(np.partition(sizes.numpy(), place, axis=1)[:, place : place + 1])


# --- counting -----------------------------------------------------------------------------------


def where_set(flags: Tensor) -> Tensor:
    """Return the places of what is not 0, all rows one after the other; on the host only."""
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def tally(keys: Ints, size: int) -> tuple[Ints, Ints]:
    """Return which whole numbers below `size` occur, and how often."""
    if size > _SPARSE * keys.size:
        return np.unique(keys, return_counts=True)
    counts = np.bincount(keys.ravel(), minlength=size)
    # Flags are found many times faster than numbers.
    where = np.flatnonzero(counts != 0)
    return where, counts[where]


def histogram(keys: Tensor, size: int) -> Tensor:
    """Return how often each whole number below `size` occurs; off the host keys are rows."""
    if on_host(keys):
        return torch.from_numpy(np.bincount(keys.flatten().numpy(), minlength=size))
    # Threads that add to one place wait for each other: neighbours get places of their own.
    most = min(_MOST_COPIES, min(_PLACES, keys.numel()) // max(1, size))
    copies = 1 << max(0, most.bit_length() - 1)
    lane = torch.arange(keys.shape[-1], device=keys.device) & (copies - 1)
    place = (keys.long() * copies).add_(lane).flatten()
    one = torch.ones(1, dtype=torch.int32, device=keys.device).expand(len(place))
    counts = torch.zeros(size * copies, dtype=torch.int32, device=keys.device)
    return counts.scatter_add_(0, place, one).view(size, copies).sum(dim=1)
