"""The values that cross a boundary: between the server, the parts of a method, devices and runtime.

What concerns many devices is a struct of arrays with one row for each device; what concerns one
device is a struct of one row. All values are immutable; `take` and `join` make new ones out of old.
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
from anyfleet.names import near

Params = Mapping[str, Tensor]
Trees = Mapping[str, Params]  # "model", "delta", "weights", "buffers"
Report = Mapping[str, Any]  # the numbers that a device measured, by name
ChooserState = Mapping[str, tuple[float, ...]]  # what a chooser keeps on its device, by name

EVERYTHING = -1  # for a number of epochs or local steps: not limited by it


class Kind(StrEnum):
    """What an order asks of a device."""

    TRAIN = "train"  # train and send the result
    HOLD = "hold"  # train, hold the result and send the report only
    FETCH = "fetch"  # send the result held since an earlier order
    EVALUATE = "evaluate"  # measure the model on the device's own test data
    STATISTICS = "statistics"  # measure normalisation statistics on its training data
    REPORT = "report"  # measure the numbers of a report without training


TRAINING = (Kind.TRAIN, Kind.HOLD)  # kinds of orders that train
OF_TRAINING = (*TRAINING, Kind.FETCH)  # kinds whose replies tell of training


@dataclass(frozen=True, eq=False)
class Devices(Arrays):
    """What the devices of a fleet declare once; the row of a device is its number."""

    level: Ints  # capability class, 0 the strongest
    samples: Ints  # training samples it holds
    group: Ints  # number of its group in the fleet
    column_width: Floats  # models cross its link in columns of this width; 1: in one piece
    counting: Counting = (
        "flops"  # what the speed of every device counts: FLOP, or operations by a rule
    )

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The levels that have devices, ascending; found once, however large the fleet."""
        return tuple(np.flatnonzero(np.bincount(self.level)).tolist())


@dataclass(frozen=True, eq=False)
class Conditions(Arrays):
    """What devices report of themselves at check-in: arrays with one entry for each device.

    `speed` is FLOP per second now, `bit_rate_up` and `bit_rate_down` are bits per second, `memory`
    is bytes that are free for training, `battery` is joules left (infinite on mains), `budget` is
    joules that one order may cost, `loss` is that of the last reply (NaN before the first), and
    `load` is how many times longer everything takes because of other work. The other fields are
    those of a group of the fleet (docs/fleets.md).
    """

    speed: Floats  # FLOP per second, now, at the highest frequency
    bit_rate_up: Floats  # bits per second
    bit_rate_down: Floats  # bits per second
    memory: Floats  # bytes free for training
    battery: Floats  # joules left; infinite on mains
    loss: Floats  # mean training loss of its last reply; NaN before the first
    budget: Floats  # joules it is willing to spend on one order
    load: Floats  # factor by which other work slows everything
    overhead: Floats  # seconds for each local step, without load
    latency: Floats  # seconds for each call of an operator, without load
    bandwidth: Floats  # bytes per second that it can move besides calculating
    fixed: Floats  # the part of a whole model's time that does not shrink with the slice
    exponent: Floats  # the rest shrinks with this power of the width; NaN: with FLOP
    slowest: Floats  # lowest frequency, cycles per second
    fastest: Floats  # highest frequency, cycles per second
    coefficient: Floats  # joules for a cycle, divided by the frequency squared
    send_power: Floats  # watts while sending
    receive_power: Floats  # watts while receiving


@dataclass(frozen=True)
class SubModelSize:
    """The size of a sub-model that is wanted, before its channels are picked."""

    width: float = 1.0
    first_trained_layer: int = 0  # this layer and all behind it are trained
    rounding: Rounding = "ceil"
    axis_widths: tuple[tuple[str, float], ...] = ()  # axes of another width, by name

    @property
    def widest(self) -> float:
        """The largest width of any axis."""
        return max(self.width, *(width for _, width in self.axis_widths), 0.0)

    def widths(self, blueprint: Blueprint) -> dict[str, float]:
        """Return the width of every axis that is cut, by name."""
        return {**dict.fromkeys(blueprint.counts(1.0), self.width), **dict(self.axis_widths)}

    def counts(self, blueprint: Blueprint) -> dict[str, int]:
        """Return how many channels are kept of every axis that is cut, by name."""
        return blueprint.counts(self.widths(blueprint), self.rounding)

    def prefix(self, blueprint: Blueprint) -> Slice:
        """Return the slice of the leading channels."""
        return _prefix(self, blueprint)


@lru_cache(maxsize=4096)
def _prefix(size: SubModelSize, blueprint: Blueprint) -> Slice:
    """Return the slice of the leading channels: one value for all devices, hashed only once."""
    return blueprint.prefix(size.widths(blueprint), size.first_trained_layer, size.rounding)


@dataclass(frozen=True, eq=False)
class Hyperparameters(Arrays):
    """What each device trains with: numbers that may differ between devices trained together."""

    lr: Floats
    epochs: Ints
    batch_size: Ints
    local_steps: Ints  # at most, or EVERYTHING
    sent_fraction: Floats  # bits to send over those of the uncompressed update; NaN: not asked
    frequency: Floats  # cycles per second; NaN: the highest it has
    target_seconds: Floats  # duration of an order that the server aims at; NaN: none

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

    def changed(self, **values: Any) -> "Hyperparameters":
        """Return these hyperparameters with others: an array each, or one number for all rows."""
        for name in values:
            if name not in self.__dataclass_fields__:
                hint = near(name, self.__dataclass_fields__)
                raise TypeError(f"there is no hyperparameter {name!r}{hint or '.'}")
        arrays = {}
        for name, value in values.items():
            # Fractions of an epoch or a local step are refused, not cut off.
            numbers = np.asarray(value).astype(getattr(self, name).dtype, casting="same_kind")
            arrays[name] = np.array(np.broadcast_to(numbers, len(self)))
        return replace(self, **arrays)


@dataclass(frozen=True, eq=False)
class Aggregated:
    """What an aggregator returns: the new model, its own new state, and diagnostics."""

    model: Params
    state: Any = None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Charges(Arrays):
    """What orders cost, as the runtime charged it."""

    order: Ints
    flops: Floats
    bits_down: Floats
    bits_up: Floats
    download_seconds: Floats
    compute_seconds: Floats
    upload_seconds: Floats
    download_joules: Floats
    compute_joules: Floats
    upload_joules: Floats
    began: Floats  # seconds since the start of the run
    delivered_down: Floats  # share of the model's columns that came through
    delivered_up: Floats


def no_charges(orders: Ints, now: float) -> Charges:
    """Return the charges of orders that were never sent: all zero."""
    spent = {f.name: np.zeros(len(orders)) for f in fields(Charges)}
    return Charges(**{**spent, "order": orders, "began": np.full(len(orders), now)})


def measured(report: Report, name: str) -> float:
    """Return the number that a device reported; NaN if it reported none, or not a finite one."""
    value = report.get(name)
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
