"""Partitions that ignore classes: equal or unequal sizes, order, or rows given by hand."""

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
    proportional_sizes,
    within,
)


@checked
@dataclass(frozen=True)
class Iid:
    """specification §B iid-n: disjoint uniform draws, `samples` each.

    Without `samples` the devices divide a `share` of the data evenly (sizes differ by at most one):
    the CIFAR-20 rule is `Iid(share=0.2)` with 20 devices.
    """

    samples: int | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        within("Iid.share", self.share)
        if self.samples is not None:
            at_least("Iid.samples", self.samples, 1)
            if self.share < 1:
                raise ValueError("Iid takes samples or share, not both.")

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        check_devices(devices, "Iid")
        total = int(self.share * len(labels) + 1e-9)
        sizes = even_sizes(total, devices) if self.samples is None else [self.samples] * devices
        if min(sizes) < 1:
            raise ValueError(f"Iid cannot give {devices} devices a sample each out of {total}.")
        return deal(np.random.default_rng(key), np.arange(len(labels)), sizes, part="Iid")


@checked
@dataclass(frozen=True)
class LogNormalSizes:
    """Quantity skew: sizes in proportion to log-normal draws, labels uniform, all data used."""

    sigma: float = 1.0
    minimum: int = 1

    def __post_init__(self) -> None:
        at_least("LogNormalSizes.sigma", self.sigma, 0)
        at_least("LogNormalSizes.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        rng = np.random.default_rng(key)
        _check_minimum(devices, len(labels), self.minimum, part="LogNormalSizes")
        weights = rng.lognormal(0.0, self.sigma, devices)
        sizes = proportional_sizes(weights, len(labels), self.minimum)
        return deal(rng, np.arange(len(labels)), sizes, part="LogNormalSizes")


@checked
@dataclass(frozen=True)
class DirichletSizes:
    """Quantity skew: sizes in proportion to one Dirichlet draw, labels uniform, all data used."""

    alpha: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        within("DirichletSizes.alpha", self.alpha, high=float("inf"))
        at_least("DirichletSizes.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        rng = np.random.default_rng(key)
        _check_minimum(devices, len(labels), self.minimum, part="DirichletSizes")
        weights = rng.dirichlet(np.full(devices, self.alpha))
        sizes = proportional_sizes(weights, len(labels), self.minimum)
        return deal(rng, np.arange(len(labels)), sizes, part="DirichletSizes")


@checked
@dataclass(frozen=True)
class Contiguous:
    """Even runs of neighbouring rows, in order: for text, which has no classes (specification §D, S1)."""

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        _check_minimum(devices, len(labels), 1, part="Contiguous")
        ends = np.cumsum(even_sizes(len(labels), devices))
        return tuple(np.split(np.arange(len(labels)), ends[:-1]))


@checked
@dataclass(frozen=True)
class Given:
    """Rows chosen by the user, one tuple per device; devices may share rows."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for device, rows in enumerate(self.rows):
            if len(set(rows)) != len(rows) or not rows:
                raise ValueError(f"Given.rows[{device}] must name at least one row, each once.")

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        if devices != len(self.rows):
            raise ValueError(f"Given lists {len(self.rows)} devices, but {devices} are wanted.")
        for device, rows in enumerate(self.rows):
            if min(rows) < 0 or max(rows) >= len(labels):
                raise ValueError(f"Given.rows[{device}] must lie in 0 … {len(labels) - 1}.")
        return tuple(np.sort(np.array(rows, dtype=np.int64)) for rows in self.rows)


def _check_minimum(devices: int, rows: int, minimum: int, *, part: str) -> None:
    check_devices(devices, part)
    if devices * minimum > rows:
        raise ValueError(
            f"{part} cannot give {devices} devices {minimum} sample(s) each out of {rows}. "
            "Lower the minimum or the number of devices."
        )
