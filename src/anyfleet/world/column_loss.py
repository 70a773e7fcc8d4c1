"""Links that lose columns: a model crosses column by column, and the first loss ends it."""

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
from anyfleet.world.quantities import Distribution, bounds


@checked
@dataclass(frozen=True)
class ColumnLoss:
    """The loss of columns on a link (FedResCuE); a column is `column_width` of the model's width.

    A column is lost with probability `error`, and all that follow are lost with it: what arrives
    is a prefix. A distribution draws a new `error` for every column. With `minimum_bit_rate` (bits
    per second) the link itself decides: a column is lost when the bit rate falls below it. The
    columns do not depend on the widths of the sub-models.
    """

    column_width: float = 0.125
    error: float | Distribution = 0.0
    minimum_bit_rate: float | None = None

    def __post_init__(self) -> None:
        refuse(
            (*column_width_faults("ColumnLoss.column_width", self.column_width), *self._faults())
        )
        if self.minimum_bit_rate is not None and bounds(self.error)[1] > 0:
            raise ValueError(
                "ColumnLoss.error and ColumnLoss.minimum_bit_rate both say how likely a column is "
                "lost; give only one of them."
            )

    def _faults(self) -> Iterator[str]:
        yield from probability_faults("ColumnLoss.error", self.error)
        if self.minimum_bit_rate is not None and not 0 < self.minimum_bit_rate < math.inf:
            yield (
                "ColumnLoss.minimum_bit_rate must be finite bits per second above 0, got "
                f"{self.minimum_bit_rate}."
            )

    @property
    def lossy(self) -> bool:
        """True if a column can be lost at all."""
        return self.minimum_bit_rate is not None or bounds(self.error)[1] > 0

    def delivered(self, keys: Tensor, columns: Ints, outage: Floats | None = None) -> Ints:
        """Return how many leading columns of each transmission arrive.

        There is one key for each transmission, made of device, visit and direction. `outage` is
        the probability that the link falls below `minimum_bit_rate`; pass it exactly when that is
        set.
        """
        if (outage is None) != (self.minimum_bit_rate is None):
            raise ValueError(
                "ColumnLoss.delivered takes the link's outage when ColumnLoss.minimum_bit_rate is "
                f"set, and only then; minimum_bit_rate is {self.minimum_bit_rate}."
            )
        count = int(columns.max(initial=0))
        error = self._errors(keys, count) if outage is None else outage[:, np.newaxis]
        u = rng.uniform(rng.fold(keys, "column"), count).numpy()
        return np.minimum(leading_columns(u, error), columns)

    def _errors(self, keys: Tensor, count: int) -> float | Floats:
        """Return the error of each transmission and column, or the one number for all."""
        if isinstance(self.error, int | float):
            return self.error
        each = rng.fold(rng.fold(keys, "error").unsqueeze(1), torch.arange(count))
        return self.error.draw(each.flatten()).reshape(len(keys), count)


def column_width_faults(name: str, width: float) -> Iterator[str]:
    """Yield what is wrong with the width of a column."""
    if not 0 < width <= 1:
        yield f"{name} must lie in (0, 1], a share of the model's width; got {width}."


def probability_faults(name: str, *errors: float | Distribution) -> Iterator[str]:
    """Yield what is wrong with the first of these numbers that is not a probability."""
    for low, high in map(bounds, errors):
        if not 0 <= low <= high <= 1:
            yield (
                f"{name} must be a probability, got numbers from {low:g} to {high:g}; give a "
                "distribution bounds in [0, 1]."
            )
            return
