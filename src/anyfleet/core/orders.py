"""Orders: what the server asks of devices, and how their messages are laid out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, dtype

from anyfleet import rng
from anyfleet.arrays import Batch, Floats, Ints
from anyfleet.core.layout import Envelope, Lane, lanes
from anyfleet.core.messages import Kind, Numbers, Report, Trees
from anyfleet.core.method import Job
from anyfleet.core.view import Flight
from anyfleet.elastic import Blueprint, Slice, columns


@dataclass(frozen=True, eq=False)
class Orders(Batch):
    """What the server asks of devices. Rows of one batch share kind, job and server step."""

    id: Ints
    device: Ints
    visit: Ints  # how often it was asked to train before: the address of its randomness
    key: Tensor  # int64 per row
    slices: tuple[Slice, ...]
    share: Floats  # of the model's width, as planned; a slice is rounded to whole channels
    menus: tuple[tuple[Slice, ...], ...]  # what it can hold of its menu; empty: no choice
    choice: Ints  # which entry of the planner's menu it chose at check-in, or -1
    utility: Floats  # by which it chose, from 0 to 1; not a number: it chose otherwise
    numbers: Numbers
    trees: tuple[Trees, ...]
    symbols: tuple[Any, ...]  # the model as the downlink codec packs it
    bits: Floats  # of the trees and index sets, downlink
    delivered: Floats  # width of the model that came through the link; 1 unless it failed
    column: Floats  # models travel in columns of this width; 1: in one piece
    heard: Ints  # the device's last order whose training result arrived, or -1
    of: Ints  # FETCH: the order whose result is held, else -1
    kind: Kind
    step: int
    cohort: int  # the key of what the whole cohort draws together
    job: Job


def flight(order: Orders, report: Report | None = None) -> Flight:
    """Return a single order as policies see it."""
    (number,), (device,) = order.id, order.device
    return Flight(int(number), int(device), order.step, order.kind, report=report or {})


def uplink(order: Orders, blueprint: Blueprint, names: tuple[str, ...], numbers: dtype) -> Envelope:
    """Of the answers to orders of equal slices; the key of an answer is its order's alone."""
    return Envelope(_lanes_of(order, names, blueprint), numbers, rng.fold(order.key, "uplink"))


def downlink(
    order: Orders, blueprint: Blueprint, names: tuple[str, ...], numbers: dtype
) -> Envelope:
    """Of the models in orders; one broadcast for all devices of a cohort with this slice."""
    key = rng.fold(torch.tensor([order.cohort]), "downlink")
    return Envelope(_lanes_of(order, names, blueprint), numbers, key)


def _lanes_of(order: Orders, names: tuple[str, ...], blueprint: Blueprint) -> Mapping[str, Lane]:
    return lanes(names, order.slices[0], grid(order), blueprint)


def grid(order: Orders) -> tuple[int, float]:
    """How many columns its messages have, and how wide they are."""
    column, share = float(order.column[0]), float(order.share[0])
    return columns(share, column) if column < 1 else 1, column
