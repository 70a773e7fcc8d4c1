"""Choices by time alone, and without any condition."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anyfleet.config.number_values import Unbounded
from anyfleet.core.check_in import CheckIns, Choices
from anyfleet.core.signals import Menu, Signal
from anyfleet.core.slots import Choose


@dataclass(frozen=True)
class First(Choose):
    """The first entry of the menu."""

    def __call__(self, check_ins: CheckIns) -> Choices:
        return check_ins.choices(np.zeros(len(check_ins), dtype=np.int64))


@dataclass(frozen=True)
class LargestInTime(Choose):
    """The first entry that finishes within `seconds`, else the last; menus go downwards."""

    seconds: Unbounded
    requires: ClassVar[frozenset[Signal]] = frozenset({Menu()})

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"LargestInTime.seconds must be positive, got {self.seconds}.")

    def __call__(self, check_ins: CheckIns) -> Choices:
        in_time = check_ins.offered & (check_ins.seconds <= self.seconds)
        last = check_ins.offered.sum(axis=0) - 1
        return check_ins.choices(np.where(in_time.any(axis=0), in_time.argmax(axis=0), last))
