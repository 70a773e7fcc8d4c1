"""What replies must pass before they count, and a new model before it replaces the old one.

NaN would spread through every average, and a single update of huge norm would be the next model.
The server makes these checks, so that they hold for every runtime: a reply that is refused becomes
a failed order with its reason, and the round goes on without it. docs/robustness.md says what each
check withstands.
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
from anyfleet.core.messages import Conditions, Kind, Params, Report
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import MEASURES
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Blueprint

SETTLED = 3  # devices of which update sizes are known before a median says what is usual
REMEMBERED = 1_000  # devices over whose sizes the median is taken, at most
EARLY = 20  # devices whose first sizes are kept: the limit never falls below what these allow
# Until SETTLED devices are known, the limit is this × (1 + RMS of the initial model).
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
        for order, reply, norms in zip(orders, replies, _norms(replies), strict=True):
            wrong = (
                *self._values(order, reply, norms),
                *self._samples(order, reply),
                *self._reported(order, reply.report_of(0)),
            )
            found.append("".join(wrong[:1]))
        return found

    def _values(self, order: Cohort, reply: Replies, norms: list[float]) -> Iterator[str]:
        """Yield what is wrong with the tensors of a reply, of which the norms are given."""
        for (name, tree), norm in zip(reply.trees_of(0).items(), norms, strict=True):
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
        """Yield the running variances below zero: one of them makes a model NaN."""
        variances = {site.variance for site in self.blueprint.norms}
        for name, value in tree.items():
            if name in variances and bool((value < 0).any()):
                yield f"variance: {name} is negative"

    def _samples(self, order: Cohort, reply: Replies) -> Iterator[str]:
        """Yield a number of samples that the device does not have."""
        samples, most = int(reply.samples[0]), int(self.declared[int(order.device[0])])
        # Devices evaluate on test data, of which they declare nothing.
        if samples < 0 or (order.kind != Kind.EVALUATE and samples > most):
            yield f"samples: {samples} of {most}"

    def _reported(self, order: Cohort, report: Report) -> Iterator[str]:
        """Yield what is wrong with a report."""
        count = sum(len(each) if isinstance(each, tuple) else 1 for each in report.values())
        most = self.limits.for_model(self.blueprint).report
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
        for name, value in report.items():
            yield from self._unasked(order, name)
            several = isinstance(value, tuple)
            numbers = value if several else (value,)
            if several and (name in scalars or order.kind not in _TRAINING):
                yield f"report: several numbers as {name}"
            elif name in vectors and not several:
                yield f"report: one number as {name}"
            elif not all(isinstance(number, Real) for number in numbers):
                yield f"report: {name} is no number"
            else:
                yield from _strange(name, numbers, name in nonnegative)

    def _unasked(self, order: Cohort, name: str) -> Iterator[str]:
        """Yield a name under which nothing was to be reported."""
        if len(name) > LONGEST_NAME:
            yield f"report: a name of {len(name)} characters; at most {LONGEST_NAME}"
        elif order.kind in _TRAINING:
            # A trainer may report what it likes, but a measure only if some part asks for it.
            measured = any(name in each.names for each in order.job.measures)
            if measured and name not in order.job.report:
                yield f"report: {name} was not asked for"
        elif name not in {"loss", *self.metrics}:
            yield f"report: {name} was not asked for"


def _norms(replies: Sequence[Replies]) -> list[list[float]]:
    """Return the norm of every tree of every reply; a GPU is waited for only once."""
    trees = [[list(tree.values()) for tree in reply.trees_of(0).values()] for reply in replies]
    found = [get_total_norm(tree) for each in trees for tree in each if tree]
    lengths = iter(torch.stack([one.double() for one in found]).tolist() if found else [])
    return [[next(lengths) if tree else 0.0 for tree in each] for each in trees]


def _finite(value: Tensor) -> bool:
    """Return whether all entries are finite."""
    return bool(torch.isfinite(value).all())


def _length(value: Tensor) -> float:
    """Return the norm of a tensor, in double precision."""
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def _strange(name: str, numbers: Sequence[float], nonnegative: bool) -> Iterator[str]:
    """Yield what no honest device reports under this name."""
    for value in numbers:
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if math.isinf(number) or (name in _ALWAYS and math.isnan(number)):
            yield f"not finite: {name}"
            return
        if abs(number) > LARGEST or (nonnegative and number < 0):
            least = 0 if nonnegative else -LARGEST
            yield f"report: {name} of {number:.3g} is not in [{least:g}, {LARGEST:g}]"
            return


def believable(reported: Conditions) -> Conditions:
    """Return the conditions with NaN for every loss that no device can have."""
    believed = np.abs(reported.loss) <= LARGEST
    return replace(reported, loss=np.where(believed, reported.loss, np.nan))


# --- the updates of a round beside those before -----------------------------------------------


class Verdict(NamedTuple):
    """Which updates of a round are refused for their size, and why."""

    above: Flags  # of every update, whether it is above the limit: those are refused
    limit: str  # in words
    median: float  # of which the limit is a multiple; infinite: too few devices are known
    known: "UpdateSizes"  # of earlier rounds, as far as they are still compared with


@dataclass(frozen=True, eq=False)
class UpdateSizes:
    """The sizes of updates that counted: root mean squares of the change per trained coordinate.

    The limit on the size of an update is a multiple of the median of what devices send: of every
    device its median size in this round, or in the last one in which it counted, over the
    `REMEMBERED` devices that counted last. A device has one voice however often it sends. This
    median shrinks as training converges, but the limit does not: it is never below the same
    multiple of the median of the sizes with which the first devices began.

    While fewer than `SETTLED` devices are known, an update is refused only when it is absurd
    (`most_at_first`). All updates of a round meet the same limit, so that it does not matter who
    came first. A size of zero says nothing and is passed over.

    When every single update of a round is above the limit, of at least `SETTLED` devices, then no
    device has changed but the training has (its learning rate, say): the updates are compared among
    themselves, none of them may be absurd, and the past is forgotten.
    """

    device: Ints  # those remembered; the one that counted last comes last
    last: Floats  # the size of each, in the last round in which it counted
    first: Floats  # of the first devices, each when it first counted; in no particular order

    @classmethod
    def none(cls) -> "UpdateSizes":
        """Return what is known before the first round."""
        return cls(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))

    def compare(self, device: Ints, sizes: Floats, growth: float, most: float) -> Verdict:
        """Return which of a round's updates are too large.

        The limit is `growth` times the median; above `most` an update is absurd.
        """
        if math.isinf(growth):
            most = math.inf
        found = _compared(self, device, sizes, growth, most)
        if len(np.unique(device)) < SETTLED or not found.above.all():
            return found
        anew = _compared(UpdateSizes.none(), device, sizes, growth, most)
        return anew if growth * anew.median <= most else anew._replace(**_absurd(sizes, most))

    def after(self, device: Ints, sizes: Floats) -> "UpdateSizes":
        """Return what is known after a round in which these updates counted."""
        senders, own = _by_device(device, sizes)
        others = ~np.isin(self.device, senders)
        first = self.first
        if len(first) < EARLY:
            # All that are new in this round, so that the numbers of devices do not matter.
            first = np.concatenate([first, own[~np.isin(senders, self.device)]])[:REMEMBERED]
        return UpdateSizes(
            np.concatenate([self.device[others], senders])[-REMEMBERED:],
            np.concatenate([self.last[others], own])[-REMEMBERED:],
            first,
        )


def _compared(
    known: UpdateSizes, device: Ints, sizes: Floats, growth: float, most: float
) -> Verdict:
    """Return which updates are too large beside these and those known before."""
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
    """Return the devices that changed something, ascending, and the median size of each."""
    rows = np.lexsort((sizes, device))
    rows = rows[sizes[rows] > 0]
    senders, start, count = np.unique(device[rows], return_index=True, return_counts=True)
    ordered = sizes[rows]
    return senders, ordered[start + (count - 1) // 2] / 2 + ordered[start + count // 2] / 2


def most_at_first(what: str, initial: Params) -> float:
    """Return the size above which a change is absurd, whatever others send.

    It depends on the initial model alone: the current one grows with what is sent.
    """
    # Entries of -inf (a mask) are left out; integers and complex numbers count by magnitude.
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
    """Return whether entries ceased to be finite: a mask of -inf may stay what it is."""
    if name not in old or old[name].shape != value.shape:
        return True
    before = old[name]
    same = (value == before) | (torch.isnan(value) & torch.isnan(before))
    return bool((~torch.isfinite(value) & ~same).any())


def sound(state: Any) -> bool:
    """Return whether all tensors in the state of a part are finite, however deep they lie."""
    if isinstance(state, Tensor):
        return _finite(state)
    if isinstance(state, Mapping):
        return all(map(sound, state.values()))
    if isinstance(state, tuple | list):
        return all(map(sound, state))
    if is_dataclass(state) and not isinstance(state, type):
        return all(sound(getattr(state, each.name)) for each in fields(state))
    return True
