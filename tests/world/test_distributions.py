"""Laws: their shape, their support, and that a device keeps its draw."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import config, rng
from anyfleet.arrays import Floats
from anyfleet.errors import ConfigError
from anyfleet.world.distributions import Categorical, Disc, LogNormal, Normal, Uniform
from anyfleet.world.quantities import Distribution, When

COUNT = 40_000
LAWS: tuple[Distribution, ...] = (
    Uniform(-2.0, 3.0),
    Uniform(5.0, 5.0),
    Categorical((4.0, 1.0, 2.5)),
    Categorical((1.0, 2.0, 9.0), (1.0, 3.0, 0.0)),
    LogNormal(1.0, 0.2),
    LogNormal(2.0, 1.5, low=0.5, high=4.0),
    Disc(550.0),
    Disc(2.0, floor=0.0),
    Normal(400.0, 80.0),
    Normal(400.0, 300.0, low=1.0, high=1e3),
    Normal(3.0, 0.0),
)


def keys(count: int = COUNT, seed: int = 0) -> Tensor:
    return rng.fold(rng.root(seed, "laws"), torch.arange(count))


def distance(drawn: Floats, cumulative: Callable[[Floats], Floats]) -> float:
    """Kolmogorov's distance between a sample and a continuous distribution."""
    ranked = np.sort(drawn)
    ideal, steps = cumulative(ranked), np.arange(len(ranked) + 1) / len(ranked)
    return float(max((steps[1:] - ideal).max(), (ideal - steps[:-1]).max()))


def normal_below(x: Floats) -> Floats:
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])


# A sample of n from the true distribution lies farther off than 1.95/sqrt(n) once in a thousand.
FAR = 1.95 / math.sqrt(COUNT)


def test_uniform_is_uniform() -> None:
    assert distance(Uniform(-2.0, 3.0).draw(keys()), lambda x: (x + 2) / 5) < FAR


def test_lognormal_has_its_median_and_sigma() -> None:
    drawn = np.log(LogNormal(3.0, 0.5).draw(keys()) / 3.0) / 0.5
    assert distance(drawn, normal_below) < FAR


def test_clipping_a_lognormal_moves_only_what_lies_outside() -> None:
    free, clipped = LogNormal(2.0, 1.5), LogNormal(2.0, 1.5, low=0.5, high=4.0)
    assert np.array_equal(clipped.draw(keys()), np.clip(free.draw(keys()), 0.5, 4.0))


def test_disc_is_uniform_in_area() -> None:
    drawn = Disc(550.0, floor=0.0).draw(keys())
    assert distance(drawn, lambda x: (x / 550) ** 2) < FAR
    # A disc of 550 m has the mean distance 366.7 m, and the deviation 550/sqrt(18).
    assert drawn.mean() == pytest.approx(550 * 2 / 3, abs=4 * 550 / math.sqrt(18 * COUNT))


def test_disc_keeps_its_floor() -> None:
    drawn = Disc(10.0, floor=5.0).draw(keys())
    assert drawn.min() == 5.0
    # A quarter of the area lies within half the radius.
    assert (drawn == 5.0).mean() == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / COUNT))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((), (1 / 3, 1 / 3, 1 / 3)),
        ((1.0, 3.0, 4.0), (0.125, 0.375, 0.5)),
        ((0.0, 1.0, 0.0), (0.0, 1.0, 0.0)),
    ],
)
def test_choice_takes_each_value_as_often_as_it_weighs(
    weights: tuple[float, ...], shares: tuple[float, ...]
) -> None:
    drawn = Categorical((4.0, 1.0, 2.5), weights).draw(keys())
    for value, share in zip((4.0, 1.0, 2.5), shares, strict=True):
        slack = 4 * math.sqrt(share * (1 - share) / COUNT)
        assert (drawn == value).mean() == pytest.approx(share, abs=slack)


def test_a_value_without_weight_is_not_drawn_even_at_a_border(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = torch.tensor([[0.0], [0.25], [0.5], [1 - 2.0**-53]], dtype=torch.float64)
    monkeypatch.setattr(rng, "uniforms", lambda key, count: shares)
    law = Categorical((9.0, 1.0, 8.0, 2.0, 7.0), (0.0, 0.1, 0.0, 0.1, 0.0))
    assert law.draw(keys(4)).tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("deviation", [1.0, 50.0, 150.0, 300.0, 390.0])
def test_normal_keeps_mean_and_deviation_however_much_is_clipped(deviation: float) -> None:
    drawn = Normal(400.0, deviation, low=0.0, high=1e4).draw(keys())
    assert drawn.mean() == pytest.approx(400, abs=4 * deviation / math.sqrt(COUNT))
    # The deviation of a sample's variance is at most that of a plain normal's, 1.41 s²/sqrt(n).
    assert drawn.var() == pytest.approx(deviation**2, rel=4 * 1.41 / math.sqrt(COUNT))
    assert drawn.min() >= 0
    assert drawn.max() <= 800


@pytest.mark.parametrize("deviation", [0.01, 0.4, 1.0, 1.9, 1.999])
def test_the_clipped_normals_moments_are_exact(deviation: float) -> None:
    """By integration: Normal as a function of the uniform number it is made of."""
    inner = _drawn_from_grid(Normal(7.0, deviation, low=5.0, high=20.0))
    assert inner.mean() == pytest.approx(7.0, abs=1e-9)
    assert inner.std() == pytest.approx(deviation, rel=1e-4)


def _drawn_from_grid(law: Normal) -> Floats:
    """What a law makes of evenly spaced probabilities instead of random ones."""
    share = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "uniform", lambda key, count: share[:, None] - 2.0**-54)
        return law.draw(torch.zeros(200_000, dtype=torch.int64))


def test_an_unclipped_normal_is_normal() -> None:
    drawn = (Normal(-3.0, 2.0).draw(keys()) + 3) / 2
    assert distance(drawn, normal_below) < FAR


def test_a_small_deviation_is_hardly_clipped_and_thus_plain() -> None:
    clipped, free = Normal(10.0, 1.0, low=0.0, high=20.0), Normal(10.0, 1.0)
    assert clipped.draw(keys()) == pytest.approx(free.draw(keys()), abs=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_a_law_is_constant_in_time_and_within_its_bounds(law: Distribution) -> None:
    drawn = law.draw(keys())
    low, high = law.bounds()
    assert drawn.shape == (COUNT,)
    assert drawn.dtype == np.float64
    assert low <= drawn.min()
    assert drawn.max() <= high
    for when in (When(0.0, 0), When(1e6, 7)):
        assert np.array_equal(law.at(keys(), when), drawn)
        assert law.until(when) == math.inf


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_a_draw_depends_on_its_own_key_only(law: Distribution) -> None:
    some = torch.tensor([999, 3, 3, 0])
    assert np.array_equal(law.draw(keys(1000)[some]), law.draw(keys(1000))[some.numpy()])
    assert law.draw(keys(0)).shape == (0,)


def test_other_seeds_draw_other_numbers() -> None:
    for law in (Uniform(0.0, 1.0), LogNormal(1.0, 1.0), Disc(9.0, 0.0), Normal(0.0, 1.0)):
        assert not np.isin(law.draw(keys(100)), law.draw(keys(100, seed=1))).any()


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (Categorical((1.0, 2.0, 9.0), (1.0, 3.0, 0.0)), (1.0, 2.0)),
        (Disc(550.0), (1.0, 550.0)),
        (LogNormal(1.0, 0.2), (0.0, math.inf)),
        (Normal(400.0, 80.0, low=100.0, high=1e3), (100.0, 700.0)),
        (Normal(900.0, 80.0, low=100.0, high=1e3), (800.0, 1e3)),
        (Normal(400.0, 80.0), (-math.inf, math.inf)),
        (Normal(400.0, 0.0), (400.0, 400.0)),
        (Normal(0.0, 0.0, low=0.0), (0.0, 0.0)),
    ],
)
def test_bounds_are_as_narrow_as_the_law(law: Distribution, expected: tuple[float, float]) -> None:
    assert law.bounds() == expected


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.integers(0, 1000))
def test_a_uniform_draw_never_leaves_its_interval(one: float, two: float, seed: int) -> None:
    drawn = Uniform(min(one, two), max(one, two)).draw(keys(50, seed))
    assert drawn.min() >= min(one, two)
    assert drawn.max() <= max(one, two)


@given(st.floats(1e-3, 1e3), st.floats(0.001, 0.99), st.floats(0, 1e3), st.integers(0, 99))
def test_a_clipped_normal_never_leaves_its_ends(
    reach: float, share: float, mean: float, seed: int
) -> None:
    law = Normal(mean, share * reach, low=mean - reach, high=mean + 2 * reach)
    drawn = law.draw(keys(50, seed))
    assert drawn.min() >= law.low
    assert drawn.max() <= mean + reach * (1 + 1e-9)


BAD: tuple[tuple[Callable[[], Distribution], str], ...] = (
    (lambda: Uniform(2.0, 1.0), "Uniform.low, 2.0, is above Uniform.high, 1.0; swap"),
    (lambda: Uniform(0.0, math.inf), "Uniform.high must be a finite number, got inf."),
    (lambda: Uniform(math.nan, 1.0), "Uniform.low must be a finite number, got nan."),
    (lambda: Categorical(()), "Categorical.values must be one or more finite numbers"),
    (lambda: Categorical((1.0, math.inf)), "Categorical.values must be one or more finite numbers"),
    (
        lambda: Categorical((1.0, 2.0), (1.0,)),
        "Categorical.weights needs one entry for each of the 2",
    ),
    (lambda: Categorical((1.0, 2.0), (3.0, -1.0)), "Categorical.weights must not be negative"),
    (lambda: Categorical((1.0, 2.0), (0.0, 0.0)), "their sum must be positive and finite"),
    (lambda: Categorical((1.0,), (math.nan,)), "Categorical.weights must not be negative"),
    (lambda: LogNormal(0.0, 1.0), "LogNormal.median must be positive, got 0.0."),
    (lambda: LogNormal(1.0, 0.0), "LogNormal.sigma must be positive, got 0.0."),
    (lambda: LogNormal(1.0, math.inf), "LogNormal.sigma must be a finite number"),
    (lambda: LogNormal(1.0, 1.0, low=-1.0), "LogNormal.low must not be negative, got -1.0."),
    (lambda: LogNormal(1.0, 1.0, low=2.0), "LogNormal.median must lie between LogNormal.low and"),
    (lambda: LogNormal(1.0, 1.0, high=math.nan), "LogNormal.median must lie between"),
    (lambda: Disc(0.0, 0.0), "Disc.radius must be positive, got 0.0."),
    (lambda: Disc(math.inf), "Disc.radius must be a finite number"),
    (lambda: Disc(5.0, 6.0), "Disc.floor must lie between 0 and Disc.radius, which is 5.0"),
    (lambda: Disc(5.0, -1.0), "Disc.floor must not be negative, got -1.0."),
    (lambda: Normal(math.nan, 1.0), "Normal.mean must be a finite number, got nan."),
    (lambda: Normal(1.0, -1.0), "Normal.deviation must not be negative, got -1.0."),
    (lambda: Normal(1.0, 1.0, low=2.0), "Normal.mean must lie between Normal.low and Normal.high"),
    (lambda: Normal(1.0, 1.0, high=0.0), "Normal.mean must lie between Normal.low and Normal.high"),
    (lambda: Normal(400.0, 400.0, low=0.0), "Normal.deviation must be below 400, the distance"),
    (lambda: Normal(0.0, 0.1, low=0.0), "Normal.deviation must be below 0, the distance"),
)


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_an_impossible_law_is_refused(make: Callable[[], Distribution], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("complete", [False, True])
def test_a_law_survives_its_file(law: Distribution, complete: bool) -> None:
    kind: Any = Distribution
    assert config.load(config.dump(law, complete=complete), kind) == law


def test_a_bad_law_in_a_file_is_told_with_its_path() -> None:
    table = {"use": "anyfleet.world.distributions:Disc", "radius": 5, "floor": -1}
    with pytest.raises(ConfigError) as caught:
        config.load({"distance": table}, dict[str, Distribution])
    assert [problem.path for problem in caught.value.problems] == ["distance.floor"]
    assert "Disc.floor" in str(caught.value)
