"""What an aggregator gets: the updates of one round, one by one or reduced.

`for update in updates` gives single records in the coordinates of the whole model. The reductions
(`mean`, `median`, `norms`, `gram` …) do the same work faster: they take all updates of one slice
together (`core/ordered_stacks.py`) and place what they find in the whole model once for each slice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Arrays, Floats, Ints, distinct, listed
from anyfleet.core.arriving import on_its_way
from anyfleet.core.messages import Params, Report
from anyfleet.core.ordered_stacks import (
    Aligned,
    OrderedStack,
    WholeModel,
    base,
    ordered_stacks,
    whole_model,
)
from anyfleet.core.stacks import Replies, Reports, Stack
from anyfleet.elastic import WHOLE, Blueprint, Slice, place

_COUNTED = 16  # low bits of a mark: enough to count devices in a sum of marks


def add_delta(model: Params, delta: Params) -> dict[str, Tensor]:
    """Return a model with a change added; tensors that `delta` does not name stay as they are."""
    if not delta:
        return dict(model)
    old, changes = [model[name] for name in delta], [*delta.values()]
    moved = torch._foreach_add(old, changes)  # noqa: SLF001 - one call, where a loop is one each
    return {**model, **dict(zip(delta, moved, strict=True))}


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
    slice_index: Ints  # the number of each update's slice
    blueprint: Blueprint  # of the whole model
    _factor: Floats  # by which each update is multiplied
    _stack_index: Ints  # the number of each update's stack
    _place: Ints  # of each update in its stack
    distinct_slices: tuple[Slice, ...] = listed("slice_index")
    # "delta" of each stack is the change of the current model, in coordinates of the slices.
    _stacks: tuple[Stack, ...] = listed("_stack_index")

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
        nothing: list[Params] = [{}] * count
        each = zip(deltas, masks or nothing, sent or nothing, reports or nothing, strict=True)
        different, slice_index = distinct(slices or [WHOLE] * count)
        return cls(
            device=np.array(range(count) if device is None else device, dtype=np.int64),
            samples=np.array([1] * count if samples is None else samples, dtype=np.float64),
            staleness=np.array([0] * count if staleness is None else staleness, dtype=np.int64),
            sent_fraction=np.array(
                [1] * count if sent_fraction is None else sent_fraction, dtype=np.float64
            ),
            bits=np.array([0] * count if bits is None else bits, dtype=np.float64),
            slice_index=slice_index,
            distinct_slices=different,
            blueprint=blueprint,
            _factor=np.ones(count),
            _stack_index=np.arange(count),
            _place=np.zeros(count, dtype=np.int64),
            _stacks=tuple(
                Stack.of_one({"delta": delta}, masks=mask, kept=kept, report=report)
                for delta, mask, kept, report in each
            ),
        )

    @classmethod
    def stacked(
        cls,
        replies: Replies,
        blueprint: Blueprint,
        *,
        slices: Sequence[Slice],
        slice_index: Ints,
        staleness: Sequence[int] | Ints,
        sent_fraction: Sequence[float] | Floats,
    ) -> "Updates":
        """Return the updates of replies, whose stacks stay as they are.

        The tree "delta" of every stack must be a change of the server's current model under the
        names of the server, in the coordinates of the slices. `slices` lists them, and
        `slice_index` has the number of each reply's.
        """
        return cls(
            device=replies.device,
            samples=replies.samples.astype(np.float64),
            staleness=np.array(staleness, dtype=np.int64),
            sent_fraction=np.array(sent_fraction, dtype=np.float64),
            bits=replies.bits,
            slice_index=slice_index,
            distinct_slices=tuple(slices),
            blueprint=blueprint,
            _factor=np.ones(len(replies)),
            _stack_index=replies.stack_index,
            _place=replies.place,
            _stacks=replies.stacks,
        )

    def __iter__(self) -> Iterator[Update]:
        """Yield every update by itself."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Update:
        """Return one update; its tensors are placed in the whole model when they are asked for."""
        row = range(len(self))[row]  # counts from the end, or raises IndexError, as a list does
        stack, at = self._stacks[int(self._stack_index[row])], int(self._place[row])
        delta, factor = stack.trees_of(at)["delta"], float(self._factor[row])
        if factor != 1:
            delta = {name: (value.double() * factor).to(value) for name, value in delta.items()}
        return Update(
            device=int(self.device[row]),
            samples=float(self.samples[row]),
            staleness=int(self.staleness[row]),
            sent_fraction=float(self.sent_fraction[row]),
            bits=float(self.bits[row]),
            slice=self.distinct_slices[int(self.slice_index[row])],
            report=stack.report_of(at),
            local_delta=delta,
            local_mask=stack.masks_of(at),
            blueprint=self.blueprint,
        )

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The sub-models that were trained, one for each update."""
        return tuple(self.distinct_slices[number] for number in self.slice_index.tolist())

    def report(self, name: str) -> Floats:
        """Return the number that each device reported under this name; NaN where it did not."""
        told = tuple(stack.report for stack in self._stacks)
        return Reports(self._stack_index, self._place, told).number(name)

    def scaled(self, factors: Floats) -> "Updates":
        """Return the same updates, each multiplied by its factor."""
        return self.having(_factor=self._factor * factors)

    def only_sent(self) -> "Updates":
        """Return the updates as if devices had trained only what their codecs sent.

        Entries that a codec left out count as zeros otherwise.
        """
        stacks = [
            replace(stack, masks={**stack.masks, **_both(stack.masks, stack.kept)})
            for stack in self._stacks
        ]
        return self.having(_stacks=tuple(stacks))

    @cached_property
    def _ordered(self) -> tuple[OrderedStack, ...]:
        rows = self._stack_index, self._place, self.slice_index
        return ordered_stacks(
            rows, self._stacks, self.distinct_slices, self._factor, self.blueprint
        )

    @cached_property
    def _aligned(self) -> dict[str, Aligned]:
        """Every tensor by its name, with the stacks that have it."""
        return {n: Aligned(n, tuple(g for g in self._ordered if n in g.tree)) for n in self._types}

    @cached_property
    def _types(self) -> dict[str, torch.dtype]:
        """The names of all tensors, with their types."""
        return {name: v.dtype for stack in self._ordered for name, v in stack.tree.items()}

    def _shares(self, weights: Floats | Ints, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the weights of every ordered stack, where its tensors are; sent there together."""
        host = torch.from_numpy(weights[np.concatenate([stack.rows for stack in self._ordered])])
        like = next(value for stack in self._ordered for value in stack.tree.values())
        every = host.to(like.device, dtype, non_blocking=True)
        return tuple(every.split_with_sizes([len(stack.rows) for stack in self._ordered]))

    # -- per coordinate

    def mean(self, weights: Floats) -> dict[str, Tensor]:
        """Return, per coordinate, the weighted mean change of those who trained it.

        Zero where nobody did. Weights need not sum to 1. It is the overlap mean of specification
        §0.2, written as a change of the model.
        """
        if np.count_nonzero(weights) != len(weights):
            # What does not count may be anything, even not a number.
            counted = np.flatnonzero(weights)
            return self.take(counted).mean(weights[counted])
        # Normalised first: equal weights then give the same bits whatever their common value.
        weights = weights / weights.sum() if weights.sum() > 0 else weights
        if not self._types:
            return {}
        whole, stacks = whole_model(tuple(self._types), self.blueprint), self._ordered
        shares = self._shares(weights, reduce(torch.promote_types, set(self._types.values())))
        total = shares[0].new_zeros(whole.entries)
        for stack, own in zip(stacks, shares, strict=True):
            stack.add_sums(total, whole, own)
        if len(stacks) > 1 or not stacks[0].together or not weights.sum() > 0:
            mass = self._masses(whole, weights, shares)
            total = torch.where(mass > 0, total / mass, 0.0)
        elif stacks[0].joint is None:
            # Everybody trained the same, and the weights sum to 1 but for the last bit.
            total = total / weights.sum().item()
        return {name: value.to(self._types[name]) for name, value in whole.split(total).items()}

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
        if not self._types:
            return {}
        whole = whole_model(tuple(self._types), self.blueprint)
        ones = np.ones(len(self), dtype=np.int64)
        return whole.split(self._masses(whole, ones, self._shares(ones, torch.int64)) > 0)

    def regions(self) -> Regions:
        """Return the trained coordinates, counted by who trained them."""
        # A sum of marks tells how many devices there are, and all but surely which.
        marks = ((rng.bits(rng.root(0, "regions"), len(self)) << _COUNTED) + 1).numpy()
        every = self._aligned.values()
        alike, mixed = [a for a in every if a.complete], [a for a in every if not a.complete]
        sums = np.array([marks[a.rows].sum() for a in alike], dtype=np.int64)
        counts = np.array([a.entries for a in alike], dtype=np.int64)
        if mixed:
            whole = whole_model(tuple(a.name for a in mixed), self.blueprint)
            flat = self._masses(whole, marks, self._shares(marks, torch.int64))
            found = torch.stack(torch.unique(flat, return_counts=True)).cpu().numpy()
            sums, counts = np.concatenate([sums, found[0]]), np.concatenate([counts, found[1]])
        different, number = np.unique(sums[sums != 0], return_inverse=True)
        coordinates = np.zeros(len(different), dtype=np.int64)
        np.add.at(coordinates, number, counts[sums != 0])
        return Regions(different % (1 << _COUNTED), coordinates)

    # -- per device

    def norms(self) -> Floats:
        """Return the Euclidean length of every update."""
        (norms,) = self._each(OrderedStack.norms)()
        return _joint(norms)

    def root_mean_squares(self) -> Floats:
        """Return the root mean square of every update, over the coordinates its device trained.

        Narrow and wide slices compare by it. What a codec left out counts as zero; an update
        without a trained coordinate has 0.
        """
        return self.measured_sizes()()

    def measured_sizes(self) -> Callable[[], Floats]:
        """Return what returns `root_mean_squares`, for which an accelerator is asked now."""
        counts = np.zeros(len(self))
        for stack in self._ordered:
            counts[stack.rows] = sum([stack.sizes[n] for n in stack.tree if n not in stack.masks])
        measured = self._each(OrderedStack.norms, OrderedStack.counts)

        def sizes() -> Floats:
            norms, trained = measured()
            entries = np.maximum(counts + trained.sum(axis=1), 1.0)
            found: Floats = _joint(norms) / np.sqrt(entries)
            return found

        return sizes

    def tree_norms(self, tree: Params) -> Floats:
        """Return the length of a tree of the whole model, over what each device trained of it."""
        (found,) = self._each(lambda s: [s.lengths_of(n, tree[n]) for n in s.tree if n in tree])()
        return _joint(found)

    def dots(self, tree: Params) -> Floats:
        """Return the inner product of every update with a tree of the whole model."""
        (found,) = self._each(lambda s: [s.dots(n, tree[n]) for n in s.tree if n in tree])()
        products: Floats = found.sum(axis=1)
        return products

    def _each(
        self, *numbers: Callable[[OrderedStack], Sequence[Tensor]]
    ) -> Callable[[], list[Floats]]:
        """Return what returns numbers of every update, side by side, which are on their way.

        0 stands where others have more of them. All kinds of numbers are waited for together: one
        by one they would hold up an accelerator.
        """
        kinds = [[(s.rows, list(each(s))) for s in self._ordered] for each in numbers]
        measured = on_its_way([own for kind in kinds for _, columns in kind for own in columns])

        def each() -> list[Floats]:
            arrays, found = iter(measured()), []
            for kind in kinds:
                most = max((len(columns) for _, columns in kind), default=0)
                found.append(np.zeros((len(self), max(1, most))))
                for rows, columns in kind:
                    for column in range(len(columns)):
                        found[-1][rows, column] = next(arrays)
            return found

        return each

    # -- per pair

    def gram(self, *, common: bool = False) -> Floats:
        """Return the inner products of all pairs of updates, over the coordinates both trained.

        With `common` they are over the coordinates that everybody trained, so that the vectors of
        all devices can be compared (specification §E).
        """
        sums: dict[bytes, Tensor] = {}  # by the rows that have a tensor: many tensors have the same
        for aligned in self._aligned.values():
            if common and len(aligned.rows) < len(self):
                continue
            rows = aligned.rows.tobytes()
            for _, block, there in aligned.blocks():
                own = block.to(torch.float64, copy=True)
                if common and there is not None:
                    own = torch.where(there.all(dim=0), own, 0.0)
                found = _products(own)
                sums[rows] = sums[rows] + found if rows in sums else found
        products = np.zeros((len(self), len(self)))
        for rows, found in sums.items():
            which = np.frombuffer(rows, dtype=np.int64)
            products[np.ix_(which, which)] += found.cpu().numpy()
        return products

    def _by_rank(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Reduce the values of each coordinate, given in ascending order, to one.

        `reduce` gets [devices, coordinates], of which the first `counts` rows of a column are
        values; a block of coordinates at a time.
        """
        found: dict[str, Tensor] = {}
        for name, aligned in self._aligned.items():
            new = aligned.stacks[0].tree[name].new_zeros(aligned.entries)
            for part, block, there in aligned.blocks():
                flags = torch.ones_like(block, dtype=torch.bool) if there is None else there
                ranked = block if there is None else torch.where(flags, block, torch.inf)
                counts = flags.sum(dim=0)
                reduced = reduce(_ascending(ranked), counts).to(new)
                # In place, on an array made here.
                new[part] = torch.where(counts > 0, reduced, 0.0)
            found[name] = aligned.placed(new)
        return found

    def _masses(
        self, whole: WholeModel, weights: Floats | Ints, shares: Sequence[Tensor]
    ) -> Tensor:
        """Return, per coordinate, the sum of the weights of those who trained it.

        `shares` are the weights where the tensors are (`_shares`).
        """
        mass = shares[0].new_zeros(whole.entries)
        for stack, own in zip(self._ordered, shares, strict=True):
            stack.add_masses(mass, whole, own, weights[stack.rows])
        return mass


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


def _joint(lengths: Floats) -> Floats:
    """Return the length of every row's vector, of whose pieces these are the lengths."""
    joint: Floats = np.hypot.reduce(lengths, axis=1)  # does not square them: they may be huge
    return joint


def _products(rows: Tensor) -> Tensor:
    """Return the inner products of all pairs of rows."""
    if rows.is_cuda:
        return rows @ rows.T
    array = rows.numpy()
    return torch.from_numpy(array @ array.T)  # computes each pair once


def _ascending(values: Tensor) -> Tensor:
    """Return every column in ascending order."""
    if values.is_cuda or values.dtype not in (torch.float32, torch.float64):
        return values.sort(dim=0).values
    return torch.from_numpy(np.sort(values.numpy(), axis=0))  # several times as fast
