"""What the server asks of replies before they count, and of a new model before it replaces the old.

Numbers that are none would spread through every average, and a single update of huge length would
be the next model. These checks stand beside the server, so that every runtime has them: what is
refused becomes a lost order with its reason, and the round goes on without it.
docs/robustness.md says what each of them withstands.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Kind, Params, Replies, Report
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import MEASURES
from anyfleet.elastic import Blueprint

SETTLED = 3  # devices whose sizes are known before a median says what is usual
REMEMBERED = 1_000  # devices over whose sizes the median is taken, at most
EARLY = 20  # devices whose first sizes are kept: the limit never falls below what these allow
# Before that many devices are known: times one plus the root mean square of the initial model.
# Statistics may be variances of inputs that nobody normalised.
ABSURD: Mapping[str, float] = MappingProxyType({"params": 1e3, "buffers": 1e12})
LARGEST = 1e30  # of a reported number: squares and sums of millions of them stay finite
MOST_NAMES = 64  # of reported numbers
LONGEST_NAME = 100  # characters

# Numbers of a report that every device has, at least 0; others are NaN where nothing was measured.
_ALWAYS = frozenset({"norm", "distortion"})
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

    def refusals(self, orders: Sequence[Cohort], replies: Sequence[Replies]) -> list[str]:
        """Return for each reply why it is refused, or "" for those that may count."""
        found = []
        for order, update, norms in zip(orders, replies, _norms(replies), strict=True):
            wrong = (
                *self._values(order, update, norms),
                *self._samples(order, update),
                *self._told(order, update.report[0]),
            )
            found.append("".join(wrong[:1]))
        return found

    def _values(self, order: Cohort, update: Replies, norms: list[float]) -> Iterator[str]:
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

    def _samples(self, order: Cohort, update: Replies) -> Iterator[str]:
        samples, most = int(update.samples[0]), int(self.declared[int(order.device[0])])
        # Tests are made on data that nobody declares.
        if samples < 0 or (order.kind != Kind.EVALUATE and samples > most):
            yield f"samples: {samples} of {most}"

    def _told(self, order: Cohort, report: Report) -> Iterator[str]:
        count = sum(len(told) if isinstance(told, tuple) else 1 for told in report.values())
        most = self.limits.most(self.blueprint).report
        if len(report) > MOST_NAMES or count > most:
            yield f"report: {count} numbers under {len(report)} names; at most {most}, {MOST_NAMES}"
            return
        if not all(isinstance(name, str) for name in report):
            yield "report: a name that is no text"
            return
        measures = order.job.measures
        scalars = MEASURES.union(*(each.scalars for each in measures))
        vectors = frozenset[str]().union(*(each.vectors for each in measures))
        nonnegative = _ALWAYS.union(*(each.nonnegative for each in measures))
        for name, told in report.items():
            yield from self._unasked(order, name)
            several = isinstance(told, tuple)
            if several and (name in scalars or order.kind not in _TRAINING):
                yield f"report: several numbers as {name}"
            elif name in vectors and not several:
                yield f"report: one number as {name}"
            elif not all(isinstance(number, Real) for number in (told if several else (told,))):
                yield f"report: {name} is no number"
            else:
                yield from _strange(name, told if several else (told,), name in nonnegative)

    def _unasked(self, order: Cohort, name: str) -> Iterator[str]:
        if len(name) > LONGEST_NAME:
            yield f"report: a name of {len(name)} characters; at most {LONGEST_NAME}"
        elif order.kind in _TRAINING:
            # A trainer may report what it likes, but measurements only if some part wants them.
            measured = any(name in each.names for each in order.job.measures)
            if measured and name not in order.job.report:
                yield f"report: {name} was not asked for"
        elif name not in {"loss", *self.metrics}:
            yield f"report: {name} was not asked for"


def _norms(updates: Sequence[Replies]) -> list[list[float]]:
    """Return the length of every tree of every reply; they are waited for together."""
    trees = [[list(tree.values()) for tree in update.trees[0].values()] for update in updates]
    found = [get_total_norm(tree) for each in trees for tree in each if tree]
    lengths = iter(torch.stack([one.double() for one in found]).tolist() if found else [])
    return [[next(lengths) if tree else 0.0 for tree in each] for each in trees]


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _length(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def _strange(name: str, numbers: Sequence[float], nonnegative: bool) -> Iterator[str]:
    """Yield what no honest device reports under this name."""
    for told in numbers:
        try:
            number = float(told)
        except OverflowError:  # a whole number of hundreds of digits
            number = math.inf
        if math.isinf(number) or (name in _ALWAYS and math.isnan(number)):
            yield f"not finite: {name}"
            return
        if abs(number) > LARGEST or (nonnegative and number < 0):
            least = 0 if nonnegative else -LARGEST
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
    limit: str  # in words
    median: float  # of which the limit is a multiple; infinite: too few devices are known
    known: "Sizes"  # of earlier rounds, still to be compared with


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of updates that counted: root mean squares of a change per trained coordinate.

    The limit on the size of an update is a factor over the median of what devices send: of every
    device its median size in this round, or in the last one in which it counted, over the
    `REMEMBERED` devices that counted last. A device has one voice however often it sends. This
    median shrinks as training converges, but the limit does not: it is never below the factor over
    the median of the sizes with which the first devices began.

    While fewer than `SETTLED` devices are known, an update is refused only when it is absurd
    (`most_at_first`). All updates of a round meet the same limit, so that it does not matter who
    came first. A size of zero says nothing and is passed over.

    When every single update of a round is above the limit, of at least `SETTLED` devices, then not
    a device has changed but the training (its learning rate, say): they are compared among
    themselves, none of them may be absurd, and the past is forgotten.
    """

    device: Ints  # those remembered; who counted last comes last
    last: Floats  # the size of each, in the last round in which it counted
    first: Floats  # of the first devices, each when it first counted; not in any order

    @classmethod
    def none(cls) -> "Sizes":
        """Return what is known before the first round."""
        return cls(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))

    def judge(self, device: Ints, sizes: Floats, growth: float, most: float) -> Verdict:
        """Return which of a round's updates are too large; `most` is where they are absurd."""
        if math.isinf(growth):
            most = math.inf
        found = _judged(self, device, sizes, growth, most)
        if len(np.unique(device)) < SETTLED or not found.above.all():
            return found
        anew = _judged(Sizes.none(), device, sizes, growth, most)
        return anew if growth * anew.median <= most else anew._replace(**_absurd(sizes, most))

    def after(self, device: Ints, sizes: Floats) -> "Sizes":
        """Return what is known after a round in which these updates counted."""
        senders, own = _by_device(device, sizes)
        others = ~np.isin(self.device, senders)
        first = self.first
        if len(first) < EARLY:
            # All that are new in this round, so that no number of a device decides.
            first = np.concatenate([first, own[~np.isin(senders, self.device)]])[:REMEMBERED]
        return Sizes(
            np.concatenate([self.device[others], senders])[-REMEMBERED:],
            np.concatenate([self.last[others], own])[-REMEMBERED:],
            first,
        )


def _judged(known: Sizes, device: Ints, sizes: Floats, growth: float, most: float) -> Verdict:
    senders, own = _by_device(device, sizes)
    compared = np.concatenate([known.last[~np.isin(known.device, senders)], own])
    if len(compared) < SETTLED:
        return Verdict(**_absurd(sizes, most), median=math.inf, known=known)
    early = float(np.median(known.first)) if len(known.first) >= SETTLED else 0.0
    median = max(float(np.median(compared)), early)
    limit = f"{growth:g} × the median {median:.3g}"
    return Verdict(sizes > growth * median, limit, median, known)


def _absurd(sizes: Floats, most: float) -> dict[str, Any]:
    """Return the part of a verdict that needs no other sizes."""
    return {"above": sizes > most, "limit": f"{most:.3g}, the most with nothing to compare it with"}


def _by_device(device: Ints, sizes: Floats) -> tuple[Ints, Floats]:
    """Return those who changed something, in ascending order, and the median size of each."""
    rows = np.lexsort((sizes, device))
    rows = rows[sizes[rows] > 0]
    senders, start, count = np.unique(device[rows], return_index=True, return_counts=True)
    ordered = sizes[rows]
    return senders, ordered[start + (count - 1) // 2] / 2 + ordered[start + count // 2] / 2


def most_at_first(what: str, initial: Params) -> float:
    """Return the size from which on a change is absurd, whatever others send.

    It goes by the initial model: the current one grows with what is sent.
    """
    # Without a mask of -inf; whole and complex numbers count by what they amount to.
    values = [value[torch.isfinite(value)] for value in initial.values()]
    plain = [value.abs() if value.is_complex() else value.double() for value in values]
    count = sum(value.numel() for value in values)
    return ABSURD[what] * (1.0 + math.hypot(*map(_length, plain)) / math.sqrt(max(count, 1)))


def too_large(what: str, size: float, limit: str) -> str:
    """Return the reason for refusing an update of this size."""
    return f"size: {what} of {size:.3g} a coordinate, above {limit}"


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
