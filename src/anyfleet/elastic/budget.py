"""Budgets of a device, and the largest slice that fits one: the inverse of cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from anyfleet.elastic.blueprint import SHARED_KINDS, WHOLE, Blueprint, Slice
from anyfleet.elastic.cost import flops, memory
from anyfleet.elastic.cost.passes import ITEM

Extraction = Callable[[Mapping[str, int]], Slice]


@dataclass(frozen=True)
class Budget:
    """Limits on training one batch; None is no limit.

    flops: forward and backward. nbytes: parameters of the small model. memory: bytes of
    parameters, gradients and activations (`Cost.memory`, the least that training needs; a real
    device takes more, see `Train.work`). seconds: time of one batch at `speed` (FLOP per
    second).
    """

    flops: float | None = None
    nbytes: float | None = None
    memory: float | None = None
    seconds: float | None = None
    speed: float | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be a limit."""
        if (self.seconds is None) != (self.speed is None):
            raise ValueError("a limit in seconds needs a speed (FLOP per second), and vice versa")
        for name in ("flops", "nbytes", "memory", "seconds", "speed"):
            value = getattr(self, name)
            # Written so that a NaN is refused too.
            if value is not None and not value > 0:
                raise ValueError(f"Budget.{name} must be a positive number, got {value}")
        limits = (self.flops, self.nbytes, self.memory, self.seconds)
        if all(limit is None for limit in limits):
            raise ValueError("a Budget needs a limit: flops, nbytes, memory, or seconds with speed")
        if self.batch < 1:
            raise ValueError(f"Budget.batch must be at least 1, got {self.batch}")

    def fits(self, blueprint: Blueprint, slice: Slice) -> bool:
        """Return whether training this slice stays within every limit; tries cheap ones first."""
        small, first = blueprint.local(slice), slice.first_trained_layer
        limits = [limit for limit in (self.flops, self._work()) if limit is not None]
        if self.nbytes is not None and ITEM * small.numel() > self.nbytes:
            return False
        if limits:
            work = flops.count(small, first, self.batch)
            if work.forward + work.backward > min(limits):
                return False
        if self.memory is None:
            return True
        held = ITEM * (small.numel() + small.numel(small.trained(first)))
        return held + memory.saved_bytes(small, first, self.batch) <= self.memory

    def _work(self) -> float | None:
        return None if self.seconds is None or self.speed is None else self.seconds * self.speed


def largest(
    blueprint: Blueprint,
    budget: Budget,
    along: Literal["width", "trained_layers"] = "width",
    *,
    widths: Mapping[str, float] | None = None,
    start: Slice | None = None,
    extract: Extraction | None = None,
) -> Slice | None:
    """Return the largest slice within the budget; None if not even the smallest fits.

    Along the width, `widths` are relative widths per axis, scaled together and capped at 1
    (default: all equal), and `extract` turns counts into a slice (default: leading indices). Along
    the trained layers, as many of the last layers are trained as fit. `start` gives what does not
    vary: the first trained layer, or the kept indices. Exact: the next larger slice does not fit.
    """
    fixed = start or WHOLE
    if along == "trained_layers":
        firsts = range(len(blueprint.layers) - 1, -1, -1)
        return _last([partial(Slice, fixed.keep, first) for first in firsts], blueprint, budget)
    if along != "width":
        raise ValueError(f"along is 'width' or 'trained_layers', got {along!r}")
    relative = widths or {n: 1.0 for n, a in blueprint.axes.items() if a.kind in SHARED_KINDS}
    chosen = extract or partial(_leading, blueprint, fixed.first_trained_layer)
    scales = _scales(blueprint, relative)
    slices = [partial(_at, blueprint, relative, scale, chosen) for scale in scales]
    return _last(slices, blueprint, budget)


def _leading(blueprint: Blueprint, first_trained_layer: int, counts: Mapping[str, int]) -> Slice:
    keep = {name: range(count) for name, count in counts.items()}
    return Slice.of(keep, blueprint, first_trained_layer)


def _at(
    blueprint: Blueprint, widths: Mapping[str, float], scale: float, extract: Extraction
) -> Slice:
    return extract(blueprint.counts({n: min(1.0, scale * w) for n, w in widths.items()}))


def _scales(blueprint: Blueprint, widths: Mapping[str, float]) -> list[float]:
    """Return every scale at which some count changes, ascending."""
    if any(not width > 0 for width in widths.values()):
        raise ValueError(f"widths must be positive, got {dict(widths)}")
    found = {
        k / (blueprint.axes[n].whole * w)
        for n, w in widths.items()
        for k in range(1, blueprint.axes[n].size + 1)
    }
    return sorted(found) or [1.0]


def _last(
    slices: Sequence[Callable[[], Slice]], blueprint: Blueprint, budget: Budget
) -> Slice | None:
    """Return the last of ever larger slices that fits, by bisection; None if none does."""
    low, high = 0, len(slices)
    while low < high:
        middle = (low + high) // 2
        if budget.fits(blueprint, slices[middle]()):
            low = middle + 1
        else:
            high = middle
    return slices[low - 1]() if low else None
