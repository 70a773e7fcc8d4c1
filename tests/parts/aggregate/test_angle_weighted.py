"""Weights by the angle between a device and the mean, with the numbers of the specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.core.updates import Updates
from anyfleet.formulas import fedadp_expected_decrease
from anyfleet.formulas.contribution import fedadp_angles
from anyfleet.parts.aggregate import AngleWeighted, Mean
from anyfleet.parts.aggregate.angle_weighted import Angle
from tests.core.test_updates import BLUEPRINT, dense, several
from tests.helpers.vectors import ADP, PLACE, ZERO, Seen, at, numbers, step, vectors


def test_1_17_fedadp_example_over_two_rounds() -> None:
    part = AngleWeighted()
    one = step(part, vectors(ADP))
    assert numbers(one.diagnostics["angles"]) == pytest.approx(
        [0.837981, 0.052583, 0.930211], abs=1e-6
    )
    first = [0.312465, 0.529790, 0.157744]
    assert numbers(one.diagnostics["weights"]) == pytest.approx(first, abs=1e-6)
    expected = np.array(first) @ np.array(ADP)
    assert one.model[PLACE].tolist() == pytest.approx(expected.tolist(), abs=2e-6)
    # Vectors at .3, .3 and 1.5 from their mean: what they have sideways cancels.
    second = 1 + 0.1 * math.sin(1.5) / math.sin(0.3)
    found = vectors(at(0.3, -0.3, 1.5, lengths=(1.0, second, 0.1)))
    two = step(part, found, one.state)
    assert numbers(two.diagnostics["angles"]) == pytest.approx([0.3, 0.3, 1.5])
    smoothed = numbers(two.diagnostics["smoothed_angles"])
    assert smoothed == pytest.approx([0.568991, 0.176292, 1.215105], abs=1e-6)
    weights = numbers(two.diagnostics["weights"])
    assert weights == pytest.approx([0.492731, 0.493172, 0.014097], abs=1e-6)
    assert two.state[2] == (pytest.approx(1.215105, abs=1e-6), 2)


def test_1_17_fedadp_example_with_unequal_sizes() -> None:
    stepped = step(AngleWeighted(), vectors(ADP, samples=[100, 100, 200]))
    angles = [1.080839, 0.295441, 0.687353]
    weights = [0.025691, 0.333975, 0.640334]
    assert numbers(stepped.diagnostics["angles"]) == pytest.approx(angles, abs=1e-6)
    assert numbers(stepped.diagnostics["weights"]) == pytest.approx(weights, abs=1e-6)
    expected = np.array(weights) @ np.array(ADP)
    assert stepped.model[PLACE].tolist() == pytest.approx(expected.tolist(), abs=2e-6)


def test_1_17_a_device_without_progress_keeps_the_angle_it_has() -> None:
    part = AngleWeighted()
    new = step(part, vectors([(1.0, 0.0), (0.0, 0.0)]))
    assert numbers(new.diagnostics["angles"]) == pytest.approx([0.0, math.pi / 2])
    assert numbers(new.diagnostics["smoothed_angles"]) == pytest.approx([0.0, math.pi / 2])
    assert new.state.keys() == {0}
    before = {0: Angle(0.2, 4), 1: Angle(0.7, 2)}
    old = step(part, vectors([(1.0, 0.0), (0.0, 0.0)]), before)
    assert numbers(old.diagnostics["angles"]) == pytest.approx([0.0, math.pi / 2])
    assert numbers(old.diagnostics["smoothed_angles"]) == pytest.approx([0.16, 0.7])
    assert old.state == {0: (pytest.approx(0.16), 5), 1: Angle(0.7, 2)}
    assert before == {0: Angle(0.2, 4), 1: Angle(0.7, 2)}


def test_1_17_a_mean_without_direction_leaves_the_weights_as_they_are() -> None:
    before = {0: Angle(0.1, 1), 1: Angle(3.0, 1), 2: Angle(1.0, 3)}
    found = vectors([(2.0, 0.0), (-1.0, 0.0), (0.0, 0.0)], samples=[1, 2, 5])
    stepped = step(AngleWeighted(), found, before)
    assert numbers(stepped.diagnostics["weights"]) == pytest.approx([0.125, 0.25, 0.625])
    assert stepped.state == before
    assert stepped.model[PLACE].tolist() == [0.0, 0.0]


def test_1_17_one_device_alone_is_the_mean() -> None:
    stepped = step(AngleWeighted(), vectors([(0.3, -0.4)], samples=[7]))
    assert stepped.diagnostics["weights"] == {0: 1.0}
    assert stepped.diagnostics["angles"][0] == pytest.approx(0.0, abs=1e-7)
    assert stepped.model[PLACE].tolist() == [0.3, -0.4]


def test_1_17_angles_are_averaged_over_a_devices_own_visits() -> None:
    part = AngleWeighted()
    both = vectors([(1.0, 0.1), (1.0, -0.1)])
    state = step(part, both).state
    for _ in range(3):
        state = step(part, both.take([0]), state).state
    assert state[0].visits == 4
    assert state[0].mean == pytest.approx(math.atan(0.1) / 4)  # alone its angle is 0
    assert state[1] == (pytest.approx(math.atan(0.1)), 1)
    later = step(part, vectors([(1.0, 0.3), (1.0, -0.3)]), state).state
    assert later[1] == (pytest.approx((math.atan(0.1) + math.atan(0.3)) / 2), 2)


def test_a_device_that_answers_twice_in_a_step_visits_twice() -> None:
    found = vectors(at(0.5, -0.5, 0.0, lengths=(1.0, 1.0, 1.0)))
    found = replace(found, device=np.array([4, 4, 1]))
    stepped = step(AngleWeighted(), found)
    assert stepped.state == {4: (pytest.approx(0.5), 2), 1: (pytest.approx(0.0), 1)}
    assert stepped.diagnostics["smoothed_angles"] == {4: pytest.approx(0.5), 1: pytest.approx(0.0)}


def test_equal_angles_are_the_mean_bit_for_bit() -> None:
    found = vectors(at(0.4, -0.4, lengths=(0.3, 0.3)) * 3, samples=[3] * 6)
    plain, weighted = (step(part, found).model[PLACE] for part in (Mean(), AngleWeighted()))
    assert torch.equal(plain, weighted)


def test_an_update_that_is_not_finite_has_no_weight() -> None:
    broken = vectors([*ADP, (math.nan, 1.0), (math.inf, 0.0)])
    stepped = step(AngleWeighted(), broken)
    assert torch.equal(stepped.model[PLACE], step(AngleWeighted(), vectors(ADP)).model[PLACE])
    assert numbers(stepped.diagnostics["weights"])[3:] == [0.0, 0.0]
    assert stepped.state.keys() == {0, 1, 2}
    nobody = step(AngleWeighted(), vectors([(math.nan, 0.0)]))
    assert torch.equal(nobody.model[PLACE], ZERO[PLACE])


def test_weights_by_angle_start_from_those_of_the_base() -> None:
    found = vectors(ADP, samples=[1, 2, 3])
    found = replace(found, staleness=np.array([0, 3, 0]))
    part = AngleWeighted(base=Mean("equal", discount=1.0))
    stepped = step(part, found)
    base = np.array([1.0, 0.25, 1.0])
    mean = base @ np.array(ADP) / base.sum()
    lengths = np.linalg.norm(ADP, axis=1)
    expected = fedadp_angles(np.array(ADP) @ mean, lengths, float(np.linalg.norm(mean)))
    assert numbers(stepped.diagnostics["angles"]) == pytest.approx(expected.tolist())


@given(several())
def test_angles_of_sub_models_are_those_of_restricted_vectors(found: Updates) -> None:
    stepped = AngleWeighted()(
        {n: torch.zeros(BLUEPRINT.shape(n)) for n in BLUEPRINT.params},
        found,
        Seen(),  # type: ignore[arg-type]
        {},
        torch.tensor(0),
    )
    rows, masks = (tensor.numpy() for tensor in dense(found))
    weights = found.samples
    mass = weights @ masks
    mean = np.divide(weights @ (masks * rows), mass, where=mass > 0, out=np.zeros(len(mass)))
    own = masks * mean
    cosines = (rows * own).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(own, axis=1)
    np.testing.assert_allclose(np.cos(numbers(stepped.diagnostics["angles"])), cosines, atol=1e-5)


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_f_4_weights_of_this_steps_angles_never_lower_the_expected_decrease(
    seed: int, count: int
) -> None:
    noise = np.random.default_rng(seed)
    found = vectors(noise.normal(size=(count, 2)).tolist(), samples=[*range(1, count + 1)])
    state = {device: Angle(float(noise.uniform(0, math.pi)), 9) for device in range(count)}
    notes = step(AngleWeighted(), found, state).diagnostics
    now = fedadp_expected_decrease(
        np.array(numbers(notes["weights"])), np.array(numbers(notes["angles"]))
    )
    assert notes["expected_decrease"] == pytest.approx(now)
    plain = notes["expected_decrease_of_mean"]
    assert notes["expected_decrease_instantaneous"] >= plain - 1e-12
    fresh = step(AngleWeighted(), found).diagnostics
    assert fresh["expected_decrease"] == pytest.approx(fresh["expected_decrease_instantaneous"])
    assert fresh["expected_decrease_of_mean"] == pytest.approx(plain)
