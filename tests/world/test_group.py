"""Groups: what a field may be, and how a wrong one is refused."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from anyfleet.world import Categorical, Group, Normal, Redrawn, Replayed, Uniform, Wandering
from anyfleet.world.group import _MAY_BE_INFINITE, _RANGES

TRACE = Path(__file__).parent / "trace.csv"
NUMBERS = [f.name for f in fields(Group) if f.name in _RANGES]


def group(**fields: Any) -> Group:
    return Group(**fields)


def test_every_number_of_a_group_has_a_range() -> None:
    others = {"name", "count", "level", "devices", "frequency", "exponent"}
    others |= {"link", "column_loss", "availability"}
    assert {f.name for f in fields(Group)} - others == set(_RANGES)


@pytest.mark.parametrize("name", NUMBERS)
def test_no_column_may_be_negative(name: str) -> None:
    for number in (-1.0, Uniform(-1.0, 0.5), Redrawn(Uniform(-1.0, 0.5))):
        with pytest.raises(ValueError, match=f"Group.{name}"):
            group(**{name: number})


@pytest.mark.parametrize("name", NUMBERS)
def test_nought_only_where_it_means_something(name: str) -> None:
    allowed = _RANGES[name][1]
    if allowed:
        group(**{name: 0.0})
    else:
        with pytest.raises(ValueError, match=f"Group.{name} must be above 0"):
            group(**{name: 0.0})


@pytest.mark.parametrize("name", NUMBERS)
def test_laws_are_bounded(name: str) -> None:
    with pytest.raises(ValueError, match=f"Group.{name} must be bounded"):
        group(**{name: Normal(0.5, 0.1)})
    group(**{name: Normal(0.5, 0.1, low=0.1, high=0.9)})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("every", [None, 10.0])
def test_what_concerns_the_battery_stays_and_all_else_may_change(
    name: str, every: float | None
) -> None:
    law = Uniform(0.1, 0.9)
    changing = Redrawn(law, every), Wandering(0.1, every=every), Replayed(TRACE, "rate", every)
    group(**{name: law})
    if name not in ("battery", "charge", "reserve", "recharge"):
        for number in changing[:1] if _RANGES[name][2] == 1 else changing:
            group(**{name: number})
        return
    for number in changing:
        with pytest.raises(ValueError, match=f"Group.{name} must be a number or a distribution"):
            group(**{name: number})


@pytest.mark.parametrize("name", NUMBERS)
def test_infinity_is_mains_or_no_limit(name: str) -> None:
    if name in _MAY_BE_INFINITE:
        group(**{name: math.inf})
    else:
        with pytest.raises(ValueError, match=f"Group.{name}"):
            group(**{name: math.inf})
    with pytest.raises(ValueError, match=f"Group.{name}"):
        group(**{name: math.nan})


@pytest.mark.parametrize("name", ["fixed", "charge", "reserve", "mortality"])
def test_shares_end_at_one(name: str) -> None:
    group(**{name: 1.0})
    with pytest.raises(ValueError, match=f"Group.{name}.*at most 1"):
        group(**{name: Uniform(0.5, 1.5)})


@pytest.mark.parametrize("frequency", [(0.0, 1e9), (2e9, 1e9), (1e8, math.inf), (-1e8, 1e9)])
def test_frequencies_go_from_slowest_to_fastest(frequency: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"Group\.frequency"):
        group(frequency=frequency)
    group(frequency=(1e9, 1e9))


def test_an_empty_group_and_a_negative_level_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Group\.count must be at least 1"):
        group(count=0)
    with pytest.raises(ValueError, match=r"Group\.level"):
        group(level=-1)


@pytest.mark.parametrize("exponent", [0.0, -1.0, math.inf, math.nan])
def test_an_exponent_is_a_positive_number_or_none(exponent: float) -> None:
    with pytest.raises(ValueError, match=r"Group\.exponent must be above 0"):
        Group(exponent=exponent)
    assert Group(exponent=1.7) != Group() == Group(exponent=None)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_would_stop_the_clock_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Group.{name} .*at most"):
        group(**{name: 1e300})
    if name in ("speed", "bandwidth", "load"):
        with pytest.raises(ValueError, match=f"Group.{name} must be at least 1e-09"):
            group(**{name: 1e-300})
        with pytest.raises(ValueError, match=f"Group.{name} must be at least 1e-09"):
            group(**{name: Categorical((1e-300, 1.0))})


def test_frequencies_that_would_stop_the_clock_are_refused() -> None:
    for frequency in ((1e-300, 1e9), (1e9, 1e300)):
        with pytest.raises(ValueError, match=r"Group\.frequency"):
            group(frequency=frequency)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"devices": (0, 3, 0, "ada", "ada")},
            r"Group\.devices names these more than once: 0, ada\.",
        ),
        ({"devices": (-1, "", True)}, r"from 0, or names of owners; got -1, '', True\."),
        ({"devices": (0, 1), "count": 3}, r"Group\.count is 3, but the group names 2 devices"),
        ({"level": 1000}, r"Group\.level must lie in 0 … 999, got 1000"),
        ({"battery": -math.inf}, r"Group\.battery must be"),
    ],
)
def test_names_and_levels_that_cannot_be_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        group(**fields)
    assert group(devices=(0, 1), count=2).devices == (0, 1)
