"""How much of each message a failing link lets through."""

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
_UPLOADS = (Kind.TRAIN, Kind.FETCH)  # answers with a model in them


@dataclass(frozen=True)
class Transfer:
    """One order's way down and back: widths of the model, and shares of its columns."""

    down: float = 1.0
    up: float = 1.0
    down_share: float = 1.0
    up_share: float = 1.0


def transfers(orders: Cohort, world: World, when: When, active: Active) -> list[Transfer]:
    """Drawn when orders are submitted."""
    if not world.lossy:
        return [Transfer()] * len(orders)
    misfit = unpadded(orders.job)
    if misfit:
        raise CompositionError(misfit)
    keys = addresses(orders, world.seed, "crossing")
    step = world.column_width(orders.device)
    count = np.array([columns(*pair) for pair in zip(orders.width, step, strict=True)])
    whole = np.ones(len(orders)), np.ones(len(orders))
    ways = []
    crosses: dict[Way, bool] = {
        "down": orders.kind != Kind.FETCH,
        "up": orders.kind in _UPLOADS,
    }
    for way, carries in crosses.items():
        if not carries:
            ways.append(whole)
            continue
        way_keys = rng.fold(keys, way)
        came = world.delivered_columns(count, orders.device, way_keys, when, active=active, way=way)
        ways.append((np.where(came == count, 1.0, came * step), came / count))
    (down, down_share), (up, up_share) = ways
    return [
        Transfer(*(float(column[row]) for column in (down, up, down_share, up_share)))
        for row in range(len(orders))
    ]


def addresses(orders: Cohort, seed: int, purpose: str) -> Tensor:
    """Keys for what befalls orders: the same whatever happens to others.

    Training is addressed by device and visit. Only training counts as a visit, so all else also
    needs its step: a device whom one question kills would die of every other.
    """
    keys = rng.fold(rng.root(seed, purpose), torch.from_numpy(orders.device))
    keys = rng.fold(keys, torch.from_numpy(orders.visit))
    if orders.kind in _VISITS:
        return keys
    return rng.fold(rng.fold(keys, str(orders.kind)), orders.round_index)
