"""The metric by which a run is measured: which one, which way is better, how it is written."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_LESS = ("loss", "error", "mse", "mae", "mape", "perplexity", "nll", "entropy", "distance")
_FEWEST, _DIGITS = 4, 17  # of a number: those that are usual, and all that it has
_SHORT = frozenset({"err", "ppl", "wer", "cer"})


def main_metric(names: Iterable[str]) -> str:
    """Return the metric by which a task with these metrics is measured.

    It is accuracy if that is among them, otherwise the first, or the loss without any.
    """
    known = list(names)
    return "accuracy" if "accuracy" in known else next(iter(known), "loss")


@dataclass(frozen=True)
class Metric:
    """A metric, known by its name alone.

    Less is better if a word of the name ends in loss, error, mse, mae, mape, perplexity, nll,
    entropy or distance, or is err, ppl, wer or cer ("rmse", "word_error_rate"); otherwise more is
    better. A metric whose name ends in "accuracy" is a share and written in per cent; all others
    are written as they are.
    """

    name: str = "accuracy"

    @property
    def less(self) -> bool:
        """True if less is better."""
        words = re.split(r"[^a-z0-9]+", self.name.lower())
        return any(word.endswith(_LESS) or word in _SHORT for word in words)

    @property
    def share(self) -> bool:
        """True if values are shares, from 0 to 1."""
        return self.name.lower().endswith("accuracy")

    @property
    def head(self) -> str:
        """The head above values in a table, each multiplied by `scale`."""
        return f"{self.name} %" if self.share else self.name

    @property
    def scale(self) -> float:
        """The factor of values below `head`."""
        return 100.0 if self.share else 1.0

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values, leaving out NaN; NaN without any."""
        known = [value for value in values if not math.isnan(value)]
        return (min if self.less else max)(known, default=math.nan)

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of some values; NaN without any, or if one of them is NaN."""
        known = list(values)
        if any(map(math.isnan, known)):
            return math.nan
        return (max if self.less else min)(known, default=math.nan)

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is at least as good as a target; NaN never is."""
        return value <= target if self.less else value >= target

    def told(self, value: float) -> str:
        """Return a value as people write it: "71.3 %", or with four digits; "–" for NaN."""
        if math.isnan(value):
            return "–"
        return percent(value) if self.share else f"{value:.4g}"

    def apart(self, value: float, other: float) -> str:
        """Return a value with as many digits as tell it from another one, if it is another."""
        for digits in range(_FEWEST, _DIGITS):
            text, same = self._digits(value, digits), self._digits(other, digits)
            if text != same:
                return self.told(value) if digits == _FEWEST else text
        return self.told(value)

    def _digits(self, value: float, digits: int) -> str:
        return f"{100 * value:.{digits - 3}f} %" if self.share else f"{value:.{digits}g}"


def percent(share: float) -> str:
    """Return a share as people write it: "71.3 %"."""
    return f"{100 * share:.1f} %"
