"""Partitions by size alone: equal or unequal numbers of samples, runs of rows, or given rows."""

from dataclasses import dataclass

import numpy as np

from anyfleet.arguments import checked
from anyfleet.tasks.partition.common import (
    DeviceRows,
    IntArray,
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
    """Disjoint uniform draws of `samples` rows for each device (iid-n of specification §B).

    Without `samples` the devices divide a `share` of the data evenly; sizes differ by at most one.
    The CIFAR-20 rule is `Iid(share=0.2)` with 20 devices.
    """

    samples: int | None = None  # of each device; none: an even part of `share`
    share: float = 1.0

    def __post_init__(self) -> None:
        within("Iid.share", self.share)
        if self.samples is not None:
            at_least("Iid.samples", self.samples, 1)
            if self.share < 1:
                raise ValueError("Iid takes samples or share, not both. Leave one out.")

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        check_devices(devices, "Iid")
        total = int(self.share * len(labels) + 1e-9)
        sizes = even_sizes(total, devices) if self.samples is None else [self.samples] * devices
        if min(sizes) < 1:
            raise ValueError(
                f"Iid cannot give {devices} devices a sample each out of {total}. Use fewer "
                "devices."
            )
        return deal(np.random.default_rng(key), np.arange(len(labels)), sizes, part="Iid")


@checked
@dataclass(frozen=True)
class LogNormalSizes:
    """Sizes in proportion to log-normal draws; labels are uniform, and all data are used."""

    sigma: float = 1.0  # deviation of the logarithm of sizes
    minimum: int = 1  # samples that a device has at least

    def __post_init__(self) -> None:
        at_least("LogNormalSizes.sigma", self.sigma, 0)
        at_least("LogNormalSizes.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        rng = np.random.default_rng(key)
        _check_minimum(devices, len(labels), self.minimum, part="LogNormalSizes")
        weights = rng.lognormal(0.0, self.sigma, devices)
        sizes = proportional_sizes(weights, len(labels), self.minimum)
        return deal(rng, np.arange(len(labels)), sizes, part="LogNormalSizes")


@checked
@dataclass(frozen=True)
class DirichletSizes:
    """Sizes in proportion to one Dirichlet draw; labels are uniform, and all data are used."""

    alpha: float = 0.5  # small: unequal; large: alike
    minimum: int = 1  # samples that a device has at least

    def __post_init__(self) -> None:
        within("DirichletSizes.alpha", self.alpha, high=float("inf"))
        at_least("DirichletSizes.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        rng = np.random.default_rng(key)
        _check_minimum(devices, len(labels), self.minimum, part="DirichletSizes")
        weights = rng.dirichlet(np.full(devices, self.alpha))
        sizes = proportional_sizes(weights, len(labels), self.minimum)
        return deal(rng, np.arange(len(labels)), sizes, part="DirichletSizes")


@checked
@dataclass(frozen=True)
class Contiguous:
    """Even runs of neighbouring rows, in order, for text without classes (specification §D)."""

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
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
    ) -> DeviceRows:
        if devices != len(self.rows):
            raise ValueError(f"Given lists {len(self.rows)} devices, but the task has {devices}.")
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
