"""Partitions of S4: devices that see few classes, beside devices that see all.

Samples are drawn without replacement inside a device; unless a docstring says otherwise, two
devices may hold the same sample (specification §B leaves this open and chooses so).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyfleet.arguments import checked
from anyfleet.tasks.partition.dealing import (
    IntArray,
    Shares,
    at_least,
    check_devices,
    deal,
    draw,
    join,
    rows_by_class,
    within,
)


@checked
@dataclass(frozen=True)
class XClass:
    """x-class: a device draws `classes` labels, then `samples` rows uniformly from their union."""

    classes: int = 1
    samples: int = 600

    def __post_init__(self) -> None:
        at_least("XClass.classes", self.classes, 1)
        at_least("XClass.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        check_devices(devices, "XClass")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="XClass")
        return _unions(rng, pools, [self.classes] * devices, self.samples, part="XClass")


@checked
@dataclass(frozen=True)
class ClassCounts:
    """x-class with a number of classes for each device, e.g. (1, 1, 1, 2, 2, 10, 10, 10)."""

    counts: tuple[int, ...]
    samples: int = 600

    def __post_init__(self) -> None:
        for device, count in enumerate(self.counts):
            at_least(f"ClassCounts.counts[{device}]", count, 1)
        at_least("ClassCounts.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        if devices != len(self.counts):
            raise ValueError(
                f"ClassCounts lists {len(self.counts)} devices, but {devices} are wanted."
            )
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="ClassCounts")
        return _unions(rng, pools, self.counts, self.samples, part="ClassCounts")


@checked
@dataclass(frozen=True)
class Mixed:
    """X iid + Y non-iid: the first `iid` devices are iid-n (disjoint), the others x-class."""

    iid: int
    classes: int = 1
    samples: int = 600

    def __post_init__(self) -> None:
        at_least("Mixed.iid", self.iid, 0)
        at_least("Mixed.classes", self.classes, 1)
        at_least("Mixed.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        if devices < max(1, self.iid):
            raise ValueError(f"Mixed has {self.iid} iid devices, but {devices} are wanted in all.")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="Mixed")
        even = deal(rng, np.arange(len(labels)), [self.samples] * self.iid, part="Mixed")
        counts = [self.classes] * (devices - self.iid)
        return even + _unions(rng, pools, counts, self.samples, part="Mixed")


@checked
@dataclass(frozen=True)
class Case1:
    """Case 1: the devices see 1, 2 … C classes, in random order; there are C devices."""

    samples: int = 600

    def __post_init__(self) -> None:
        at_least("Case1.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="Case1")
        if devices != len(pools):
            raise ValueError(
                f"Case1 needs as many devices as classes ({len(pools)}), got {devices}. "
                "For another number use Case2 or ClassCounts."
            )
        counts = [int(count) for count in rng.permutation(devices) + 1]
        return _unions(rng, pools, counts, self.samples, part="Case1")


@checked
@dataclass(frozen=True)
class Case2:
    """Case 2: the first half of the devices see U{1 … C/2} classes, the others U{C/2+1 … C}."""

    samples: int = 600

    def __post_init__(self) -> None:
        at_least("Case2.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        check_devices(devices, "Case2")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="Case2")
        if len(pools) < 2:
            raise ValueError("Case2 needs data with at least two classes.")
        half, few = len(pools) // 2, devices // 2
        low = rng.integers(1, half, few, endpoint=True)
        high = rng.integers(half + 1, len(pools), devices - few, endpoint=True)
        counts = [int(count) for count in np.concatenate([low, high])]
        return _unions(rng, pools, counts, self.samples, part="Case2")


@checked
@dataclass(frozen=True)
class SigmaRho:
    """(sigma, rho) of S4 §4.4: the first `sigma` K devices are iid-n and disjoint.

    Each of the others holds exactly `samples / rho` rows of each of `rho` random classes.
    """

    sigma: float = 0.5
    rho: int = 1
    samples: int = 200

    def __post_init__(self) -> None:
        if self.sigma != 0:
            within("SigmaRho.sigma", self.sigma)
        at_least("SigmaRho.rho", self.rho, 1)
        at_least("SigmaRho.samples", self.samples, 1)
        if self.samples % self.rho:
            raise ValueError(
                f"SigmaRho.samples ({self.samples}) must be a multiple of rho ({self.rho})."
            )

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        check_devices(devices, "SigmaRho")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="SigmaRho")
        even = round(self.sigma * devices)
        shares = deal(rng, np.arange(len(labels)), [self.samples] * even, part="SigmaRho")
        return shares + tuple(self._skewed(rng, pools) for _ in range(devices - even))

    def _skewed(self, rng: np.random.Generator, pools: Sequence[IntArray]) -> IntArray:
        each = self.samples // self.rho
        chosen = _choose(rng, pools, self.rho, part="SigmaRho")
        return join([draw(rng, pool, each, part="SigmaRho") for pool in chosen])


def _choose(
    rng: np.random.Generator, pools: Sequence[IntArray], count: int, *, part: str
) -> list[IntArray]:
    if count > len(pools):
        raise ValueError(f"{part} asks for {count} classes, but the data has {len(pools)}.")
    return [pools[index] for index in rng.choice(len(pools), count, replace=False)]


def _unions(
    rng: np.random.Generator,
    pools: Sequence[IntArray],
    counts: Sequence[int],
    samples: int,
    *,
    part: str,
) -> Shares:
    return tuple(
        draw(rng, join(_choose(rng, pools, count, part=part)), samples, part=part)
        for count in counts
    )
