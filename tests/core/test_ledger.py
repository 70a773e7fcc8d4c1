"""The ledger: its rows, their file form, and how long devices waited."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.ledger import REPORTED, Ledger, LedgerWriter
from anyfleet.core.messages import Charges, Devices, Kind, no_charges
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.replies import RepliedOrders
from anyfleet.core.slots import MEASURES
from anyfleet.elastic import Slice, trace, width
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.codec import Fgc
from anyfleet.parts.plan import SentFractionByLevel, TrainedLayersByLevel, WidthByLevel
from anyfleet.parts.schedule import HoldAndFetch, Surveyed, Synchronous
from anyfleet.parts.select import Everyone
from anyfleet.world import levels
from tests.core.test_local_training import orders
from tests.helpers import runs, small
from tests.helpers.nets import LeNet, traced

TASK = small.task()
ORDERS = orders(heterofl(widths=(0.5,), lr=0.1, batch_size=8), TASK, [2, 5, 7])
ISSUED = IssuedOrders.of(ORDERS)


DEVICES = Devices(
    level=np.arange(8),
    samples=np.full(8, 30),
    group=np.zeros(8, dtype=int),
    column_width=np.ones(8),
)


def charges(orders: IssuedOrders, **spent: float) -> Charges:
    nothing = no_charges(orders.order, 1.0)
    return replace(nothing, **{name: np.array([value]) for name, value in spent.items()})


def filled() -> Ledger:
    book = LedgerWriter(TASK.blueprint)
    last, first, middle = (ISSUED.take([row]) for row in (2, 0, 1))
    reply = work(ORDERS.take([0]), (DeviceState(),), TASK).replies
    book.failed(last, charges(last), ("no battery",))
    spent = charges(
        first,
        download_seconds=1.0,
        compute_seconds=2.0,
        upload_seconds=0.5,
        upload_joules=0.25,
        bits_down=64.0,
    )
    job, blueprint = ORDERS.job, TASK.blueprint
    came = RepliedOrders.of(first, reply, spent, np.ones(1), job=job, blueprint=blueprint)
    book.replied(came, ("",))
    book.failed(middle, charges(middle, compute_seconds=4.0, compute_joules=3.0), ("died",))
    return book.close(DEVICES, round_index=6, now=9.0)


def test_rows_are_sorted_by_order_and_know_their_round() -> None:
    rows = filled()
    assert rows.order.tolist() == [0, 1, 2]
    assert rows.device.tolist() == rows.level.tolist() == [2, 5, 7]
    assert rows.round_index.tolist() == [6, 6, 6]
    assert rows.failure == ("", "died", "no battery")
    assert rows.counted.tolist() == [True, False, False]


def test_who_is_done_waits_for_the_end_of_the_round() -> None:
    rows = filled()
    assert rows.seconds.tolist() == [3.5, 4.0, 0.0]
    assert rows.wait_seconds.tolist() == [9 - 1 - 3.5, 9 - 1 - 4.0, 9 - 1]
    assert rows.joules.tolist() == [0.25, 3.0, 0.0]
    assert rows.bits_down.tolist() == [64, 0, 0]


def test_plans_are_told_as_they_were() -> None:
    rows = filled()
    assert rows.slice_width.tolist() == [0.5] * 3
    assert rows.batch_size.tolist() == [8] * 3
    assert rows.lr.tolist() == [0.1] * 3
    local = TASK.blueprint.local(TASK.blueprint.prefix(0.5))
    assert rows.parameters.tolist() == [local.numel()] * 3
    assert math.isfinite(rows.loss[0])
    assert np.isnan(rows.loss[1:]).all()


def test_what_is_closed_is_not_told_again() -> None:
    book = LedgerWriter(TASK.blueprint)
    order = ISSUED.take([0])
    book.failed(order, charges(order), ("died",))
    assert len(book.close(DEVICES, 0, 2.0)) == 1
    assert len(book.close(DEVICES, 1, 3.0)) == 0


def test_rows_come_back_from_a_file() -> None:
    rows = filled()
    plain = json.loads(json.dumps(rows.as_dicts()).replace("NaN", "null"))
    again = Ledger.from_dicts(plain)
    for field in fields(Ledger):
        one, two = getattr(rows, field.name), getattr(again, field.name)
        if isinstance(one, tuple):
            assert one == two
        else:
            assert one.dtype == two.dtype
            assert np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def test_rows_that_lack_a_field_are_refused() -> None:
    rows = filled().as_dicts()
    del rows[1]["channel_share"], rows[2]["norm"]
    with pytest.raises(ValueError, match=r"rows lack norm, channel_share"):
        Ledger.from_dicts(rows)


def test_every_number_that_a_part_can_ask_for_has_a_field() -> None:
    # What a measure adds has a field if it is a single number; channels are many.
    assert set(REPORTED) == MEASURES | {"fisher"}
    assert set(REPORTED) <= {field.name for field in fields(Ledger)}


def test_an_empty_round_has_all_fields() -> None:
    empty = Ledger.from_dicts([])
    assert len(empty) == 0
    assert empty.as_dicts() == []
    assert empty.joules.sum() == 0
    assert empty.counted.dtype == bool


def test_a_hair_of_rounding_is_no_negative_wait() -> None:
    book = LedgerWriter(TASK.blueprint)
    order = ISSUED.take([0])
    book.failed(order, charges(order, compute_seconds=2.0), ("died",))
    assert book.close(DEVICES, 0, 3.0 - 1e-15).wait_seconds.tolist() == [0.0]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_the_width_is_the_largest_share_of_any_axis(share: float) -> None:
    lenet = trace(LeNet(), torch.zeros(2, 1, 14, 14))
    assert width(lenet.prefix(share), lenet) == pytest.approx(share, abs=0.1)
    assert width(Slice(), lenet) == 1.0
    axes = list(lenet.counts(1.0))
    one_axis = Slice.of({axes[0]: range(1)}, lenet)
    assert width(one_axis, lenet) == 1.0  # the others are whole


def test_an_axis_that_no_share_cuts_does_not_count() -> None:
    """Of a transformer all heads keep their width: that makes no slice whole."""
    blueprint = traced("language_fused").blueprint
    uncut = {a for a, axis in blueprint.axes.items() if axis.free} - blueprint.counts(1.0).keys()
    assert uncut  # or nothing is tested
    assert width(blueprint.prefix(0.5), blueprint) == pytest.approx(0.5)


# --- facts about training results -----------------------------------------------------------------

RESULT = ("measured_sent_fraction", "channel_share", "trained_share")
COARSE = replace(
    fedavg(lr=0.1, batch_size=16),
    select=Everyone(),
    plan=SentFractionByLevel((0.3, 0.1), WidthByLevel((1.0, 0.5))),
    uplink=Fgc(),
)


def test_a_training_result_has_its_facts_and_a_failure_none() -> None:
    fleet = levels(speeds=(1e9, 1e8), mortality=0.5)
    (made,) = small.steps(COARSE, TASK, 1, fleet=fleet)
    came = {"": 0, "died": 0}
    for row in small.rows(made):
        came[row.failure] += 1
        if row.failure:
            assert np.isnan([getattr(row, name) for name in RESULT]).all()
            continue
        fraction = row.bits_up / (32 * row.parameters)
        assert 0 < fraction <= row.sent_fraction
        assert row.measured_sent_fraction == pytest.approx(fraction)
        assert (row.channel_share, row.trained_share) == ((1.0, 0.5)[row.level], 1.0)
    assert min(came.values()) > 1


def test_frozen_layers_are_told_as_the_share_that_was_trained() -> None:
    method = replace(fedavg(lr=0.1), select=Everyone(), plan=TrainedLayersByLevel(depths=2))
    (made,) = small.steps(method, TASK, 1, fleet=levels(speeds=(1e9, 1e8)))
    ledger = made.ledger
    whole, last = (ledger.trained_share[ledger.level == level] for level in (0, 1))
    assert (whole == 1).all()
    local = TASK.blueprint
    (first,) = set(ledger.first_trained_layer[ledger.level == 1].tolist())
    trained = local.numel(local.trained(first)) / local.numel(local.trained())
    assert 0 < trained < 1
    assert (last == trained).all()
    assert (ledger.channel_share == 1).all()


def test_a_fetched_result_has_facts_and_a_held_one_none() -> None:
    method = replace(COARSE, schedule=HoldAndFetch())
    (made,) = small.steps(method, TASK, 1, fleet=levels(speeds=(1e9, 1e8)))
    kinds = np.array(made.ledger.kind)
    for name in RESULT:
        values = getattr(made.ledger, name)
        assert np.isnan(values[kinds == "hold"]).all()
        assert (values[kinds == "fetch"] > 0).all()
    asked = {row.device: row.sent_fraction for row in small.rows(made) if row.kind == "hold"}
    for row in small.rows(made):
        if row.kind == "fetch":
            assert 0.5 * asked[row.device] < row.measured_sent_fraction <= asked[row.device]
    # What a device reports of a message that waited is told when it is sent.
    assert np.isfinite(made.ledger.distortion[kinds == "fetch"]).all()


def test_a_reply_that_is_no_result_has_no_facts() -> None:
    method = replace(COARSE, schedule=Surveyed(Synchronous(), Kind.EVALUATE))
    (made,) = small.steps(method, TASK, 1)
    kinds = np.array(made.ledger.kind)
    for name in RESULT:
        assert np.isnan(getattr(made.ledger, name)[kinds == "evaluate"]).all()
        assert np.isfinite(getattr(made.ledger, name)[kinds == "train"]).all()


def test_facts_are_in_the_files_of_a_run_that_went_on(tmp_path: Path) -> None:
    runs.finished(runs.written(tmp_path, runs.results()[:2]))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    found = Ledger.from_dicts(json.loads(line) for line in lines)
    expected = join([result.round.ledger for result in runs.results()])
    for name in (*RESULT, "distortion"):
        assert np.array_equal(getattr(found, name), getattr(expected, name), equal_nan=True)
    assert np.isfinite(found.channel_share).any()
    assert (found.measured_sent_fraction[np.isfinite(found.measured_sent_fraction)] < 0.2).all()
