"""The coordinates of a dimension that are kept when its axes keep some of theirs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from anyfleet.elastic.program import Dim

# A run of indices is a Python slice, anything else a tensor.
Index = slice | Tensor

_WHOLE = slice(None)


def index(dim: Dim, kept: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> Index:
    """Return the coordinates kept along one dimension; axes absent from `kept` are whole."""
    own = {axis: torch.tensor([kept[axis]]) for row in dim for axis in row if axis in kept}
    return _run(indices_of(dim, own, sizes)[0]) if own else _WHOLE


def indices_of(dim: Dim, kept: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """Return the coordinates that several slices keep along one dimension, a row for each slice.

    `kept` has the indices of each axis, [slices, indices]: the slices are of equal shape. Where no
    axis of the dimension is in it there is one row, which all slices share.
    """
    offset, parts = 0, []
    for product in dim:
        rows, size = torch.zeros(1, 1, dtype=torch.long), 1
        for axis in product:
            own = kept[axis] if axis in kept else torch.arange(sizes[axis])[None]
            rows = (rows[:, :, None] * sizes[axis] + own[:, None]).flatten(1)
            size *= sizes[axis]
        parts.append(rows + offset)
        offset += size
    most = max(len(rows) for rows in parts)
    return torch.cat([rows.expand(most, -1) for rows in parts], dim=1)


def take(tensor: Tensor, kept: tuple[Index, ...], *, lead: int = 0) -> Tensor:
    """Return the part of a tensor at the given coordinates; a view if all are runs.

    The first `lead` dimensions stay whole: those of a stack.
    """
    for position, rows in enumerate(kept, lead):
        if isinstance(rows, slice) and rows is not _WHOLE:
            tensor = tensor.narrow(position, rows.start, rows.stop - rows.start)
    for position, rows in enumerate(kept, lead):
        if isinstance(rows, Tensor):
            tensor = tensor.index_select(position, rows.to(tensor.device))
    return tensor


def moved(kept: Mapping[str, tuple[Index, ...]], device: str) -> dict[str, tuple[Index, ...]]:
    """Return the coordinates of tensors with their lists of indices on a device.

    All lists go there in one transfer.
    """
    lists = {id(rows): rows for dims in kept.values() for rows in dims if isinstance(rows, Tensor)}
    if not lists:
        return dict(kept)
    sizes = [len(rows) for rows in lists.values()]
    there = torch.cat(list(lists.values())).to(device).split_with_sizes(sizes)
    place = dict(zip(lists, there, strict=True))
    return {n: tuple(place.get(id(rows), rows) for rows in dims) for n, dims in kept.items()}


def broadcast(kept: tuple[Index, ...], shape: tuple[int, ...], device: str) -> tuple[Index, ...]:
    """Return the same coordinates, on their device, such that `tensor[...] = part` works."""
    # Index tensors separated by a slice would move their dimensions to the front, so the slices
    # between them become tensors too, all shaped to broadcast against each other.
    at = [position for position, rows in enumerate(kept) if isinstance(rows, Tensor)]
    if not at:
        return kept
    block = range(at[0], at[-1] + 1)
    out = list(kept)
    for position in block:
        rows = kept[position]
        if isinstance(rows, slice):
            rows = torch.arange(shape[position], device=device)[rows]
        out[position] = rows.reshape([-1 if p == position else 1 for p in block])
    return tuple(out)


def _run(rows: Tensor) -> Index:
    start, count = int(rows[0]), len(rows)
    if torch.equal(rows, torch.arange(start, start + count)):
        return slice(start, start + count)
    return rows
