"""Rates, noise and outage: the worked numbers of AnycostFL, FedResCuE and WHALE-FL, and laws."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats
from anyfleet.config import dump, load, to_toml
from anyfleet.formulas import outage_probability
from anyfleet.formulas.reference import outage_range
from anyfleet.world.distributions import Disc, LogNormal, Normal, Uniform
from anyfleet.world.links import (
    BitRates,
    Link,
    Shannon,
    Steady,
    Way,
    bluetooth,
    lte,
    noise_watts,
    path_gain,
    shannon_rate,
    wifi,
)
from anyfleet.world.processes import Redrawn, Replayed, Wandering
from anyfleet.world.quantities import When

NOW = When(0.0, 0)
LINK: Any = Link  # a protocol, for `load`
COUNT = 20_000
WAYS: tuple[Way, ...] = ("up", "down")
# FedResCuE's example: 0.1 W, noise 1e-12 W, 300 m, one bit per second and hertz.
EXAMPLE = Shannon(noise_dbm_per_mhz=-90.0, ref_loss_db=0.0, fading=True)
EXAMPLE_OUTAGE = 0.020394320861578885
LINKS: list[Link] = [
    Steady(1e6, 2e6),
    Steady(Uniform(1e6, 2e6), Uniform(1e6, 2e6), shared=True),
    wifi(),
    Shannon(),
    Shannon(fading=True, shared=True, interference=1e-14),
]


def keys_of(count: int, seed: int = 0) -> Tensor:
    return rng.fold(rng.root(seed, "radio"), torch.arange(count))


def up_at(link: Link, distance: float, active: int = 1) -> float:
    return float(link.bit_rates(keys_of(1), NOW, np.array([distance]), active).up[0])


def within(sample: Floats, mean: float) -> bool:
    """The sample's mean is within five standard errors of `mean`."""
    return bool(abs(sample.mean() - mean) < 5 * sample.std() / math.sqrt(len(sample)))


# --- AnycostFL's cell -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "rates"),
    [(0.0, (10.29, 12.01, 19.53)), (15.3, (5.24, 6.94, 14.45)), (40.0, (0.17, 0.50, 6.26))],
)
def test_rates_of_the_three_intercepts(loss: float, rates: tuple[float, ...]) -> None:
    link = Shannon(ref_loss_db=loss)
    up = link.bit_rates(keys_of(3), NOW, np.array([550.0, 400.0, 100.0]), 1).up
    assert np.round(up / 1e6, 2).tolist() == list(rates)


# At 40 dB a few near devices carry the mean: the deviation is 1.9, so 400 draws say 1.2 to 1.4.
@pytest.mark.parametrize(("loss", "mean"), [(0.0, 13.0), (15.3, 7.93), (40.0, 1.31)])
def test_cell_means_of_the_three_intercepts(loss: float, mean: float) -> None:
    """The quadrature of a uniform disc, and draws from one."""
    link = Shannon(ref_loss_db=loss)
    radius = 550 * np.sqrt((np.arange(100_000) + 0.5) / 100_000)
    exact = float(link.bit_rates(keys_of(1), NOW, radius, 1).up.mean() / 1e6)
    assert exact == pytest.approx(mean, abs=0.005)
    drawn = link.bit_rates(keys_of(COUNT), NOW, Disc(550.0).draw(keys_of(COUNT)), 1).up / 1e6
    assert within(drawn, exact)


def test_noise_is_given_per_megahertz() -> None:
    assert noise_watts(-114.0, 1e6) == pytest.approx(3.981e-15, rel=2e-4)
    assert noise_watts(-114.0, 5e6) == pytest.approx(5 * noise_watts(-114.0, 1e6))


def test_nearer_than_a_metre_is_a_metre() -> None:
    assert path_gain(0.0, 3.76, 40.0) == pytest.approx(1e-4)
    assert up_at(Shannon(), 0.0) == up_at(Shannon(), 1.0) > up_at(Shannon(), 1.1)


def test_interference_adds_to_the_noise() -> None:
    noise = noise_watts(-114.0, 1e6)
    louder = Shannon(noise_dbm_per_mhz=-114.0 + 10 * math.log10(3))
    assert up_at(Shannon(interference=2 * noise), 300) == pytest.approx(up_at(louder, 300))


def test_the_station_has_its_own_power_and_band() -> None:
    distance = np.array([200.0])
    default = Shannon().bit_rates(keys_of(1), NOW, distance, 1)
    same = Shannon(station_power=0.1, station_band=1e6).bit_rates(keys_of(1), NOW, distance, 1)
    swapped = Shannon(band=1e7, send_power=10.0).bit_rates(keys_of(1), NOW, distance, 1)
    assert same.down == same.up == default.up
    assert default.down == swapped.up


def test_a_faint_signal_is_slow_but_never_stops() -> None:
    assert shannon_rate(1e6, 1e-18) == pytest.approx(1e-12 / math.log(2))
    assert 0 < up_at(Shannon(), 1e9) < 1


def test_a_gap_in_a_trace_is_no_rate_at_all(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("rate\n0\n5\n")
    link = Steady(Replayed(trace, "rate", shift=False), 7.0)
    assert [link.bit_rates(keys_of(1), When(0.0, s), np.ones(1), 1).up[0] for s in (0, 1)] == [0, 5]


# --- FedResCuE's outage -----------------------------------------------------------------------


def test_outage_of_the_worked_example() -> None:
    snr = 0.1 * path_gain(300.0, 3.76, 0.0) / 1e-12
    assert 1 / snr == pytest.approx(0.020605, abs=5e-7)
    assert outage_probability(1.0, snr) == pytest.approx(EXAMPLE_OUTAGE, rel=1e-9)
    reach = outage_range(1.0, 0.1, noise=1e-12, exponent=3.76)
    assert reach == pytest.approx(842.4, abs=0.05)


def test_a_fading_link_is_lost_as_often_as_the_closed_form_says() -> None:
    distance = np.full(COUNT, 300.0)
    closed = EXAMPLE.outage(keys_of(COUNT), NOW, distance, 1e6, active=1, way="up")
    assert closed == pytest.approx(EXAMPLE_OUTAGE, rel=1e-9)
    lost = EXAMPLE.bit_rates(keys_of(COUNT), NOW, distance, 1).up < 1e6
    assert within(lost.astype(np.float64), EXAMPLE_OUTAGE)


def test_without_fading_the_range_is_sharp() -> None:
    link = Shannon(noise_dbm_per_mhz=-90.0, ref_loss_db=15.3)
    reach = outage_range(1.0, 0.1, noise=1e-12, exponent=3.76, ref_loss_db=15.3)
    outage = link.outage(
        keys_of(2), NOW, np.array([reach * 0.999, reach * 1.001]), 1e6, active=1, way="up"
    )
    assert outage.tolist() == [0.0, 1.0]


def test_the_way_down_is_lost_as_often_as_the_stations_power_and_band_say() -> None:
    """A hundred times the power over ten times the band: a tenth of the noise for each watt."""
    distance = np.full(COUNT, 300.0)
    outage = EXAMPLE.outage(keys_of(COUNT), NOW, distance, 1e7, active=1, way="down")
    assert outage == pytest.approx(1 - (1 - EXAMPLE_OUTAGE) ** 0.1, rel=1e-9)
    lost = EXAMPLE.bit_rates(keys_of(COUNT), NOW, distance, 1).down < 1e7
    assert within(lost.astype(np.float64), float(outage[0]))
    sharp = replace(EXAMPLE, fading=False)
    reach = outage_range(1.0, 10.0, noise=1e-11, exponent=3.76)
    ends = np.array([reach * 0.999, reach * 1.001])
    found = sharp.outage(keys_of(2), NOW, ends, 1e7, active=1, way="down")
    assert found.tolist() == [0.0, 1.0]


def test_a_shared_band_is_lost_sooner() -> None:
    """Ten devices leave each a tenth of the band, with a tenth of its noise."""
    link = Shannon(noise_dbm_per_mhz=-90.0, ref_loss_db=0.0, fading=True, shared=True)
    snr = 0.1 * path_gain(300.0, 3.76, 0.0) / 1e-13
    outage = link.outage(keys_of(1), NOW, np.array([300.0]), 1e6, active=10, way="up")
    assert outage == pytest.approx(outage_probability(10.0, snr))
    assert outage > EXAMPLE_OUTAGE


def test_what_no_signal_can_carry_is_certainly_lost() -> None:
    for way in WAYS:
        assert EXAMPLE.outage(keys_of(1), NOW, np.array([1.0]), 1e12, active=1, way=way) == 1.0


# --- fading -----------------------------------------------------------------------------------


def fades_of(rates: BitRates, distance: Floats) -> tuple[Floats, Floats]:
    """The fades that made these rates, from the rates alone."""
    gain = path_gain(distance, EXAMPLE.exponent, EXAMPLE.ref_loss_db)
    up = np.expm1(rates.up * math.log(2) / 1e6) * 1e-12 / (gain * 0.1)
    down = np.expm1(rates.down * math.log(2) / 1e7) * 1e-11 / (gain * 10.0)
    return up, down


def test_fades_are_exponential_and_independent_both_ways() -> None:
    distance = np.full(COUNT, 300.0)
    up, down = fades_of(EXAMPLE.bit_rates(keys_of(COUNT), NOW, distance, 1), distance)
    for fade in (up, down):
        assert within(fade, 1.0)
        assert within(fade**2, 2.0)
    assert abs(np.corrcoef(up, down)[0, 1]) < 5 / math.sqrt(COUNT)


def test_a_fade_lasts_one_server_step() -> None:
    distance, keys = np.full(COUNT, 300.0), keys_of(COUNT)
    first = EXAMPLE.bit_rates(keys, When(0.0, 0), distance, 1).up
    assert (EXAMPLE.bit_rates(keys, When(99.0, 0), distance, 1).up == first).all()
    second = EXAMPLE.bit_rates(keys, When(99.0, 1), distance, 1).up
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(COUNT)
    assert EXAMPLE.until(NOW) == math.inf


# --- given rates ------------------------------------------------------------------------------


def test_constants_are_what_every_device_has() -> None:
    rates = Steady(1e6, 2e6).bit_rates(keys_of(3), NOW, np.ones(3), 7)
    assert rates.up.tolist() == [1e6] * 3
    assert rates.down.tolist() == [2e6] * 3


def test_the_ways_are_drawn_independently() -> None:
    law = Uniform(1e6, 2e6)
    rates = Steady(law, law).bit_rates(keys_of(COUNT), NOW, np.ones(COUNT), 1)
    assert abs(np.corrcoef(rates.up, rates.down)[0, 1]) < 5 / math.sqrt(COUNT)


def test_a_given_rate_is_lost_or_not() -> None:
    link = Steady(Uniform(1e6, 2e6), Uniform(1e6, 3e6))
    keys, distance = keys_of(100), np.ones(100)
    found = []
    for way in WAYS:
        outage = link.outage(keys, NOW, distance, 1.5e6, active=1, way=way)
        assert (outage == (link.bit_rates(keys, NOW, distance, 1).of(way) < 1.5e6)).all()
        assert set(outage) == {0.0, 1.0}
        found.append(outage)
    assert (found[0] != found[1]).any()
    just, less = (
        Steady(1e6, 1.0).outage(keys, NOW, distance, 1e6, active=1, way=way) for way in WAYS
    )
    assert just.max() == 0  # just enough
    assert less.min() == 1


def test_rates_hold_until_the_first_of_them_changes() -> None:
    law = Uniform(1e6, 2e6)
    assert Steady(law, 1e6).until(NOW) == math.inf
    assert Steady(Redrawn(law, every=7.0), Redrawn(law, every=5.0)).until(When(11.0, 0)) == 14.0


@pytest.mark.parametrize(("link", "mean"), [(wifi(), 80e6), (lte(), 20e6), (bluetooth(), 10e6)])
def test_wandering_radios_keep_their_mean(link: Steady, mean: float) -> None:
    """At any one step; the floor at 5 % of the mean is 7 deviations away."""
    for step in (0, 10):
        rates = link.bit_rates(keys_of(COUNT), When(0.0, step), np.ones(COUNT), 1)
        assert within(rates.up, mean)
        assert within(rates.down, mean)
        assert np.log(rates.up).std() == pytest.approx(0.4, abs=0.01)


def test_wandering_radios_remember() -> None:
    def logs(step: int) -> Floats:
        rates = wifi().bit_rates(keys_of(COUNT), When(0.0, step), np.ones(COUNT), 1)
        return np.asarray(np.log(rates.up))

    for lag in (1, 4):
        expected = 0.8**lag
        tolerance = 5 * (1 - expected**2) / math.sqrt(COUNT)
        assert abs(np.corrcoef(logs(20), logs(20 + lag))[0, 1] - expected) < tolerance


# --- one band for all -------------------------------------------------------------------------


def test_two_devices_on_a_shared_medium_have_half_each() -> None:
    link, alone = Steady(1e6, 2e6, shared=True), Steady(1e6, 2e6)
    rates, whole = (each.bit_rates(keys_of(2), NOW, np.ones(2), 2) for each in (link, alone))
    assert (2 * rates.up == whole.up).all()
    assert (2 * rates.down == whole.down).all()


def test_a_part_of_the_band_has_a_part_of_the_noise() -> None:
    """A device sends with all of its power; the station divides its own."""
    distance = np.array([300.0])
    whole = Shannon().bit_rates(keys_of(1), NOW, distance, 5)
    part = Shannon(shared=True).bit_rates(keys_of(1), NOW, distance, 5)
    assert part.up == Shannon(band=2e5).bit_rates(keys_of(1), NOW, distance, 1).up
    assert whole.up / 5 < part.up < whole.up
    assert part.down == pytest.approx(whole.down / 5)


# --- properties -------------------------------------------------------------------------------

DISTANCES = st.floats(0, 5000)
SHANNONS = st.builds(
    Shannon,
    band=st.floats(1e5, 1e8),
    send_power=st.floats(0.01, 10),
    exponent=st.floats(2, 5),
    ref_loss_db=st.floats(0, 60),
    interference=st.floats(0, 1e-12),
    fading=st.booleans(),
    shared=st.booleans(),
)


def no_faster(slow: BitRates, fast: BitRates) -> bool:
    return all((a <= b * (1 + 1e-12)).all() for a, b in zip(slow, fast, strict=True))


@given(SHANNONS, DISTANCES, DISTANCES, st.integers(1, 50))
def test_farther_is_slower(link: Shannon, one: float, other: float, active: int) -> None:
    near, far = (
        link.bit_rates(keys_of(1), NOW, np.array([d]), active) for d in sorted((one, other))
    )
    assert no_faster(far, near)


@given(SHANNONS, DISTANCES, st.integers(1, 50), st.integers(1, 50))
def test_more_company_is_slower(link: Shannon, distance: float, one: int, other: int) -> None:
    few, many = (
        link.bit_rates(keys_of(1), NOW, np.array([distance]), active)
        for active in sorted((one, other))
    )
    assert no_faster(many, few)
    assert link.shared or many == few


@given(st.floats(-20, 80), st.floats(-20, 80), DISTANCES)
def test_more_loss_is_slower(one: float, other: float, distance: float) -> None:
    little, much = (
        Shannon(ref_loss_db=loss).bit_rates(keys_of(1), NOW, np.array([distance]), 1)
        for loss in sorted((one, other))
    )
    assert no_faster(much, little)


@given(SHANNONS, st.lists(DISTANCES, max_size=6), st.floats(1e3, 1e9), st.integers(1, 9))
def test_outage_is_a_probability_that_grows_with_what_is_asked(
    link: Shannon, distances: list[float], minimum: float, active: int
) -> None:
    keys, distance = keys_of(len(distances)), np.array(distances, dtype=np.float64)
    for way in WAYS:
        outage = link.outage(keys, NOW, distance, minimum, active=active, way=way)
        assert ((outage >= 0) & (outage <= 1)).all()
        more = link.outage(keys, NOW, distance, 2 * minimum, active=active, way=way)
        assert (more >= outage).all()


@pytest.mark.parametrize("link", LINKS)
@given(
    distances=st.lists(DISTANCES, max_size=8),
    step=st.integers(0, 5),
    shuffle=st.randoms(use_true_random=False),
)
def test_only_its_key_decides_about_a_device(
    link: Link, distances: list[float], step: int, shuffle: Any
) -> None:
    """Neither its place in the batch, nor its company there, nor when it is asked."""
    keys, distance = keys_of(len(distances)), np.array(distances, dtype=np.float64)
    together = link.bit_rates(keys, When(0.0, step), distance, 3)
    order = list(range(len(distances)))
    shuffle.shuffle(order)
    chosen = np.array(order[: len(order) // 2 + 1], dtype=np.int64)
    alone = link.bit_rates(keys[chosen], When(0.0, step), distance[chosen], 3)
    assert (alone.up == together.up[chosen]).all()
    assert (alone.down == together.down[chosen]).all()
    assert (together.up > 0).all()
    assert (together.down > 0).all()


# --- what is refused, and run files -----------------------------------------------------------

POSITIVE = ("band", "send_power", "exponent", "station_power", "station_band")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in POSITIVE for value in (0.0, -1.0, math.inf, math.nan)),
        *(
            (name, value)
            for name in ("interference", "receive_power")
            for value in (-1.0, math.inf)
        ),
        *(
            (name, value)
            for name in ("noise_dbm_per_mhz", "ref_loss_db")
            for value in (math.inf, math.nan, -1e4)
        ),
    ],
)
def test_a_wrong_field_of_shannon_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Shannon\.{field} must"):
        Shannon(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bit_rate_up", 0.0),
        ("bit_rate_up", -1.0),
        ("bit_rate_up", math.inf),
        ("bit_rate_down", LogNormal(1e6, 1.0)),
        ("bit_rate_down", math.nan),
        ("bit_rate_down", Normal(1e6, 1e5)),
        ("bit_rate_up", Uniform(-1.0, 1e6)),
        ("send_power", -0.1),
        ("receive_power", math.nan),
    ],
)
def test_a_wrong_field_of_steady_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Steady\.{field} must"):
        Steady(**({"bit_rate_up": 1e6, "bit_rate_down": 1e6} | {field: value}))


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("link", LINKS)
def test_links_survive_a_file(link: Any, complete: bool) -> None:
    text = to_toml({"link": dump(link, complete=complete)})
    assert load(tomllib.loads(text)["link"], LINK) == link


def test_a_file_may_change_a_named_radio() -> None:
    data = {"use": "anyfleet.world.links:lte", "bit_rate_up": 5_000_000, "send_power": 2}
    assert load(data, LINK) == Steady(5e6, Wandering(20e6), send_power=2.0, receive_power=1.0)
