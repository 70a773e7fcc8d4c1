"""Orders: what the server asks of devices, and the layouts of the messages that carry them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, dtype

from anyfleet import rng
from anyfleet.arrays import Arrays, Flags, Floats, Ints, listed
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout, tensor_layouts
from anyfleet.core.messages import Hyperparameters, Kind, Trees
from anyfleet.core.method import Job
from anyfleet.core.stacks import Reports
from anyfleet.core.view import KIND, Kinds, OrderStatuses
from anyfleet.elastic import Blueprint, Slice, columns


@dataclass(frozen=True, eq=False)
class Download:
    """What of the model travels down, for all devices that are sent the same."""

    trees: Trees
    symbols: Symbols | None = None  # the model as the downlink codec compressed it
    bits: float = 0.0  # of the trees and index sets


NOTHING = Download({})


@dataclass(frozen=True, eq=False)
class Cohort(Arrays):
    """Orders issued together, one row for each; they share the kind, the round and the job."""

    id: Ints
    device: Ints
    visit: Ints  # how often the device was ordered to train before; addresses its randomness
    key: Tensor  # one int64 for each row
    slice_index: Ints  # the number of each order's slice
    width: Floats  # as planned; a slice is rounded to whole channels
    menu_index: Ints  # the number of each order's menu; -1: none, its slice is decided
    choice: Ints  # which entry of the plan's menu the device chose at check-in, or -1
    utility: Floats  # by which it chose, from 0 to 1; NaN: it chose in another way
    hyperparameters: Hyperparameters
    download_index: Ints  # the number of what is sent to each device; -1: nothing is
    bits: Floats  # downlink: of the download, the index sets and the menu
    delivered_width: Floats  # of the model that came through the link; 1 unless the link failed
    column_width: Floats  # models travel in columns of this width; 1: in one piece
    acknowledged: Ints  # the device's last order whose result the server counted, or -1
    held_order: Ints  # of kind FETCH: the order whose result is held, else -1
    kind: Kind
    round_index: int
    cohort_key: int  # addresses what the whole cohort draws together
    job: Job
    slices: tuple[Slice, ...] = listed("slice_index")
    # What of its menu each device can hold.
    menus: tuple[tuple[Slice, ...], ...] = listed("menu_index")
    downloads: tuple[Download, ...] = listed("download_index")

    def slice_of(self, row: int) -> Slice:
        """Return the slice of one order."""
        return self.slices[int(self.slice_index[row])]

    def menu_of(self, row: int) -> tuple[Slice, ...]:
        """Return the menu of one order; () if it has none."""
        number = int(self.menu_index[row])
        return self.menus[number] if number >= 0 else ()

    def download_of(self, row: int) -> Download:
        """Return what is sent with one order."""
        number = int(self.download_index[row])
        return self.downloads[number] if number >= 0 else NOTHING

    def trees_of(self, row: int) -> Trees:
        """Return the trees that are sent with one order."""
        return self.download_of(row).trees

    def with_downloads(self, *downloads: Download) -> "Cohort":
        """Return the orders with what is sent with each of them."""
        return replace(self, downloads=downloads, download_index=np.arange(len(self)))


@dataclass(frozen=True, eq=False)
class IssuedOrders(Arrays):
    """Orders as the server keeps them until they end, of any kinds and rounds."""

    order: Ints  # ascending, but for those that are replied to
    device: Ints
    round_index: Ints  # of the rounds that issued them
    kind_index: Ints
    key: Tensor  # one int64 for each row
    slice_index: Ints
    width: Floats  # as planned
    choice: Ints  # which entry of the plan's menu the device chose, or -1
    utility: Floats  # by which it chose; NaN: it chose in another way
    held_order: Ints  # of kind FETCH: the order whose result is held, else -1
    hyperparameters: Hyperparameters
    kinds: tuple[Kind, ...] = listed("kind_index")
    slices: tuple[Slice, ...] = listed("slice_index")

    @classmethod
    def of(cls, orders: Cohort) -> "IssuedOrders":
        """Return the orders of a cohort."""
        return cls(
            order=orders.id,
            device=orders.device,
            round_index=np.full(len(orders), orders.round_index),
            kind_index=np.zeros(len(orders), dtype=np.int64),
            key=orders.key,
            slice_index=orders.slice_index,
            width=orders.width,
            choice=orders.choice,
            utility=orders.utility,
            held_order=orders.held_order,
            hyperparameters=orders.hyperparameters,
            kinds=(orders.kind,),
            slices=orders.slices,
        )

    @classmethod
    def none(cls) -> "IssuedOrders":
        """Return no orders."""
        whole, numbers = np.empty(0, dtype=np.int64), np.empty(0)
        return cls(
            order=whole,
            device=whole,
            round_index=whole,
            kind_index=whole,
            key=torch.empty(0, dtype=torch.int64),
            slice_index=whole,
            width=numbers,
            choice=whole,
            utility=numbers,
            held_order=whole,
            hyperparameters=Hyperparameters.alike(0, lr=0.0, batch_size=0),
            kinds=(),
            slices=(),
        )

    @cached_property
    def kind(self) -> Kinds:
        """The kind of each order."""
        found: Kinds = np.array(self.kinds or (Kind.TRAIN,), dtype=KIND)[self.kind_index]
        return found

    @property
    def result_of(self) -> Ints:
        """The number of the order whose training result a reply to each one brings, or -1."""
        kind = self.kind
        own = np.where(kind == Kind.TRAIN, self.order, -1)
        return np.where(kind == Kind.FETCH, self.held_order, own)

    def slice_of(self, row: int) -> Slice:
        """Return the slice of one order."""
        return self.slices[int(self.slice_index[row])]

    def sorted(self) -> "IssuedOrders":
        """Return the orders as they were issued."""
        return self.take(np.argsort(self.order))

    def without(self, orders: Ints) -> "IssuedOrders":
        """Return all but the orders of these numbers."""
        return self.take(~np.isin(self.order, orders))

    def named(self, orders: Ints) -> tuple[Ints, Flags]:
        """Return the rows of orders of these numbers, and which of the numbers there are at all."""
        rows = np.minimum(np.searchsorted(self.order, orders), max(0, len(self) - 1))
        there = self.order[rows] == orders if len(self) else np.zeros(len(orders), dtype=bool)
        return rows[there], there

    @cached_property
    def statuses(self) -> OrderStatuses:
        """The orders as parts see them, before devices reported anything."""
        return self.statuses_with(Reports.none(len(self)))

    def statuses_with(self, told: Reports) -> OrderStatuses:
        """Return the orders as parts see them, with what devices reported in their replies."""
        return OrderStatuses(self.order, self.device, self.round_index, self.kind, told)


def uplink(
    order: Cohort, blueprint: Blueprint, names: tuple[str, ...], numbers: dtype
) -> MessageLayout:
    """Return the layout of the replies to orders of equal slices; each reply has its own key."""
    return MessageLayout(_tensors(order, names, blueprint), numbers, rng.fold(order.key, "uplink"))


def downlink(
    order: Cohort, blueprint: Blueprint, names: tuple[str, ...], numbers: dtype
) -> MessageLayout:
    """Return the layout of the models in orders; devices of a cohort with equal slices share it."""
    return MessageLayout(_tensors(order, names, blueprint), numbers, downlink_key(order))


def downlink_key(orders: Cohort) -> Tensor:
    """Return the key of all models in the orders of a cohort, as a stack of one."""
    return rng.fold(torch.tensor([orders.cohort_key]), "downlink")


def _tensors(
    order: Cohort, names: tuple[str, ...], blueprint: Blueprint
) -> Mapping[str, TensorLayout]:
    """Return how the tensors of an order's slice travel."""
    return tensor_layouts(names, order.slice_of(0), grid(order), blueprint)


def grid(orders: Cohort, row: int = 0) -> tuple[int, float]:
    """Return how many columns the messages of an order have, and the width of a column."""
    column, width = float(orders.column_width[row]), float(orders.width[row])
    return columns(width, column) if column < 1 else 1, column
