"""How much of anything a message may bring: asked before memory is taken for it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from anyfleet.arguments import checked
from anyfleet.config.number_values import Unbounded
from anyfleet.elastic import Blueprint
from anyfleet.errors import refuse

FRAME_BYTES = 8  # around every piece of a message: its length and its checksum
_HEADER, _PER_TENSOR = 1 << 16, 512  # bytes of a header: at least, and for every tensor
_WIDEST = 8  # bytes of a number


@checked
@dataclass(frozen=True)
class Limits:
    """What is refused of messages: what is too large, and updates that are too long.

    None: as the model has it. A message may then have twice the bytes of the model and its header,
    a header as much as names, index sets and masks of the model can take.

    `growth` limits how much larger than usual a change of the model may be (`screening.Sizes`);
    infinity turns it off, and with it the limit that holds before anything is usual.
    """

    message: int | None = None  # bytes
    header: int | None = None  # bytes
    job: int = 1 << 16  # bytes of the parts that an order names
    columns: int = 256
    menu: int = 64  # entries
    report: int | None = None  # numbers
    local_steps: int = 1_000_000
    epochs: int = 10_000
    batch_size: int = 1 << 16  # samples
    count: int = 1_000_000  # of any whole number within a part
    norm: float = math.inf  # of an update, as it is sent: changes, or weights
    growth: Unbounded = 1000.0  # of a change, over the median of those before

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

    def most(self, blueprint: Blueprint) -> "Most":
        """The bytes and numbers that messages about this model may have."""
        return _most(self, blueprint)


@dataclass(frozen=True)
class Most:
    """Limits for messages about one model."""

    message: int  # bytes
    header: int  # bytes
    report: int  # numbers


@lru_cache(maxsize=64)
def _most(limits: Limits, blueprint: Blueprint) -> Most:
    names = [*blueprint.params, *blueprint.buffers]
    entries = blueprint.numel(names)
    channels = sum(blueprint.sizes.values())
    told = 4 * channels * (1 + limits.menu)  # an index set for each entry of a menu
    report = limits.report or 64 + 4 * channels
    header = limits.header or _HEADER + limits.job + told + 9 * report
    header = limits.header or header + _PER_TENSOR * len(names) + entries // 8
    framed = FRAME_BYTES * (2 + limits.columns)
    return Most(limits.message or header + framed + 2 * _WIDEST * entries, header, report)
