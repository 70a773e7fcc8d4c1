"""What an aggregator gets: facts about the devices, and reductions over their updates.

A stack or a cluster can do these reductions without handing out single updates.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Params, Replies, Report
from anyfleet.elastic import Blueprint, Slice, alpha, place

_BLOCK = 1 << 16  # coordinates of which all devices' values are compared at once
_SQUARABLE = 1e150  # the squares of smaller numbers, and sums of many of them, are finite
_COUNTED = 16  # low bits of a mark: enough to count devices in a sum of marks


def base(name: str) -> str:
    """The name in the blueprint of a tensor that the server keeps per width."""
    return name.partition("@")[0]


class Regions(NamedTuple):
    """Coordinates that the same devices trained; one entry for each such set of devices."""

    devices: Ints  # how many they are
    coordinates: Ints  # how many they trained


class Updates:
    """Updates of one server step, in the order in which they were issued.

    In canonical order, because float sums must not depend on who arrived first. Trees hold changes
    of the server's current model; `slices` say where they belong.
    """

    def __init__(
        self,
        updates: Replies,
        *,
        slices: Sequence[Slice],
        staleness: Ints,
        changes: Sequence[Params],
        rates: Floats,
        blueprint: Blueprint,
    ) -> None:
        self.device = updates.device
        self.samples: Floats = updates.samples.astype(np.float64)
        self.bits = updates.bits
        self.report: tuple[Report, ...] = updates.report
        self.staleness = staleness
        self.sent_fractions = rates  # measured: the bits of each over those of an uncompressed one
        self.slices = tuple(slices)
        self._updates = updates
        self._changes = tuple(changes)
        self._blueprint = blueprint
        tensors = (value for change in changes for value in change.values())
        self._device = next((value.device for value in tensors), torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.device)

    def take(self, rows: Sequence[int] | Ints) -> "Updates":
        """Only these rows, in the given order."""
        chosen = np.asarray(rows, dtype=np.int64)
        return Updates(
            self._updates.take(chosen),
            slices=[self.slices[row] for row in chosen],
            staleness=self.staleness[chosen],
            changes=[self._changes[row] for row in chosen],
            rates=self.sent_fractions[chosen],
            blueprint=self._blueprint,
        )

    @property
    def alphas(self) -> Floats:
        """AnycostFL's measure of what each device trained: 1 for the whole model."""
        return np.array([alpha(slice_, self._blueprint) for slice_ in self.slices])

    def scaled(self, factors: Floats) -> "Updates":
        """Return the same updates, each multiplied by its factor."""
        changes = [
            change if factor == 1 else {n: (v.double() * factor).to(v) for n, v in change.items()}
            for change, factor in zip(self._changes, factors.tolist(), strict=True)
        ]
        return Updates(
            self._updates,
            slices=self.slices,
            staleness=self.staleness,
            changes=changes,
            rates=self.sent_fractions,
            blueprint=self._blueprint,
        )

    def only_sent(self) -> "Updates":
        """As if devices had trained only what their codecs sent, instead of zeros besides."""
        pairs = zip(self._updates.masks, self._updates.kept, strict=True)
        masks = tuple({**mask, **_both(mask, kept)} for mask, kept in pairs)
        return Updates(
            replace(self._updates, masks=masks),
            slices=self.slices,
            staleness=self.staleness,
            changes=self._changes,
            rates=self.sent_fractions,
            blueprint=self._blueprint,
        )

    # -- per coordinate

    def mean(self, weights: Floats) -> dict[str, Tensor]:
        """Per coordinate, the weighted mean change of those who trained it; zero where nobody did.

        `overlap_mean` of specification §0.2, written as a change.
        """
        total, mass = self._sums(weights)
        return {name: torch.where(mass[name] > 0, total[name] / mass[name], 0.0) for name in total}

    def trimmed(self, share: float) -> dict[str, Tensor]:
        """Return, per coordinate, the mean change of those who trained it, without the extremes.

        Of n values the `floor(share * n)` smallest and as many of the largest are left out; every
        device counts alike. Zero where nobody trained.
        """

        def mean(ordered: Tensor, counts: Tensor) -> Tensor:
            # A share that is a fraction in print may be a hair less in binary.
            left_out = (share * counts.double() + 1e-9).floor()
            rank = torch.arange(len(ordered), device=ordered.device)[:, None]
            inner = (rank >= left_out) & (rank < counts - left_out)
            # In double precision: the sum of large numbers must not overflow.
            total = torch.where(inner, ordered, 0.0).sum(dim=0, dtype=torch.float64)
            return total / (counts - 2 * left_out)

        return self._by_rank(mean)

    def median(self) -> dict[str, Tensor]:
        """Return, per coordinate, the median change of those who trained it.

        Of an even number of values it is the mean of the middle two; every device counts alike.
        Zero where nobody trained.
        """

        def middle(ordered: Tensor, counts: Tensor) -> Tensor:
            below, above = (counts - 1).clamp(min=0) // 2, counts // 2
            low, high = (ordered.gather(0, at[None])[0].double() for at in (below, above))
            return (low + high) / 2

        return self._by_rank(middle)

    def covered(self) -> dict[str, Tensor]:
        """Which coordinates somebody trained."""
        _, mass = self._sums(np.ones(len(self)))
        return {name: value > 0 for name, value in mass.items()}

    def regions(self) -> Regions:
        """The trained coordinates, counted by who trained them."""
        found: Counter[int] = Counter()
        # A sum of marks tells how many devices there are, and all but surely which.
        marks = (rng.bits(rng.root(0, "regions"), len(self)) << _COUNTED) + 1
        for name in self._names():
            for mark, coordinates in self._marked(name, marks.tolist()):
                found[mark] += coordinates
        found.pop(0, None)
        return Regions(
            np.array([mark % (1 << _COUNTED) for mark in found], dtype=np.int64),
            np.array(list(found.values()), dtype=np.int64),
        )

    # -- per device

    def norms(self) -> Floats:
        """The length of every update."""
        found = [
            _length(self._own(row, name))
            for row, change in enumerate(self._changes)
            for name in change
        ]
        # Waited for together: each on its own would hold up a graphics card.
        lengths = iter(torch.stack(found).tolist() if found else [])
        return np.array([_joint([next(lengths) for _ in change]) for change in self._changes])

    def root_mean_squares(self) -> Floats:
        """Return the root mean square of every update, over the coordinates its device trained.

        Narrow and wide slices compare by it. What a codec left out counts as zero; an update
        without a trained coordinate has the size zero.
        """
        counts = [
            sum(self._trained(row, name) for name in change)
            for row, change in enumerate(self._changes)
        ]
        return self.norms() / np.sqrt(np.maximum(np.array(counts, dtype=np.float64), 1.0))

    def _trained(self, row: int, name: str) -> int:
        """Return how many entries of a tensor a device trained."""
        value, mask = self._changes[row][name], self._mask(row, name)
        return value.numel() if mask is None else int((mask > 0).expand_as(value).sum())

    def tree_norms(self, tree: Params) -> Floats:
        """The length of a tree in global coordinates, over those that each device trained."""
        squares = np.zeros(len(self))
        known: dict[tuple[str, Slice], float] = {}  # many devices have one of few slices
        for row, change in enumerate(self._changes):
            for name in change:
                if name not in tree:
                    continue
                mask, where = self._mask(row, name), (name, self.slices[row])
                if mask is not None:
                    squares[row] += _square(tree[name][self._place(row, name)] * mask)
                    continue
                if where not in known:
                    known[where] = _square(tree[name][self._place(row, name)])
                squares[row] += known[where]
        return np.sqrt(squares)

    def dots(self, tree: Params) -> Floats:
        """The inner product of every update with a tree in global coordinates."""
        found = np.zeros(len(self))
        for row, change in enumerate(self._changes):
            for name in change:
                if name in tree:
                    part = tree[name][self._place(row, name)].double()
                    found[row] += float((self._own(row, name).double() * part).sum())
        return found

    # -- per pair

    def gram(self, *, common: bool = False) -> Floats:
        """Inner products of all pairs of updates, over the coordinates both trained.

        With `common`, over the coordinates that everybody trained, so that the vectors of all
        devices can be compared (specification §E).
        """
        count = len(self)
        products = np.zeros((count, count))
        for name in self._names():
            if common and not all(name in change for change in self._changes):
                continue
            rows = [self._full(row, name).flatten() for row in range(count)]
            shared = self._shared(name) if common else None
            for start in range(0, rows[0].numel(), _BLOCK):
                block = torch.stack([row[start : start + _BLOCK] for row in rows]).double()
                if shared is not None:
                    block = block[:, shared[start : start + _BLOCK]]
                products += (block @ block.T).cpu().numpy()
        return products

    def _by_rank(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Reduce the values of each coordinate, given in ascending order, to one.

        `reduce` gets [devices, coordinates], of which the first `counts` rows of a column are
        values; a block of coordinates at a time.
        """
        found: dict[str, Tensor] = {}
        for name in self._names():
            rows = [row for row, change in enumerate(self._changes) if name in change]
            values = [self._full(row, name).flatten() for row in rows]
            trained = self._flags(name, rows)
            new = torch.zeros_like(values[0])
            for start in range(0, new.numel(), _BLOCK):
                part = slice(start, start + _BLOCK)
                there = torch.stack([flags[part] for flags in trained])
                block = torch.stack([value[part] for value in values])
                ordered = torch.where(there, block, torch.inf).sort(dim=0).values
                counts = there.sum(dim=0)
                reduced = reduce(ordered, counts).to(new)
                # In place, on an array made here.
                new[part] = torch.where(counts > 0, reduced, 0.0)
            found[name] = new.reshape(self._blueprint.shape(base(name)))
        return found

    def _flags(self, name: str, rows: Sequence[int]) -> list[Tensor]:
        """Return for each of these rows, flat, which coordinates of a tensor it trained."""
        if self._alike(name):
            whole = torch.ones(self._blueprint.shape(base(name)), device=self._device).flatten() > 0
            return [whole] * len(rows)
        return [self._summed(name, {row: 1}).flatten() > 0 for row in rows]

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for change in self._changes for name in change))

    def _full(self, row: int, name: str) -> Tensor:
        """One update in global coordinates, zero outside its slice."""
        shape = self._blueprint.shape(base(name))
        if name not in self._changes[row]:
            return torch.zeros(shape, device=self._device)
        own = self._own(row, name)
        if not self.slices[row].keep:
            return own
        full = own.new_zeros(shape)
        full[self._place(row, name)] = own
        return full

    def _own(self, row: int, name: str) -> Tensor:
        """What one device trained of a tensor, in its own coordinates."""
        change, mask = self._changes[row][name], self._mask(row, name)
        return change if mask is None else change * mask

    def _shared(self, name: str) -> Tensor | None:
        """Flat: where all devices trained a tensor; None is everywhere."""
        if self._alike(name):
            return None
        counts = self._summed(name, dict.fromkeys(range(len(self)), 1))
        return (counts == len(self)).flatten()

    def _alike(self, name: str) -> bool:
        """Whether everybody who trained a tensor trained all of it."""
        rows = [row for row, change in enumerate(self._changes) if name in change]
        return all(not self.slices[r].keep and self._mask(r, name) is None for r in rows)

    def _marked(self, name: str, marks: Sequence[int]) -> list[tuple[int, int]]:
        """Sums of marks over those who trained a coordinate, and how many coordinates have them."""
        trained = {row: marks[row] for row, change in enumerate(self._changes) if name in change}
        if self._alike(name):
            whole = int(np.prod(self._blueprint.shape(base(name)), dtype=np.int64))
            return [(_wrapped(sum(trained.values())), whole)]
        sums, counts = torch.unique(self._summed(name, trained), return_counts=True)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))

    def _summed(self, name: str, marks: dict[int, int]) -> Tensor:
        """Per coordinate, the sum of the marks of those rows that trained it."""
        shape = self._blueprint.shape(base(name))
        sums = torch.zeros(shape, dtype=torch.int64, device=self._device)
        for row, mark in marks.items():
            mask = self._mask(row, name)
            # In place, on an array made here.
            sums[self._place(row, name)] += mark if mask is None else mark * (mask > 0)
        return sums

    def _mask(self, row: int, name: str) -> Tensor | None:
        mask = self._updates.masks[row].get(base(name))
        return None if mask is None else mask.to(self._changes[row][name])

    def _place(self, row: int, name: str) -> tuple[slice | Tensor, ...]:
        device = str(self._changes[row][name].device)
        return place(base(name), self.slices[row], self._blueprint, device)

    def _sums(self, weights: Floats) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        total: dict[str, Tensor] = {}
        mass: dict[str, Tensor] = {}
        # Normalised first: equal weights then give the same bits whatever their common value.
        shares = weights / weights.sum() if weights.sum() > 0 else weights
        for row, change in enumerate(self._changes):
            share = float(shares[row])
            if not share:
                continue  # what does not count may be anything, even not a number
            for name, value in change.items():
                if name not in total:
                    shape = self._blueprint.shape(base(name))
                    total[name] = value.new_zeros(shape)
                    mass[name] = value.new_zeros(shape)
                mask = self._mask(row, name)
                where = self._place(row, name)
                # In place, on arrays made here: copying costs four times as much.
                total[name][where] += share * value if mask is None else share * (mask * value)
                mass[name][where] += share if mask is None else share * mask
        return total, mass


def _both(mask: Params, kept: Params) -> dict[str, Tensor]:
    """What was trained and sent of the tensors that were not sent whole."""
    return {n: flags * mask[n].to(flags) if n in mask else flags for n, flags in kept.items()}


def _length(value: Tensor) -> Tensor:
    """Return the Euclidean length, in double precision."""
    length: Tensor = torch.linalg.vector_norm(value, dtype=torch.float64)
    return length


def _square(value: Tensor) -> float:
    """Return the squared length, infinite where it is beyond double precision."""
    length = float(_length(value))
    return length**2 if length < _SQUARABLE else length * length


def _joint(lengths: Sequence[float]) -> float:
    """Return the length of a vector whose pieces have these."""
    if all(length < _SQUARABLE for length in lengths):
        return math.sqrt(sum(length**2 for length in lengths))
    return math.hypot(*lengths)


def _wrapped(number: int) -> int:
    """As 64-bit integers add up."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
