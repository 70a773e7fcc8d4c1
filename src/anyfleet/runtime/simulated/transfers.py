"""Transfers: how much of each message crosses a link that loses columns."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Arrays, Floats, Ints, alike
from anyfleet.core.delivery import unpadded
from anyfleet.core.messages import TRAINING, Kind
from anyfleet.core.orders import Cohort
from anyfleet.elastic import columns
from anyfleet.errors import CompositionError
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import When
from anyfleet.world.world import Active

_UPLOADS = (Kind.TRAIN, Kind.FETCH)  # kinds whose reply holds a model


@dataclass(frozen=True, eq=False)
class Transfers(Arrays):
    """What crosses the links of orders: widths of the model, and shares of its columns."""

    width_down: Floats
    width_up: Floats
    delivered_down: Floats
    delivered_up: Floats


def draw_transfers(orders: Cohort, world: World, when: When, active: Active) -> Transfers:
    """Return the transfer of each order, drawn when it is submitted."""
    everything = np.ones(len(orders))
    if not world.lossy:
        return Transfers(everything, everything, everything, everything)
    misfit = unpadded(orders.job)
    if misfit:
        raise CompositionError(misfit)
    keys = event_keys(orders, world.seed, "crossing")
    column_width = world.column_width(orders.device)
    count = np.empty(len(orders), dtype=np.int64)
    for rows in alike(orders.width, column_width):
        count[rows] = columns(float(orders.width[rows[0]]), float(column_width[rows[0]]))

    def crossing(way: Way, has_model: bool) -> tuple[Floats, Floats]:
        if not has_model:
            return everything, everything
        came: Ints = world.delivered_columns(
            count, orders.device, rng.fold(keys, way), when, active=active, way=way
        )
        return np.where(came == count, 1.0, came * column_width), came / count

    width_down, delivered_down = crossing("down", orders.kind != Kind.FETCH)
    width_up, delivered_up = crossing("up", orders.kind in _UPLOADS)
    return Transfers(width_down, width_up, delivered_down, delivered_up)


def event_keys(orders: Cohort, seed: int, purpose: str) -> Tensor:
    """Return one random key per order for what happens to it, independent of other orders.

    Training is addressed by device and visit. Only training counts as a visit, so other kinds are
    addressed by kind and round too; otherwise a device that dies during one would die during all.
    """
    keys = rng.fold(rng.root(seed, purpose), torch.from_numpy(orders.device))
    keys = rng.fold(keys, torch.from_numpy(orders.visit))
    if orders.kind in TRAINING:
        return keys
    return rng.fold(rng.fold(keys, str(orders.kind)), orders.round_index)
