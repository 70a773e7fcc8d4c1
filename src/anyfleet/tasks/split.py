"""The split of a data set: rows of the server, training rows and test rows of each device."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.core.limits import MOST_DEVICES
from anyfleet.errors import AnyfleetWarning
from anyfleet.tasks.data import Data
from anyfleet.tasks.partition import DeviceRows, Iid, IntArray, Partition

_IID = Iid()
_LONGEST = 100  # characters of a partition in an error
_IGNORED = (
    "The samples have natural owners, which the partition ignores: {}. For one device per owner "
    "use partition=ByOwner() instead of {}; to mix owners on purpose, leave them out of the data."
)


@dataclass(frozen=True, eq=False)
class Division:
    """A data set that is divided: training and test rows of each device, and the server's data."""

    train_rows: tuple[Tensor, ...]
    test_rows: tuple[Tensor, ...]
    server: Data


@checked
@dataclass(frozen=True)
class Split:
    """The rule that divides a data set.

    First `server` random rows are set aside for the server; the `partition` divides the others.
    Every device keeps a random `test_share` of its rows as its own test data. Where a partition
    lets devices share rows, a row that is test data of any device is trained on by none.
    """

    devices: int = 20
    partition: Partition = _IID
    test_share: float = 0.1
    server: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise ValueError(
                f"devices must be at least 1 and at most {MOST_DEVICES:,}, got {self.devices}."
            )
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must lie in [0, 1), got {self.test_share}.")
        if self.server < 0:
            raise ValueError(
                f"server must be at least 0, the number of samples it keeps; got {self.server}."
            )

    def divide(self, data: Data) -> Division:
        """Return `data` divided; the same fields give the same rows.

        Warn if the data have natural owners that the partition ignores.
        """
        if self.server >= len(data):
            raise ValueError(self._too_much(data))
        server, pool = self._set_aside(len(data), self.server)
        owners = _owners(data, pool)
        try:
            owned = self._deal(data, pool)
        except ValueError as error:
            if not self.server or len(pool) >= self.devices:
                raise
            raise ValueError(f"{error} And {self._too_much(data)}") from error
        if owners is not None and (mixed := _mixture(owned, owners)):
            text = _IGNORED.format(mixed, _called(self.partition))
            warnings.warn(text, AnyfleetWarning, stacklevel=3)
        train_rows, test_rows = self._hold_out([pool[rows] for rows in owned])
        return Division(
            _tensors(train_rows), _tensors(test_rows), data.rows(torch.from_numpy(server))
        )

    @property
    def assignment(self) -> str:
        """The sentence that says how devices come to their data."""
        return f"{_called(self.partition)} divides the data, with seed {self.seed}."

    def _set_aside(self, samples: int, server: int) -> tuple[IntArray, IntArray]:
        """Return `server` random rows for the server, and the others; both ascending."""
        order = self._generator("server").permutation(samples)
        return np.sort(order[:server]), np.sort(order[server:])

    def _deal(self, data: Data, pool: IntArray) -> DeviceRows:
        """Return the positions in `pool` of the rows of each device."""
        labels, owners = data.y.numpy()[pool], _owners(data, pool)
        key = number(self.seed, "partition")
        return self.partition(labels, self.devices, key=key, owners=owners)

    def _too_much(self, data: Data) -> str:
        """Return the error that the server keeps too much, with the number that would fit."""
        left, fits = max(0, len(data) - self.server), self._fitting(data)
        tests = " and to test with" if self.test_share else ""
        hint = (
            f"{fits} would leave each of them samples to train on{tests}."
            if fits is not None
            else f"even without that there are too few. {self._obstacle(data, 0)}"
        )
        return (
            f"server asks for {self.server} of {len(data)} samples, which leaves {left} to "
            f"{self.devices} devices: {hint}"
        )

    def _fitting(self, data: Data) -> int | None:
        """Return how many rows the server may keep, found by trial; None if not even 0 fits.

        It is the largest number where devices get equal parts; other partitions may allow more.
        """
        least = next((n for n in range(1, len(data)) if self._suffices(n)), len(data))
        pool = least * self.devices
        while pool < len(data):
            if not self._obstacle(data, len(data) - pool):
                return len(data) - pool
            pool *= 2
        return None if self._obstacle(data, 0) else 0

    def _suffices(self, rows: int) -> bool:
        """Return whether `rows` are enough to train on, and to test with if `test_share` is set."""
        tested = self._test_size(rows)
        return tested < rows and (tested > 0 or not self.test_share)

    def _obstacle(self, data: Data, server: int) -> str:
        """Return why the data cannot be divided if the server keeps `server` rows, or ""."""
        _, pool = self._set_aside(len(data), server)
        try:
            _, test_rows = self._hold_out([pool[rows] for rows in self._deal(data, pool)])
        except ValueError as error:
            return str(error)
        spared = not self.test_share or all(map(len, test_rows))
        return (
            "" if spared else "Some devices have no sample to spare for tests: use fewer devices."
        )

    def _hold_out(self, owned: list[IntArray]) -> tuple[list[IntArray], list[IntArray]]:
        generator = self._generator("held out")
        held = [
            np.sort(generator.permutation(rows)[: self._test_size(len(rows))]) for rows in owned
        ]
        anywhere = np.unique(np.concatenate(held))
        train_rows = [np.setdiff1d(rows, anywhere) for rows in owned]
        for device, rows in enumerate(train_rows):
            if not len(rows):
                raise ValueError(
                    f"device {device} has no training data left. Lower test_share, or choose a "
                    "partition that gives it more samples."
                )
        return train_rows, held

    def _test_size(self, rows: int) -> int:
        # At least one row, if there is one to spare, so that every device can be tested.
        least = 1 if self.test_share and rows > 1 else 0
        return max(least, round(self.test_share * rows))

    def _generator(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(number(self.seed, purpose))


def _owners(data: Data, rows: IntArray) -> IntArray | None:
    return None if data.owners is None else data.owners.numpy()[rows]


def _called(partition: Partition) -> str:
    """Return a partition as text: with its fields, or its name alone if that is too long."""
    text = repr(partition)
    return text if len(text) <= _LONGEST else type(partition).__name__


def _mixture(owned: Iterable[IntArray], owners: IntArray) -> str:
    """Return how many devices mix owners, or "" if the partition respects owners.

    It respects them if each device has one owner, or each owner one device.
    """
    whose = [np.unique(owners[rows]) for rows in owned]
    mixed = [device for device, names in enumerate(whose) if len(names) > 1]
    spread = np.unique(np.concatenate(whose), return_counts=True)[1]
    if not mixed or spread.max() == 1:
        return ""
    return f"{len(mixed)} of {len(whose)} devices have rows of several owners"


def number(seed: int, purpose: str) -> int:
    """Return a seed for another library's generator, different for each purpose."""
    return int(rng.root(seed, f"tasks/{purpose}")) & (2**63 - 1)


def _tensors(rows: list[IntArray]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in rows)


def union(parts: Iterable[Tensor]) -> Tensor:
    """Return all rows that occur in `parts`, ascending, each once."""
    return torch.from_numpy(np.unique(np.concatenate([part.numpy() for part in parts])))
