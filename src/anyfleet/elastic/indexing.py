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
    if not any(axis in kept for product in dim for axis in product):
        return _WHOLE
    offset, parts = 0, []
    for product in dim:
        rows, size = torch.zeros(1, dtype=torch.long), 1
        for axis in product:
            own = torch.tensor(kept[axis]) if axis in kept else torch.arange(sizes[axis])
            rows = (rows[:, None] * sizes[axis] + own).reshape(-1)
            size *= sizes[axis]
        parts.append(rows + offset)
        offset += size
    return _run(torch.cat(parts))


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
