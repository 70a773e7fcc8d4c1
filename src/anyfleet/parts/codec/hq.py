"""FedHQ: as many quantisation levels as the channel of each device carries."""

from collections.abc import Mapping
from dataclasses import dataclass
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
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.parts.codec.qsgd import Qsgd, quantised, uniforms
from anyfleet.parts.codec.quantiser import Quantiser, target_fraction
from anyfleet.parts.codec.topk import Places, TopK, check_keep, kept_entries, spread_symbols, top

_HALVINGS = 8


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
        target = target_fraction(sent_fraction, self.sent_fraction)
        budget = (target * NUMBER_BITS * layout.entries).double()
        kept = self._kept(rows, budget, layout)
        choice = _choice(self.quantisation_levels, budget.device)
        # Bisection: `best` fits or is the first, everything from `beyond` on does not.
        best = torch.zeros_like(budget, dtype=torch.int64)
        beyond = torch.full_like(best, len(choice))
        for _ in range((len(choice) - 1).bit_length()):
            middle = (best + beyond) // 2
            fits = self._size(self._symbols(kept, choice[middle]), layout) <= budget
            best, beyond = torch.where(fits, middle, best), torch.where(fits, beyond, middle)
        return self._symbols(kept, choice[best])

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        return TopK(self.keep, Qsgd(bucket=self.bucket)).dequantise(symbols, layout)

    def _kept(self, rows: Params, budget: Tensor, layout: MessageLayout) -> "_Kept":
        """Return as many entries of every row as its budget holds with the fewest levels.

        Whether some row is short is read once a try.
        """
        kept = self._entries(rows, top(rows, self.keep), layout)
        fewest = torch.full_like(budget, self.quantisation_levels[0])
        for halving in range(1, _HALVINGS + 1):
            short = self._size(self._symbols(kept, fewest), layout) > budget
            if not bool(short.any()):
                break
            fewer = top(rows, self.keep / 2**halving)
            flags = {
                name: torch.where(short[:, None], fewer[name], flags)
                for name, flags in kept.flags.items()
            }
            kept = self._entries(rows, flags, layout)
        return kept

    def _entries(self, rows: Params, flags: Params, layout: MessageLayout) -> "_Kept":
        """Return the entries of rows that flags keep."""
        places = {n: Places.of(each, kept_entries(self.keep, each)) for n, each in flags.items()}
        entries = {name: places[name].gathered(each) for name, each in rows.items()}
        return _Kept(flags, places, entries, uniforms(entries, layout))

    def _symbols(self, kept: "_Kept", steps: Tensor) -> Symbols:
        inner = quantised(kept.entries, steps, kept.uniforms, self.bucket)
        return spread_symbols(inner, kept.flags, kept.places)

    def _size(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        return self.bits(symbols, layout).sum(dim=1)


class _Kept(NamedTuple):
    """The kept entries of a stack: flags, places, the entries side by side, and their draws."""

    flags: Params
    places: Mapping[str, Places]
    entries: Params
    uniforms: Params


@lru_cache(maxsize=64)
def _choice(quantisation_levels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(quantisation_levels, dtype=torch.float64).to(device)
