"""The largest entries of rows, the places of flags, and sums of groups.

On the host numpy is several times faster than torch; elsewhere tensors stay where they are.
"""

import numpy as np
import torch
from torch import Tensor

_SPARSE = 8  # numbers for each that occurs, from which on sorting is faster than counting


def on_host(tensor: Tensor) -> bool:
    """Return whether numbers can be read at once, without waiting for an accelerator."""
    return tensor.device.type == "cpu"


def largest(sizes: Tensor, count: Tensor | int, ascending: Tensor | None = None) -> Tensor:
    """Return flags of exactly `count` of the largest of every row, ties to the lower index.

    Sizes are 0 or more. NaN counts as the largest, so that nobody takes it for an update of zeros.
    Whoever asks several times sorts once (`ascending`).
    """
    every = sizes.shape[1]
    if not every or (isinstance(count, int) and count >= every):
        return torch.ones_like(sizes, dtype=torch.bool)
    known = _comparable(sizes)
    if isinstance(count, int):
        wanted: Tensor | int = count
        edge = _ranked(known, every - count)
    else:
        wanted = count.clamp(0, every)
        # Where nothing is wanted, or everything, any edge will do.
        place = (every - wanted).clamp(max=every - 1)[:, None]
        edge = (in_order(sizes) if ascending is None else ascending).gather(1, place)
    found = known >= edge
    spare = counted(found) - wanted
    if not on_host(spare) or bool((spare > 0).any()):
        level = known == edge
        free = (counted(level) - spare)[:, None]
        found &= ~level | (level.cumsum(dim=1, dtype=torch.int32) <= free)
    return found


def in_order(sizes: Tensor) -> Tensor:
    """Return the sizes of every row in ascending order, for `largest`."""
    known = _comparable(sizes)
    if not on_host(known):
        return known.sort(dim=1).values
    return torch.from_numpy(np.sort(known.numpy(), axis=1))


def _comparable(sizes: Tensor) -> Tensor:
    return sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _ranked(sizes: Tensor, place: int) -> Tensor:
    """Return the size at `place` of every row, as if it were sorted, [rows, 1]."""
    if not on_host(sizes):
        return sizes.kthvalue(place + 1, dim=1, keepdim=True).values
    return torch.from_numpy(np.partition(sizes.numpy(), place, axis=1)[:, place : place + 1])


def counted(flags: Tensor) -> Tensor:
    """Return how many flags of every row are set."""
    if not on_host(flags):
        return flags.sum(dim=1)
    return torch.from_numpy(np.count_nonzero(flags.numpy(), axis=1))


def last_set(flags: Tensor) -> Tensor:
    """Return the place after the last set flag of every row; 0 if none is."""
    if not flags.shape[1]:
        return torch.zeros(len(flags), dtype=torch.int64, device=flags.device)
    if not on_host(flags):
        places = torch.arange(1, flags.shape[1] + 1, dtype=torch.int32, device=flags.device)
        return (flags * places).amax(dim=1)
    plain = flags.numpy()
    found = plain.shape[1] - plain[:, ::-1].argmax(axis=1)
    return torch.from_numpy(found * plain.any(axis=1))


def where_set(flags: Tensor) -> Tensor:
    """Return the places of set flags, all rows one after the other."""
    if not on_host(flags):
        return flags.flatten().nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def worth_a_look(counts: Tensor) -> Tensor:
    """Return the places of counts that are not 0; off the host those of all, as nobody waits."""
    if not on_host(counts):
        return torch.arange(counts.numel(), device=counts.device)
    return torch.from_numpy(np.flatnonzero(counts.numpy()))


def tally(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers below `size`, and how often each occurs: those worth a look."""
    if not on_host(keys):
        ones = torch.ones(1, dtype=torch.int64, device=keys.device).expand(len(keys))
        zeros = torch.zeros(size, dtype=torch.int64, device=keys.device)
        counts = zeros.scatter_add_(0, keys.long(), ones)
        return worth_a_look(counts), counts
    if size > _SPARSE * len(keys):
        found, often = np.unique(keys.numpy(), return_counts=True)
        return torch.from_numpy(found.astype(np.int64)), torch.from_numpy(often)
    counts = torch.bincount(keys, minlength=size)
    where = worth_a_look(counts)
    return where, counts.index_select(0, where)


def group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the sum of every group of what was worth a look.

    Groups lie one after the other. A sum does not depend on other groups.
    """
    if not on_host(values):
        return values.view(groups, values.numel() // max(1, groups)).sum(dim=1)
    return torch.bincount(group, values, groups)
