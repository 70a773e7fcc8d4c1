"""Seconds and joules of computing and of transfers, for planners, devices and the simulator.

Computing:

    seconds = (local steps × overhead + calls × latency + moved / bandwidth
               + whole / speed × (fixed + (1 − fixed) × fraction))
              × load × fastest / frequency
    joules  = coefficient × frequency² × cycles

A transfer takes bits / bit rate seconds, and watts × seconds joules.

`fraction` is FLOP / whole or, for a device with an exponent, width^exponent less what fewer trained
layers save. Cycles are what the device spends on the order, not on its other work. A device with a
speed and nothing else takes FLOP / speed seconds, or cycles / frequency (specification §A.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from anyfleet.arrays import Arrays, Floats, Ints, alike, every
from anyfleet.core.messages import EVERYTHING, Conditions, Hyperparameters
from anyfleet.core.training_work import Amounts, Counted, Work
from anyfleet.elastic import WHOLE, Blueprint, Priced, Slice, width
from anyfleet.elastic.cost.operations import Counting, operations
from anyfleet.tracebacks import during

# A transfer that would take longer counts as one without a link, so that no sum overflows.
LONGEST_TRANSFER = 1e15  # seconds
IN_TIME = 1 - 1e-9  # of what may be spent: a plan that fits exactly must not be late by rounding


@dataclass(frozen=True, eq=False)
class Effort(Arrays):
    """The computing that orders ask for."""

    flops: Floats
    all_layers: Floats  # FLOP if every layer of the slice were trained
    whole: Floats  # FLOP of the same samples on the whole model
    width: Floats  # of the slice
    local_steps: Floats
    calls: Floats  # of operators
    moved: Floats  # bytes that operators read and write

    def spent(self, own: Conditions, frequency: Floats) -> tuple[Floats, Floats]:
        """Return the seconds and the joules of it, cheaper than one after the other."""
        alone, clock = _undisturbed(self, own), clocked(own, frequency)
        seconds = alone * own.load * own.fastest / clock
        return seconds, own.coefficient * clock**2 * (alone * own.fastest)

    def seconds(self, own: Conditions, frequency: Floats) -> Floats:
        """Return the seconds that it takes; a `frequency` of NaN means the fastest."""
        return self.spent(own, frequency)[0]

    def cycles(self, own: Conditions) -> Floats:
        """Return the cycles that the processor spends on it, without other work."""
        return _undisturbed(self, own) * own.fastest

    def joules(self, own: Conditions, frequency: Floats) -> Floats:
        """Return the joules that it costs; other work takes time, but pays for its own cycles."""
        return self.spent(own, frequency)[1]


@dataclass(frozen=True, eq=False)
class Demand(Arrays):
    """The computing and the memory that orders ask for."""

    effort: Effort
    memory: Floats  # bytes at the peak

    def then(self, after: "Demand") -> "Demand":
        """Return the demand of both, one after the other."""
        amounts = ("flops", "all_layers", "whole", "local_steps", "calls", "moved")
        both = {n: getattr(self.effort, n) + getattr(after.effort, n) for n in amounts}
        return Demand(replace(self.effort, **both), np.maximum(self.memory, after.memory))


class Counts(NamedTuple):
    """The FLOP of a slice, of the slice with all its layers trained, and of the whole model."""

    flops: Amounts
    all_layers: Amounts
    whole: Amounts


def effort_of(
    counts: Counts, width: float, *, local_steps: Counted, calls: Amounts, moved: Amounts
) -> Effort:
    """Return the effort of orders with slices of one width; numbers are those of one order."""
    count = max((len(v) for v in (*counts, local_steps) if isinstance(v, np.ndarray)), default=1)
    return Effort(*(_column(v, count) for v in (*counts, width, local_steps, calls, moved)))


def _column(value: Amounts | Ints, count: int) -> Floats:
    """Return an amount as an array with a value for each order."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value.astype(np.float64, copy=False)
    return np.full(count, float(value))


@dataclass(frozen=True)
class Amount:
    """The amount of training of one order."""

    batch_size: int
    processed: int = 0  # samples, each as often as it is used
    local_steps: int = 0
    width: float | None = None  # as planned, where that is known


class Worker(Protocol):
    """A trainer, or whatever else takes work."""

    def work(self, priced: Priced, processed: Counted, local_steps: Counted, /) -> Work: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class TrainingAmounts(Arrays):
    """The amounts of training of many orders."""

    batch_size: Ints
    processed: Ints  # samples, each as often as it is used
    local_steps: Ints
    width: Floats  # as planned; NaN where that is not known

    @classmethod
    def of(
        cls, hyperparameters: Hyperparameters, samples: Ints, width: Floats | float = np.nan
    ) -> "TrainingAmounts":
        """Return the amounts of devices with so many samples: epochs over them, up to a limit."""
        batch, steps = hyperparameters.batch_size, steps_of(hyperparameters, samples)
        widths = np.broadcast_to(np.asarray(width, dtype=np.float64), len(steps))
        return cls(batch, processed(steps, samples, batch), steps, widths)


def steps_of(hyperparameters: Hyperparameters, samples: Ints) -> Ints:
    """Return the local steps of devices with so many samples: epochs over them, up to a limit."""
    most = hyperparameters.local_steps
    own = hyperparameters.epochs * -(-samples // hyperparameters.batch_size)
    # A fixed number of local steps is given as a limit with epochs = EVERYTHING.
    fixed = np.where(samples > 0, most, 0)
    own = np.where(hyperparameters.epochs == EVERYTHING, fixed, own)
    return np.where(most == EVERYTHING, own, np.minimum(own, most))


def processed(local_steps: Ints, samples: Ints, batch_size: Ints) -> Ints:
    """Return the samples used in so many local steps; the last of an epoch may have fewer."""
    per_epoch = np.maximum(1, -(-samples // batch_size))
    epochs, left = np.divmod(local_steps, per_epoch)
    return epochs * samples + np.minimum(left * batch_size, samples)


@lru_cache(maxsize=4096)
def training(
    train: Worker, blueprint: Blueprint, slice_: Slice, amount: Amount, counting: Counting
) -> Demand:
    """Return what it takes to train a slice, as a batch of one."""
    prices = [*_prices(blueprint, slice_, amount.batch_size, amount.width)]
    prices.append(Priced(blueprint, WHOLE, amount.batch_size, 1.0))
    with during("train", train):
        works = [train.work(priced, amount.processed, amount.local_steps) for priced in prices]
    pairs = zip(prices, works, strict=True)
    counts = Counts(*(_counted(*pair, amount.processed, counting) for pair in pairs))
    own, wide = works[0], width(slice_, blueprint)
    effort = effort_of(
        counts, wide, local_steps=amount.local_steps, calls=own.calls, moved=own.moved
    )
    return Demand(effort, _column(own.memory, 1))


def trainings(
    train: Worker,
    blueprint: Blueprint,
    slices: Sequence[Slice],
    index: Ints,
    amounts: TrainingAmounts,
    counting: Counting,
) -> Demand:
    """Return what it takes to train many slices; `index` is the number of each order's slice.

    What orders of equal slices, batches and widths have in common is computed once.
    """
    table = np.empty((8, len(index)))
    flops, all_layers, whole, wide, steps, calls, moved, memory = table
    steps[:] = amounts.local_steps

    def count(priced: Priced, rows: Ints) -> tuple[Amounts, Work]:
        some = amounts.processed[rows]
        work = _works(train, priced, some, amounts.local_steps[rows])
        return _counted(priced, work, some, counting), work

    with during("train", train):
        groups = alike(index, amounts.batch_size, amounts.width)
        for rows in groups:
            first = rows[0]
            planned, batch = float(amounts.width[first]), int(amounts.batch_size[first])
            known = None if math.isnan(planned) else planned
            own, deep = _prices(blueprint, slices[int(index[first])], batch, known)
            flops[rows], work = count(own, rows)
            # Most slices train all layers.
            all_layers[rows] = flops[rows] if deep == own else count(deep, rows)[0]
            wide[rows] = width(own.slice, blueprint)
            calls[rows], moved[rows], memory[rows] = work.calls, work.moved, work.memory
        for rows in alike(amounts.batch_size):
            full = Priced(blueprint, WHOLE, int(amounts.batch_size[rows[0]]), 1.0)
            # Often there is no other model than the whole one.
            same = len(groups) == 1 and own == full
            whole[rows] = flops[rows] if same else count(full, rows)[0]
    return Demand(Effort(flops, all_layers, whole, wide, steps, calls, moved), memory)


def _works(train: Worker, priced: Priced, processed: Ints, local_steps: Ints) -> Work:
    """Return the work of many orders, one amount after the other if the trainer must have it so."""
    try:
        found = train.work(priced, processed, local_steps)
        amounts = (found.flops, found.memory, found.calls, found.moved)
        if not {np.shape(amount) for amount in amounts} <= {(), processed.shape}:
            raise ValueError("an amount is neither one number nor one for each order")
    except (TypeError, ValueError):
        table = np.empty((4, len(processed)))
        for rows in alike(processed, local_steps):
            one = train.work(priced, int(processed[rows[0]]), int(local_steps[rows[0]]))
            table[:, rows] = np.array([[one.flops], [one.memory], [one.calls], [one.moved]])
        return Work(*table)
    return found


@lru_cache(maxsize=4096)
def _prices(
    blueprint: Blueprint, slice_: Slice, batch: int, planned: float | None
) -> tuple[Priced, Priced]:
    """Return the costs of a slice, and of it with all layers trained."""
    deep = replace(slice_, first_trained_layer=0)
    return Priced(blueprint, slice_, batch, planned), Priced(blueprint, deep, batch, planned)


def _counted(priced: Priced, work: Work, processed: Counted, counting: Counting) -> Amounts:
    """Return the FLOP of work, or its operations by a rule, which counts one pass over samples."""
    if counting == "flops":
        return work.flops
    once = np.multiply(processed, float(priced.sample.flops))
    often = np.zeros(np.shape(once))
    often = np.divide(work.flops, once, out=often, where=np.greater(processed, 0))
    rule = operations(priced.blueprint, priced.slice, priced.batch_size, counting)
    found: Floats = np.divide(processed, priced.batch_size) * (often * rule)
    return found


def clocked(own: Conditions, frequency: Floats) -> Floats:
    """Return the frequencies at which devices run: those asked for, within their range."""
    asked = np.where(np.isnan(frequency), own.fastest, frequency)
    return np.clip(asked, own.slowest, own.fastest)


def transfer_seconds(bits: Floats | float, bit_rate: Floats | float) -> Floats:
    """Return the seconds that bits take; infinite over a link that carries nothing."""
    some = np.greater(bits, 0)
    within = np.less(np.divide(bits, LONGEST_TRANSFER), bit_rate)
    # No bits take no time, even over a link that is down.
    seconds: Floats = np.where(some, np.inf, np.zeros(within.shape))
    return np.divide(bits, bit_rate, out=seconds, where=within & some)


def transfer_joules(seconds: Floats, watts: Floats | float) -> Floats:
    """Return the joules of transfers that take so many seconds; 0 for one that never ends.

    The radio draws power only while bits cross: waiting for a link is free.
    """
    joules: Floats = watts * np.where(np.isfinite(seconds), seconds, 0.0)
    return joules


def _share(some: Floats, everything: Floats) -> Floats:
    """Return some of everything as a share; 0 of nothing."""
    return np.divide(some, everything, out=np.zeros(len(some)), where=everything > 0)


def _undisturbed(effort: Effort, own: Conditions) -> Floats:
    """Return the seconds at the highest frequency and without other work."""
    fraction, by_flops = _share(effort.flops, effort.whole), np.isnan(own.exponent)
    if not every(by_flops):
        by_trained_layers = _share(effort.flops, effort.all_layers)
        by_width = effort.width ** np.nan_to_num(own.exponent) * by_trained_layers
        fraction = np.where(by_flops, fraction, by_width)
    shrunk = own.fixed * (fraction > 0) + (1 - own.fixed) * fraction
    computing = effort.whole / (own.speed * own.load) * shrunk
    handling = effort.local_steps * own.overhead + effort.calls * own.latency
    seconds: Floats = computing + handling + effort.moved / own.bandwidth
    return seconds
