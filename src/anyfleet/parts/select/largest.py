"""Selection by the size of updates: many devices train, those with the largest upload (BN2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.messages import Devices
from anyfleet.core.signals import HeldResults, Signal
from anyfleet.core.slots import Measure, Select, State
from anyfleet.core.view import OrderStatuses, View
from anyfleet.errors import refuse
from anyfleet.formulas.contribution import bn2_largest
from anyfleet.papers import BN2, Paper
from anyfleet.parts.select.uniform import drawn, more_than_all, wanted


@dataclass(frozen=True)
class Largest(Select):
    """A uniform draw of `draw` devices trains; the `keep` with the largest `number` upload.

    The number is one that devices report: by default the norm of the update, as in specification
    §1.20. Equal ones go by device number, and NaN comes last. All devices train and report first,
    so the method needs a schedule under which results wait on the devices. `measures` brings in
    what devices measure for it, as `Fisher()` for "fisher", unless another part does.
    """

    draw: int = 20  # devices that train
    keep: int = 10  # devices that upload
    number: str = "norm"  # of a device's report
    measures: tuple[Measure, ...] = ()

    papers: ClassVar[tuple[Paper, ...]] = (BN2,)
    requires: ClassVar[frozenset[Signal]] = frozenset({HeldResults()})

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.keep < 1:
            yield f"Largest.keep must be at least 1, got {self.keep}."
        if any(self.number in each.vectors for each in self.measures):
            yield f'Largest.number must be a single number of a device, "{self.number}" are many.'
        if self.draw < self.keep:
            yield f"Largest.draw must be at least keep={self.keep}, got {self.draw}."

    @property
    def reports(self) -> frozenset[str]:
        return frozenset({self.number})

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return drawn(view, wanted(view, self.draw), key)

    def excess(self, devices: Devices) -> str:
        return more_than_all("Largest.draw", self.draw, len(devices))

    def fetch(self, held: OrderStatuses, view: View) -> Ints:
        by_device = held.take(np.argsort(held.device, kind="stable"))
        rows = bn2_largest(by_device.report(self.number), self.keep)
        # In the order of devices, as any cohort is.
        return by_device.order[np.sort(rows)]
