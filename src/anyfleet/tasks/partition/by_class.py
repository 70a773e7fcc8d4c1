"""Partitions by class: devices see few classes, or classes in unequal proportions.

`TwoClassDisjoint`, `BalancedClasses` and `Dirichlet` are disjoint. The others draw without
replacement within a device, but two devices may hold the same sample unless a docstring says
otherwise (specification §B leaves this open and chooses so).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyfleet.arguments import checked
from anyfleet.tasks.partition.common import (
    DeviceRows,
    IntArray,
    at_least,
    check_devices,
    deal,
    draw,
    even_sizes,
    join,
    rows_by_class,
    within,
)

# How often a Dirichlet draw that leaves a device with too few samples is repeated.
_ATTEMPTS = 1000


@checked
@dataclass(frozen=True)
class TwoClassDisjoint:
    """Two classes per device (FedPMT): `samples / 2` rows of each, no row on two devices.

    Classes are balanced: a shuffled list with every class equally often (within one) is dealt out
    two per device, and a device that got one class twice swaps with one that lacks it.
    """

    samples: int = 300  # of each device

    def __post_init__(self) -> None:
        at_least("TwoClassDisjoint.samples", self.samples, 2)
        if self.samples % 2:
            raise ValueError(f"TwoClassDisjoint.samples must be even, got {self.samples}.")

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        part = "TwoClassDisjoint"
        check_devices(devices, part)
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part=part)
        if len(pools) < 2:
            raise ValueError(f"{part} needs data with at least two classes.")
        pairs = _pairs(rng, len(pools), devices)
        held: list[list[IntArray]] = [[] for _ in range(devices)]
        for label, pool in enumerate(pools):
            takers = np.flatnonzero((pairs == label).any(axis=1))
            shares = deal(
                rng, pool, [self.samples // 2] * len(takers), part=f"{part}, class {label}"
            )
            for device, share in zip(takers, shares, strict=True):
                held[device].append(share)
        return tuple(join(parts) for parts in held)


@checked
@dataclass(frozen=True)
class BalancedClasses:
    """`sigma` classes per device (WHALE-FL), each class divided among the devices that have it.

    Classes are dealt in freshly shuffled passes, so that numbers of devices per class differ by at
    most one. The devices of a class get equal parts of it (within one), and all data are used.
    """

    sigma: int = 2

    def __post_init__(self) -> None:
        at_least("BalancedClasses.sigma", self.sigma, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        part = "BalancedClasses"
        check_devices(devices, part)
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part=part)
        self._check(len(pools), devices)
        owned = _round_robin(rng, len(pools), devices, self.sigma)
        held: list[list[IntArray]] = [[] for _ in range(devices)]
        for label, pool in enumerate(pools):
            takers = np.flatnonzero((owned == label).any(axis=1))
            if len(pool) < len(takers):
                raise ValueError(
                    f"{part}: class {label} has {len(pool)} samples for {len(takers)} owners. "
                    "Use fewer devices or a smaller sigma."
                )
            shares = deal(rng, pool, even_sizes(len(pool), len(takers)), part=part)
            for device, share in zip(takers, shares, strict=True):
                held[device].append(share)
        return tuple(join(parts) for parts in held)

    def _check(self, classes: int, devices: int) -> None:
        if self.sigma > classes:
            raise ValueError(
                f"BalancedClasses.sigma is {self.sigma}; the data has {classes} classes."
            )
        if self.sigma * devices < classes:
            raise ValueError(
                f"BalancedClasses: {devices} devices with {self.sigma} labels each leave some of "
                f"{classes} classes without an owner. Use more devices or a larger sigma."
            )


@checked
@dataclass(frozen=True)
class Dirichlet:
    """The Dirichlet split (FedMA): every class is divided by a Dirichlet draw over the devices.

    The draw is repeated until every device has `minimum` samples.
    """

    alpha: float = 0.5  # small: unequal; large: alike
    minimum: int = 1  # samples that a device has at least

    def __post_init__(self) -> None:
        within("Dirichlet.alpha", self.alpha, high=float("inf"))
        at_least("Dirichlet.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        check_devices(devices, "Dirichlet")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="Dirichlet")
        for _ in range(_ATTEMPTS):
            sizes = np.stack([self._sizes(rng, len(pool), devices) for pool in pools])
            if sizes.sum(axis=0).min() >= self.minimum:
                break
        else:
            raise ValueError(
                f"Dirichlet(alpha={self.alpha}) left a device with fewer than {self.minimum} of "
                f"{len(labels)} samples in {_ATTEMPTS} draws. Raise alpha, or use fewer devices."
            )
        dealt = [
            deal(rng, pool, size.tolist(), part="Dirichlet")
            for pool, size in zip(pools, sizes, strict=True)
        ]
        return tuple(join(parts) for parts in zip(*dealt, strict=True))

    def _sizes(self, rng: np.random.Generator, rows: int, devices: int) -> IntArray:
        ends = np.cumsum(rng.dirichlet(np.full(devices, self.alpha)))
        cuts = np.append(np.floor(ends[:-1] * rows), rows).astype(np.int64)
        return np.diff(cuts, prepend=0)


@checked
@dataclass(frozen=True)
class XClass:
    """`classes` random classes per device, then `samples` rows drawn uniformly from their union."""

    classes: int = 1  # of each device
    samples: int = 600  # of each device

    def __post_init__(self) -> None:
        at_least("XClass.classes", self.classes, 1)
        at_least("XClass.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        check_devices(devices, "XClass")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="XClass")
        return _unions(rng, pools, [self.classes] * devices, self.samples, part="XClass")


@checked
@dataclass(frozen=True)
class ClassCounts:
    """`XClass` with a number of classes for each device, such as (1, 1, 1, 2, 2, 10, 10, 10)."""

    counts: tuple[int, ...]  # classes of each device
    samples: int = 600  # of each device

    def __post_init__(self) -> None:
        for device, count in enumerate(self.counts):
            at_least(f"ClassCounts.counts[{device}]", count, 1)
        at_least("ClassCounts.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        if devices != len(self.counts):
            raise ValueError(
                f"ClassCounts.counts lists {len(self.counts)} devices, but the task has {devices}."
            )
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="ClassCounts")
        return _unions(rng, pools, self.counts, self.samples, part="ClassCounts")


@checked
@dataclass(frozen=True)
class Mixed:
    """`Iid` for the first `iid` devices (disjoint), `XClass` for the others."""

    iid: int
    classes: int = 1  # of each device
    samples: int = 600  # of each device

    def __post_init__(self) -> None:
        at_least("Mixed.iid", self.iid, 0)
        at_least("Mixed.classes", self.classes, 1)
        at_least("Mixed.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        if devices < max(1, self.iid):
            raise ValueError(
                f"Mixed has {self.iid} iid devices, but the task has {devices} in all. Lower iid."
            )
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="Mixed")
        even = deal(rng, np.arange(len(labels)), [self.samples] * self.iid, part="Mixed")
        counts = [self.classes] * (devices - self.iid)
        return even + _unions(rng, pools, counts, self.samples, part="Mixed")


@checked
@dataclass(frozen=True)
class Case1:
    """Case 1 of FedPNS: C devices see 1, 2 … C classes, in random order."""

    samples: int = 600  # of each device

    def __post_init__(self) -> None:
        at_least("Case1.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
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
    """Case 2 of FedPNS: half of the devices see U{1 … C/2} classes, the others U{C/2+1 … C}."""

    samples: int = 600  # of each device

    def __post_init__(self) -> None:
        at_least("Case2.samples", self.samples, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
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
    """The (sigma, rho) split of FedPNS: the first `sigma` K devices are i.i.d. and disjoint.

    Each of the others holds exactly `samples / rho` rows of each of `rho` random classes.
    """

    sigma: float = 0.5
    rho: int = 1
    samples: int = 200  # of each device

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
    ) -> DeviceRows:
        check_devices(devices, "SigmaRho")
        rng, pools = np.random.default_rng(key), rows_by_class(labels, part="SigmaRho")
        even = round(self.sigma * devices)
        shares = deal(rng, np.arange(len(labels)), [self.samples] * even, part="SigmaRho")
        return shares + tuple(self._skewed(rng, pools) for _ in range(devices - even))

    def _skewed(self, rng: np.random.Generator, pools: Sequence[IntArray]) -> IntArray:
        each = self.samples // self.rho
        chosen = _choose(rng, pools, self.rho, part="SigmaRho")
        return join([draw(rng, pool, each, part="SigmaRho") for pool in chosen])


def _pairs(rng: np.random.Generator, classes: int, devices: int) -> IntArray:
    """Return two different classes for each device; every class equally often, within one."""
    often = np.array(even_sizes(2 * devices, classes))
    multiset = np.repeat(np.arange(classes), rng.permutation(often))
    pairs = rng.permutation(multiset).reshape(devices, 2)
    for device in np.flatnonzero(pairs[:, 0] == pairs[:, 1]):
        twice = pairs[device, 0]
        if twice != pairs[device, 1]:  # an earlier swap has already settled this device
            continue
        # Some device lacks the class: it appears at most `devices` times, two of them here.
        lacking = np.flatnonzero((pairs != twice).all(axis=1))
        other, slot = rng.choice(lacking), rng.integers(2)
        pairs[device, 1], pairs[other, slot] = pairs[other, slot], twice
    return pairs


def _round_robin(rng: np.random.Generator, classes: int, devices: int, each: int) -> IntArray:
    """Return `each` different classes for each device, always those dealt least so far."""
    dealt = np.zeros(classes, dtype=np.int64)
    owned = np.empty((devices, each), dtype=np.int64)
    for device in range(devices):
        # A random tie-break shuffles every pass over the classes.
        owned[device] = np.lexsort((rng.random(classes), dealt))[:each]
        dealt[owned[device]] += 1
    return owned


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
) -> DeviceRows:
    return tuple(
        draw(rng, join(_choose(rng, pools, count, part=part)), samples, part=part)
        for count in counts
    )
