"""What replies must pass before they count, and a new model before it replaces the old one.

NaN would spread through every average, and a single update of huge norm would be the next model.
The server makes these checks, so that they hold for every runtime: a reply that is refused becomes
a failed order with its reason, and the round goes on without it. docs/robustness.md says what each
check withstands.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from itertools import islice
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Flags, Floats, Ints, alike, among, distinct, every
from anyfleet.core.arriving import Transfer, on_its_way
from anyfleet.core.limits import Limits
from anyfleet.core.messages import OF_TRAINING, Conditions, Kind, Params
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.slots import MEASURES
from anyfleet.core.stacks import Replies, Reported, Stack, gathered
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
_NEGATIVE = "negative variances"  # among facts, where others are named like trees


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

    def check(self, orders: IssuedOrders, replies: Replies) -> "Screened":
        """Return which replies are refused, and the sizes that were found on the way."""
        return self.begin(orders, replies)()

    def begin(self, orders: IssuedOrders, replies: Replies) -> Callable[[], "Screened"]:
        """Return what does the same later; what it asks an accelerator for is on its way."""
        replies = replies.pruned()
        return partial(self._check, orders, replies, _facts(replies, self._variances))

    def _check(
        self, orders: IssuedOrders, replies: Replies, facts: Callable[[], "_Facts"]
    ) -> "Screened":
        found = _Refusals(len(replies))
        sizes = self._check_values(found, replies, facts())
        self._check_samples(found, orders, replies)
        _, forms = distinct([_form(stack.report) for stack in replies.stacks])
        for rows in alike(forms[replies.stack_index], orders.kind_index):
            training = orders.kinds[int(orders.kind_index[rows[0]])] in OF_TRAINING
            self._check_reports(found, rows, _columns(replies, rows, forms), training)
        return Screened(found.reasons, sizes)

    @cached_property
    def _variances(self) -> frozenset[str | None]:
        """The names of running variances: one below zero makes a model NaN."""
        return frozenset(site.variance for site in self.blueprint.norms)

    def _check_values(self, found: "_Refusals", replies: Replies, facts: "_Facts") -> Floats:
        """Refuse replies for their tensors; return their sizes (`Screened`)."""
        for name, norms in facts.norms.items():
            for row in _rows(~np.isfinite(norms)):
                # A sum of large squares may overflow where the numbers themselves do not.
                tree = replies.trees_of(row)[name]
                bad = (n for n, value in tree.items() if not _finite(value))
                found.refuse(row, "".join(f"not finite: {n}" for n in islice(bad, 1)))
                norms[row] = math.hypot(*map(_length, tree.values()))
            if name == self.job.send:
                for row in _rows(norms > self.limits.norm):
                    above = f"norm: {norms[row]:.3g} is above {self.limits.norm:.3g}"
                    found.refuse(row, above)
        for row in _rows(facts.negative):
            tree = replies.trees_of(row)["buffers"]
            below = (n for n in tree if n in self._variances and (tree[n] < 0).any())
            found.refuse(row, f"variance: {next(below)} is negative")
        counts = np.array([_entries(stack) for stack in replies.stacks])[replies.stack_index]
        sizes: Floats = facts.norms.get("delta", 0.0) / np.sqrt(counts)
        return sizes

    def _check_samples(self, found: "_Refusals", orders: IssuedOrders, replies: Replies) -> None:
        """Refuse numbers of samples that a device does not have."""
        samples, most = replies.samples, self.declared[orders.device]
        bad = (samples < 0) | (samples > most)
        if Kind.EVALUATE in orders.kinds:
            # Devices evaluate on test data, of which they declare nothing.
            bad &= (samples < 0) | (orders.kind != Kind.EVALUATE)
        for row in _rows(bad):
            found.refuse(row, f"samples: {samples[row]} of {most[row]}")

    def _check_reports(
        self, found: "_Refusals", rows: Ints, columns: Reported, training: bool
    ) -> None:
        """Refuse reports of rows that report under the same names."""
        counts = np.zeros(len(rows), dtype=np.int64)
        for values in columns.values():
            counts += _counts(values)
        most = self.limits.for_model(self.blueprint).report
        for where in _rows((counts > most) | (len(columns) > MOST_NAMES)):
            many = f"{counts[where]} numbers under {len(columns)} names"
            found.refuse(int(rows[where]), f"report: {many}; at most {most}, {MOST_NAMES}")
        if not all(isinstance(name, str) for name in columns):
            found.refuse_all(rows, "report: a name that is no text")
            return
        for name, values in columns.items():
            wrong = self._unasked(name, training)
            if not wrong and values.dtype == object:
                self._check_odd(found, rows, name, values, training)
                continue
            wrong = wrong or self._misshapen(name, values.ndim > 1, training)
            if wrong:
                found.refuse_all(rows, f"report: {wrong}")
            else:
                self._check_numbers(found, rows, name, values.reshape(len(values), -1))

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
        least = 0 if name in self._names.nonnegative else -LARGEST
        fits = (numbers >= least) & (numbers <= LARGEST)
        if name not in _ALWAYS:
            fits |= np.isnan(numbers)
        for where in [] if every(fits) else _rows(~np.all(fits, axis=1)):
            number, row = numbers[where, fits[where].argmin()], int(rows[where])
            if not math.isfinite(number):
                found.refuse(row, f"not finite: {name}")
                continue
            span = f"[{least:g}, {LARGEST:g}]"
            found.refuse(row, f"report: {name} of {number:.3g} is not in {span}")

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


class Screened(NamedTuple):
    """What the checks found of each reply."""

    reasons: list[str]  # why it is refused; "": it may count
    sizes: Floats  # root mean squares of changes; NaN where it is not the whole tree that counts


class _Names(NamedTuple):
    """What the names of reported numbers stand for."""

    scalars: frozenset[str]
    vectors: frozenset[str]
    nonnegative: frozenset[str]


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
    """Facts about the trees of replies, one entry for each reply."""

    norms: dict[str, Floats]  # by tree: not finite if a number is not, or if the squares overflow
    negative: Flags  # whether a running variance is negative


def _facts(replies: Replies, variances: Collection[str | None]) -> Callable[[], _Facts]:
    """Return what returns the facts about the trees of all replies; they are on their way."""
    parts = [
        (name, number, numbers)
        for number, stack in enumerate(replies.stacks)
        for name, numbers in (*stack.lengths.items(), *_negative(stack, variances))
    ]
    measured = on_its_way([numbers for *_, numbers in parts])
    return partial(_joined, replies, [(name, number) for name, number, _ in parts], measured)


def _joined(
    replies: Replies, names: Sequence[tuple[str, int]], measured: Callable[[], list[Floats]]
) -> _Facts:
    """Return facts by reply, given those of every stack as they were measured."""
    columns: dict[str, list[Floats]] = {}
    known = [
        ((name, number), numbers)
        for number, stack in enumerate(replies.stacks)
        for name, numbers in stack.known_lengths.items()
    ]
    for (name, number), numbers in (*known, *zip(names, measured(), strict=True)):
        columns.setdefault(name, [np.empty(0)] * len(replies.stacks))[number] = numbers
    found = {
        name: gathered(each, replies.stack_index, replies.place, missing=0.0)
        for name, each in columns.items()
    }
    negative = found.pop(_NEGATIVE, np.zeros(len(replies)))
    return _Facts(found, negative > 0)


def _negative(stack: Stack, variances: Collection[str | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield how many running variances of each device are negative, if there are any."""
    values = [v for n, v in stack.trees.get("buffers", {}).items() if n in variances]
    if values:
        below = [(value < 0).flatten(1).any(dim=1) for value in values]
        yield _NEGATIVE, torch.stack(below).sum(dim=0, dtype=torch.float64)


def sized(replies: Replies) -> bool:
    """Return whether the checks find the sizes of all replies (`Screened`)."""
    return not any(math.isnan(_entries(stack)) for stack in replies.stacks)


def _entries(stack: Stack) -> float:
    """Return how many entries of a change were trained, at least 1; NaN: not all that came."""
    tree = stack.trees.get("delta")
    if not tree or stack.masks:
        return math.nan
    return max(1, sum([value.shape[1:].numel() for value in tree.values()]))


def _form(report: Reported) -> tuple[object, ...]:
    """Return what is equal for reports whose arrays can be put together."""
    return tuple((name, values.dtype, values.shape[1:]) for name, values in report.items())


def _columns(replies: Replies, rows: Ints, forms: Ints) -> Reported:
    """Return what rows reported whose stacks have one form, by name."""
    index, place = replies.stack_index[rows], replies.place[rows]
    numbers = (forms == forms[index[0]]).nonzero()[0]
    told, index = [replies.stacks[n].report for n in numbers.tolist()], numbers.searchsorted(index)
    return {name: gathered([each[name] for each in told], index, place) for name in told[0]}


def _rows(flags: Flags) -> list[int]:
    """Return the rows that are flagged."""
    rows: list[int] = flags.nonzero()[0].tolist()
    return rows


def _counts(values: NDArray[Any]) -> Ints | int:
    """Return how many numbers each device reported under a name."""
    if values.dtype == object:
        return np.array([len(v) if isinstance(v, tuple) else 1 for v in values], dtype=np.int64)
    return math.prod(values.shape[1:])


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
    if every(believed | np.isnan(reported.loss)):
        return reported
    return reported.having(loss=np.where(believed, reported.loss, np.nan))


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
        if not every(found.above) or len(np.unique(device)) < SETTLED:
            return found
        anew = _compared(UpdateSizes.none(), device, sizes, growth, most)
        return anew if growth * anew.median <= most else anew._replace(**_absurd(sizes, most))

    def after(self, device: Ints, sizes: Floats) -> "UpdateSizes":
        """Return what is known after a round in which these updates counted."""
        senders, own = _by_device(device, sizes)
        others = ~among(self.device, senders)
        first = self.first
        if len(first) < EARLY:
            # All that are new in this round, so that the numbers of devices do not matter.
            first = np.concatenate([first, own[~among(senders, np.sort(self.device))]])[:REMEMBERED]
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
    compared = np.concatenate([known.last[~among(known.device, senders)], own])
    if len(compared) < SETTLED:
        return Verdict(**_absurd(sizes, most), median=math.inf, known=known)
    early = _median(known.first) if len(known.first) >= SETTLED else 0.0
    median = max(_median(compared), early)
    limit = f"{growth:g} × the median {median:.3g}"
    return Verdict(sizes > growth * median, limit, median, known)


def _absurd(sizes: Floats, most: float) -> dict[str, Any]:
    """Return the part of a verdict that needs no other sizes."""
    return {"above": sizes > most, "limit": f"{most:.3g}, the most with nothing to compare it with"}


def _by_device(device: Ints, sizes: Floats) -> tuple[Ints, Floats]:
    """Return the devices that changed something, ascending, and the median size of each."""
    rows = np.lexsort((sizes, device))
    rows = rows[sizes[rows] > 0]
    senders, ordered = device[rows], sizes[rows]
    new = np.append(True, senders[1:] != senders[:-1])[: len(rows)]
    if new.all():
        return senders, ordered
    start = np.flatnonzero(new)
    count = np.diff(start, append=len(rows))
    middle = ordered[start + (count - 1) // 2] / 2 + ordered[start + count // 2] / 2
    return senders[start], middle


def _median(values: Floats) -> float:
    """Return the median of some numbers; much of what `numpy.median` does is for other arrays."""
    ordered, half = np.sort(values), len(values) // 2
    return float((ordered[half] + ordered[(len(values) - 1) // 2]) / 2)


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


def unsound(trees: Sequence[tuple[Params, Params]], state: Any, before: Any) -> list[str]:
    """Return what has become infinite or NaN: tensors of new trees, or the aggregator's state.

    Each tree comes with the one before it. An accelerator is waited for only once if all is well.
    """
    if _all_finite(_new(trees, state, before)):
        return []
    wrong = [name for tree, old in trees for name in not_finite(tree, old)]
    return wrong if sound(state) or not sound(before) else [*wrong, "the state of the aggregator"]


def finiteness(trees: Sequence[tuple[Params, Params]], state: Any, before: Any) -> Transfer | None:
    """Return numbers that are all finite only if `unsound` finds nothing; None: it has to look.

    Nobody waits for an accelerator.
    """
    values = _new(trees, state, before)
    floats = [value for value in values if value.is_floating_point()]
    if any(value.is_complex() for value in values) or len({v.device for v in floats}) != 1:
        return None
    return Transfer(torch.stack(torch._foreach_norm(floats)))  # noqa: SLF001


def _new(trees: Sequence[tuple[Params, Params]], state: Any, before: Any) -> list[Tensor]:
    """Return the tensors that are not those of before."""
    new = [v for tree, old in trees for name, v in tree.items() if v is not old.get(name)]
    return [*new, *(() if state is before else _tensors(state))]


def not_finite(new: Params, old: Params) -> list[str]:
    """Return the names of the tensors that have become infinite or NaN somewhere."""
    return [name for name, value in new.items() if not _finite(value) and _became(value, old, name)]


def _all_finite(values: Sequence[Tensor]) -> bool:
    """Return whether all entries are surely finite.

    Sums of large squares may overflow where the numbers themselves do not.
    """
    floats = [value for value in values if value.is_floating_point()]
    if len(floats) < len(values) and any(value.is_complex() for value in values):
        return False
    if not floats:
        return True
    lengths = torch._foreach_norm(floats)  # noqa: SLF001 - one call, where a loop is one each
    return math.isfinite(torch.stack(lengths).sum().item())


def _became(value: Tensor, old: Params, name: str) -> bool:
    """Return whether entries ceased to be finite: a mask of -inf may stay what it is."""
    if name not in old or old[name].shape != value.shape:
        return True
    before = old[name]
    same = (value == before) | (torch.isnan(value) & torch.isnan(before))
    return bool((~torch.isfinite(value) & ~same).any())


def sound(state: Any) -> bool:
    """Return whether all tensors in the state of a part are finite, however deep they lie."""
    return all(map(_finite, _tensors(state)))


def _tensors(state: Any) -> list[Tensor]:
    """Return all tensors in the state of a part, however deep they lie."""
    found: list[Tensor] = []
    left = [state]
    while left:
        each = left.pop()
        if isinstance(each, float | int | str):
            continue  # most of what is remembered of many devices
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            left.extend(each)
        elif isinstance(each, Mapping):
            left.extend(each.values())
        elif is_dataclass(each) and not isinstance(each, type):
            left.extend(getattr(each, f.name) for f in fields(each))
    return found
