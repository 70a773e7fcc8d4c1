"""An aggregator of one's own: the geometric median, which a few wild devices cannot mislead.

>>> from anyfleet.parts import try_aggregate
>>> deltas = [{"w": torch.tensor(point)} for point in ([0.0, 1.0], [0.0, 1.0], [9e3, 9e3])]
>>> try_aggregate(GeometricMedian(), {"w": torch.zeros(2)}, deltas).model["w"].round(decimals=3)
tensor([0., 1.])
"""

from dataclasses import dataclass

import torch

from anyfleet.parts import Aggregate, Aggregated, add_delta


@dataclass(frozen=True)
class GeometricMedian(Aggregate):
    """The point with the least sum of distances to the updates, by Weiszfeld's iteration."""

    iterations: int = 30

    def __call__(self, model, updates, view, state, key):
        delta = updates.mean(updates.samples)
        for _ in range(self.iterations):
            distances = [max(distance(delta, update), 1e-9) for update in updates]
            delta = updates.mean(updates.samples / distances)
        return Aggregated(add_delta(model, delta), state)


def distance(delta, update):
    """Return how far an update is from `delta`, over the coordinates that its device trained."""
    gaps = ((delta[n] - change)[update.covered[n]] for n, change in update.delta.items())
    return float(torch.cat(tuple(gaps)).norm())
