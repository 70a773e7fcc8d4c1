"""The ledger: rows in columns, their file form, and how long devices waited."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.ledger import Ledger, LedgerWriter
from anyfleet.core.messages import Charges, Devices, DeviceState, Kind, no_charges
from anyfleet.core.orders import Cohort
from anyfleet.elastic import Slice, trace, width
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.codec import Fgc
from anyfleet.parts.plan import SentFractionByLevel, WidthByLevel
from anyfleet.parts.schedule import HoldAndFetch, Surveyed, Synchronous
from anyfleet.parts.select import Everyone
from anyfleet.world import levels
from tests.core.test_local_training import orders
from tests.helpers import runs, small
from tests.helpers.nets import LeNet, traced

TASK = small.task()
ORDERS = orders(heterofl(widths=(0.5,), lr=0.1, batch_size=8), TASK, [2, 5, 7])


def ledger() -> LedgerWriter:
    devices = Devices(
        level=np.arange(8),
        samples=np.full(8, 30),
        group=np.zeros(8, dtype=int),
        column_width=np.ones(8),
    )
    return LedgerWriter(devices, TASK.blueprint)


def charges(order: Cohort, **spent: float) -> Charges:
    nothing = no_charges(int(order.id[0]), 1.0)
    return replace(nothing, **{name: np.array([value]) for name, value in spent.items()})


def filled() -> Ledger:
    book = ledger()
    last, first, middle = (ORDERS.take([row]) for row in (2, 0, 1))
    answer = work(first, (DeviceState(),), TASK).replies
    book.failed(last, charges(last), "no battery")
    book.replied(
        first,
        answer,
        charges(
            first,
            download_seconds=1.0,
            compute_seconds=2.0,
            upload_seconds=0.5,
            upload_joules=0.25,
            bits_down=64.0,
        ),
        "",
    )
    book.failed(middle, charges(middle, compute_seconds=4.0, compute_joules=3.0), "died")
    return book.close(step=6, now=9.0)


def test_rows_are_sorted_by_order_and_know_their_step() -> None:
    rows = filled()
    assert rows.order.tolist() == [0, 1, 2]
    assert rows.device.tolist() == rows.level.tolist() == [2, 5, 7]
    assert rows.round_index.tolist() == [6, 6, 6]
    assert rows.failure == ("", "died", "no battery")
    assert rows.counted.tolist() == [True, False, False]


def test_who_is_done_waits_for_the_end_of_the_step() -> None:
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
    book = ledger()
    order = ORDERS.take([0])
    book.failed(order, charges(order), "died")
    assert len(book.close(0, 2.0)) == 1
    assert len(book.close(1, 3.0)) == 0


def test_rows_come_back_from_a_file() -> None:
    rows = filled()
    plain = json.loads(json.dumps(rows.as_dicts()).replace("NaN", "null"))
    again = Ledger.of(plain)
    # A folder of an older version has fewer columns: what is unknown is not a number.
    older = Ledger.of({k: v for k, v in row.items() if k != "gain"} for row in plain)
    assert np.isnan(older.gain).all()
    assert older.order.tolist() == again.order.tolist()
    for field in fields(Ledger):
        one, two = getattr(rows, field.name), getattr(again, field.name)
        if isinstance(one, tuple):
            assert one == two
        else:
            assert one.dtype == two.dtype
            assert np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def test_an_empty_step_has_all_columns() -> None:
    empty = Ledger.of([])
    assert len(empty) == 0
    assert empty.as_dicts() == []
    assert empty.joules.sum() == 0
    assert empty.counted.dtype == bool


def test_a_hair_of_rounding_is_no_negative_wait() -> None:
    book = ledger()
    order = ORDERS.take([0])
    book.failed(order, charges(order, compute_seconds=2.0), "died")
    assert book.close(0, 3.0 - 1e-15).wait_seconds.tolist() == [0.0]


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


# --- theory (specification §F.3) --------------------------------------------------------------------

THEORY = ("measured_sent_fraction", "gain", "divergence")
COARSE = replace(
    fedavg(lr=0.1, batch_size=16),
    select=Everyone(),
    plan=SentFractionByLevel((0.3, 0.1), WidthByLevel((1.0, 0.5))),
    uplink=Fgc(),
)


def test_f_3_gains_and_divergences_of_a_round_by_hand() -> None:
    fleet = levels(speeds=(1e9, 1e8), mortality=0.5)
    (step,) = small.steps(COARSE, TASK, 1, fleet=fleet)
    came = {"": 0, "died": 0}
    for row in small.rows(step):
        came[row.failure] += 1
        if row.failure:
            assert np.isnan([row.measured_sent_fraction, row.gain, row.divergence]).all()
            continue
        share = (1.0, 0.5)[row.level]
        rate = row.bits_up / (32 * row.parameters)
        assert 0 < rate <= row.sent_fraction
        assert row.measured_sent_fraction == pytest.approx(rate)
        assert row.gain == pytest.approx(share**8 * rate)
        close = share**2 * (2 - share**2) * math.sqrt(rate)
        assert row.divergence == pytest.approx((1 - close) ** 2)
    assert min(came.values()) > 1
    least = np.nanmin(step.ledger.gain)
    # One number for the step, also beside those who were lost.
    assert step.ledger.contraction == pytest.approx(np.full(8, 1 - least))


def test_f_3_a_lost_answer_does_not_count_in_the_contraction() -> None:
    book, (one, two) = ledger(), (ORDERS.take([row]) for row in (0, 1))
    answers = [work(order, (DeviceState(),), TASK).replies for order in (one, two)]
    short = replace(answers[1], bits=answers[1].bits / 100)
    book.replied(one, answers[0], charges(one), "")
    book.replied(two, short, charges(two), "stale")
    rows = book.close(0, 1.0)
    assert rows.gain == pytest.approx([0.5**8, 0.5**8 / 100], rel=1e-3)  # label masks travel, too
    assert rows.contraction == pytest.approx([1 - 0.5**8] * 2)


def test_f_3_results_that_are_fetched_have_a_gain_and_what_is_held_has_none() -> None:
    method = replace(COARSE, schedule=HoldAndFetch())
    (step,) = small.steps(method, TASK, 1, fleet=levels(speeds=(1e9, 1e8)))
    kinds = np.array(step.ledger.kind)
    for name in THEORY:
        column = getattr(step.ledger, name)
        assert np.isnan(column[kinds == "hold"]).all()
        assert (column[kinds == "fetch"] > 0).all()
    asked = {row.device: row.sent_fraction for row in small.rows(step) if row.kind == "hold"}
    for row in small.rows(step):
        if row.kind == "fetch":
            assert 0.5 * asked[row.device] < row.measured_sent_fraction <= asked[row.device]
    # A message that waited is told of when it is sent.
    assert np.isfinite(step.ledger.distortion[kinds == "fetch"]).all()


def test_f_3_an_answer_that_is_no_result_has_no_gain() -> None:
    method = replace(COARSE, schedule=Surveyed(Synchronous(), Kind.EVALUATE))
    (step,) = small.steps(method, TASK, 1)
    kinds = np.array(step.ledger.kind)
    for name in THEORY:
        assert np.isnan(getattr(step.ledger, name)[kinds == "evaluate"]).all()
    least = step.ledger.gain[kinds == "train"].min()
    assert step.ledger.contraction == pytest.approx(np.full(len(kinds), 1 - least))


def test_columns_of_theory_are_in_the_files_of_a_run_that_went_on(tmp_path: Path) -> None:
    runs.finished(runs.written(tmp_path, runs.moments()[:2]))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    found = Ledger.of(json.loads(line) for line in lines)
    expected = join([moment.round.ledger for moment in runs.moments()])
    for name in (*THEORY, "contraction", "distortion"):
        assert np.array_equal(getattr(found, name), getattr(expected, name), equal_nan=True)
    assert np.isfinite(found.gain).any()
    assert (found.measured_sent_fraction[np.isfinite(found.measured_sent_fraction)] < 0.2).all()
