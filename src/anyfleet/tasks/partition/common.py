"""What all partitions share: their signature, rows by class, and drawing without replacement."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
DeviceRows = tuple[IntArray, ...]


class Partition(Protocol):
    """The rule that says which rows each device has.

    `labels` has the class of each row, where the rule needs classes, and `owners` the natural owner
    of each row. The result depends on nothing but the arguments and the fields of the part.
    """

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        """Return one ascending array of rows per device."""
        ...


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError if a field is below its least value."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def within(name: str, value: float, *, low: float = 0.0, high: float = 1.0) -> None:
    """Raise ValueError if a field is outside (low, high]."""
    if not low < value <= high:
        raise ValueError(f"{name} must lie in ({low}, {high}], got {value}.")


def rows_by_class(labels: IntArray, *, part: str) -> tuple[IntArray, ...]:
    """Return the rows of each class that occurs, classes ascending."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{part} needs one class index per row, but the targets have shape {labels.shape} and "
            f"type {labels.dtype}. Use Iid, Contiguous or ByOwner for such data."
        )
    return tuple(np.flatnonzero(labels == label) for label in np.unique(labels))


def draw(rng: np.random.Generator, rows: IntArray, count: int, *, part: str) -> IntArray:
    """Return `count` of `rows` without replacement, ascending."""
    if count > len(rows):
        raise ValueError(
            f"{part} asks for {count} samples where only {len(rows)} are left. "
            "Ask for fewer samples, fewer devices, or load more data."
        )
    return np.sort(rng.choice(rows, count, replace=False))


def deal(
    rng: np.random.Generator, rows: IntArray, sizes: Sequence[int], *, part: str
) -> DeviceRows:
    """Return disjoint random parts of `rows` with the given sizes."""
    chosen = rng.permutation(rows)
    if sum(sizes) > len(rows):
        raise ValueError(
            f"{part} asks for {sum(sizes)} samples ({len(sizes)} disjoint parts) but there are "
            f"{len(rows)}. Ask for fewer samples or devices, or load more data."
        )
    ends = np.cumsum(sizes)
    return tuple(np.sort(chosen[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def even_sizes(total: int, parts: int) -> list[int]:
    """Return `parts` whole numbers with sum `total`, equal within one, larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def proportional_sizes(weights: NDArray[np.float64], total: int, minimum: int) -> list[int]:
    """Return whole numbers with sum `total` in proportion to `weights`, each at least `minimum`."""
    spare = total - minimum * len(weights)
    exact = spare * weights / weights.sum()
    sizes = np.floor(exact).astype(np.int64)
    # What rounding down left over goes to the largest remainders.
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: spare - int(sizes.sum())]] += 1
    return [int(size) + minimum for size in sizes]


def join(parts: Sequence[IntArray]) -> IntArray:
    """Return all rows of `parts` in one ascending array."""
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def check_devices(devices: int, part: str) -> None:
    """Raise ValueError if there are no devices."""
    if devices < 1:
        raise ValueError(f"{part}: devices must be at least 1, got {devices}.")
