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


def take(tensor: Tensor, kept: tuple[Index, ...]) -> Tensor:
    """Return the part of a tensor at the given coordinates; a view if all are runs."""
    runs = tuple(rows if isinstance(rows, slice) else _WHOLE for rows in kept)
    if any(run is not _WHOLE for run in runs):
        tensor = tensor[runs]
    for position, rows in enumerate(kept):
        if isinstance(rows, Tensor):
            tensor = tensor.index_select(position, rows.to(tensor.device))
    return tensor


def broadcast(kept: tuple[Index, ...], shape: tuple[int, ...], device: str) -> tuple[Index, ...]:
    """Return the same coordinates in a form in which `tensor[...] = part` works."""
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
            rows = torch.arange(shape[position])[rows]
        out[position] = rows.reshape([-1 if p == position else 1 for p in block]).to(device)
    return tuple(out)


def _run(rows: Tensor) -> Index:
    start, count = int(rows[0]), len(rows)
    if torch.equal(rows, torch.arange(start, start + count)):
        return slice(start, start + count)
    return rows
