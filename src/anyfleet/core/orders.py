"""Orders: what the server asks of devices, and how their messages are laid out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, dtype

from anyfleet import rng
from anyfleet.arrays import Arrays, Floats, Ints
from anyfleet.core.layout import MessageLayout, TensorLayout, tensor_layouts
from anyfleet.core.messages import Hyperparameters, Kind, Trees
from anyfleet.core.method import Job
from anyfleet.elastic import Blueprint, Slice, columns


@dataclass(frozen=True, eq=False)
class Cohort(Arrays):
    """What the server asks of devices. Rows of one batch share kind, job and server step."""

    id: Ints
    device: Ints
    visit: Ints  # how often it was asked to train before: the address of its randomness
    key: Tensor  # int64 per row
    slices: tuple[Slice, ...]
    width: Floats  # of the model's width, as planned; a slice is rounded to whole channels
    menus: tuple[tuple[Slice, ...], ...]  # what it can hold of its menu; empty: no choice
    choice: Ints  # which entry of the planner's menu it chose at check-in, or -1
    utility: Floats  # by which it chose, from 0 to 1; not a number: it chose otherwise
    hyperparameters: Hyperparameters
    trees: tuple[Trees, ...]
    symbols: tuple[Any, ...]  # the model as the downlink codec packs it
    bits: Floats  # of the trees and index sets, downlink
    delivered_width: Floats  # width of the model that came through the link; 1 unless it failed
    column_width: Floats  # models travel in columns of this width; 1: in one piece
    acknowledged: Ints  # the device's last order whose training result arrived, or -1
    held_order: Ints  # FETCH: the order whose result is held, else -1
    kind: Kind
    round_index: int
    cohort_key: int  # the key of what the whole cohort draws together
    job: Job


def uplink(
    order: Cohort, blueprint: Blueprint, names: tuple[str, ...], numbers: dtype
) -> MessageLayout:
    """Of the answers to orders of equal slices; the key of an answer is its order's alone."""
    return MessageLayout(_lanes_of(order, names, blueprint), numbers, rng.fold(order.key, "uplink"))


def downlink(
    order: Cohort, blueprint: Blueprint, names: tuple[str, ...], numbers: dtype
) -> MessageLayout:
    """Of the models in orders; one broadcast for all devices of a cohort with this slice."""
    key = rng.fold(torch.tensor([order.cohort_key]), "downlink")
    return MessageLayout(_lanes_of(order, names, blueprint), numbers, key)


def _lanes_of(
    order: Cohort, names: tuple[str, ...], blueprint: Blueprint
) -> Mapping[str, TensorLayout]:
    return tensor_layouts(names, order.slices[0], grid(order), blueprint)


def grid(order: Cohort) -> tuple[int, float]:
    """How many columns its messages have, and how wide they are."""
    column, share = float(order.column_width[0]), float(order.width[0])
    return columns(share, column) if column < 1 else 1, column
