"""AnycostFL's flexible gradient compression: any sent fraction (specification §1.12.2).

The strongest kernels are kept, and their values lie on a grid of quantisation levels. They are
rounded at random so that their mean is exact, given the kernels that are kept. Signs travel too:
the paper's message leaves them out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.message_size import NUMBER_BITS, heavy_update
from anyfleet.core.messages import Params
from anyfleet.core.signals import FollowsSentFraction, Signal
from anyfleet.errors import BadMessage, refuse
from anyfleet.papers import ANYCOST, Paper
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.parts.codec.kernels import Kernels
from anyfleet.parts.codec.lookup import LEVELS, Table, count_of, looked_up, measured
from anyfleet.parts.codec.quantiser import Quantiser, target_fraction
from anyfleet.parts.codec.ranking import (
    Chosen,
    array_of,
    joined,
    on_host,
    split,
    still_left,
)

MOST_LEVELS = 1 << 16
_AIM, _FULL = 0.985, 0.95  # of a budget: what is tried, and what is not worth another try
_TRIES = 8  # after which it is halved until it fits
_BLOCK = 4  # halvings that are made without waiting for how they end
_POWER, _POWERS = 0.72, (0.3, 1.2)  # of the kernels, with which bits grow: at first, and ever


@dataclass(frozen=True)
class Fgc(Quantiser):
    """The strongest kernels of the whole message, on a grid of magnitudes, at a sent fraction.

    A kernel is a slice of a convolution, or any other number alone. `table` says which share of
    them and how many quantisation levels a sent fraction means: (sent fraction, share, levels),
    ascending. Empty: it is measured on an update of the server's own before a run, or without a
    server split on a made-up one with heavy tails. A message that is still too long keeps fewer
    kernels; if not even one fits, it keeps none. Orders that ask for nothing are met at
    `sent_fraction`; there, 1 is the smallest error that the table knows.
    """

    table: Table = ()
    sent_fraction: float = 1.0
    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)
    provides: ClassVar[frozenset[Signal]] = frozenset({FollowsSentFraction()})

    def __post_init__(self) -> None:
        wrong = (
            ""
            if 0 < self.sent_fraction <= 1
            else f"Fgc.sent_fraction must lie in (0, 1], got {self.sent_fraction}."
        )
        refuse([wrong, *_table_faults(self.table)])

    @property
    def symbol_format(self) -> SymbolFormat:
        most = max((levels for _, _, levels in self.table), default=LEVELS[-1])
        return SymbolFormat(kernels=True, most_level=1 + most)

    @property
    def drops(self) -> bool:
        return True

    @property
    def calibrates(self) -> bool:
        return not self.table

    def calibrated(self, update: Params, layout: MessageLayout) -> "Fgc":
        kernels = Kernels(update, layout)
        strongest = float(kernels.norms.max()) if kernels.norms.numel() else 0.0
        # Training that moved nothing, or diverged, shows nothing.
        if self.table or not 0 < strongest < torch.inf:
            return self
        return replace(self, table=_measured(self, kernels))

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        return self.measured(rows, sent_fraction, layout)[0]

    def measured(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> tuple[Symbols, Tensor]:
        kernels = Kernels(rows, layout)
        target = target_fraction(sent_fraction, self.sent_fraction).double()
        share, levels = looked_up(self.table or _generic(), target)
        count = count_of(share, kernels.norms.shape[1])
        budget = target.clamp(0, 1) * NUMBER_BITS * layout.entries
        return self._fitted(kernels, count, levels, budget)

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        sent = symbols.quantisation_levels
        if not sent:
            return {}
        ends = next(iter(symbols.scales.values()), torch.zeros(1, 3))
        every = joined(sent)
        chosen = Chosen.of(torch.as_tensor(array_of(every) != 0))
        low, high, steps = (
            chosen.of_row(each) for each in ends.to(layout.dtype).expand(len(every), -1).unbind(1)
        )
        levels = chosen.values(every)
        part = (levels.abs() - 1) / steps.clamp(min=1)
        grid = torch.where(part < 1, low + (high - low) * part, high)
        return split(chosen.everywhere(grid * levels.sign()), sent)

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        if len(columns):
            _check_grid(symbols, layout)
        return symbols

    def _fitted(
        self, kernels: Kernels, count: Tensor, levels: Tensor, budget: Tensor
    ) -> tuple[Symbols, Tensor]:
        """Return symbols and bits, with fewer kernels where a message exceeds its bit budget.

        Devices leave the search when their message is found. Who is left is all that is waited for,
        and not in every halving: who is done stays as it is in further tries.
        """
        search, part = _Search.of(count, levels, budget), kernels
        symbols = kernels.quantised(count, levels)
        bits = some = self.bits(symbols, kernels.layout)
        tries = 1
        while True:
            search, done = search.after(some.sum(dim=1), tries)
            if on_host(done) or tries <= _TRIES or tries % _BLOCK == 0:
                rest = still_left(~done)
                if not len(rest):
                    return symbols, bits
                if len(rest) < len(done):
                    search, part = search.take(rest), part.take(rest)
            tried = part.quantised(search.kernels, search.levels)
            some = self.bits(tried, part.layout)
            symbols = tried if len(some) == len(bits) else _replaced(symbols, search.row, tried)
            bits = bits.index_copy(0, search.row, some)
            tries += 1


def _replaced(symbols: Symbols, row: Tensor, by: Symbols) -> Symbols:
    """Return symbols of a stack with those of some rows in the place of others."""

    def put(old: Params, new: Params) -> dict[str, Tensor]:
        return split(joined(old).index_copy(0, row, joined(new)), old)

    return Symbols(
        quantisation_levels=put(symbols.quantisation_levels, by.quantisation_levels),
        kept=put(symbols.kept, by.kept),
        scales=put(symbols.scales, by.scales),
    )


class _Search(NamedTuple):
    """The search for how many kernels fit, of devices that are left in it; all are [devices]."""

    row: Tensor  # of the stack
    kernels: Tensor  # how many are tried
    levels: Tensor
    budget: Tensor
    full: Tensor  # kernels that were asked for
    fits: Tensor  # the most kernels that are known to fit
    over: Tensor  # the fewest that are known not to
    last_kernels: Tensor
    last_size: Tensor  # NaN: there was no try before

    @classmethod
    def of(cls, count: Tensor, levels: Tensor, budget: Tensor) -> "_Search":
        """Return the beginning of a search."""
        row = torch.arange(len(count), device=count.device)
        fits, none = torch.zeros_like(count), torch.full_like(budget, torch.nan)
        return cls(row, count, levels, budget, count, fits, count + 1, count, none)

    def take(self, devices: Tensor) -> "_Search":
        """Return that of some devices."""
        return _Search(*(each.index_select(0, devices) for each in self))

    def after(self, size: Tensor, tries: int) -> tuple["_Search", Tensor]:
        """Return what is tried next after messages of this size, and who is done."""
        good = (size <= self.budget) | (self.kernels == 0)
        fits = torch.where(good, self.kernels, self.fits)
        over = torch.where(good, self.over, self.kernels)
        near = (over > self.full) | (over - self.kernels == 1) | (size >= _FULL * self.budget)
        done = good & (near | (tries > _TRIES))
        guess = (fits + over) // 2
        if tries <= _TRIES:
            # A power law finds the count sooner than halving.
            guess = self._shrunk(size).clamp(min=fits, max=over - 1)
        found = self._replace(
            kernels=torch.where(done, self.kernels, guess),
            fits=fits,
            over=over,
            last_kernels=self.kernels,
            last_size=size,
        )
        return found, done

    def _shrunk(self, size: Tensor) -> Tensor:
        """Return how many kernels take `_AIM` of the budget, if bits grow with a power of them."""
        count = self.kernels.clamp(min=1).double()
        run = (count / self.last_kernels.clamp(min=1)).log()
        rise = (size / self.last_size).log()
        power = torch.where(run == 0, _POWER, rise / run).nan_to_num(_POWER).clamp(*_POWERS)
        return (count * (_AIM * self.budget / size) ** (1 / power)).long()


def _measured(codec: Fgc, kernels: Kernels) -> Table:
    return measured(kernels, lambda symbols: float(codec.bits(symbols, kernels.layout).sum()))


def _table_faults(table: Table) -> list[str]:
    fractions, shares, levels = [[row[field] for row in table] for field in range(3)]
    found = []
    if any(not 0 < each <= 1 for each in fractions) or fractions != sorted(set(fractions)):
        found.append(
            f"Fgc.table needs sent fractions above 0 and up to 1 that ascend; got {fractions}."
        )
    if any(not 0 < share <= 1 for share in shares):
        found.append(f"Fgc.table needs kept shares above 0 and up to 1; got {shares}.")
    if any(level != int(level) or not 1 <= level <= MOST_LEVELS for level in levels):
        found.append(
            f"Fgc.table needs whole quantisation levels from 1 to {MOST_LEVELS}; got {levels}."
        )
    return found


def _check_grid(symbols: Symbols, layout: MessageLayout) -> None:
    """Raise BadMessage unless the levels lie on the grid: a message may say anything."""
    counts = {name: rows.shape[1] for name, rows in symbols.scales.items() if rows.shape[1]}
    if counts != dict.fromkeys(list(layout.tensors)[:1], 3):
        raise BadMessage("a message on a grid needs its two ends and its steps, and nothing else")
    steps = max((float(symbols.scales[name][0, 2]) for name in counts), default=1.0)
    if not 1 <= steps <= MOST_LEVELS or steps != int(steps):
        raise BadMessage(f"a grid with {steps:g} steps; from 1 to {MOST_LEVELS} there may be")
    levels = (
        int(rows.abs().max()) for rows in symbols.quantisation_levels.values() if rows.numel()
    )
    highest = max(levels, default=0)
    if highest > steps + 1:
        raise BadMessage(f"place {highest - 1} on a grid with {steps:g} steps")


@lru_cache(maxsize=1)
def _generic() -> Table:
    return _measured(Fgc(), Kernels(*heavy_update()))
