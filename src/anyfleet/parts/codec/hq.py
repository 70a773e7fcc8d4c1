"""FedHQ: as many quantisation levels as the channel of each device carries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.core.messages import Params
from anyfleet.core.signals import FollowsSentFraction, Signal
from anyfleet.errors import refuse
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.codec.bitstream import Outline, SymbolFormat
from anyfleet.parts.codec.qsgd import (
    Qsgd,
    bucket_norms,
    bucket_sizes,
    quantised,
    split_scales,
    uniforms,
)
from anyfleet.parts.codec.quantiser import Quantiser, target_fraction
from anyfleet.parts.codec.ranking import joined, on_host, split, still_left, widths
from anyfleet.parts.codec.topk import Places, TopK, check_keep, kept_entries, top

_HALVINGS = 8
_AT_ONCE = 1 << 27  # entries of rows that are tried together off the host


@dataclass(frozen=True)
class Hq(Quantiser):
    """QSGD with the most quantisation levels whose message fits the sent fraction of an order.

    Messages are measured, with positions and all (specification §1.16). A device whose sent
    fraction does not hold the fewest levels keeps half as many entries, and half again, up to 8
    times; after that it sends more than it should. Orders that ask for nothing are met at
    `sent_fraction`.
    """

    quantisation_levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # to choose from
    bucket: int = 512  # entries that share a norm
    keep: float = 0.15  # share of the entries that is sent
    sent_fraction: float = 1.0
    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)
    provides: ClassVar[frozenset[Signal]] = frozenset({FollowsSentFraction()})

    def __post_init__(self) -> None:
        check_keep("Hq", self.keep)
        refuse(self._faults())

    def _faults(self) -> list[str]:
        faults, levels = [], self.quantisation_levels
        ascending = all(a < b for a, b in pairwise(levels))
        if not levels or not ascending or not 1 <= levels[0] <= levels[-1] <= 2**24:
            faults.append(
                f"Hq.quantisation_levels must be numbers from 1 to {2**24} that ascend, "
                f"got {levels}."
            )
        if self.bucket < 1:
            faults.append(f"Hq.bucket must be at least 1 entry, got {self.bucket}.")
        if not 0 < self.sent_fraction <= 1:
            faults.append(f"Hq.sent_fraction must lie in (0, 1], got {self.sent_fraction}.")
        return faults

    @property
    def symbol_format(self) -> SymbolFormat:
        return SymbolFormat(bucket=self.bucket, most_level=self.quantisation_levels[-1])

    @property
    def drops(self) -> bool:
        return True

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        return self.measured(rows, sent_fraction, layout)[0]

    def measured(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> tuple[Symbols, Tensor]:
        if not rows:
            return Symbols(), self.bits(Symbols(), layout)
        target = target_fraction(sent_fraction, self.sent_fraction)
        budget = (target * NUMBER_BITS * layout.entries).double()
        kept = self._kept(rows, budget, layout)
        # Messages with every number of levels are tried together, as if they were more devices.
        choice, devices = _choice(self.quantisation_levels, budget.device), len(budget)
        levels, scales = kept.quantised(choice[:, None].expand(-1, devices))
        bits = kept.bits(levels).view(len(choice), devices, -1)
        fits = bits.sum(dim=2) <= budget
        # Bisection: `best` fits or is the first, everything from `beyond` on does not.
        best = torch.zeros_like(budget, dtype=torch.int64)
        beyond = torch.full_like(best, len(choice))
        for _ in range((len(choice) - 1).bit_length()):
            middle = (best + beyond) // 2
            good = fits.gather(0, middle[None])[0]
            best, beyond = torch.where(good, middle, best), torch.where(good, beyond, middle)
        row = best * devices + torch.arange(devices, device=best.device)
        levels, scales, bits = (
            each.flatten(0, 1).index_select(0, row) for each in (levels, scales, bits)
        )
        symbols = Symbols(
            quantisation_levels=split(kept.places.spread(levels), rows),
            kept=split(kept.flags, rows),
            scales=split_scales(scales, tuple(rows), kept.places.slots, self.bucket),
        )
        return symbols, bits

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        return TopK(self.keep, Qsgd(bucket=self.bucket)).dequantise(symbols, layout)

    def _kept(self, rows: Params, budget: Tensor, layout: MessageLayout) -> "_Kept":
        """Return as many entries of every row as its budget holds with the fewest levels.

        Who is short is all that is waited for. Off the host halvings are tried together.
        """
        every, within, keys = joined(rows), widths(rows), layout.key.expand(len(budget))
        flags, keep = top(every, within, self.keep), self.keep
        some = self._entries(every, flags, keep, rows, layout)
        left, least = still_left(self._short(some, budget)), self.keep / 2**_HALVINGS
        if not len(left):
            return some
        while len(left) and keep > least:
            mine = every.index_select(0, left), budget.index_select(0, left)
            own = replace(layout, key=keys.index_select(0, left))
            halves = _halves(keep, least, _at_once(mine[0]))
            tried, short = self._tried(*mine, halves, rows, own)
            # The first that fits, or the last.
            number = short.long().cumprod(dim=0).sum(dim=0).clamp(max=len(halves) - 1)
            fewer = tried[number, torch.arange(len(left), device=left.device)]
            flags, keep = flags.index_copy(0, left, fewer), halves[-1]
            if keep > least:
                left = left.index_select(0, still_left(short.all(dim=0)))
        return self._entries(every, flags, self.keep, rows, layout)

    def _tried(
        self,
        every: Tensor,
        budget: Tensor,
        shares: Sequence[float],
        rows: Params,
        layout: MessageLayout,
    ) -> tuple[Tensor, Tensor]:
        """Return what is kept when these shares are, [tries, devices, entries], and who is short.

        They are tried together, as if they were more devices.
        """
        tries, within = len(shares), widths(rows)
        flags = torch.stack([top(every, within, keep) for keep in shares])
        again = replace(layout, key=layout.key.repeat(tries))
        some = self._entries(every.repeat(tries, 1), flags.flatten(0, 1), shares[0], rows, again)
        return flags, self._short(some, budget.repeat(tries)).view(tries, -1)

    def _short(self, some: "_Kept", budget: Tensor) -> Tensor:
        """Return whose budget does not hold what is kept with the fewest levels."""
        fewest = torch.full_like(budget, self.quantisation_levels[0])
        return some.bits(some.quantised(fewest)[0]).sum(dim=1) > budget

    def _entries(
        self, every: Tensor, flags: Tensor, keep: float, rows: Params, layout: MessageLayout
    ) -> "_Kept":
        """Return the entries that flags keep of rows, which lie side by side in `every`.

        They are the share `keep` of each tensor at most.
        """
        within = widths(rows)
        places = Places.of(flags, within, kept_entries(keep, within))
        entries, slots = places.gathered(every), places.slots
        return _Kept(
            flags,
            places,
            entries,
            uniforms(entries, slots, tuple(rows), layout),
            bucket_norms(entries, slots, self.bucket),
            bucket_sizes(slots, self.bucket),
            Outline.of(Symbols(kept=split(flags, rows)), layout, self.symbol_format),
        )


def _at_once(rows: Tensor) -> int:
    """Return how many tries are made together: one on the host, which need not wait."""
    return 1 if on_host(rows) else max(1, _AT_ONCE // max(1, rows.numel()))


def _halves(share: float, least: float, most: int) -> list[float]:
    """Return a half of a share, a half of that and so on, down to the least or `most` of them."""
    found = [share / 2]
    while found[-1] > least and len(found) < most:
        found.append(found[-1] / 2)
    return found


class _Kept(NamedTuple):
    """The kept entries of a stack: flags, places, and what is known of them side by side."""

    flags: Tensor
    places: Places
    entries: Tensor
    uniforms: Tensor
    norms: Tensor  # of buckets
    buckets: tuple[int, ...]
    outline: Outline

    def quantised(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return levels and scales with so many steps, [devices] or [tries, devices]."""
        return quantised(self.entries, steps, self.uniforms, self.buckets, self.norms)

    def bits(self, levels: Tensor) -> Tensor:
        """Return the bits of messages with these levels, one try after the other."""
        where, filled = self.places.where, self.places.filled
        if levels.ndim == 2:
            return self.outline.of_kept(levels, where, filled).bits()
        tries = len(levels)
        again = None if filled is None else filled.repeat(tries, 1)
        where = where if on_host(where) else where.repeat(tries, 1)
        return self.outline.repeated(tries).of_kept(levels.flatten(0, 1), where, again).bits()


@lru_cache(maxsize=64)
def _choice(quantisation_levels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(quantisation_levels, dtype=torch.float64).to(device)
