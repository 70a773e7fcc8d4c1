"""AnycostFL's theory of a ledger (specification §F.3)."""

import math
from dataclasses import replace

import numpy as np
import pytest

from anyfleet.analysis.anycost_theory import anycost_theory
from anyfleet.arrays import join
from anyfleet.core.messages import Kind
from anyfleet.methods import fedavg
from anyfleet.parts.codec import Fgc
from anyfleet.parts.plan import SentFractionByLevel, TrainedLayersByLevel, WidthByLevel
from anyfleet.parts.schedule import Surveyed, Synchronous
from anyfleet.parts.select import Everyone
from anyfleet.world import levels
from tests.helpers import small

TASK = small.task()
COARSE = replace(
    fedavg(lr=0.1, batch_size=16),
    select=Everyone(),
    plan=SentFractionByLevel((0.3, 0.1), WidthByLevel((1.0, 0.5))),
    uplink=Fgc(),
)


def test_f_3_gains_and_divergences_of_a_round_by_hand() -> None:
    fleet = levels(speeds=(1e9, 1e8), mortality=0.5)
    (made,) = small.steps(COARSE, TASK, 1, fleet=fleet)
    theory, came = anycost_theory(made.ledger), {"": 0, "died": 0}
    for row, gain, divergence in zip(small.rows(made), theory.gain, theory.divergence, strict=True):
        came[row.failure] += 1
        if row.failure:
            assert np.isnan([gain, divergence]).all()
            continue
        width = (1.0, 0.5)[row.level]
        sent = row.bits_up / (32 * row.parameters)
        assert gain == pytest.approx(width**8 * sent)
        close = width**2 * (2 - width**2) * math.sqrt(sent)
        assert divergence == pytest.approx((1 - close) ** 2)
    assert min(came.values()) > 1
    # One number for the round, also in the rows of those that failed.
    assert theory.contraction == pytest.approx(np.full(8, 1 - np.nanmin(theory.gain)))


def test_f_3_frozen_layers_lower_the_gain() -> None:
    method = replace(fedavg(lr=0.1), select=Everyone(), plan=TrainedLayersByLevel(depths=2))
    (made,) = small.steps(method, TASK, 1, fleet=levels(speeds=(1e9, 1e8)))
    ledger, gain = made.ledger, anycost_theory(made.ledger).gain
    assert 0 < ledger.trained_share.min() < 1
    assert gain == pytest.approx(ledger.trained_share**4 * ledger.measured_sent_fraction)


def test_f_3_a_reply_that_does_not_count_is_not_in_the_contraction() -> None:
    (made,) = small.steps(COARSE, TASK, 1, fleet=levels(speeds=(1e9, 1e8)))
    least = int(np.argmin(anycost_theory(made.ledger).gain))
    stale = tuple("stale" if row == least else "" for row in range(8))
    theory = anycost_theory(replace(made.ledger, failure=stale))
    others = np.delete(theory.gain, least)
    assert np.isfinite(theory.gain[least])
    assert theory.gain[least] < others.min()
    assert theory.contraction == pytest.approx(np.full(8, 1 - others.min()))


def test_f_3_every_round_of_a_run_has_its_own_contraction() -> None:
    made = small.steps(COARSE, TASK, 3, fleet=levels(speeds=(1e9, 1e8), mortality=0.3))
    nothing = replace(made[1].ledger, failure=("died",) * len(made[1].ledger))
    whole = anycost_theory(join([made[0].ledger, nothing, made[2].ledger]))
    first, second, third = (whole.take(range(start, start + 8)) for start in (0, 8, 16))
    assert np.isnan(second.contraction).all()
    for part, index in ((first, 0), (third, 2)):
        alone = anycost_theory(made[index].ledger)
        assert part.contraction.tolist() == alone.contraction.tolist()
        assert np.array_equal(part.gain, alone.gain, equal_nan=True)
    assert first.contraction[0] != third.contraction[0]


def test_f_3_a_reply_that_is_no_result_has_no_gain() -> None:
    method = replace(COARSE, schedule=Surveyed(Synchronous(), Kind.EVALUATE))
    (made,) = small.steps(method, TASK, 1)
    kinds, theory = np.array(made.ledger.kind), anycost_theory(made.ledger)
    assert np.isnan(theory.gain[kinds == "evaluate"]).all()
    assert np.isnan(theory.divergence[kinds == "evaluate"]).all()
    least = theory.gain[kinds == "train"].min()
    assert theory.contraction == pytest.approx(np.full(len(kinds), 1 - least))
