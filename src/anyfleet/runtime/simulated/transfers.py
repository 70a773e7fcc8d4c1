"""Transfers: how much of each message crosses a link that loses columns."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.delivery import unpadded
from anyfleet.core.messages import Kind
from anyfleet.core.orders import Cohort
from anyfleet.elastic import columns
from anyfleet.errors import CompositionError
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import When
from anyfleet.world.world import Active

_VISITS = (Kind.TRAIN, Kind.HOLD)
_UPLOADS = (Kind.TRAIN, Kind.FETCH)  # kinds whose reply holds a model


@dataclass(frozen=True)
class Transfer:
    """What crosses the link of one order: widths of the model, and shares of its columns."""

    width_down: float = 1.0
    width_up: float = 1.0
    delivered_down: float = 1.0
    delivered_up: float = 1.0


def draw_transfers(orders: Cohort, world: World, when: When, active: Active) -> list[Transfer]:
    """Return the transfer of each order, drawn when it is submitted."""
    if not world.lossy:
        return [Transfer()] * len(orders)
    misfit = unpadded(orders.job)
    if misfit:
        raise CompositionError(misfit)
    keys = event_keys(orders, world.seed, "crossing")
    column_width = world.column_width(orders.device)
    count = np.array([columns(*pair) for pair in zip(orders.width, column_width, strict=True)])
    everything = np.ones(len(orders)), np.ones(len(orders))
    found = []
    with_model: dict[Way, bool] = {
        "down": orders.kind != Kind.FETCH,
        "up": orders.kind in _UPLOADS,
    }
    for way, has_model in with_model.items():
        if not has_model:
            found.append(everything)
            continue
        came = world.delivered_columns(
            count, orders.device, rng.fold(keys, way), when, active=active, way=way
        )
        found.append((np.where(came == count, 1.0, came * column_width), came / count))
    (width_down, delivered_down), (width_up, delivered_up) = found
    arrays = (width_down, width_up, delivered_down, delivered_up)
    return [Transfer(*(float(array[row]) for array in arrays)) for row in range(len(orders))]


def event_keys(orders: Cohort, seed: int, purpose: str) -> Tensor:
    """Return one random key per order for what happens to it, independent of other orders.

    Training is addressed by device and visit. Only training counts as a visit, so other kinds are
    addressed by kind and round too; otherwise a device that dies during one would die during all.
    """
    keys = rng.fold(rng.root(seed, purpose), torch.from_numpy(orders.device))
    keys = rng.fold(keys, torch.from_numpy(orders.visit))
    if orders.kind in _VISITS:
        return keys
    return rng.fold(rng.fold(keys, str(orders.kind)), orders.round_index)
