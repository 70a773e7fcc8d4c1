"""What parts see of orders: arrays of many, and each one by itself."""

import math
from dataclasses import replace

import numpy as np

from anyfleet.core.messages import Kind
from anyfleet.core.server import Server
from anyfleet.core.view import OrderStatus, OrderStatuses, View
from anyfleet.methods import fedavg
from anyfleet.runtime import Simulated
from tests.helpers import small

STATUSES = (
    OrderStatus(4, 7, 1, Kind.TRAIN, {"loss": 0.5}),
    OrderStatus(2, 3, 0, Kind.HOLD, {"norm": 2}),
    OrderStatus(5, 0, 1, Kind.STATISTICS),
)
MANY = OrderStatuses.of(STATUSES)
NONE = OrderStatuses.of(())


def view(**changes: object) -> View:
    task = small.task()
    seen = Server(fedavg(), task, Simulated(task, small.world(task)), 0).view()
    return replace(seen, **changes)  # type: ignore[arg-type]


def test_orders_are_arrays_and_each_one_by_itself() -> None:
    assert len(MANY) == 3
    assert MANY.order.tolist() == [4, 2, 5]
    assert MANY.device.tolist() == [7, 3, 0]
    assert [vars(each) for each in MANY] == [vars(each) for each in STATUSES]
    assert all(type(each.device) is int and type(each.kind) is Kind for each in MANY)
    assert (MANY.kind == Kind.HOLD).tolist() == [False, True, False]


def test_no_orders_are_false_and_have_the_same_arrays() -> None:
    assert not NONE
    assert MANY
    assert list(NONE) == []
    assert (NONE.order.dtype, NONE.kind.dtype) == (MANY.order.dtype, MANY.kind.dtype)
    assert not NONE.training
    assert NONE.report("loss").shape == (0,)
    assert (NONE + MANY).order.tolist() == (MANY + NONE).order.tolist() == [4, 2, 5]


def test_orders_are_picked_by_round_kind_and_flags() -> None:
    assert MANY.of_round(1).order.tolist() == [4, 5]
    assert MANY.of_round(2).order.tolist() == []
    assert MANY.of_kind(Kind.STATISTICS, Kind.HOLD).order.tolist() == [2, 5]
    assert MANY.of_kind(Kind.EVALUATE).order.tolist() == []
    assert MANY.training.order.tolist() == [4, 2]
    assert MANY.where(MANY.device > 2).order.tolist() == [4, 2]
    assert MANY.training.of_round(1).reports == ({"loss": 0.5},)


def test_a_reported_number_is_nan_where_it_was_not_reported() -> None:
    assert np.array_equal(MANY.report("loss"), [0.5, math.nan, math.nan], equal_nan=True)
    assert np.array_equal(MANY.report("norm"), [math.nan, 2.0, math.nan], equal_nan=True)
    assert MANY.report("norm").dtype == np.float64


def test_a_view_has_all_orders_and_those_of_this_round() -> None:
    one, two, three = (OrderStatuses.of([each]) for each in STATUSES)
    seen = view(round_index=1, under_way=one, failed=two, declined=three)
    assert seen.orders.order.tolist() == [4, 2, 5]
    assert seen.issued.order.tolist() == [4]
    assert view(round_index=0, replied=MANY).issued.order.tolist() == [2]
