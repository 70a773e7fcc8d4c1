"""What the server asks of replies before they count, and of a new model before it replaces the old.

Numbers that are none would spread through every average, and a single update of huge length would
be the next model. These checks stand beside the server, so that every runtime has them: what is
refused becomes a lost order with its reason, and the round goes on without it.
docs/robustness.md says what each of them withstands.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from anyfleet.columns import Flags, Floats, Ints
from anyfleet.elastic import Blueprint
from anyfleet.fisher import MEASURED
from anyfleet.limits import Limits
from anyfleet.types import Conditions, Kind, Orders, Params, Report, Task, Updates

SETTLED = 3  # updates before the limit on their size takes effect
REMEMBERED = 1_000  # sizes of counted updates over which the median is taken, at most
LARGEST = 1e30  # of a reported number: squares and sums of millions of them stay finite
MOST_NAMES = 64  # of reported numbers
LONGEST_NAME = 100  # characters

# Numbers of a report that every device has; others are not a number where nothing was measured.
_ALWAYS = frozenset({"norm", "distortion"})
_SQUARES = frozenset({"norm", "distortion", "fisher", "fisher_squares", "channels"})  # at least 0
_SINGLE = frozenset({"loss", "norm", "fisher", "distortion"})  # columns of the ledger
_TRAINING = (Kind.TRAIN, Kind.HOLD, Kind.FETCH)


# --- single replies ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Screen:
    """The checks that each reply has to pass, whatever the others are like."""

    limits: Limits
    blueprint: Blueprint
    declared: Ints  # training samples of every device
    metrics: frozenset[str] = frozenset()  # names that an evaluation reports besides the loss

    @classmethod
    def of(cls, task: Task, declared: Ints, limits: Limits) -> "Screen":
        """Return the checks for the replies of a fleet that learns this task."""
        return cls(limits, task.blueprint, declared, frozenset(task.metrics))

    def refusals(self, orders: Sequence[Orders], updates: Sequence[Updates]) -> list[str]:
        """Return for each reply why it is refused, or "" for those that may count."""
        found = []
        for order, update, norms in zip(orders, updates, _norms(updates), strict=True):
            wrong = (
                *self._values(order, update, norms),
                *self._samples(order, update),
                *self._told(order, update.report[0]),
            )
            found.append("".join(wrong[:1]))
        return found

    def _values(self, order: Orders, update: Updates, norms: list[float]) -> Iterator[str]:
        for (name, tree), norm in zip(update.trees[0].items(), norms, strict=True):
            length = norm
            if not math.isfinite(norm):
                # A sum of large squares may overflow where the numbers themselves do not.
                yield from (f"not finite: {n}" for n, value in tree.items() if not _finite(value))
                length = math.hypot(*(_length(value) for value in tree.values()))
            if name == order.job.send and length > self.limits.norm:
                yield f"norm: {length:.3g} is above {self.limits.norm:.3g}"
            if name == "buffers":
                yield from self._variances(tree)

    def _variances(self, tree: Params) -> Iterator[str]:
        """Yield the running variances that no data have: one of them makes a model NaN."""
        variances = {site.variance for site in self.blueprint.norms}
        for name, value in tree.items():
            if name in variances and bool((value < 0).any()):
                yield f"variance: {name} is negative"

    def _samples(self, order: Orders, update: Updates) -> Iterator[str]:
        samples, most = int(update.samples[0]), int(self.declared[int(order.device[0])])
        # Tests are made on data that nobody declares.
        if samples < 0 or (order.kind != Kind.EVALUATE and samples > most):
            yield f"samples: {samples} of {most}"

    def _told(self, order: Orders, report: Report) -> Iterator[str]:
        count = sum(len(told) if isinstance(told, tuple) else 1 for told in report.values())
        most = self.limits.most(self.blueprint).report
        if len(report) > MOST_NAMES or count > most:
            yield f"report: {count} numbers under {len(report)} names; at most {most}, {MOST_NAMES}"
            return
        for name, told in report.items():
            yield from self._unasked(order, name)
            if isinstance(told, tuple) and (name in _SINGLE or order.kind not in _TRAINING):
                yield f"report: several numbers as {name}"
                continue
            yield from _strange(name, told if isinstance(told, tuple) else (told,))

    def _unasked(self, order: Orders, name: str) -> Iterator[str]:
        if len(name) > LONGEST_NAME:
            yield f"report: a name of {len(name)} characters; at most {LONGEST_NAME}"
        elif order.kind in _TRAINING:
            # A trainer may report what it likes, but measurements only if some part wants them.
            if name in MEASURED and name not in order.job.report:
                yield f"report: {name} was not asked for"
        elif name not in {"loss", *self.metrics}:
            yield f"report: {name} was not asked for"


def _norms(updates: Sequence[Updates]) -> list[list[float]]:
    """Return the length of every tree of every reply; they are waited for together."""
    trees = [[list(tree.values()) for tree in update.trees[0].values()] for update in updates]
    found = [get_total_norm(tree) for each in trees for tree in each if tree]
    lengths = iter(torch.stack([one.double() for one in found]).tolist() if found else [])
    return [[next(lengths) if tree else 0.0 for tree in each] for each in trees]


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _length(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def _strange(name: str, numbers: Sequence[float]) -> Iterator[str]:
    """Yield what no honest device reports under this name."""
    for number in numbers:
        if math.isinf(number) or (name in _ALWAYS and math.isnan(number)):
            yield f"not finite: {name}"
            return
        if abs(number) > LARGEST or (name in _SQUARES and number < 0):
            least = 0 if name in _SQUARES else -LARGEST
            yield f"report: {name} of {number:.3g} is not in [{least:g}, {LARGEST:g}]"
            return


def believable(told: Conditions) -> Conditions:
    """Return conditions in which a loss that no device can have is not known (NaN)."""
    believed = np.abs(told.loss) <= LARGEST
    return replace(told, loss=np.where(believed, told.loss, np.nan))


# --- the updates of a round beside those before -----------------------------------------------


class Verdict(NamedTuple):
    """What became of the updates of a round, by their sizes."""

    above: Flags  # the limit: these are refused
    median: float  # of which the limit is a multiple; infinite: too little is known
    known: Floats  # sizes of earlier rounds that are still to be compared with


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of updates that counted: root mean squares of a change per trained coordinate.

    The limit on the size of an update is a factor over the median of the last `REMEMBERED` of them
    and of those that the round itself brings, and is without effect while these are fewer than
    `SETTLED`. All updates of a round meet the same limit, so that it does not matter who came
    first. A size of zero says nothing and is passed over.

    When every single update of a round is above the limit, at least `SETTLED` of them, then not a
    device has changed but the training (its learning rate, say): they are compared among
    themselves, and the past is forgotten.
    """

    counted: Floats

    def judge(self, sizes: Floats, growth: float) -> Verdict:
        """Return which of a round's updates are too large."""
        found = _judged(sizes, self.counted, growth)
        if len(sizes) >= SETTLED and found.above.all():
            return _judged(sizes, np.empty(0), growth)
        return found


def _judged(sizes: Floats, known: Floats, growth: float) -> Verdict:
    compared = np.concatenate([known, sizes[sizes > 0]])
    median = float(np.median(compared)) if len(compared) >= SETTLED else math.inf
    return Verdict(sizes > growth * median, median, known)


def remembered(known: Floats, sizes: Floats) -> Sizes:
    """Return the sizes to compare with after a round in which these counted."""
    return Sizes(np.concatenate([known, sizes[sizes > 0]])[-REMEMBERED:])


def too_large(what: str, size: float, growth: float, median: float) -> str:
    """Return the reason for refusing an update of this size."""
    return f"size: {what} of {size:.3g} a coordinate, above {growth:g} × the median {median:.3g}"


# --- new models -------------------------------------------------------------------------------


def not_finite(new: Params, old: Params) -> list[str]:
    """Return the names of the tensors that have become infinite or NaN somewhere."""
    return [name for name, value in new.items() if not _finite(value) and _became(value, old, name)]


def _became(value: Tensor, old: Params, name: str) -> bool:
    """Return whether numbers are not finite that were: a mask of -inf may stay what it is."""
    if name not in old or old[name].shape != value.shape:
        return True
    before = old[name]
    same = (value == before) | (torch.isnan(value) & torch.isnan(before))
    return bool((~torch.isfinite(value) & ~same).any())


def sound(state: Any) -> bool:
    """Return whether all tensors in the state of a policy are finite, however deep they lie."""
    if isinstance(state, Tensor):
        return _finite(state)
    if isinstance(state, Mapping):
        return all(map(sound, state.values()))
    if isinstance(state, tuple | list):
        return all(map(sound, state))
    if is_dataclass(state) and not isinstance(state, type):
        return all(sound(getattr(state, each.name)) for each in fields(state))
    return True
