"""FedHQ's aggregation: coarse messages count less, with the numbers of the specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.core.messages import Report
from anyfleet.core.updates import Updates
from anyfleet.formulas.reference.compression import qsgd_error_bound
from anyfleet.methods import fedavg, fedhq
from anyfleet.parts.aggregate import AngleWeighted, ErrorWeighted, Mean
from anyfleet.parts.codec import Fgc, Hq, Qsgd, Raw, Stc, TopK
from anyfleet.world import levels
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.vectors import ADP, PLACE, numbers, step, vectors

BASE = fedavg(count=4, lr=0.1, batch_size=16)


def told(*errors: float | None, samples: list[int] | None = None) -> Updates:
    """Three updates whose devices reported these errors, or none."""
    found = vectors(ADP, samples)
    reports: list[Report] = [{} if e is None else {"distortion": e} for e in errors]
    deltas = [each.local_delta for each in found]
    return Updates.of(deltas, found.blueprint, samples=found.samples, reports=reports)


def test_1_16_fedhq_example() -> None:
    errors = qsgd_error_bound(1000, np.array([2, 4, 16])).tolist()
    assert errors == pytest.approx([15.811, 7.906, 1.976], abs=1e-3)
    stepped = step(ErrorWeighted(), told(*errors))
    weights = [0.117152, 0.221150, 0.661698]
    assert numbers(stepped.diagnostics["weights"]) == pytest.approx(weights, abs=1e-6)
    expected = (np.array(weights) @ np.array(ADP)).tolist()
    assert stepped.model[PLACE].tolist() == pytest.approx(expected, abs=2e-6)


def test_1_16_equal_errors_are_the_mean() -> None:
    found = told(0.3, 0.3, 0.3, samples=[1, 2, 5])
    assert ErrorWeighted().weigh(found) == pytest.approx([0.125, 0.25, 0.625])
    assert ErrorWeighted(Mean("equal")).weigh(found) == pytest.approx([1 / 3] * 3)


def test_1_16_sizes_and_age_are_multiplied() -> None:
    found = told(0.0, 1.0, 3.0, samples=[4, 4, 8])
    found = replace(found, staleness=np.array([0, 1, 0]))
    raw = np.array([4, 4 / 2 / 2, 8 / 4])
    part = ErrorWeighted(Mean("samples", discount=1.0))
    assert part.weigh(found) == pytest.approx(raw / raw.sum())


@pytest.mark.parametrize("odd", [None, math.nan, math.inf])
def test_what_is_not_told_has_no_weight(odd: float | None) -> None:
    found = told(0.5, odd, 0.5)
    assert ErrorWeighted().weigh(found) == pytest.approx([0.5, 0.0, 0.5])
    nobody = step(ErrorWeighted(), told(odd, odd, odd))
    assert nobody.model[PLACE].tolist() == [0.0, 0.0]
    assert numbers(nobody.diagnostics["weights"]) == [0.0] * 3


def test_no_lie_makes_a_device_count_more_than_an_exact_one() -> None:
    found = told(-0.999999, 0.0, -1e300)
    assert ErrorWeighted().weigh(found) == pytest.approx([1 / 3] * 3)
    found = told(-0.999999, 0.0, -math.inf)  # no number at all
    assert ErrorWeighted().weigh(found) == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize("codec", [Raw(), Hq(), Fgc(), TopK(0.1, Qsgd()), Stc()])
def test_1_16_an_update_of_zeros_has_no_error(codec: Hq) -> None:
    """Whatever a codec makes of it: it lacks nothing."""
    order = orders(replace(BASE, uplink=codec), small.task(), [1])
    still = replace(
        order, hyperparameters=replace(order.hyperparameters, local_steps=np.array([0]))
    )
    update = work(still, (DeviceState(),), small.task()).replies
    assert not any(bool(value.any()) for value in update.trees_of(0)["delta"].values())
    assert update.report_of(0)["distortion"] == 0.0
    assert ErrorWeighted().weigh(told(0.0, 0.0, 1.0)) == pytest.approx([0.4, 0.4, 0.2])


def test_errors_are_those_of_the_messages_and_are_paid_for() -> None:
    task, fleet = small.task(), levels(speeds=(1e9, 1e8))
    base = fedhq(sent_fraction=0.2, count=8, lr=0.1, batch_size=16)
    (one,), (two,) = (
        small.steps(replace(base, aggregate=part), task, 1, fleet=fleet)
        for part in (ErrorWeighted(), Mean())
    )
    # The device measures it anyway; it costs a number only where somebody asked for it.
    assert one.ledger.distortion.tolist() == two.ledger.distortion.tolist()
    assert (one.ledger.bits_up - two.ledger.bits_up).tolist() == [NUMBER_BITS] * 8
    samples = np.array([task.size(device) for device in one.ledger.device])
    raw = samples / (1 + one.ledger.distortion)
    assert numbers(one.diagnostics["weights"]) == pytest.approx((raw / raw.sum()).tolist())
    assert np.ptp(one.ledger.distortion) > 0


def test_errors_are_squared_and_relative() -> None:
    task = small.task(dtype=torch.float64)
    order = orders(replace(BASE, uplink=Hq(sent_fraction=0.05)), task, [2])
    rough = work(order, (DeviceState(),), task).replies
    exact = work(
        replace(order, job=replace(order.job, uplink=Raw())), (DeviceState(),), task
    ).replies
    one, two = rough.trees_of(0)["delta"], exact.trees_of(0)["delta"]
    error = rough.report_of(0)["distortion"]
    assert error == pytest.approx(small.distance(two, one) ** 2)
    assert 0.1 < error < 1
    assert exact.report_of(0)["distortion"] == 0.0


def test_angles_start_from_these_weights() -> None:
    found = told(0.0, 1.0, 3.0)
    weighted = step(AngleWeighted(base=ErrorWeighted()), found)
    by_hand = vectors(ADP)
    by_hand = replace(by_hand, samples=ErrorWeighted().weigh(found))
    expected = step(AngleWeighted(base=Mean()), by_hand)
    torch.testing.assert_close(weighted.model[PLACE], expected.model[PLACE])
    assert weighted.diagnostics["weights"] == pytest.approx(expected.diagnostics["weights"])
