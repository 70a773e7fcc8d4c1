"""The look-up from a sent fraction to a share of kernels and a number of quantisation levels.

Sent fractions on a grid are looked up in a table; between them the share changes as a power of the
fraction. The table is measured on one update. Length and error of all pairs (share, levels) are
first estimated from one histogram; only pairs that look best for a sent fraction are made into
messages and measured (specification §1.12.2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Floats, Ints
from anyfleet.core.layout import Symbols
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.parts.codec.kernels import Kernels

# Finer ones than the specification has: where few large entries stretch the grid, small ones drown
# in its steps, and part of a sent fraction stays unused.
LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
SENT_FRACTIONS = np.geomspace(1 / 200, 1.0, 12)
_SHARES = np.geomspace(1e-4, 1.0, 90)  # of the kernels
_BINS = 4096  # of magnitudes, narrow where they are small
_HEADER_BITS = 500
_TRIES = 6  # pairs that are measured for one sent fraction, at most

# Sent fraction, kept share, quantisation levels; sent fractions ascend.
Table = tuple[tuple[float, float, int], ...]


def looked_up(table: Table, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return shares and levels for sent fractions; below the table, shares shrink with them."""
    known, logs, shares, levels = _points(table, fraction.device)
    last = len(table) - 1
    fraction = fraction.nan_to_num().clamp(0.0, table[-1][0])
    lower = (torch.searchsorted(known, fraction, right=True) - 1).clamp(min=0)
    upper = (lower + 1).clamp(max=last)
    slope = (shares[upper] - shares[lower]) / (logs[upper] - logs[lower])
    inside = fraction.clamp(min=table[0][0]).log() - logs[lower]
    between = torch.where(lower == last, shares[lower], slope * inside + shares[lower]).exp()
    return between * (fraction / table[0][0]).clamp(max=1.0), levels[lower]


@lru_cache(maxsize=64)
def _points(table: Table, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sent fractions of a table, their logarithms, those of shares, and levels."""
    known, shares = (torch.tensor([row[at] for row in table], dtype=torch.float64) for at in (0, 1))
    levels = torch.tensor([row[2] for row in table])
    known, logs, shares, levels = (
        each.to(device) for each in (known, known.log(), shares.log(), levels)
    )
    return known, logs, shares, levels


def count_of(share: Tensor, kernels: int) -> Tensor:
    """Return how many kernels a share of them is: rounded up, at least one."""
    return (share * kernels - 1e-9).ceil().clamp(1, max(1, kernels)).long()


def measured(kernels: Kernels, bits: Callable[[Symbols], float]) -> Table:
    """Return the table of one update (a stack of one); `bits` measures the length of a message.

    For every sent fraction it has the pair with the smallest squared error whose message fits. Sent
    fractions that nothing fits are left out; without any, the shortest message stands for the last.
    """
    guess, total = estimated(kernels), NUMBER_BITS * kernels.layout.entries
    # What headers and tables add: a byte for every symbol of a table, until it is measured.
    extra = 8.0 * np.array(LEVELS) + _HEADER_BITS
    found: list[tuple[float, float, int]] = []
    best, error = (-1, -1), np.inf
    for fraction in SENT_FRACTIONS:
        # What was found for a smaller sent fraction fits, too.
        left = guess.error < error
        for _ in range(_TRIES):
            left &= guess.bits + extra <= fraction * total
            if not left.any():
                break
            at = np.unravel_index(np.where(left, guess.error, np.inf).argmin(), left.shape)
            size = bits(_message(kernels, _SHARES[at[0]], LEVELS[at[1]]))
            extra[at[1]] = size - guess.bits[at]
            if size <= fraction * total:
                best, error = (int(at[0]), int(at[1])), float(guess.error[at])
                break
            left[at] = False
        if best[0] >= 0:
            found.append((float(fraction), float(_SHARES[best[0]]), LEVELS[best[1]]))
    return tuple(found) or ((1.0, float(_SHARES[0]), LEVELS[0]),)


def _message(kernels: Kernels, share: float, levels: int) -> Symbols:
    count = count_of(torch.tensor([share], dtype=torch.float64), kernels.norms.shape[1])
    return kernels.quantised(count, torch.tensor([levels]))


class Estimate(NamedTuple):
    """The bits and the squared error of messages, [shares, numbers of quantisation levels]."""

    bits: Floats
    error: Floats


def estimated(kernels: Kernels) -> Estimate:
    """Return what messages will be like, on average over the rounding."""
    seen = _counted(kernels)
    pairs = [_on_grid(seen, levels) for levels in LEVELS]
    total = kernels.norms.shape[1]
    mask = total * _entropy(np.stack([seen.kernels, total - seen.kernels], axis=-1) / total)
    bits, noise = (np.stack(each, axis=1) for each in zip(*pairs, strict=True))
    return Estimate(
        bits + mask[:, None] + seen.often.sum(axis=1)[:, None], noise + seen.left[:, None]
    )


@dataclass(frozen=True, eq=False)
class _Counted:
    """What each share of the kernels holds."""

    kernels: Ints
    left: Floats  # squared norm of what it leaves out
    zeros: Floats  # entries
    often: Floats  # [shares, bins]: other entries, by their magnitude
    size: Floats  # [shares, bins]: their mean magnitude
    low: Floats
    high: float


def _counted(kernels: Kernels) -> _Counted:
    """Return the counts of all shares: what each has more than the one before, added up."""
    taken = count_of(torch.from_numpy(_SHARES), kernels.norms.shape[1])
    band = _bands(kernels.norms[0], taken)
    sizes = torch.cat([units[0].flatten().abs() for units in kernels.units.values()]).float()
    owner = kernels.split(band[None])
    where = torch.cat([b[0].repeat_interleave(kernels.units[n].shape[2]) for n, b in owner.items()])
    some, shares, high = sizes > 0, len(_SHARES), float(sizes.max())
    zeros = torch.bincount(where[~some], minlength=shares).cumsum(dim=0)
    where, sizes = where[some], sizes[some]
    low = torch.full((shares,), torch.inf).scatter_reduce(0, where, sizes, "amin")
    place = ((sizes / high).sqrt() * _BINS).long().clamp(max=_BINS - 1) + _BINS * where
    often, total = (
        torch.bincount(place, weights, _BINS * shares).view(shares, _BINS).cumsum(dim=0).double()
        for weights in (None, sizes.double())
    )
    energy = torch.bincount(band, kernels.norms[0].double().square(), shares).cumsum(dim=0)
    return _Counted(
        kernels=taken.numpy(),
        left=(energy[-1] - energy).numpy(),
        zeros=zeros.double().numpy(),
        often=often.numpy(),
        size=(total / often.clamp(min=1)).numpy(),
        low=low.cummin(dim=0).values.nan_to_num(posinf=0.0).double().numpy(),
        high=high,
    )


def _bands(norms: Tensor, taken: Tensor) -> Tensor:
    """Return the first of the shares that holds each kernel."""
    order = torch.argsort(norms, descending=True, stable=True)
    rank = torch.searchsorted(taken, torch.arange(len(norms)), right=True)
    return torch.empty_like(order).index_copy_(0, order, rank)


def _on_grid(seen: _Counted, levels: int) -> tuple[Floats, Floats]:
    """Return the bits of quantisation levels, and the squared error of their rounding."""
    low = seen.low[:, None]
    # A share whose entries are all equally large has a grid of one point.
    step = np.where(seen.high > low, seen.high - low, seen.high) / levels
    place = np.clip((seen.size - low) / step, 0, levels)
    below = np.minimum(np.floor(place), levels - 1)
    above = place - below
    noise: Floats = (seen.often * above * (1 - above) * step**2).sum(axis=1)
    wide = levels + 2  # the first is that of zeros
    first = wide * np.arange(len(low))[:, None] + below.astype(np.int64) + 1
    often = seen.zeros[:, None] * (np.arange(wide) == 0)
    for start, part in ((first, 1 - above), (first + 1, above)):
        found = np.bincount(start.ravel(), (seen.often * part).ravel(), wide * len(low))
        often += found.reshape(len(low), wide)
    return _entropy(often), noise


def _entropy(often: Floats) -> Floats:
    """Return the bits of symbols that occur so often."""
    total = often.sum(axis=-1, keepdims=True)
    share = np.where(often > 0, often / np.maximum(total, 1e-300), 1.0)
    bits: Floats = -(often * np.log2(share)).sum(axis=-1)
    return bits
