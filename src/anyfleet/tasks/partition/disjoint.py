"""Disjoint partitions by class: S0's two classes, S1's balanced owners, the Dirichlet split."""

from dataclasses import dataclass

import numpy as np

from anyfleet.arguments import checked
from anyfleet.tasks.partition.dealing import (
    IntArray,
    Shares,
    at_least,
    check_devices,
    deal,
    even_sizes,
    join,
    rows_by_class,
    within,
)

# Draws of a Dirichlet split that leave a device short are repeated this often.
_ATTEMPTS = 1000


@checked
@dataclass(frozen=True)
class TwoClassDisjoint:
    """2-class disjoint (S0): `samples / 2` of each of two classes, no sample on two devices.

    Labels are balanced: a shuffled multiset with every class equally often (within one) is dealt
    out two per device, and a device that got one class twice swaps with one that lacks it.
    """

    samples: int = 300

    def __post_init__(self) -> None:
        at_least("TwoClassDisjoint.samples", self.samples, 2)
        if self.samples % 2:
            raise ValueError(f"TwoClassDisjoint.samples must be even, got {self.samples}.")

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
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
    """Balanced sigma-class (S1): `sigma` labels per device, each class divided among its owners.

    Labels go round robin in freshly shuffled passes, so that numbers of owners differ by at most
    one; the owners of a class get equal parts of it (within one), and all data is used.
    """

    sigma: int = 2

    def __post_init__(self) -> None:
        at_least("BalancedClasses.sigma", self.sigma, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
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
    """The non-iid FedMA split: every class is divided by a Dirichlet draw over the devices.

    The draw is repeated until every device has `minimum` samples.
    """

    alpha: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        within("Dirichlet.alpha", self.alpha, high=float("inf"))
        at_least("Dirichlet.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
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


def _pairs(rng: np.random.Generator, classes: int, devices: int) -> IntArray:
    """Two different classes for each device; every class equally often, within one."""
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
    """`each` different classes for each device, always those dealt least so far."""
    dealt = np.zeros(classes, dtype=np.int64)
    owned = np.empty((devices, each), dtype=np.int64)
    for device in range(devices):
        # A random tie-break shuffles every pass over the classes.
        owned[device] = np.lexsort((rng.random(classes), dealt))[:each]
        dealt[owned[device]] += 1
    return owned
