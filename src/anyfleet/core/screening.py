"""What replies must pass before they count, and a new model before it replaces the old one.

NaN would spread through every average, and a single update of huge norm would be the next model.
The server makes these checks, so that they hold for every runtime: a reply that is refused becomes
a failed order with its reason, and the round goes on without it. docs/robustness.md says what each
check withstands.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import islice
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Flags, Floats, Ints, alike
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Kind, Params
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.slots import MEASURES
from anyfleet.core.stacks import Replies, Reported, Stack, lengths
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
    job: Job
    blueprint: Blueprint
    declared: Ints  # training samples of every device
    metrics: frozenset[str] = frozenset()  # names that an evaluation reports besides the loss

    @classmethod
    def of(cls, task: Task, job: Job, declared: Ints, limits: Limits) -> "Screen":
        """Return the checks for the replies of a fleet that learns this task."""
        return cls(limits, job, task.blueprint, declared, frozenset(task.metrics))

    def refusals(self, orders: IssuedOrders, replies: Replies) -> list[str]:
        """Return for each reply why it is refused, or "" for those that may count."""
        found = _Refusals(len(replies))
        groups = alike(replies.stack_index, orders.kind_index)
        places = [_Places(rows, replies.place[rows]) for rows in groups]
        stacks = [replies.stacks[int(replies.stack_index[rows[0]])] for rows in groups]
        facts = _facts(stacks, self._variances)
        for at, stack, known in zip(places, stacks, facts, strict=True):
            self._check_values(found, at, stack, known)
        self._check_samples(found, orders, replies)
        for at, stack in zip(places, stacks, strict=True):
            training = orders.kinds[int(orders.kind_index[at.rows[0]])] in _TRAINING
            self._check_reports(found, at, stack.report, training)
        return found.reasons

    @cached_property
    def _variances(self) -> frozenset[str | None]:
        """The names of running variances: one below zero makes a model NaN."""
        return frozenset(site.variance for site in self.blueprint.norms)

    def _check_values(
        self, found: "_Refusals", at: "_Places", stack: Stack, facts: Mapping[str, "_Facts"]
    ) -> None:
        """Refuse replies for their tensors."""
        for name, tree in stack.trees.items():
            if not tree:
                continue
            norms, negative = (values[at.places] for values in facts[name])
            for where in np.flatnonzero(~np.isfinite(norms)).tolist():
                # A sum of large squares may overflow where the numbers themselves do not.
                place, row = int(at.places[where]), int(at.rows[where])
                bad = (n for n, value in tree.items() if not _finite(value[place]))
                found.refuse(row, "".join(f"not finite: {n}" for n in islice(bad, 1)))
                norms[where] = math.hypot(*(_length(value[place]) for value in tree.values()))
            if name == self.job.send:
                for where in np.flatnonzero(norms > self.limits.norm).tolist():
                    above = f"norm: {norms[where]:.3g} is above {self.limits.norm:.3g}"
                    found.refuse(int(at.rows[where]), above)
            for where in np.flatnonzero(negative).tolist():
                place = int(at.places[where])
                below = (n for n in tree if n in self._variances and (tree[n][place] < 0).any())
                found.refuse(int(at.rows[where]), f"variance: {next(below)} is negative")

    def _check_samples(self, found: "_Refusals", orders: IssuedOrders, replies: Replies) -> None:
        """Refuse numbers of samples that a device does not have."""
        samples, most = replies.samples, self.declared[orders.device]
        # Devices evaluate on test data, of which they declare nothing.
        beyond = (samples > most) & (orders.kind != Kind.EVALUATE)
        for row in np.flatnonzero((samples < 0) | beyond).tolist():
            found.refuse(row, f"samples: {samples[row]} of {most[row]}")

    def _check_reports(
        self, found: "_Refusals", at: "_Places", reported: Reported, training: bool
    ) -> None:
        """Refuse reports; devices of one stack report under the same names."""
        columns = {name: values[at.places] for name, values in reported.items()}
        counts = sum(map(_counts, columns.values()), np.zeros(len(at.rows), dtype=np.int64))
        most = self.limits.for_model(self.blueprint).report
        for where in np.flatnonzero((counts > most) | (len(columns) > MOST_NAMES)).tolist():
            many = f"{counts[where]} numbers under {len(columns)} names"
            found.refuse(int(at.rows[where]), f"report: {many}; at most {most}, {MOST_NAMES}")
        if not all(isinstance(name, str) for name in columns):
            found.refuse_all(at.rows, "report: a name that is no text")
            return
        for name, values in columns.items():
            wrong = self._unasked(name, training)
            if not wrong and values.dtype == object:
                self._check_odd(found, at.rows, name, values, training)
                continue
            wrong = wrong or self._misshapen(name, values.ndim > 1, training)
            if wrong:
                found.refuse_all(at.rows, f"report: {wrong}")
            else:
                self._check_numbers(found, at.rows, name, values.reshape(len(values), -1))

    def _check_odd(
        self, found: "_Refusals", rows: Ints, name: str, values: NDArray[Any], training: bool
    ) -> None:
        """Refuse what devices reported that is not an array of numbers, one by one."""
        for row, value in zip(rows.tolist(), values, strict=True):
            several = isinstance(value, tuple)
            numbers = value if several else (value,)
            if wrong := self._misshapen(name, several, training):
                found.refuse(row, f"report: {wrong}")
            elif not all(isinstance(number, Real) for number in numbers):
                found.refuse(row, f"report: {name} is no number")
            else:
                self._check_numbers(found, np.array([row]), name, _infinite(numbers))

    def _misshapen(self, name: str, several: bool, training: bool) -> str:
        """Return why one number, or several, cannot stand under a name, or ""."""
        if several and (name in self._names.scalars or not training):
            return f"several numbers as {name}"
        return f"one number as {name}" if name in self._names.vectors and not several else ""

    def _check_numbers(self, found: "_Refusals", rows: Ints, name: str, numbers: Floats) -> None:
        """Refuse what no honest device reports under this name; numbers are [devices, numbers]."""
        nonnegative = name in self._names.nonnegative
        endless = np.isinf(numbers) | (np.isnan(numbers) if name in _ALWAYS else False)
        outside = (np.abs(numbers) > LARGEST) | ((numbers < 0) if nonnegative else False)
        wrong = endless | outside
        for where in np.flatnonzero(wrong.any(axis=1)).tolist():
            place = int(wrong[where].argmax())
            if endless[where, place]:
                found.refuse(int(rows[where]), f"not finite: {name}")
                continue
            least, number = 0 if nonnegative else -LARGEST, numbers[where, place]
            span = f"[{least:g}, {LARGEST:g}]"
            found.refuse(int(rows[where]), f"report: {name} of {number:.3g} is not in {span}")

    @cached_property
    def _names(self) -> "_Names":
        """Which names stand for one number, for several, and for none below zero."""
        measures = self.job.measures
        return _Names(
            MEASURES.union(*(each.scalars for each in measures)),
            frozenset[str]().union(*(each.vectors for each in measures)),
            _ALWAYS.union(*(each.nonnegative for each in measures)),
        )

    def _unasked(self, name: str, training: bool) -> str:
        """Return why nothing was to be reported under a name, or ""."""
        if len(name) > LONGEST_NAME:
            return f"a name of {len(name)} characters; at most {LONGEST_NAME}"
        # A trainer may report what it likes, but a measure only if some part asks for it.
        measured = any(name in each.names for each in self.job.measures)
        refused = measured and name not in self.job.report
        if not training:
            refused = name not in {"loss", *self.metrics}
        return f"{name} was not asked for" if refused else ""


class _Names(NamedTuple):
    """What the names of reported numbers stand for."""

    scalars: frozenset[str]
    vectors: frozenset[str]
    nonnegative: frozenset[str]


class _Places(NamedTuple):
    """Replies of one stack: their rows among all, and their places in the stack."""

    rows: Ints
    places: Ints


class _Refusals:
    """Why replies are refused, as it is found out; the first reason counts."""

    def __init__(self, count: int) -> None:
        self.reasons = [""] * count

    def refuse(self, row: int, reason: str) -> None:
        self.reasons[row] = self.reasons[row] or reason

    def refuse_all(self, rows: Ints, reason: str) -> None:
        for row in rows.tolist():
            self.refuse(row, reason)


class _Facts(NamedTuple):
    """Facts about the trees of a stack, one entry for each device."""

    norms: Floats  # not finite if a number is not, or if the squares overflow
    negative: Flags  # whether a running variance is negative


def _facts(stacks: Sequence[Stack], variances: Collection[str | None]) -> list[dict[str, _Facts]]:
    """Return the facts about every tree of every stack; a GPU is waited for only once."""
    trees = [(name, tree) for stack in stacks for name, tree in stack.trees.items() if tree]
    found = []
    for name, tree in trees:
        found += [lengths(tree), _negative(tree, variances if name == "buffers" else ())]
    numbers = torch.cat(found).cpu().numpy() if found else np.empty(0)
    parts = iter(np.split(numbers, np.cumsum([len(fact) for fact in found])))
    return [
        {name: _Facts(next(parts), next(parts) > 0) for name, tree in stack.trees.items() if tree}
        for stack in stacks
    ]


def _negative(tree: Params, variances: Collection[str | None]) -> Tensor:
    """Return for each device in a stack whether a running variance is negative, as 0 or 1."""
    below = [(v < 0).flatten(1).any(dim=1) for n, v in tree.items() if n in variances]
    first = next(iter(tree.values()))
    nobody = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    return torch.stack(below).any(dim=0).double() if below else nobody


def _counts(values: NDArray[Any]) -> Ints:
    """Return how many numbers each device reported under a name."""
    if values.dtype == object:
        return np.array([len(v) if isinstance(v, tuple) else 1 for v in values], dtype=np.int64)
    return np.full(len(values), values[0].size if len(values) else 0)


def _infinite(numbers: Sequence[Any]) -> Floats:
    """Return odd numbers as an array of one device; integers of hundreds of digits as infinite."""
    found = []
    for number in numbers:
        try:
            found.append(float(number))
        except OverflowError:
            found.append(math.inf)
    return np.array([found])


def _finite(value: Tensor) -> bool:
    """Return whether all entries are finite."""
    return bool(torch.isfinite(value).all())


def _length(value: Tensor) -> float:
    """Return the norm of a tensor, in double precision."""
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def believable(reported: Conditions) -> Conditions:
    """Return the conditions with NaN for every loss that no device can have."""
    believed = np.abs(reported.loss) <= LARGEST
    if (believed | np.isnan(reported.loss)).all():
        return reported
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
    if _all_finite([*new.values()]):
        return []
    return [name for name, value in new.items() if not _finite(value) and _became(value, old, name)]


def _all_finite(values: list[Tensor]) -> bool:
    """Return whether all entries are surely finite; an accelerator is waited for only once.

    Sums of large squares may overflow where the numbers themselves do not.
    """
    if not all(value.is_floating_point() for value in values):
        return False
    if not values:
        return True
    lengths = torch._foreach_norm(values)  # noqa: SLF001 - one call, where a loop is one each
    return bool(torch.stack([length.double() for length in lengths]).isfinite().all())


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
