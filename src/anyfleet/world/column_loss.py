"""Links that fail: a model crosses column by column, and the first loss ends the transmission."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Floats, Ints
from anyfleet.errors import refuse
from anyfleet.formulas.links import leading_columns
from anyfleet.world.quantities import Law, bounds


@checked
@dataclass(frozen=True)
class Columns:
    """Sequential columns, `width` of the whole model's width each (FedResCuE).

    A column is lost with probability `error`, and with it all that follow: what arrives is a
    prefix. A law draws a new `error` for every column. With `minimum_bit_rate` (bits per second) the
    link itself says how likely a column is lost: its rate falls below this. The columns are
    independent of the grid of submodel widths.
    """

    width: float = 0.125
    error: float | Law = 0.0
    minimum_bit_rate: float | None = None

    def __post_init__(self) -> None:
        refuse((*no_width("Columns.width", self.width), *self._faults()))
        if self.minimum_bit_rate is not None and bounds(self.error)[1] > 0:
            raise ValueError(
                "Columns.error and Columns.minimum_bit_rate both say how likely a column is lost: "
                "give one of them."
            )

    def _faults(self) -> Iterator[str]:
        yield from no_probability("Columns.error", self.error)
        if self.minimum_bit_rate is not None and not 0 < self.minimum_bit_rate < math.inf:
            yield (
                "Columns.minimum_bit_rate must be finite bits per second above 0, got "
                f"{self.minimum_bit_rate}."
            )

    @property
    def fails(self) -> bool:
        """Whether anything can be lost at all."""
        return self.minimum_bit_rate is not None or bounds(self.error)[1] > 0

    def delivered(self, keys: Tensor, columns: Ints, outage: Floats | None = None) -> Ints:
        """How many leading columns arrive of each transmission.

        Each transmission has a key of its own, of its device, visit and direction. `outage` is
        the link's for `minimum_bit_rate`, and belongs to nothing else.
        """
        if (outage is None) != (self.minimum_bit_rate is None):
            raise ValueError(
                "Columns.delivered takes the link's outage when Columns.minimum_bit_rate is set, "
                f"and only then; minimum_bit_rate is {self.minimum_bit_rate}."
            )
        count = int(columns.max(initial=0))
        error = self._errors(keys, count) if outage is None else outage[:, np.newaxis]
        u = rng.uniform(rng.fold(keys, "column"), count).numpy()
        return np.minimum(leading_columns(u, error), columns)

    def _errors(self, keys: Tensor, count: int) -> float | Floats:
        """The error of each transmission and column."""
        if isinstance(self.error, int | float):
            return self.error
        each = rng.fold(rng.fold(keys, "error").unsqueeze(1), torch.arange(count))
        return self.error.draw(each.flatten()).reshape(len(keys), count)


def no_width(name: str, width: float) -> Iterator[str]:
    """What is wrong with columns that are no part of a model."""
    if not 0 < width <= 1:
        yield f"{name} must lie in (0, 1], a share of the whole width; got {width}."


def no_probability(name: str, *errors: float | Law) -> Iterator[str]:
    """What is wrong with errors that are no probability."""
    for low, high in map(bounds, errors):
        if not 0 <= low <= high <= 1:
            yield (
                f"{name} must be a probability, got numbers from {low:g} to {high:g}; give a law "
                "bounds in [0, 1]."
            )
            return
