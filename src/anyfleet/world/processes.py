"""Numbers that change with time: drawn again and again, wandering, or replayed from a file.

Each is a function of the device and of the time slot alone; no state is carried along.
"""

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Floats, Ints
from anyfleet.errors import refuse
from anyfleet.names import near
from anyfleet.world.quantities import (
    MOST,
    Distribution,
    Moments,
    Number,
    Seconds,
    TakesMoments,
    Time,
    at,
    bounds,
    changes,
    slot,
    slot_end,
    until,
)

__all__ = ["Redrawn", "Replayed", "Wandering", "changes_by_round", "period_faults"]

# Seconds of a slot: the number of slots that have passed must be exact.
_SHORTEST = 1e-6
# Innovations with less weight than this would not show in a bit rate.
_NEGLIGIBLE = 1e-6
# Where a wandering number stops, in deviations: once in 1e15 draws, and the bounds are finite.
_FARTHEST = 8.0
# With a larger spread, cutting at the farthest would lose more than 1e-4 of the mean.
_WIDEST = 4.0
# Innovations hashed at a time: intermediate results stay in the processor's cache.
_BLOCK = 1 << 15


def period_faults(owner: str, every: float | None) -> Iterator[str]:
    """Yield what is wrong with the length of a time slot."""
    if every is not None and not _SHORTEST <= every <= MOST:
        yield (
            f"{owner}.every must be a positive number of seconds, from {_SHORTEST:g} to {MOST:g}; "
            f"got {every}. Without it there is one draw per round."
        )


@checked
@dataclass(frozen=True)
class Redrawn(TakesMoments):
    """A new draw of a distribution in every round, or every `every` seconds."""

    of: Distribution  # what is drawn from
    every: float | None = None  # seconds between draws; none: each round

    changes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(period_faults("Redrawn", self.every))

    def at(self, keys: Tensor, when: Time) -> Floats:
        return self.of.draw(rng.fold(keys, slot(when, self.every)))

    def until(self, when: Time) -> Seconds:
        return slot_end(when, self.every)

    def bounds(self) -> tuple[float, float]:
        return self.of.bounds()


@checked
@dataclass(frozen=True)
class Wandering(TakesMoments):
    """A positive number that wanders about its mean, as bit rates do: an AR(1) process of its log.

    The process is z' = a z + sqrt(1 - a²) n with `persistence` a. The number is
    mean · exp(s z - s²/2) with `spread` s, so its average over time is the mean. It is never less
    than `floor` times the mean, which raises the average a little. `mean` may differ from device
    to device.
    """

    mean: Number
    persistence: float = 0.8
    spread: float = 0.4
    floor: float = 0.05
    every: float | None = None  # seconds of a step; none: a round

    changes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        least = bounds(self.mean)[0]
        if not 0 <= least < math.inf:
            yield f"Wandering.mean must be finite and not negative, got {least}."
        # Beyond that, a single number would be the sum of thousands of innovations.
        if not 0 <= self.persistence <= 0.99:
            yield (
                f"Wandering.persistence must lie in [0, 0.99], got {self.persistence}. "
                "For slower changes choose longer slots."
            )
        if not 0 <= self.spread <= _WIDEST:
            yield f"Wandering.spread must lie in [0, {_WIDEST:g}], got {self.spread}."
        if not 0 <= self.floor <= 1:
            yield f"Wandering.floor must lie in [0, 1], got {self.floor}."
        yield from period_faults("Wandering", self.every)

    def at(self, keys: Tensor, when: Time) -> Floats:
        # A plain number needs no keys.
        own = keys if isinstance(self.mean, int | float) else rng.fold(keys, "mean")
        mean = at(self.mean, own, when)
        z = _autoregressive(keys, slot(when, self.every), self.persistence)
        return mean * self._factor(np.clip(z, -_FARTHEST, _FARTHEST))

    def until(self, when: Time) -> Seconds:
        ends = slot_end(when, self.every), until(self.mean, when)
        return np.minimum(*ends) if isinstance(when, Moments) else min(ends)

    def bounds(self) -> tuple[float, float]:
        least, most = bounds(self.mean)
        low, high = self._factor(np.array([-_FARTHEST, _FARTHEST]))
        return least * float(low), most * float(high)

    def _factor(self, z: Floats) -> Floats:
        return np.maximum(np.exp(self.spread * z - self.spread**2 / 2), self.floor)


def _autoregressive(keys: Tensor, now: int | Tensor, persistence: float) -> Floats:
    """Return the standard AR(1) process at slot `now`: a weighted sum of its latest innovations.

    Innovations before slot 0 have addresses like all others: the process has no beginning.
    """
    weights = _weights(persistence)
    size = max(1, _BLOCK // len(weights))
    found = [np.empty(0)]
    for start in range(0, len(keys), size):
        block = slice(start, start + size)
        slots = now if isinstance(now, int) else now[block].numpy()
        latest = _latest(keys[block], slots, len(weights))
        # Added one after the other: a sum must not depend on how many devices are computed with it.
        found.append(np.cumsum(weights * latest, axis=1)[:, -1])
    return np.concatenate(found)


def _latest(keys: Tensor, now: int | Ints, count: int) -> Floats:
    """Return so many innovations of each device, the latest first."""
    ago = np.arange(count)
    if isinstance(now, int):
        return _innovations(keys[:, None], now - ago)
    # Where a device is followed by itself, a little later, both have some in common.
    own, fresh, later = keys.numpy(), np.full(len(keys), count), now[1:] - now[:-1]
    shared = np.flatnonzero((own[1:] == own[:-1]) & (later >= 0) & (later < count))
    fresh[1 + shared] = later[shared]
    newest = np.cumsum(fresh) - 1
    row = np.repeat(np.arange(len(own)), fresh)
    slots = (now - newest)[row] + np.arange(len(row))
    return _innovations(torch.from_numpy(own[row]), slots)[newest[:, None] - ago]


def _innovations(keys: Tensor, slots: Ints) -> Floats:
    """Return the innovation of every key at the slot beside it."""
    drawn: Floats = rng.normal(rng.fold(keys, torch.from_numpy(slots)), 1)[..., 0].numpy()
    return drawn


@lru_cache(maxsize=256)
def _weights(persistence: float) -> Floats:
    """Return the weights of the innovations that are kept, the latest first."""
    weights = persistence ** np.arange(_innovation_count(persistence), dtype=np.float64)
    # They make up for the variance of those left out.
    weights /= np.sqrt(np.square(weights).sum())
    return weights


def _innovation_count(persistence: float) -> int:
    """Return how many innovations have a weight that is not negligible."""
    if persistence <= _NEGLIGIBLE:
        return 1
    return math.floor(math.log(_NEGLIGIBLE) / math.log(persistence)) + 1


@checked
@dataclass(frozen=True)
class Replayed(TakesMoments):
    """Numbers from one `field` of a CSV file with a header: one row per slot, then from the top.

    With `shift` each device starts at a random row of its own, otherwise all start at the first.
    The file is read once, when the part is made.
    """

    file: Path | str  # CSV with a header
    field: str
    every: float | None = None  # seconds of a row; none: a round
    scale: float = 1.0  # factor of every number
    shift: bool = True
    _rows: Floats = dataclasses.field(init=False, repr=False, compare=False)

    changes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self._faults())
        # A path and its text name the same file, so the parts are equal.
        object.__setattr__(self, "file", Path(self.file))
        rows = np.array(_read(Path(self.file), self.field), dtype=np.float64) * self.scale
        object.__setattr__(self, "_rows", rows)

    def _faults(self) -> Iterator[str]:
        yield from period_faults("Replayed", self.every)
        if not 0 < self.scale <= MOST:
            yield f"Replayed.scale must be positive and finite, at most {MOST:g}; got {self.scale}."

    def at(self, keys: Tensor, when: Time) -> Floats:
        passed = np.asarray(slot(when, self.every))
        rows: Floats = self._rows[(self._starts(keys) + passed) % len(self._rows)]
        return rows

    def until(self, when: Time) -> Seconds:
        return slot_end(when, self.every)

    def bounds(self) -> tuple[float, float]:
        return float(self._rows.min()), float(self._rows.max())

    def _starts(self, keys: Tensor) -> Ints:
        if not self.shift:
            return np.zeros(len(keys), dtype=np.int64)
        share = rng.uniform(rng.fold(keys, "start"), 1)[:, 0]
        starts: Ints = (share * len(self._rows)).long().numpy()
        return starts


def changes_by_round(number: Number) -> bool:
    """Return whether a new round may change a number, as far as is known of it."""
    if not changes(number):
        return False
    if isinstance(number, Wandering):
        return number.every is None or changes_by_round(number.mean)
    return not isinstance(number, Redrawn | Replayed) or number.every is None


def _read(file: Path, field: str) -> list[float]:
    """Return the numbers of one field, or raise with the file and the line that is wrong."""
    try:
        # A pipe or a device of the machine may have no end.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"Replayed.file {file} is not a plain file.")
        with file.open(newline="", encoding="utf-8-sig") as text:
            numbers = list(_numbers(text, file, field))
    except OSError as error:
        raise ValueError(f"Replayed.file {file} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"Replayed.file {file} is not a CSV file: {error}.") from error
    if not numbers:
        raise ValueError(f"Replayed.file {file} has no rows below its header.")
    return numbers


def _numbers(text: Iterable[str], file: Path, field: str) -> Iterator[float]:
    lines = csv.reader(text)
    header = [name.strip() for name in next(lines, [])]
    if field not in header:
        hint = near(field, header) or "."
        raise ValueError(f"Replayed.field: {file} has no {field!r}, only {header}{hint}")
    place = header.index(field)
    for entries in lines:
        if entries:  # An empty line, as at the end of many files.
            yield _number(entries[place] if place < len(entries) else "", file, lines.line_num)


def _number(entry: str, file: Path, line: int) -> float:
    where = f"Replayed.file {file}, line {line}"
    try:
        number = float(entry)
    except ValueError:
        raise ValueError(f"{where}: {entry!r} is not a number.") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"{where}: {entry!r} must be finite and not negative.")
    return number
