"""Many train, and those upload whose updates are largest (BN2)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.messages import Devices, measured
from anyfleet.core.signals import HeldResults, Signal
from anyfleet.core.slots import Select, State
from anyfleet.core.view import OrderStatus, View
from anyfleet.errors import refuse
from anyfleet.formulas.contribution import bn2_largest
from anyfleet.papers import BN2, Paper
from anyfleet.parts.select.uniform import drawn, more_than_all


@dataclass(frozen=True)
class Largest(Select):
    """A uniform draw of `draw` devices trains; the `keep` with the largest `measure` upload.

    specification §1.20, with the length of the update as the measure: equal ones go by device, and what
    is not a number comes last. All compute, and send that number first, so the method needs a
    schedule in which results wait on the devices.
    """

    draw: int = 20
    keep: int = 10
    measure: str = "norm"

    papers: ClassVar[tuple[Paper, ...]] = (BN2,)
    requires: ClassVar[frozenset[Signal]] = frozenset({HeldResults()})

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.keep < 1:
            yield f"Largest.keep must be at least 1, got {self.keep}."
        if self.measure == "channels":
            yield 'Largest.measure must be a single number of a device, "channels" are many.'
        if self.draw < self.keep:
            yield f"Largest.draw must be at least keep={self.keep}, got {self.draw}."

    @property
    def reports(self) -> frozenset[str]:
        return frozenset({self.measure})

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return drawn(
            view, self.draw if view.most_devices is None else min(self.draw, view.most_devices), key
        )

    def excess(self, devices: Devices) -> str:
        return more_than_all("Largest.draw", self.draw, len(devices))

    def fetch(self, view: View, held: Sequence[OrderStatus]) -> Sequence[OrderStatus]:
        flights = sorted(held, key=lambda flight: flight.device)
        values = np.array([measured(flight.report, self.measure) for flight in flights])
        # Asked in the order of devices, as any cohort is.
        return [flights[row] for row in sorted(bn2_largest(values, self.keep).tolist())]
