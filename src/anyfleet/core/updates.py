"""What an aggregator gets: the updates of one round, one by one or reduced.

`for update in updates` gives single records in the coordinates of the whole model. The reductions
(`mean`, `median`, `norms`, `gram` …) do the same work faster, because they never place a small
update in a large tensor alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Arrays, Floats, Ints
from anyfleet.core.messages import Params, Report, measured
from anyfleet.elastic import WHOLE, Blueprint, Slice, place

_BLOCK = 1 << 16  # coordinates of which all devices' values are compared at once
_SQUARABLE = 1e150  # the squares of smaller numbers, and sums of many of them, are finite
_COUNTED = 16  # low bits of a mark: enough to count devices in a sum of marks


def base(name: str) -> str:
    """Return the name in the blueprint of a tensor that the server keeps per width."""
    return name.partition("@")[0]


def add_delta(model: Params, delta: Params) -> dict[str, Tensor]:
    """Return a model with a change added; tensors that `delta` does not name stay as they are."""
    return {**model, **{name: model[name] + change for name, change in delta.items()}}


class Regions(NamedTuple):
    """Coordinates that the same devices trained; one entry for each such set of devices."""

    devices: Ints  # how many they are
    coordinates: Ints  # how many they trained


@dataclass(frozen=True, eq=False)
class Update:
    """The update of one device.

    `delta` and `covered` are in the coordinates of the whole model, so that they can be added to it
    and to each other. They have only the tensors that the device trained.
    """

    device: int
    samples: float  # training samples of the device
    staleness: int  # rounds since the order was issued; 0: in this very round
    sent_fraction: float  # bits sent over those of an uncompressed update, as measured
    bits: float  # of the reply
    slice: Slice  # the sub-model that was trained
    report: Report  # what the device measured, by name
    local_delta: Params  # the change as it came, in the coordinates of `slice`
    local_mask: Params  # 1 where trained, 0 where not; a name that is absent: all of it was trained
    blueprint: Blueprint  # of the whole model

    @cached_property
    def delta(self) -> Params:
        """The change of the server's current model; zero where the device did not train."""
        return {
            name: self._placed(name, value * self._flags(name).to(value))
            for name, value in self.local_delta.items()
        }

    @cached_property
    def covered(self) -> Params:
        """The coordinates that the device trained, as booleans."""
        return {name: self._placed(name, self._flags(name)) for name in self.local_delta}

    def _flags(self, name: str) -> Tensor:
        """Return which entries of a tensor were trained, in the coordinates of the slice."""
        value, mask = self.local_delta[name], self.local_mask.get(base(name))
        if mask is None:
            return torch.ones_like(value, dtype=torch.bool)
        return (mask > 0).expand_as(value).to(value.device)

    def _placed(self, name: str, value: Tensor) -> Tensor:
        return _placed(name, value, self.slice, self.blueprint)


@dataclass(frozen=True, eq=False)
class Updates(Arrays):
    """The updates of one round: arrays with one entry for each, in the order of their orders.

    That order does not depend on who replied first, so neither do sums of floats. `len` counts the
    updates, `updates[row]` and `for update in updates` give them one by one (`Update`), `take`
    gives some of them, `report` one reported number of all. The other methods reduce all of them to
    one result. How the tensors are stored is private and may change: `slices` has the sub-model of
    each update, `Update.local_delta` what came of it.
    """

    device: Ints
    samples: Floats  # training samples of each device
    staleness: Ints  # rounds since each order was issued; 0: in this very round
    sent_fraction: Floats  # bits sent over those of an uncompressed update, as measured
    bits: Floats  # of each reply
    slices: tuple[Slice, ...]  # the sub-models that were trained
    blueprint: Blueprint  # of the whole model
    _reports: tuple[Report, ...]  # as they came; `report` reads one number of all of them
    _local_deltas: tuple[Params, ...]  # changes of the current model, in coordinates of the slices
    _local_masks: tuple[Params, ...]  # 1 where trained, 0 where not; a name that is absent: trained
    _local_sent: tuple[Params, ...]  # 1 where the codec sent an entry; a name that is absent: sent

    @classmethod
    def of(
        cls,
        deltas: Sequence[Params],
        blueprint: Blueprint,
        *,
        slices: Sequence[Slice] | None = None,
        device: Sequence[int] | Ints | None = None,
        samples: Sequence[float] | Floats | None = None,
        staleness: Sequence[int] | Ints | None = None,
        sent_fraction: Sequence[float] | Floats | None = None,
        bits: Sequence[float] | Floats | None = None,
        masks: Sequence[Params] | None = None,
        sent: Sequence[Params] | None = None,
        reports: Sequence[Report] | None = None,
    ) -> "Updates":
        """Return the updates with these deltas, one for each device.

        Deltas, `masks` (1 where trained) and `sent` (1 where the codec sent an entry) are in the
        coordinates of the slices. What is left out makes them fresh, uncompressed updates of the
        whole model by devices 0, 1, 2 and so on, with one sample each and empty reports.
        """
        count = len(deltas)
        return cls(
            device=np.array(range(count) if device is None else device, dtype=np.int64),
            samples=np.array([1] * count if samples is None else samples, dtype=np.float64),
            staleness=np.array([0] * count if staleness is None else staleness, dtype=np.int64),
            sent_fraction=np.array(
                [1] * count if sent_fraction is None else sent_fraction, dtype=np.float64
            ),
            bits=np.array([0] * count if bits is None else bits, dtype=np.float64),
            slices=tuple(slices or [WHOLE] * count),
            blueprint=blueprint,
            _reports=tuple(reports or [{}] * count),
            _local_deltas=tuple(deltas),
            _local_masks=tuple(masks or [{}] * count),
            _local_sent=tuple(sent or [{}] * count),
        )

    def __iter__(self) -> Iterator[Update]:
        """Yield every update by itself."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Update:
        """Return one update; its tensors are placed in the whole model when they are asked for."""
        row = range(len(self))[row]  # counts from the end, or raises IndexError, as a list does
        return Update(
            device=int(self.device[row]),
            samples=float(self.samples[row]),
            staleness=int(self.staleness[row]),
            sent_fraction=float(self.sent_fraction[row]),
            bits=float(self.bits[row]),
            slice=self.slices[row],
            report=self._reports[row],
            local_delta=self._local_deltas[row],
            local_mask=self._local_masks[row],
            blueprint=self.blueprint,
        )

    def report(self, name: str) -> Floats:
        """Return the number that each device reported under this name; NaN where it did not."""
        return np.array([measured(report, name) for report in self._reports], dtype=np.float64)

    def scaled(self, factors: Floats) -> "Updates":
        """Return the same updates, each multiplied by its factor."""
        deltas = [
            delta if factor == 1 else {n: (v.double() * factor).to(v) for n, v in delta.items()}
            for delta, factor in zip(self._local_deltas, factors.tolist(), strict=True)
        ]
        return replace(self, _local_deltas=tuple(deltas))

    def only_sent(self) -> "Updates":
        """Return the updates as if devices had trained only what their codecs sent.

        Entries that a codec left out count as zeros otherwise.
        """
        pairs = zip(self._local_masks, self._local_sent, strict=True)
        masks = tuple({**mask, **_both(mask, sent)} for mask, sent in pairs)
        return replace(self, _local_masks=masks)

    @property
    def _device(self) -> torch.device:
        tensors = (value for delta in self._local_deltas for value in delta.values())
        return next((value.device for value in tensors), torch.device("cpu"))

    # -- per coordinate

    def mean(self, weights: Floats) -> dict[str, Tensor]:
        """Return, per coordinate, the weighted mean change of those who trained it.

        Zero where nobody did. Weights need not sum to 1. It is the overlap mean of specification
        §0.2, written as a change of the model.
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
        """Return which coordinates somebody trained, as booleans."""
        _, mass = self._sums(np.ones(len(self)))
        return {name: value > 0 for name, value in mass.items()}

    def regions(self) -> Regions:
        """Return the trained coordinates, counted by who trained them."""
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
        """Return the Euclidean length of every update."""
        found = [
            _length(self._own(row, name))
            for row, delta in enumerate(self._local_deltas)
            for name in delta
        ]
        # Waited for together: each on its own would hold up a graphics card.
        lengths = iter(torch.stack(found).tolist() if found else [])
        return np.array([_joint([next(lengths) for _ in delta]) for delta in self._local_deltas])

    def root_mean_squares(self) -> Floats:
        """Return the root mean square of every update, over the coordinates its device trained.

        Narrow and wide slices compare by it. What a codec left out counts as zero; an update
        without a trained coordinate has 0.
        """
        counts = [
            sum(self._trained(row, name) for name in delta)
            for row, delta in enumerate(self._local_deltas)
        ]
        return self.norms() / np.sqrt(np.maximum(np.array(counts, dtype=np.float64), 1.0))

    def _trained(self, row: int, name: str) -> int:
        """Return how many entries of a tensor a device trained."""
        value, mask = self._local_deltas[row][name], self._mask(row, name)
        return value.numel() if mask is None else int((mask > 0).expand_as(value).sum())

    def tree_norms(self, tree: Params) -> Floats:
        """Return the length of a tree of the whole model, over what each device trained of it."""
        squares = np.zeros(len(self))
        known: dict[tuple[str, Slice], float] = {}  # many devices have one of few slices
        for row, delta in enumerate(self._local_deltas):
            for name in delta:
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
        """Return the inner product of every update with a tree of the whole model."""
        found = np.zeros(len(self))
        for row, delta in enumerate(self._local_deltas):
            for name in delta:
                if name in tree:
                    part = tree[name][self._place(row, name)].double()
                    found[row] += float((self._own(row, name).double() * part).sum())
        return found

    # -- per pair

    def gram(self, *, common: bool = False) -> Floats:
        """Return the inner products of all pairs of updates, over the coordinates both trained.

        With `common` they are over the coordinates that everybody trained, so that the vectors of
        all devices can be compared (specification §E).
        """
        count = len(self)
        products = np.zeros((count, count))
        for name in self._names():
            if common and not all(name in delta for delta in self._local_deltas):
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
            rows = [row for row, delta in enumerate(self._local_deltas) if name in delta]
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
            found[name] = new.reshape(self.blueprint.shape(base(name)))
        return found

    def _flags(self, name: str, rows: Sequence[int]) -> list[Tensor]:
        """Return for each of these rows, flat, which coordinates of a tensor it trained."""
        if self._alike(name):
            whole = torch.ones(self.blueprint.shape(base(name)), device=self._device).flatten() > 0
            return [whole] * len(rows)
        return [self._summed(name, {row: 1}).flatten() > 0 for row in rows]

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for delta in self._local_deltas for name in delta))

    def _full(self, row: int, name: str) -> Tensor:
        """Return a tensor of one update in global coordinates, zero outside its slice."""
        shape = self.blueprint.shape(base(name))
        if name not in self._local_deltas[row]:
            return torch.zeros(shape, device=self._device)
        return _placed(name, self._own(row, name), self.slices[row], self.blueprint)

    def _own(self, row: int, name: str) -> Tensor:
        """Return what one device trained of a tensor, in the coordinates of its slice."""
        delta, mask = self._local_deltas[row][name], self._mask(row, name)
        return delta if mask is None else delta * mask

    def _shared(self, name: str) -> Tensor | None:
        """Return where all devices trained a tensor, flat; None: everywhere."""
        if self._alike(name):
            return None
        counts = self._summed(name, dict.fromkeys(range(len(self)), 1))
        return (counts == len(self)).flatten()

    def _alike(self, name: str) -> bool:
        """Return whether everybody who trained a tensor trained all of it."""
        rows = [row for row, delta in enumerate(self._local_deltas) if name in delta]
        return all(not self.slices[r].keep and self._mask(r, name) is None for r in rows)

    def _marked(self, name: str, marks: Sequence[int]) -> list[tuple[int, int]]:
        """Return sums of marks of those who trained a coordinate, and how many have each sum."""
        trained = {row: marks[row] for row, delta in enumerate(self._local_deltas) if name in delta}
        if self._alike(name):
            whole = int(np.prod(self.blueprint.shape(base(name)), dtype=np.int64))
            return [(_wrapped(sum(trained.values())), whole)]
        sums, counts = torch.unique(self._summed(name, trained), return_counts=True)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))

    def _summed(self, name: str, marks: dict[int, int]) -> Tensor:
        """Return, per coordinate, the sum of the marks of the rows that trained it."""
        shape = self.blueprint.shape(base(name))
        sums = torch.zeros(shape, dtype=torch.int64, device=self._device)
        for row, mark in marks.items():
            mask = self._mask(row, name)
            # In place, on an array made here.
            sums[self._place(row, name)] += mark if mask is None else mark * (mask > 0)
        return sums

    def _mask(self, row: int, name: str) -> Tensor | None:
        mask = self._local_masks[row].get(base(name))
        return None if mask is None else mask.to(self._local_deltas[row][name])

    def _place(self, row: int, name: str) -> tuple[slice | Tensor, ...]:
        device = str(self._local_deltas[row][name].device)
        return place(base(name), self.slices[row], self.blueprint, device)

    def _sums(self, weights: Floats) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        total: dict[str, Tensor] = {}
        mass: dict[str, Tensor] = {}
        # Normalised first: equal weights then give the same bits whatever their common value.
        weights = weights / weights.sum() if weights.sum() > 0 else weights
        for row, delta in enumerate(self._local_deltas):
            weight = float(weights[row])
            if not weight:
                continue  # what does not count may be anything, even not a number
            for name, value in delta.items():
                if name not in total:
                    shape = self.blueprint.shape(base(name))
                    total[name] = value.new_zeros(shape)
                    mass[name] = value.new_zeros(shape)
                mask = self._mask(row, name)
                where = self._place(row, name)
                # In place, on arrays made here: copying costs four times as much.
                total[name][where] += weight * value if mask is None else weight * (mask * value)
                mass[name][where] += weight if mask is None else weight * mask
        return total, mass


def _placed(name: str, value: Tensor, slice_: Slice, blueprint: Blueprint) -> Tensor:
    """Return a tensor of a sub-model in the coordinates of the whole one, zero (False) besides."""
    if not slice_.keep:
        return value
    full = value.new_zeros(blueprint.shape(base(name)))
    full[place(base(name), slice_, blueprint, str(value.device))] = value
    return full


def _both(mask: Params, kept: Params) -> dict[str, Tensor]:
    """Return what was trained and sent of the tensors that were not sent whole."""
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
    """Return a sum as 64-bit integers have it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
