"""Lattices of whole steps and of hexagons, with step 1, and dither on their cells.

Points are stacked by device and coordinate, [devices, dimension, blocks] (specification §1.15). The
basis of hexagons is (1, ±1/√3). With `a` and `b` multiples of it, a point's quantisation levels are
`a + b` and `(a - b) / 2` rounded down. Whether `a - b` is odd follows from the first level, and the
first coordinate needs no second level.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_HEIGHT = 1 / math.sqrt(3)


class Dither(NamedTuple):
    """Points of the cell around 0, as distances from its axes and on which side of these."""

    shift: Tensor
    side: Tensor  # 1 or -1


def blocks(rows: Tensor, dimension: int) -> Tensor:
    """Return rows of entries in blocks, the last one filled with zeros."""
    count, size = rows.shape
    many = -(-size // dimension)
    full = pad(rows, (0, many * dimension - size)).reshape(count, many, dimension)
    return full.transpose(1, 2).contiguous()


def entries(points: Tensor, size: int) -> Tensor:
    """Return blocks as rows of `size` entries: the inverse of `blocks`."""
    return points.transpose(1, 2).flatten(1)[:, :size]


def dither(u: Tensor) -> Dither:
    """Return dither that is uniform on a cell, from numbers in [0, 1) for every coordinate."""
    # In place from here on: new tensors cost more than the arithmetic.
    side = (u >= 0.5).to(u.dtype)
    place = (2 * u).sub_(side)
    side.mul_(2).sub_(1)
    if u.shape[1] == 1:
        return Dither(place / 2, side)
    across, up = place.unbind(1)
    # A quarter of a hexagon and its copy turned upside down fill a rectangle.
    beyond = across + up / 3 > 2 / 3
    turned = (beyond[:, None].to(u.dtype) - place).abs_()
    turned[:, 1].mul_(_HEIGHT)
    return Dither(turned, side)


def nearest(points: Tensor) -> Tensor:
    """Return the quantisation levels of the nearest points of the lattice, not yet whole numbers.

    Hexagons are two rectangular lattices, one in the middles of the other: the nearest point of
    each is that of its coordinates, and which of them is nearer follows from the distances.
    """
    if points.shape[1] == 1:
        return points.round()
    across, up = points[:, 0] / 2, points[:, 1] / (2 * _HEIGHT)
    first, second = across.round(), up.round()
    between = (across - first).abs_().add_((up - second).abs_(), alpha=1 / 3) > 1 / 3
    torch.where(between, across.floor_().mul_(2).add_(1), first.mul_(2), out=first)
    torch.where(between, up.floor_(), second, out=second)
    return torch.stack([first, second], dim=1)


def points(levels: Tensor) -> Tensor:
    """Return the points that quantisation levels stand for."""
    if levels.shape[1] == 1:
        return levels
    first, second = levels.unbind(1)
    return torch.stack([first, (2 * second + first.remainder(2)) * _HEIGHT], dim=1)
