"""Values that cross a boundary: between loop, parts, client and runtime.

Orders and updates are columnar: a struct of arrays with one row per device, and a single order is a
batch of one. All of them are immutable; `take` and `join` make new batches out of old ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from anyfleet.arrays import Arrays, Floats, Ints
from anyfleet.elastic import Blueprint, Slice
from anyfleet.elastic.blueprint import Rounding
from anyfleet.elastic.cost.operations import Counting

Params = Mapping[str, Tensor]
Trees = Mapping[str, Params]  # "model", "delta", "weights", "buffers"
Report = Mapping[str, Any]  # what a device measured about itself, by name
ChooserState = Mapping[str, tuple[float, ...]]  # what a device's chooser remembers, by name

EVERYTHING = -1  # in a column of step counts: no limit but the trainer's own
MOST_DEVICES = 100_000_000  # of a fleet: whoever writes more mistyped, and would wait for ever


class Kind(StrEnum):
    """What an order asks of a device."""

    TRAIN = "train"  # train and send the result
    HOLD = "hold"  # train, keep the result, send the report only
    FETCH = "fetch"  # send a result held since an earlier order
    EVALUATE = "evaluate"  # measure the model on the device's own test data
    STATISTICS = "statistics"  # measure normalisation statistics on its training data
    REPORT = "report"  # measure the wanted numbers without training


@dataclass(frozen=True, eq=False)
class Devices(Arrays):
    """What the fleet declares once: one row per device, the row number is the device's id."""

    level: Ints  # capability class, 0 the strongest
    samples: Ints  # training samples it holds
    group: Ints  # of the fleet's groups, by number
    column_width: Floats  # models cross its link in columns of this width; 1: in one piece
    counting: Counting = "flops"  # what speeds count, for all: FLOP, or operations of a rule

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The levels that have devices; found once, however large the fleet."""
        return tuple(np.flatnonzero(np.bincount(self.level)).tolist())


@dataclass(frozen=True, eq=False)
class Conditions(Arrays):
    """What devices report at check-in."""

    speed: Floats  # FLOP per second, now, at the highest frequency
    bit_rate_up: Floats  # bits per second
    bit_rate_down: Floats  # bits per second
    memory: Floats  # bytes free for training
    battery: Floats  # joules left; infinite on mains
    loss: Floats  # mean training loss of its last answer; not a number before the first
    budget: Floats  # joules it is willing to spend on one order
    load: Floats  # how many times longer everything takes because of other work
    overhead: Floats  # seconds for each local step, without load
    latency: Floats  # seconds for each call of an operator, without load
    bandwidth: Floats  # bytes per second that it can move besides calculating
    fixed: Floats  # the part of a whole model's time that does not shrink with the slice
    exponent: Floats  # the rest shrinks with this power of the width; not a number: with FLOP
    slowest: Floats  # cycles per second
    fastest: Floats  # cycles per second
    coefficient: Floats  # joules for a cycle, divided by the frequency squared
    send_power: Floats  # watts while sending
    receive_power: Floats  # watts while receiving


@dataclass(frozen=True)
class SubModelSize:
    """The size of a sub-model, before anybody has said which channels."""

    width: float = 1.0
    first_trained_layer: int = 0  # first trained layer
    rounding: Rounding = "ceil"
    axis_widths: tuple[tuple[str, float], ...] = ()  # axes whose share differs
    device: int | None = None  # None: for evaluation, no device in particular

    @property
    def widest(self) -> float:
        """The largest share of any axis."""
        return max(self.width, *(ratio for _, ratio in self.axis_widths), 0.0)

    def widths(self, blueprint: Blueprint) -> dict[str, float]:
        """The share of every axis that is cut."""
        return {**dict.fromkeys(blueprint.counts(1.0), self.width), **dict(self.axis_widths)}

    def counts(self, blueprint: Blueprint) -> dict[str, int]:
        """Channels to keep on every axis that is cut."""
        return blueprint.counts(self.widths(blueprint), self.rounding)

    def prefix(self, blueprint: Blueprint) -> Slice:
        """The leading channels of this size."""
        return _prefix(self if self.device is None else replace(self, device=None), blueprint)


@lru_cache(maxsize=4096)
def _prefix(want: SubModelSize, blueprint: Blueprint) -> Slice:
    # The same slice for all devices that want as much: made once, and hashed once.
    return blueprint.prefix(want.widths(blueprint), want.first_trained_layer, want.rounding)


@dataclass(frozen=True, eq=False)
class Hyperparameters(Arrays):
    """What varies by device inside one stack: numbers, because unequal parts cannot be stacked."""

    lr: Floats
    epochs: Ints
    batch_size: Ints
    local_steps: Ints  # most local steps, or EVERYTHING
    sent_fraction: Floats  # bits to send over those of the uncompressed update; NaN: not asked
    frequency: Floats  # cycles per second; not a number: the fastest it can
    target_seconds: Floats  # seconds that the server aims at for an order; not a number: none

    @classmethod
    def alike(
        cls,
        count: int,
        *,
        lr: float,
        epochs: int = EVERYTHING,
        batch_size: int,
        local_steps: int = EVERYTHING,
    ) -> "Hyperparameters":
        """Return the same hyperparameters for `count` devices, and nothing that planners decide.

        Training by `local_steps` leaves `epochs` out, and the other way round.
        """
        return cls(
            lr=np.full(count, float(lr)),
            epochs=np.full(count, epochs),
            batch_size=np.full(count, batch_size),
            local_steps=np.full(count, local_steps),
            sent_fraction=np.full(count, np.nan),
            frequency=np.full(count, np.nan),
            target_seconds=np.full(count, np.nan),
        )


@dataclass(frozen=True, eq=False)
class Plans(Arrays):
    """What each device of a cohort shall do; a planner rewrites the columns it cares about."""

    device: Ints
    sub_model_sizes: tuple[SubModelSize, ...]
    hyperparameters: Hyperparameters
    menus: tuple[tuple[SubModelSize, ...], ...]  # not empty: the device chooses one of these
    declined: tuple[str, ...]  # the reason why this device is skipped, or ""


@dataclass(frozen=True, eq=False)
class Replies(Arrays):
    """What devices answer."""

    order: Ints
    device: Ints
    samples: Ints
    trees: tuple[Trees, ...]
    symbols: tuple[Any, ...]  # the trained tree as the uplink codec packs it
    masks: tuple[Params, ...]  # what was trained; a name that is absent was trained whole
    kept: tuple[Params, ...]  # what the codec sent of it; a name that is absent was sent whole
    bits: Floats  # uplink
    delivered_width: Floats  # width of the model that came through the link; 1 unless it failed
    report: tuple[Report, ...]

    @property
    def trained(self) -> bool:
        """Whether a single answer brings a training result."""
        (trees,) = self.trees
        return bool(trees.get("delta") or trees.get("weights"))


@dataclass(frozen=True, eq=False)
class DeviceState:
    """What a device keeps between visits."""

    tensors: Mapping[str, Params] = field(default_factory=dict)  # in global coordinates
    held: Replies | None = None  # a result that waits to be fetched
    chooser: ChooserState = field(default_factory=dict)  # the chooser's own
    last_sent_order: int = -1  # the order whose result it last sent; it may never have arrived


@dataclass(frozen=True, eq=False)
class Aggregated:
    """What an aggregator returns."""

    model: Params
    state: Any = None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Charges(Arrays):
    """What the runtime charged for orders."""

    order: Ints
    flops: Floats
    bits_down: Floats  # bits
    bits_up: Floats  # bits
    download_seconds: Floats  # seconds
    compute_seconds: Floats  # seconds
    upload_seconds: Floats  # seconds
    download_joules: Floats
    compute_joules: Floats
    upload_joules: Floats
    began: Floats  # seconds since the start of the run
    delivered_down: Floats  # share of the model's columns that came through
    delivered_up: Floats


@dataclass(frozen=True, eq=False)
class Events:
    """What a runtime has to tell: answers with their charges, and orders without an answer."""

    replies: Replies | None = None
    charges: Charges | None = None
    failures: tuple["Failure", ...] = ()

    def __len__(self) -> int:
        return len(self.failures) + (0 if self.replies is None else len(self.replies))


@dataclass(frozen=True, eq=False)
class Failure:
    """An order that will not be answered. A normal event, not an exception."""

    order: int
    reason: str
    charges: Charges  # what was spent before it was lost


def no_charges(order: int, now: float) -> Charges:
    """Of an order that was never sent."""
    zero = np.zeros(1)
    spent = {f.name: zero for f in fields(Charges)}
    return Charges(**{**spent, "order": np.array([order]), "began": np.array([now])})


def measured(report: Report, name: str) -> float:
    """Return a number that a device reported; NaN when it did not, or nothing finite."""
    told = report.get(name)
    try:
        number = float(told) if isinstance(told, Real) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
