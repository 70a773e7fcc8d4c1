"""How long a device calculates, and what that costs: one law for planners, devices and simulator.

    seconds = (steps × overhead + calls × latency + moved / bandwidth
               + whole / speed × (fixed + (1 − fixed) × share))
              × load × fastest / frequency
    joules  = coefficient × frequency² × cycles

`share` is FLOP / whole, or, for a device with an exponent, width^exponent, less what a slice with
fewer trained layers saves; cycles are what the device spends on it, not on its other work. A device
with a speed and nothing else takes FLOP / speed seconds, or cycles / frequency (specification §A.1).
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

IN_TIME = 1 - 1e-9  # of what may be spent: a plan that fits exactly must not be late by rounding


@dataclass(frozen=True, eq=False)
class Effort(Arrays):
    """What orders make devices calculate."""

    flops: Floats
    deep: Floats  # FLOP if every layer of the slice were trained
    whole: Floats  # FLOP of the same samples on the whole model
    width: Floats  # of the slice
    local_steps: Floats  # local steps
    calls: Floats  # of operators
    moved: Floats  # bytes that operators read and write

    def seconds(self, own: Conditions, frequency: Floats) -> Floats:
        """How long it takes; a `frequency` that is not a number means the fastest."""
        return _undisturbed(self, own) * own.load * own.fastest / clocked(own, frequency)

    def cycles(self, own: Conditions) -> Floats:
        """What the processor spends on it, without other work."""
        return _undisturbed(self, own) * own.fastest

    def joules(self, own: Conditions, frequency: Floats) -> Floats:
        """What it costs: other work slows a device down, but pays for its own cycles."""
        energy: Floats = own.coefficient * clocked(own, frequency) ** 2 * self.cycles(own)
        return energy


@dataclass(frozen=True, eq=False)
class Demand(Arrays):
    """What orders ask of devices."""

    effort: Effort
    memory: Floats  # bytes at the peak

    def then(self, after: "Demand") -> "Demand":
        """One after the other."""
        amounts = ("flops", "deep", "whole", "local_steps", "calls", "moved")
        both = {n: getattr(self.effort, n) + getattr(after.effort, n) for n in amounts}
        return Demand(replace(self.effort, **both), np.maximum(self.memory, after.memory))


class Counts(NamedTuple):
    """How much is calculated: on the slice, with all its layers trained, on the whole model."""

    flops: float
    deep: float
    whole: float


def effort_of(counts: Counts, width: float, *, steps: int, calls: float, moved: float) -> Effort:
    """A batch of one."""
    return Effort(*(np.array([float(v)]) for v in (*counts, width, steps, calls, moved)))


@dataclass(frozen=True)
class Amount:
    """How much of a slice's training: in batches of which size, how many samples and steps."""

    batch_size: int
    processed: int = 0
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
    """What it takes to train a slice; a batch of one."""
    three = slice_, replace(slice_, first_trained_layer=0), WHOLE
    batch, processed, steps = amount.batch_size, amount.processed, amount.local_steps
    planned = amount.width, amount.width, 1.0
    prices = [Priced(blueprint, e, batch, p) for e, p in zip(three, planned, strict=True)]
    with during("train", train):
        works = [train.work(priced, processed, steps) for priced in prices]
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
    own, share = works[0], width(slice_, blueprint)
    effort = effort_of(counts, share, steps=steps, calls=float(own.calls), moved=float(own.moved))
    return Demand(effort, np.array([float(own.memory)]))


def clocked(own: Conditions, frequency: Floats) -> Floats:
    """The frequencies at which devices run: those asked for, within their range."""
    wanted = np.where(np.isnan(frequency), own.fastest, frequency)
    return np.clip(wanted, own.slowest, own.fastest)


def transfer_seconds(bits: Floats | float, bit_rate: Floats) -> Floats:
    """How long bits take at a rate; over a link that carries nothing, for ever."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # Of nothing, nothing waits: not even for a link that is down.
        seconds: Floats = np.where(np.asarray(bits) > 0, bits / bit_rate, 0.0)
    return seconds


def _undisturbed(effort: Effort, own: Conditions) -> Floats:
    """Seconds at the highest frequency and without other work."""
    by_work, by_depth = (
        np.divide(effort.flops, all_of_it, out=np.zeros(len(effort)), where=all_of_it > 0)
        for all_of_it in (effort.whole, effort.deep)
    )
    by_width = effort.width ** np.nan_to_num(own.exponent) * by_depth
    share = np.where(np.isnan(own.exponent), by_work, by_width)
    shrunk = own.fixed * (share > 0) + (1 - own.fixed) * share
    calculating = effort.whole / (own.speed * own.load) * shrunk
    handling = effort.local_steps * own.overhead + effort.calls * own.latency
    seconds: Floats = calculating + handling + effort.moved / own.bandwidth
    return seconds
