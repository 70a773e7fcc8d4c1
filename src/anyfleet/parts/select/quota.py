"""Selection by quotas: a fixed number of devices of every level or group."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Devices
from anyfleet.core.slots import Select, State
from anyfleet.core.view import View
from anyfleet.errors import refuse
from anyfleet.papers import FEDPMT, Paper


@dataclass(frozen=True)
class Quota(Select):
    """A uniform draw within every level of the fleet, or within every group (specification §1.3).

    Either `count` devices in all: shared evenly among the levels or groups that have devices, and
    the remainder one by one from the first (level 0 is the strongest). Or `counts`: how many of
    level or group 0, 1, … Where fewer are free fewer are asked: others do not stand in for them.
    """

    count: int | None = None  # devices in all
    by: Literal["level", "group"] = "level"  # what the quotas are for
    counts: tuple[int, ...] = ()  # devices of level or group 0, 1, …

    papers: ClassVar[tuple[Paper, ...]] = (FEDPMT,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if (self.count is None) == (not self.counts):
            yield (
                "Quota needs either count or counts, "
                f"got count={self.count} and counts={self.counts}."
            )
        if self.count is not None and self.count < 1:
            yield f"Quota.count must be at least 1, got {self.count}."
        if self.by not in ("level", "group"):
            yield f'Quota.by must be "level" or "group", got {self.by!r}.'
        if self.counts and (min(self.counts) < 0 or not any(self.counts)):
            yield f"Quota.counts must be whole numbers, some of them positive, got {self.counts}."

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        kinds = _kinds(view.devices, self.by)
        chosen = _drawn(view, kinds, key, quotas=self._quotas(kinds.sizes))
        if view.most_devices is None or len(chosen) <= view.most_devices:
            return chosen
        # Drawn once more: the first levels would always win when the schedule wants few.
        rows = rng.sample(rng.fold(key, "fewer"), len(chosen), view.most_devices).numpy()
        fewer: Ints = chosen[rows]
        return fewer

    def excess(self, devices: Devices) -> str:
        sizes = _kinds(devices, self.by).sizes
        beyond = [(kind, n) for kind, n in enumerate(self.counts) if n and kind >= len(sizes)]
        quotas = self._quotas(sizes)
        above = [(kind, quotas[kind]) for kind in np.flatnonzero(quotas > sizes).tolist()]
        excesses = [
            f"{asked} of {self.by} {kind}, which has {sizes[kind] if kind < len(sizes) else 0}"
            for kind, asked in (*above, *beyond)
        ]
        if not excesses:
            return ""
        what = "counts" if self.counts else f"count={self.count}"
        return (
            f"Quota.{what} asks for more devices than the fleet has: {'; '.join(excesses)}. "
            "Others do not stand in for them."
        )

    def _quotas(self, sizes: Ints) -> Ints:
        """Return how many devices of each kind are asked."""
        quotas = np.zeros(len(sizes), dtype=np.int64)
        if self.count is None:
            given = self.counts[: len(sizes)]
            quotas[: len(given)] = given
            return quotas
        present = np.flatnonzero(sizes)
        each, over = divmod(self.count, max(1, len(present)))
        quotas[present] = each
        quotas[present[:over]] += 1
        return quotas


class _Kinds(NamedTuple):
    """The kinds of devices: levels or groups, by number."""

    of: Ints  # the kind of every device
    sizes: Ints  # how many devices each kind has


@lru_cache(maxsize=2)
def _kinds(devices: Devices, by: str) -> _Kinds:
    """Return the kinds of a fleet, counted once."""
    kinds = devices.level if by == "level" else devices.group
    return _Kinds(kinds, np.bincount(kinds))


def _drawn(view: View, kinds: _Kinds, key: Tensor, *, quotas: Ints) -> Ints:
    """Return the first free devices of each kind in one random order of the fleet, up to its quota.

    It is the order of `Uniform`: with one kind, the same devices.
    """
    missing, unseen, found = quotas, kinds.sizes, [np.empty(0, dtype=np.int64)]
    for chunk in rng.draws(key, len(view.devices)):
        ids: Ints = chunk.numpy()
        unseen = unseen - np.bincount(kinds.of[ids], minlength=len(unseen))
        ids = ids[missing[kinds.of[ids]] > 0]
        ids = ids[view.free(ids)]
        taken = ids[_rank(kinds.of[ids]) < missing[kinds.of[ids]]]
        missing = missing - np.bincount(kinds.of[taken], minlength=len(missing))
        found.append(taken)
        if not missing[unseen > 0].any():
            break
    return np.sort(np.concatenate(found))


def _rank(kinds: Ints) -> Ints:
    """Return how many of the same kind come before each."""
    order = np.argsort(kinds, kind="stable")
    ordered = kinds[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    ranks = np.empty(len(kinds), dtype=np.int64)
    ranks[order] = np.arange(len(kinds)) - starts
    return ranks
