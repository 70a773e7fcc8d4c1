"""Who can be reached when: the right share, at the right hour, the same whoever asks."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import config, rng
from anyfleet.errors import ConfigError
from anyfleet.world.availability import Always, Availability, Diurnal, Intermittent
from anyfleet.world.quantities import When

DAY = 86_400.0
PARTS: tuple[Availability, ...] = (
    Always(),
    Intermittent(0.3),
    Intermittent(0.9, every=7.5),
    Diurnal(),
    Diurnal(mean=0.6, swing=0.9, period=100.0, every=0.7, spread=0.0),
)


def keys(count: int, seed: int = 0) -> Tensor:
    return rng.fold(rng.root(seed, "availability"), torch.arange(count))


def share(part: Availability, when: When, count: int = 10_000) -> float:
    return float(part.online(keys(count), when).mean())


def slack(chance: float, count: int = 10_000) -> float:
    """Four deviations of a share of so many devices, and a little for shares near 0 and 1."""
    return 4 * math.sqrt(chance * (1 - chance) / count) + 1e-3


def test_always_means_everybody() -> None:
    assert Always().online(keys(5), When(9.0, 9)).tolist() == [True] * 5
    assert Always().until(When(9.0, 9)) == math.inf


@pytest.mark.parametrize("chance", [0.001, 0.25, 0.9, 1.0])
def test_an_intermittent_device_is_online_as_often_as_said(chance: float) -> None:
    part = Intermittent(chance)
    for number in range(3):
        assert share(part, When(0.0, number)) == pytest.approx(chance, abs=slack(chance))
    # Also one device over time, not only the fleet at a moment.
    own = np.mean([part.online(keys(50), When(0.0, number)) for number in range(800)], axis=0)
    assert np.abs(own - chance).max() < 1.25 * slack(chance, 800)


def test_intermittent_answers_are_independent_from_slot_to_slot() -> None:
    part = Intermittent(0.5, every=60.0)
    first, second = (part.online(keys(10_000), When(now, 0)) for now in (0.0, 60.0))
    assert (first & second).mean() == pytest.approx(0.25, abs=slack(0.25))


def test_one_time_zone_has_day_and_night() -> None:
    part = Diurnal(mean=0.5, swing=0.4, spread=0.0)
    for hour, chance in ((0, 0.9), (6, 0.5), (12, 0.1), (18, 0.5), (24, 0.9), (36, 0.1)):
        found = share(part, When(hour * 3600.0, 0))
        assert found == pytest.approx(chance, abs=slack(chance))


def test_the_probability_is_cut_to_what_a_probability_can_be() -> None:
    part = Diurnal(mean=0.5, swing=0.9, spread=0.0)
    assert share(part, When(0.0, 0)) == 1.0
    assert share(part, When(DAY / 2, 0)) == 0.0


def test_time_zones_all_over_the_day_leave_a_constant_share() -> None:
    part = Diurnal(mean=0.4, swing=0.4, spread=1.0)
    for hour in range(0, 24, 5):
        assert share(part, When(hour * 3600.0, 0)) == pytest.approx(0.4, abs=slack(0.4))


def test_time_zones_over_half_a_day_flatten_the_swing() -> None:
    """The average of cos(2π (t - u/2)) over u in [0, 1) is 2/π at t = 1/4, and 0 at t = 0."""
    part = Diurnal(mean=0.5, swing=0.5, spread=0.5, every=60.0)
    peak = 0.5 + 0.5 * 2 / math.pi
    assert share(part, When(DAY / 4, 0)) == pytest.approx(peak, abs=slack(peak))
    assert share(part, When(0.0, 0)) == pytest.approx(0.5, abs=slack(0.5))


def test_a_device_has_its_own_hours_every_day() -> None:
    """Half-days of sunshine: the share of one device over many days, hour by hour."""
    part = Diurnal(mean=0.5, swing=0.5, spread=1.0, every=3600.0)
    days = np.stack(
        [
            [part.online(keys(40), When((day * 24 + hour) * 3600.0, 0)) for hour in range(24)]
            for day in range(60)
        ]
    ).astype(float)
    by_hour = days.mean(axis=0)
    wave = 2 * np.exp(2j * np.pi * np.arange(24) / 24) @ by_hour / 24
    # An amplitude of one half for each device, whose noise is about 0.5·sqrt(2/1440).
    assert np.abs(np.abs(wave) - 0.5).max() < 4.5 * 0.5 * math.sqrt(2 / 1440)
    # The phase in the second thirty days is the phase of the first.
    first, second = (
        half.mean(axis=0).T @ np.exp(2j * np.pi * np.arange(24) / 24)
        for half in (days[:30], days[30:])
    )
    assert np.abs(np.angle(first / second)).max() < 0.3
    # And phases lie all over the day.
    assert abs(np.exp(1j * np.angle(wave)).mean()) < 3 / math.sqrt(40)


def test_the_mean_is_the_average_over_a_day() -> None:
    part = Diurnal(mean=0.3, swing=0.3, spread=0.0, every=600.0)
    shares = [share(part, When(number * 600.0, 0), 500) for number in range(144)]
    assert np.mean(shares) == pytest.approx(0.3, abs=slack(0.3, 144 * 500))


@pytest.mark.parametrize("part", PARTS, ids=repr)
@given(now=st.floats(0, 1e5), along=st.floats(0, 1, exclude_max=True), number=st.integers(0, 99))
@settings(max_examples=20)
def test_nothing_changes_before_until(
    part: Availability, now: float, along: float, number: int
) -> None:
    end = float(part.until(When(now, number)))
    assert end > now
    later = now + along * (min(end, 1e9) - now)
    if later < end:  # It may have been rounded up.
        before, after = (part.online(keys(50), When(each, number)) for each in (now, later))
        assert np.array_equal(before, after)


@pytest.mark.parametrize("part", PARTS[1:], ids=repr)
def test_it_does_change_at_until(part: Availability) -> None:
    when = When(30.0, 4)
    end = float(part.until(when))
    after = When(30.0, 5) if math.isinf(end) else When(end, 4)
    assert not np.array_equal(part.online(keys(500), when), part.online(keys(500), after))


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_an_answer_depends_on_its_own_key_and_moment_only(part: Availability) -> None:
    """Also across the blocks in which a large fleet is decided."""
    everybody = keys(70_000)
    some = torch.tensor([69_999, 3, 65_536, 65_535, 3, 0])
    for moment in (5, 0, 3):
        when = When(100.0 * moment, moment)
        whole = part.online(everybody, when)
        assert whole.dtype == np.bool_
        assert whole.shape == (70_000,)
        assert part.online(everybody[some], when).tolist() == whole[some.numpy()].tolist()
    assert part.online(everybody[:0], When(0.0, 0)).shape == (0,)


BAD: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: Intermittent(0.0), "Intermittent.share must lie in (0, 1], got 0.0."),
    (lambda: Intermittent(1.1), "Intermittent.share must lie in (0, 1], got 1.1."),
    (lambda: Intermittent(math.nan), "Intermittent.share must lie in (0, 1], got nan."),
    (lambda: Intermittent(0.5, every=0.0), "Intermittent.every must be a positive number"),
    (lambda: Diurnal(mean=-0.1), "Diurnal.mean must lie in [0, 1], got -0.1."),
    (lambda: Diurnal(swing=1.1), "Diurnal.swing must lie in [0, 1], got 1.1."),
    (lambda: Diurnal(spread=2.0), "Diurnal.spread must lie in [0, 1], got 2.0."),
    (lambda: Diurnal(mean=0.0, swing=0.0), "Diurnal.mean and Diurnal.swing are both 0"),
    (lambda: Diurnal(period=0.0), "Diurnal.period must be a positive number of seconds"),
    (lambda: Diurnal(period=math.inf), "Diurnal.period must be a positive number of seconds"),
    (lambda: Diurnal(every=-5.0), "Diurnal.every must be a positive number of seconds"),
)


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_an_impossible_availability_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("part", PARTS, ids=repr)
@pytest.mark.parametrize("complete", [False, True])
def test_availability_survives_its_file(part: Availability, complete: bool) -> None:
    kind: Any = Availability
    assert config.load(config.dump(part, complete=complete), kind) == part


def test_a_file_reports_every_mistake_with_its_path() -> None:
    kind: Any = dict[str, Availability]
    table = {"use": "anyfleet.world.availability:Diurnal", "mean": 3, "period": 0, "every": 0}
    with pytest.raises(ConfigError) as caught:
        config.load({"phones": table}, kind)
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"phones.mean", "phones.period", "phones.every"}
