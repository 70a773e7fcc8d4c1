"""Aggregators that ask how much a device helps, with the numbers of METHODS."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfleet.aggregate import AngleWeighted, Diagnosed, Mean, ServerSgd, ServerStep, Subset
from anyfleet.aggregate.angles import Angle
from anyfleet.arrivals import Arrivals
from anyfleet.columns import Floats
from anyfleet.elastic import Blueprint
from anyfleet.formulas import theory
from anyfleet.formulas.contribution import angles
from anyfleet.method import Aggregate, Method
from anyfleet.methods import fedavg, heterofl
from anyfleet.schedule import Buffered
from anyfleet.select import Everyone
from anyfleet.types import Params, Stepped
from anyfleet.world import levels
from tests import small
from tests.test_arrivals import BLUEPRINT, MATRIX, arrivals, dense, rows_and_columns, several

PLACE = "4.bias"  # a vector of two numbers
ADP = ((1.0, 0.0), (1.0, 1.0), (-0.2, 1.0))
PNS = ((1.0, 0.0), (0.8, 0.2), (0.9, -0.1), (-1.0, 0.3))
ZERO = {PLACE: torch.zeros(2, dtype=torch.float64)}


@dataclass(frozen=True)
class Seen:
    """As much of a view as these aggregators look at; `judge` notes what it was asked."""

    loss: Callable[[Tensor], float] = lambda place: 0.0
    blueprint: Blueprint = BLUEPRINT
    asked: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)

    def judge(self, params: Params, key: Tensor) -> float:
        self.asked.append((int(key), tuple(params[PLACE].tolist())))
        return self.loss(params[PLACE])


def vectors(values: Sequence[Sequence[float]], samples: Sequence[int] | None = None) -> Arrivals:
    """Updates of one small tensor. A device sends its change: the gradient with the other sign."""
    changes = [{PLACE: torch.tensor(value, dtype=torch.float64)} for value in values]
    return arrivals(changes, samples=samples)


def step(
    part: Aggregate,
    found: Arrivals,
    state: object = None,
    *,
    model: Mapping[str, Tensor] = ZERO,
    seen: Seen | None = None,
) -> Stepped:
    begun = part.init(None) if state is None else state  # type: ignore[arg-type]
    return part(model, begun, found, seen or Seen(), torch.tensor(5))  # type: ignore[arg-type]


def numbers(note: Mapping[int, float]) -> list[float]:
    return [note[device] for device in sorted(note)]


def at(*radians: float, lengths: Sequence[float]) -> list[tuple[float, float]]:
    pairs = zip(radians, lengths, strict=True)
    return [(length * math.cos(angle), length * math.sin(angle)) for angle, length in pairs]


# --- angles -----------------------------------------------------------------------------------


def test_1_17_fedadp_example_over_two_rounds() -> None:
    part = AngleWeighted()
    one = step(part, vectors(ADP))
    assert numbers(one.notes["angles"]) == pytest.approx([0.837981, 0.052583, 0.930211], abs=1e-6)
    first = [0.312465, 0.529790, 0.157744]
    assert numbers(one.notes["weights"]) == pytest.approx(first, abs=1e-6)
    expected = np.array(first) @ np.array(ADP)
    assert one.model[PLACE].tolist() == pytest.approx(expected.tolist(), abs=2e-6)
    # Vectors at .3, .3 and 1.5 from their mean: what they have sideways cancels.
    second = 1 + 0.1 * math.sin(1.5) / math.sin(0.3)
    found = vectors(at(0.3, -0.3, 1.5, lengths=(1.0, second, 0.1)))
    two = step(part, found, one.state)
    assert numbers(two.notes["angles"]) == pytest.approx([0.3, 0.3, 1.5])
    smoothed = numbers(two.notes["smoothed_angles"])
    assert smoothed == pytest.approx([0.568991, 0.176292, 1.215105], abs=1e-6)
    weights = numbers(two.notes["weights"])
    assert weights == pytest.approx([0.492731, 0.493172, 0.014097], abs=1e-6)
    assert two.state[2] == (pytest.approx(1.215105, abs=1e-6), 2)


def test_1_17_fedadp_example_with_unequal_sizes() -> None:
    stepped = step(AngleWeighted(), vectors(ADP, samples=[100, 100, 200]))
    angles = [1.080839, 0.295441, 0.687353]
    weights = [0.025691, 0.333975, 0.640334]
    assert numbers(stepped.notes["angles"]) == pytest.approx(angles, abs=1e-6)
    assert numbers(stepped.notes["weights"]) == pytest.approx(weights, abs=1e-6)
    expected = np.array(weights) @ np.array(ADP)
    assert stepped.model[PLACE].tolist() == pytest.approx(expected.tolist(), abs=2e-6)


def test_1_17_a_device_without_progress_keeps_the_angle_it_has() -> None:
    part = AngleWeighted()
    new = step(part, vectors([(1.0, 0.0), (0.0, 0.0)]))
    assert numbers(new.notes["angles"]) == pytest.approx([0.0, math.pi / 2])
    assert numbers(new.notes["smoothed_angles"]) == pytest.approx([0.0, math.pi / 2])
    assert new.state.keys() == {0}
    before = {0: Angle(0.2, 4), 1: Angle(0.7, 2)}
    old = step(part, vectors([(1.0, 0.0), (0.0, 0.0)]), before)
    assert numbers(old.notes["angles"]) == pytest.approx([0.0, math.pi / 2])
    assert numbers(old.notes["smoothed_angles"]) == pytest.approx([0.16, 0.7])
    assert old.state == {0: (pytest.approx(0.16), 5), 1: Angle(0.7, 2)}
    assert before == {0: Angle(0.2, 4), 1: Angle(0.7, 2)}


def test_1_17_a_mean_without_direction_leaves_the_weights_as_they_are() -> None:
    before = {0: Angle(0.1, 1), 1: Angle(3.0, 1), 2: Angle(1.0, 3)}
    found = vectors([(2.0, 0.0), (-1.0, 0.0), (0.0, 0.0)], samples=[1, 2, 5])
    stepped = step(AngleWeighted(), found, before)
    assert numbers(stepped.notes["weights"]) == pytest.approx([0.125, 0.25, 0.625])
    assert stepped.state == before
    assert stepped.model[PLACE].tolist() == [0.0, 0.0]


def test_1_17_one_device_alone_is_the_mean() -> None:
    stepped = step(AngleWeighted(), vectors([(0.3, -0.4)], samples=[7]))
    assert stepped.notes["weights"] == {0: 1.0}
    assert stepped.notes["angles"][0] == pytest.approx(0.0, abs=1e-7)
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
    found.device = np.array([4, 4, 1])
    stepped = step(AngleWeighted(), found)
    assert stepped.state == {4: (pytest.approx(0.5), 2), 1: (pytest.approx(0.0), 1)}
    assert stepped.notes["smoothed_angles"] == {4: pytest.approx(0.5), 1: pytest.approx(0.0)}


def test_equal_angles_are_the_mean_bit_for_bit() -> None:
    found = vectors(at(0.4, -0.4, lengths=(0.3, 0.3)) * 3, samples=[3] * 6)
    plain, weighted = (step(part, found).model[PLACE] for part in (Mean(), AngleWeighted()))
    assert torch.equal(plain, weighted)


def test_an_update_that_is_not_finite_has_no_weight() -> None:
    broken = vectors([*ADP, (math.nan, 1.0), (math.inf, 0.0)])
    stepped = step(AngleWeighted(), broken)
    assert torch.equal(stepped.model[PLACE], step(AngleWeighted(), vectors(ADP)).model[PLACE])
    assert numbers(stepped.notes["weights"])[3:] == [0.0, 0.0]
    assert stepped.state.keys() == {0, 1, 2}
    nobody = step(AngleWeighted(), vectors([(math.nan, 0.0)]))
    assert torch.equal(nobody.model[PLACE], ZERO[PLACE])


def test_weights_by_angle_start_from_those_of_the_base() -> None:
    found = vectors(ADP, samples=[1, 2, 3])
    found.staleness = np.array([0, 3, 0])
    part = AngleWeighted(base=Mean("equal", discount=1.0))
    stepped = step(part, found)
    base = np.array([1.0, 0.25, 1.0])
    mean = base @ np.array(ADP) / base.sum()
    lengths = np.linalg.norm(ADP, axis=1)
    expected = angles(np.array(ADP) @ mean, lengths, float(np.linalg.norm(mean)))
    assert numbers(stepped.notes["angles"]) == pytest.approx(expected.tolist())


@given(several())
def test_angles_of_sub_models_are_those_of_restricted_vectors(found: Arrivals) -> None:
    stepped = AngleWeighted()(
        {n: torch.zeros(BLUEPRINT.shape(n)) for n in BLUEPRINT.params},
        {},
        found,
        Seen(),  # type: ignore[arg-type]
        torch.tensor(0),
    )
    rows, masks = (tensor.numpy() for tensor in dense(found))
    weights = found.samples
    mass = weights @ masks
    mean = np.divide(weights @ (masks * rows), mass, where=mass > 0, out=np.zeros(len(mass)))
    own = masks * mean
    cosines = (rows * own).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(own, axis=1)
    np.testing.assert_allclose(np.cos(numbers(stepped.notes["angles"])), cosines, atol=1e-5)


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_f_4_weights_of_this_steps_angles_never_lower_the_expected_decrease(
    seed: int, count: int
) -> None:
    noise = np.random.default_rng(seed)
    found = vectors(noise.normal(size=(count, 2)).tolist(), samples=[*range(1, count + 1)])
    state = {device: Angle(float(noise.uniform(0, math.pi)), 9) for device in range(count)}
    notes = step(AngleWeighted(), found, state).notes
    now = theory.expected_decrease(
        np.array(numbers(notes["weights"])), np.array(numbers(notes["angles"]))
    )
    assert notes["expected_decrease"] == pytest.approx(now)
    plain = notes["expected_decrease_of_mean"]
    assert notes["expected_decrease_instantaneous"] >= plain - 1e-12
    fresh = step(AngleWeighted(), found).notes
    assert fresh["expected_decrease"] == pytest.approx(fresh["expected_decrease_instantaneous"])
    assert fresh["expected_decrease_of_mean"] == pytest.approx(plain)


# --- subsets ----------------------------------------------------------------------------------


def rising(place: Tensor) -> float:
    """A loss that falls as the first number grows: without the fourth device it does."""
    return -float(place[0])


def falling(place: Tensor) -> float:
    return float(place[0])


def test_1_18_optimal_aggregation_example_with_the_sum() -> None:
    seen = Seen(rising)
    stepped = step(Subset(), vectors(PNS), seen=seen)
    assert stepped.notes["labelled"] == stepped.notes["excluded"] == (3,)
    assert stepped.notes["labelled_count"] == stepped.notes["excluded_count"] == 1
    assert stepped.notes["alignment"] == pytest.approx(0.7625)
    assert stepped.notes["alignment_after"] == pytest.approx(2.433333, abs=1e-6)
    assert stepped.model[PLACE].tolist() == pytest.approx([0.9, 0.1 / 3])
    both, without = (place for _, place in seen.asked)
    assert both == pytest.approx((0.425, 0.1))
    assert without == pytest.approx((0.9, 0.1 / 3))


def test_1_18_optimal_aggregation_example_with_the_mean() -> None:
    seen = Seen(rising)
    stepped = step(Subset(share=0.4, statistic="mean"), vectors(PNS), seen=seen)
    assert stepped.notes["alignment"] == pytest.approx(0.190625)
    assert stepped.notes["labelled"][:2] == (3, 1)
    kept = step(Subset(share=0.4), vectors(PNS), seen=Seen(rising))
    assert kept.notes["labelled"] == (3,)  # the sum stops where the mean goes on


def test_1_18_a_removal_that_hurts_is_labelled_and_undone() -> None:
    stepped = step(Subset(), vectors(PNS), seen=Seen(falling))
    assert stepped.notes["labelled"] == (3,)
    assert stepped.notes["excluded"] == ()
    assert torch.equal(stepped.model[PLACE], step(Mean(), vectors(PNS)).model[PLACE])
    equal = step(Subset(), vectors(PNS), seen=Seen(lambda place: 1.0))
    assert equal.notes["excluded"] == (3,)  # only a loss that rises speaks for a device


def test_1_18_both_models_meet_the_same_batch_and_every_comparison_another() -> None:
    noise = np.random.default_rng(1)
    honest = (np.array([1.0, 0.0]) + 0.05 * noise.normal(size=(10, 2))).tolist()
    adverse = [(-1.0, 0.2), (-0.9, -0.3), (-1.2, 0.1)]
    seen = Seen()
    stepped = step(Subset(share=0.7), vectors([*honest, *adverse]), seen=seen)
    assert sorted(stepped.notes["excluded"]) == [10, 11, 12]
    keys = [key for key, _ in seen.asked]
    assert keys[::2] == keys[1::2]
    assert len(set(keys)) == 3
    # A model that lost to nobody is the one that the next is compared with.
    assert seen.asked[1][1] == seen.asked[2][1]


def test_1_18_a_share_of_the_updates_remains() -> None:
    scattered = vectors(at(*np.linspace(0, 5, 10), lengths=np.linspace(0.1, 1, 10).tolist()))
    for left, fewest in (("share", 7), ("thesis", 6), ("code", 8)):
        part = Subset(statistic="mean", left=left)  # type: ignore[arg-type]
        assert step(part, scattered).notes["excluded_count"] == 10 - fewest
    assert step(Subset(share=1.0), scattered).notes["labelled"] == ()


@pytest.mark.parametrize("values", [[(1.0, 2.0)], [(0.0, 0.0)] * 4, [(1.0, 2.0)] * 5])
def test_1_18_nobody_is_judged_where_there_is_nothing_to_leave_out(
    values: list[tuple[float, float]],
) -> None:
    seen = Seen()
    stepped = step(Subset(), vectors(values), seen=seen)
    assert not seen.asked
    assert stepped.notes["labelled"] == stepped.notes["excluded"] == ()
    assert stepped.model[PLACE].tolist() == list(values[0])


def test_1_18_broken_updates_are_removed_before_and_not_labelled() -> None:
    broken = vectors([(math.nan, 0.0), *PNS, (math.inf, 1.0)])
    stepped = step(Subset(), broken, seen=Seen(rising))
    assert stepped.notes["labelled"] == (4,)
    assert stepped.notes["excluded"] == (0, 5, 4)
    clean = step(Subset(), vectors(PNS), seen=Seen(rising))
    assert torch.equal(stepped.model[PLACE], clean.model[PLACE])
    nobody = step(Subset(), vectors([(math.nan, 0.0)]))
    assert torch.equal(nobody.model[PLACE], ZERO[PLACE])
    assert nobody.notes["excluded"] == (0,)


def test_a_broken_loss_is_never_the_better_one() -> None:
    def without(place: Tensor) -> float:
        return math.nan if float(place[0]) > 0.8 else 1.0

    def together(place: Tensor) -> float:
        return 1.0 if float(place[0]) > 0.8 else math.nan

    assert step(Subset(), vectors(PNS), seen=Seen(without)).notes["excluded"] == ()
    assert step(Subset(), vectors(PNS), seen=Seen(lambda _: math.nan)).notes["excluded"] == ()
    assert step(Subset(), vectors(PNS), seen=Seen(together)).notes["excluded"] == (3,)


INNER: list[Aggregate] = [
    Mean("equal"),
    AngleWeighted(),
    ServerStep(AngleWeighted(), ServerSgd(0.5, 0.9)),
]


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_subset_of_everybody_is_its_inner_aggregator_bit_for_bit(inner: Aggregate) -> None:
    states: list[object] = [None, None]
    models: list[Params] = [ZERO, ZERO]
    for values in (ADP, PNS, PNS):
        for row, part in enumerate((inner, Subset(inner))):
            seen = Seen(falling)
            stepped = step(part, vectors(values), states[row], model=models[row], seen=seen)
            models[row], states[row] = stepped.model, stepped.state
        assert torch.equal(models[0][PLACE], models[1][PLACE])
    assert repr(states[0]) == repr(states[1])


def test_the_state_of_the_inner_aggregator_is_that_of_those_who_stayed() -> None:
    inner = ServerStep(AngleWeighted(), ServerSgd(0.5, 0.9))
    subset = Subset(inner)
    one = step(subset, vectors(PNS), seen=Seen(rising))
    two = step(subset, vectors(PNS), one.state, model=one.model, seen=Seen(rising))
    assert one.notes["excluded"] == two.notes["excluded"] == (3,)
    assert two.state.inner.keys() == {0, 1, 2}
    assert {angle.visits for angle in two.state.inner.values()} == {2}  # trials left no trace
    first = step(inner, vectors(PNS[:3]))
    second = step(inner, vectors(PNS[:3]), first.state, model=first.model)
    assert torch.equal(two.model[PLACE], second.model[PLACE])
    assert "weights" in two.notes


def test_sub_models_are_compared_on_what_everybody_trained() -> None:
    part = rows_and_columns((0,))
    shared = [1.0, 1.1, 0.9, -1.0]
    changes = [{MATRIX: torch.full((1, 1), value)} for value in shared[:3]]
    # The last has a large matrix that agrees where it is alone; where all are it does not.
    whole = torch.full((3, 3), 50.0)
    whole[0, 0] = shared[3]
    found = arrivals([*changes, {MATRIX: whole}], slices=[part] * 3 + [replace(part, keep=())])
    model = {MATRIX: torch.zeros(3, 3), **ZERO}
    notes = step(Subset(), found, model=model).notes
    assert notes["labelled"] == (3,)
    sizes = np.array(shared)
    assert notes["alignment"] == pytest.approx(4 * sizes.mean() ** 2, rel=1e-6)


# --- diagnosis --------------------------------------------------------------------------------


def test_f_2_who_trained_what() -> None:
    parts = [rows_and_columns(kept) for kept in ((0,), (0, 1), (0, 1))]
    model = {n: torch.ones(BLUEPRINT.shape(n)) for n in BLUEPRINT.params}
    changes = [{MATRIX: torch.ones(n, n)} for n in (1, 2, 2)]
    found = arrivals(changes, slices=parts)
    notes = step(Diagnosed(), found, model=model).notes
    whole = sum(value.numel() for value in model.values())
    assert notes["coverage"] == pytest.approx(4 / whole)
    assert notes["regions"] == 2
    assert notes["fewest"] == 2
    assert notes["omega_squared"] == pytest.approx(1 - 1 / whole)
    everything = step(Diagnosed(), arrivals([model, model]), model=model).notes
    assert everything["coverage"] == 1
    assert (everything["regions"], everything["fewest"]) == (1, 2)
    assert everything["omega_squared"] == pytest.approx(0.0, abs=1e-12)


@given(several())
def test_f_2_agrees_with_the_formulas_on_dense_masks(found: Arrivals) -> None:
    noise = torch.Generator().manual_seed(3)
    model = {n: torch.randn(BLUEPRINT.shape(n), generator=noise) for n in BLUEPRINT.params}
    notes = step(Diagnosed(), found, model=model).notes
    _, masks = dense(found)
    flags = masks.numpy() > 0
    theta = torch.cat([model[name].flatten() for name in BLUEPRINT.params]).numpy()
    assert notes["fewest"] == theory.fewest_trainers(flags[None])
    assert notes["coverage"] == pytest.approx(flags.any(0).mean())
    assert notes["omega_squared"] == pytest.approx(
        theory.omega_squared(theta.astype(np.float64), flags), abs=1e-6
    )
    assert notes["regions"] == len({tuple(column) for column in flags.T.tolist() if any(column)})


def test_f_4_how_far_updates_agree() -> None:
    notes = step(Diagnosed(), vectors(ADP, samples=[100, 100, 200])).notes
    sizes, rows = np.array([0.25, 0.25, 0.5]), np.array(ADP)
    mean = sizes @ rows
    lengths: Floats = np.linalg.norm(rows, axis=1)
    assert numbers(notes["norms"]) == pytest.approx(lengths.tolist())
    assert notes["divergence"] == pytest.approx(theory.mean_divergence(rows, mean))
    bounds = theory.dissimilarity(lengths, float(np.linalg.norm(mean)))
    assert notes["dissimilarity_least"] == pytest.approx(bounds.least)
    assert notes["dissimilarity_most"] == pytest.approx(bounds.most)
    expected = [1.080839, 0.295441, 0.687353]
    assert numbers(notes["angles"]) == pytest.approx(expected, abs=1e-6)
    assert notes["expected_decrease"] == pytest.approx(sizes @ np.cos(expected), abs=1e-6)
    opposed = step(Diagnosed(), vectors([(1.0, 0.0), (-1.0, 0.0)])).notes
    assert opposed["dissimilarity_most"] == math.inf
    assert opposed["divergence"] == pytest.approx(1.0)
    broken = step(Diagnosed(), vectors([(1.0, 0.0), (math.nan, 0.0)])).notes
    assert broken["divergence"] == pytest.approx(0.0)
    assert math.isnan(broken["norms"][1])


@pytest.mark.parametrize(
    "method",
    [
        replace(heterofl(shares=(1.0, 0.5), lr=0.1, batch=8), select=Everyone()),
        replace(fedavg(lr=0.1), aggregate=ServerStep(AngleWeighted(), ServerSgd(0.5, 0.9))),
        replace(fedavg(lr=0.1), schedule=Buffered(4, 3), aggregate=Subset(AngleWeighted())),
    ],
    ids=["sub-models", "server step", "stale"],
)
def test_a_diagnosis_changes_no_bit_of_the_model(method: Method) -> None:
    watched = replace(method, aggregate=Diagnosed(method.aggregate))
    fleet = levels(speeds=(1e9, 2e7))
    one, two = (small.steps(each, small.task(), 3, fleet=fleet) for each in (method, watched))
    assert small.identical(one[-1].params, two[-1].params)
    assert one[-1].time == two[-1].time
    assert one[-1].notes.keys() | Diagnosed.gives <= two[-1].notes.keys()
    assert 0 < two[-1].notes["coverage"] <= 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AngleWeighted(sharpness=0), "AngleWeighted.sharpness"),
        (lambda: Subset(share=1.5), "Subset.share"),
        (lambda: Subset(statistic="median"), "Subset.statistic"),  # type: ignore[arg-type]
        (lambda: Subset(left="none"), "Subset.left"),  # type: ignore[arg-type]
    ],
)
def test_impossible_aggregators_are_refused(make: Callable[[], Aggregate], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
