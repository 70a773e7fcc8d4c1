"""The largest entries of rows, the places of flags, and sums of groups.

On the host numpy is several times faster than torch; elsewhere tensors stay where they are.
"""

import numpy as np
import torch
from torch import Tensor


def largest(sizes: Tensor, count: Tensor | int) -> Tensor:
    """Return flags of exactly `count` of the largest of every row, ties to the lower index.

    Sizes are 0 or more. NaN counts as the largest, so that nobody takes it for an update of zeros.
    """
    rows, every = sizes.shape
    wanted = torch.as_tensor(count).cpu().clamp(0, every).expand(rows)
    if bool((wanted == every).all()):
        return torch.ones_like(sizes, dtype=torch.bool)
    known = sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    # Where nothing is wanted, or everything, any edge will do.
    edge = _ranked(known, (every - wanted).clamp(max=every - 1))
    found = known >= edge
    wanted = wanted.to(sizes.device)
    spare = counted(found) - wanted
    if bool((spare > 0).any()):
        level = known == edge
        free = (counted(level) - spare)[:, None]
        found &= ~level | (level.cumsum(dim=1, dtype=torch.int32) <= free)
    return found


def _ranked(sizes: Tensor, place: Tensor) -> Tensor:
    """Return the size at `place` of every row, as if it were sorted."""
    if sizes.device.type != "cpu":
        return sizes.sort(dim=1).values.gather(1, place.to(sizes.device)[:, None])
    places = place.numpy()
    parted = np.partition(sizes.numpy(), np.unique(places), axis=1)
    return torch.from_numpy(parted[np.arange(len(parted)), places])[:, None]


def counted(flags: Tensor) -> Tensor:
    """Return how many flags of every row are set."""
    if flags.device.type != "cpu":
        return flags.sum(dim=1)
    return torch.from_numpy(np.count_nonzero(flags.numpy(), axis=1))


def last_set(flags: Tensor) -> Tensor:
    """Return the place after the last set flag of every row; 0 if none is."""
    if not flags.shape[1]:
        return torch.zeros(len(flags), dtype=torch.int64, device=flags.device)
    if flags.device.type != "cpu":
        places = torch.arange(1, flags.shape[1] + 1, dtype=torch.int32, device=flags.device)
        return (flags * places).amax(dim=1)
    plain = flags.numpy()
    found = plain.shape[1] - plain[:, ::-1].argmax(axis=1)
    return torch.from_numpy(found * plain.any(axis=1))


def where_set(flags: Tensor) -> Tensor:
    """Return the places of set flags, all rows one after the other."""
    if flags.device.type != "cpu":
        return flags.flatten().nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def on_host(tensor: Tensor) -> bool:
    """Return whether numbers can be read at once, without waiting for an accelerator."""
    return tensor.device.type == "cpu"


def worth_a_look(counts: Tensor) -> Tensor:
    """Return the places of counts that are not 0; off the host those of all, as nobody waits."""
    if not on_host(counts):
        return torch.arange(counts.numel(), device=counts.device)
    return torch.from_numpy(np.flatnonzero(counts.numpy()))


def group_sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the sum of every group of `worth_a_look`, which does not depend on other groups."""
    if not on_host(values):
        return values.view(groups, values.numel() // max(1, groups)).sum(dim=1)
    return torch.bincount(group, values, groups)


def tally(places: Tensor, size: int) -> Tensor:
    """Return how often each of the whole numbers below `size` occurs."""
    if on_host(places):
        return torch.bincount(places, minlength=size)
    ones = torch.ones(1, dtype=torch.int64, device=places.device).expand(len(places))
    return torch.zeros(size, dtype=torch.int64, device=places.device).scatter_add_(
        0, places.long(), ones
    )
