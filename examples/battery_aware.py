"""A selection of one's own: it asks the devices that have the most battery left."""

from dataclasses import dataclass

import numpy as np

from anyfleet.parts import Select, rng


@dataclass(frozen=True)
class BatteryAware(Select):
    """The `count` idle devices with the most joules left, in random order among equal ones."""

    count: int = 5

    def __call__(self, view, state, key):
        joules = view.conditions(view.idle).battery
        ties = rng.uniform(key, len(view.idle)).numpy()
        return view.idle[np.lexsort((ties, -joules))[: self.count]]
