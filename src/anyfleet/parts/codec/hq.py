"""FedHQ: as many levels as the channel of each device carries."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.codec.levelled import Levelled
from anyfleet.parts.codec.qsgd import Qsgd, drawn, draws
from anyfleet.parts.codec.stream import Layout
from anyfleet.parts.codec.topk import (
    NUMBER_BITS,
    Places,
    TopK,
    check_share,
    spread_symbols,
    target_fraction,
    top,
)

_HALVINGS = 8


@dataclass(frozen=True)
class Hq(Levelled):
    """QSGD with the most levels whose message fits an order's target rate (specification §1.16).

    Measured, with positions and all. A device whose rate does not hold the fewest levels keeps half
    as many entries, and half again, up to 8 times; after that it sends more than it should. Orders
    without a target (a rate of 1) are met at `rate`.
    """

    quantisation_levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    bucket: int = 512
    keep: float = 0.15
    sent_fraction: float = 1.0
    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)

    def __post_init__(self) -> None:
        check_share("Hq", self.keep)
        ascending = all(
            a < b
            for a, b in zip(self.quantisation_levels, self.quantisation_levels[1:], strict=False)
        )
        if (
            not self.quantisation_levels
            or not ascending
            or not 1 <= self.quantisation_levels[0] <= self.quantisation_levels[-1] <= 2**24
        ):
            raise ValueError(
                f"Hq.levels must be numbers from 1 to {2**24} that ascend, got {self.quantisation_levels}."
            )
        if self.bucket < 1:
            raise ValueError(f"Hq.bucket must be at least 1 entry, got {self.bucket}.")
        if not 0 < self.sent_fraction <= 1:
            raise ValueError(f"Hq.rate must lie in (0, 1], got {self.sent_fraction}.")

    @property
    def follows_sent_fraction(self) -> bool:
        return True

    @property
    def layout(self) -> Layout:
        return Layout(bucket=self.bucket)

    @property
    def drops(self) -> bool:
        return True

    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        entries = sum(lane.entries for lane in envelope.tensors.values())
        rate = target_fraction(rate, self.sent_fraction)
        budget = (rate * NUMBER_BITS * entries).double().cpu()  # sizes are counted there
        kept = self._kept(laid, budget, envelope)
        choice = torch.tensor(self.quantisation_levels, dtype=torch.float64)
        # Bisection: `best` fits or is the first, everything from `beyond` on does not.
        best = torch.zeros(len(rate), dtype=torch.int64)
        beyond = torch.full_like(best, len(choice))
        while bool((beyond - best > 1).any()):
            middle = (best + beyond) // 2
            fits = self._size(self._drawn(kept, choice[middle]), envelope) <= budget
            best, beyond = torch.where(fits, middle, best), torch.where(fits, beyond, middle)
        return self._drawn(kept, choice[best])

    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        return TopK(self.keep, Qsgd(bucket=self.bucket)).values(symbols, envelope)

    def _kept(self, laid: Params, budget: Tensor, envelope: MessageLayout) -> "_Kept":
        """Of every row as many entries as its budget holds with the fewest levels."""
        kept = _Kept.of(laid, top(laid, self.keep), envelope)
        fewest = torch.full_like(budget, self.quantisation_levels[0])
        for halving in range(1, _HALVINGS + 1):
            short = self._size(self._drawn(kept, fewest), envelope) > budget
            if not bool(short.any()):
                break
            fewer = top(laid, self.keep / 2**halving)
            flags = {
                name: torch.where(short.to(flags.device)[:, None], fewer[name], flags)
                for name, flags in kept.flags.items()
            }
            kept = _Kept.of(laid, flags, envelope)
        return kept

    def _drawn(self, kept: "_Kept", steps: Tensor) -> Symbols:
        inner = drawn(kept.entries, steps, kept.draws, self.bucket)
        return spread_symbols(inner, kept.flags, kept.places)

    def _size(self, symbols: Symbols, envelope: MessageLayout) -> Tensor:
        return self.bits(symbols, envelope).sum(dim=1)


class _Kept(NamedTuple):
    """Which entries are kept, where they are, the entries side by side, and what decides them."""

    flags: Params
    places: Mapping[str, Places]
    entries: Params
    draws: Params

    @classmethod
    def of(cls, laid: Params, flags: Params, envelope: MessageLayout) -> "_Kept":
        places = {name: Places.of(each) for name, each in flags.items()}
        entries = {name: places[name].gathered(rows) for name, rows in laid.items()}
        return cls(flags, places, entries, draws(entries, envelope))
