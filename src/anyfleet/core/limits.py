"""Limits: how large a fleet, a message and an update may be before they are refused."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from anyfleet.arguments import checked
from anyfleet.config.number_values import Unbounded
from anyfleet.elastic import Blueprint
from anyfleet.errors import refuse

MOST_DEVICES = 100_000_000  # of a fleet: more is a slip, and would take for ever
FRAME_BYTES = 8  # of every piece of a message, for its length and its checksum
_HEADER, _PER_TENSOR = 1 << 16, 512  # bytes of a header: at least, and for every tensor
_WIDEST = 8  # bytes of a number


@checked
@dataclass(frozen=True)
class Limits:
    """The limits above which messages and updates are refused.

    None stands for what the model needs: a message may then have twice the bytes of the model and
    its header, and a header as many as the names, index sets and masks of the model can take.

    `growth` limits how much larger than usual an update may be (`screening.UpdateSizes`).
    Infinity turns it off, and with it the limit that holds before it is known what is usual.
    """

    message: int | None = None  # bytes
    header: int | None = None  # bytes
    job: int = 1 << 16  # bytes of the parts that an order names
    columns: int = 256  # of a message
    menu: int = 64  # entries
    report: int | None = None  # numbers
    local_steps: int = 1_000_000  # of an order
    epochs: int = 10_000  # of an order
    batch_size: int = 1 << 16  # samples
    count: int = 1_000_000  # of any whole number within a part
    norm: float = math.inf  # of an update as it is sent: of changes, or of weights
    growth: Unbounded = 1000.0  # size of an update over the median of those before

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        counts = ("job", "columns", "menu", "local_steps", "epochs", "batch_size", "count")
        derived = ("message", "header", "report")
        for name in (*counts, *(each for each in derived if getattr(self, each) is not None)):
            if getattr(self, name) < 1:
                yield f"Limits.{name} must be at least 1, got {getattr(self, name)}."
        if not self.norm > 0:
            yield f"Limits.norm must be above 0, got {self.norm}."
        if not self.growth >= 1:
            yield (
                f"Limits.growth must be at least 1, got {self.growth}; infinity (inf) turns it off."
            )

    def for_model(self, blueprint: Blueprint) -> "MessageLimits":
        """Return the limits of messages about this model."""
        return _for_model(self, blueprint)


@dataclass(frozen=True)
class MessageLimits:
    """The limits of messages about one model."""

    message: int  # bytes
    header: int  # bytes
    report: int  # numbers


@lru_cache(maxsize=64)
def _for_model(limits: Limits, blueprint: Blueprint) -> MessageLimits:
    """Return the limits of messages about a model, worked out once."""
    names = [*blueprint.params, *blueprint.buffers]
    entries = blueprint.numel(names)
    channels = sum(blueprint.sizes.values())
    indices = 4 * channels * (1 + limits.menu)  # an index set for each entry of a menu
    report = limits.report or 64 + 4 * channels
    header = limits.header or _HEADER + limits.job + indices + 9 * report
    header = limits.header or header + _PER_TENSOR * len(names) + entries // 8
    framed = FRAME_BYTES * (2 + limits.columns)
    return MessageLimits(limits.message or header + framed + 2 * _WIDEST * entries, header, report)
