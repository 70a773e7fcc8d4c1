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

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from anyfleet.arrays import Arrays, Floats
from anyfleet.core.messages import Conditions
from anyfleet.core.training_work import Counted, Work
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

    def seconds(self, own: Conditions, frequency: Floats) -> Floats:
        """Return the seconds that it takes; a `frequency` of NaN means the fastest."""
        return _undisturbed(self, own) * own.load * own.fastest / clocked(own, frequency)

    def cycles(self, own: Conditions) -> Floats:
        """Return the cycles that the processor spends on it, without other work."""
        return _undisturbed(self, own) * own.fastest

    def joules(self, own: Conditions, frequency: Floats) -> Floats:
        """Return the joules that it costs; other work takes time, but pays for its own cycles."""
        energy: Floats = own.coefficient * clocked(own, frequency) ** 2 * self.cycles(own)
        return energy


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

    flops: float
    all_layers: float
    whole: float


def effort_of(
    counts: Counts, width: float, *, local_steps: int, calls: float, moved: float
) -> Effort:
    """Return the effort of one order, as a batch of one."""
    return Effort(*(np.array([float(v)]) for v in (*counts, width, local_steps, calls, moved)))


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


@lru_cache(maxsize=4096)
def training(
    train: Worker, blueprint: Blueprint, slice_: Slice, amount: Amount, counting: Counting
) -> Demand:
    """Return what it takes to train a slice, as a batch of one."""
    three = slice_, replace(slice_, first_trained_layer=0), WHOLE
    batch, processed, local_steps = amount.batch_size, amount.processed, amount.local_steps
    planned = amount.width, amount.width, 1.0
    prices = [Priced(blueprint, e, batch, p) for e, p in zip(three, planned, strict=True)]
    with during("train", train):
        works = [train.work(priced, processed, local_steps) for priced in prices]
    counts = Counts(*(float(work.flops) for work in works))
    if counting != "flops":
        # The rules count one pass over the samples: a trainer may do several.
        passes = [
            float(work.flops) / (processed * priced.sample.flops) if processed else 0.0
            for work, priced in zip(works, prices, strict=True)
        ]
        counted = [operations(blueprint, each, batch, counting) for each in three]
        pairs = zip(passes, counted, strict=True)
        counts = Counts(*(processed / batch * (often * once) for often, once in pairs))
    own, calls, moved = works[0], float(works[0].calls), float(works[0].moved)
    effort = effort_of(
        counts, width(slice_, blueprint), local_steps=local_steps, calls=calls, moved=moved
    )
    return Demand(effort, np.array([float(own.memory)]))


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


def _undisturbed(effort: Effort, own: Conditions) -> Floats:
    """Return the seconds at the highest frequency and without other work."""
    by_work, by_trained_layers = (
        np.divide(effort.flops, all_of_it, out=np.zeros(len(effort)), where=all_of_it > 0)
        for all_of_it in (effort.whole, effort.all_layers)
    )
    by_width = effort.width ** np.nan_to_num(own.exponent) * by_trained_layers
    fraction = np.where(np.isnan(own.exponent), by_work, by_width)
    shrunk = own.fixed * (fraction > 0) + (1 - own.fixed) * fraction
    computing = effort.whole / (own.speed * own.load) * shrunk
    handling = effort.local_steps * own.overhead + effort.calls * own.latency
    seconds: Floats = computing + handling + effort.moved / own.bandwidth
    return seconds
