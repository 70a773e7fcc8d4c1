"""What is left of a slice when only its first columns arrive."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anyfleet.elastic import (
    Blueprint,
    Slice,
    channel_share,
    columns,
    cut,
    narrowed,
    trace,
    trained_share,
    within,
)
from anyfleet.elastic import width as width_of
from anyfleet.elastic.blueprint import Rounding
from anyfleet.formulas import anycost_alpha
from tests.helpers.nets import LeNet

WIDE = trace(
    nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 5)),
    torch.zeros(2, 3),
)
CONVOLUTIONS = trace(LeNet(), torch.zeros(2, 1, 14, 14))
BLUEPRINTS = pytest.mark.parametrize("blueprint", [WIDE, CONVOLUTIONS], ids=["wide", "lenet"])
WIDTHS = st.sampled_from([0.05, 0.125, 0.25, 0.3, 0.5, 0.9, 1.0])


def sizes(slice_: Slice, blueprint: Blueprint) -> dict[str, int]:
    return blueprint.local(slice_).sizes


def rolled(share: float, shift: int, blueprint: Blueprint) -> Slice:
    """A window of every axis that wraps around, as FedRolex sends it."""
    keep = {}
    for axis, count in blueprint.counts(share).items():
        size = blueprint.axes[axis].size
        keep[axis] = [(shift + i) % size for i in range(count)]
    return Slice.of(keep, blueprint)


@pytest.mark.parametrize("share", [0.05 * i for i in range(1, 21)])
def test_1_9_a_slice_has_as_many_columns_as_its_share_begins(share: float) -> None:
    """C = ceil(p / 0.125), for all shares of the other grid."""
    assert columns(share, 0.125) == math.ceil(round(share / 0.125, 9))


def test_1_8_a_cut_beyond_the_slice_delivers_the_slice() -> None:
    slice_ = WIDE.prefix(0.35)
    assert columns(0.35, 0.125) == 3
    assert narrowed(slice_, 0.375, WIDE) == slice_
    assert narrowed(slice_, 0.25, WIDE) == WIDE.prefix(0.25)


@pytest.mark.parametrize("width", [0.125, 0.2, 0.3, 1 / 3, 0.5, 1.0])
def test_columns_may_be_of_any_width(width: float) -> None:
    assert columns(1.0, width) == math.ceil(round(1 / width, 9))


@BLUEPRINTS
@given(share=WIDTHS, width=WIDTHS, first=st.integers(0, 2))
def test_of_a_prefix_remains_the_smaller_prefix(
    blueprint: Blueprint, share: float, width: float, first: int
) -> None:
    found = narrowed(blueprint.prefix(share, first), width, blueprint)
    assert found == blueprint.prefix(min(share, width), first)
    assert found.first_trained_layer == first  # a suffix of layers stays a suffix


@BLUEPRINTS
@given(share=WIDTHS, width=WIDTHS, shift=st.integers(0, 50))
def test_of_a_window_remain_its_first_indices_in_its_own_order(
    blueprint: Blueprint, share: float, width: float, shift: int
) -> None:
    window = rolled(share, shift, blueprint)
    found = narrowed(window, width, blueprint)
    for axis, count in blueprint.counts(width).items():
        ordered = tuple(window.kept(axis) or range(blueprint.axes[axis].size))
        kept = tuple(found.kept(axis) or range(blueprint.axes[axis].size))
        assert kept == ordered[:count]


@BLUEPRINTS
@given(share=WIDTHS, width=WIDTHS, shift=st.integers(0, 50))
def test_cutting_the_small_model_is_cutting_the_large_one(
    blueprint: Blueprint, share: float, width: float, shift: int
) -> None:
    """In local coordinates the same numbers remain."""
    window = rolled(share, shift, blueprint)
    numbers = {
        name: torch.arange(math.prod(blueprint.shape(name))).reshape(blueprint.shape(name))
        for name in blueprint.params
    }
    local = blueprint.local(window)
    part = within(window, width, blueprint)
    twice = cut(cut(numbers, window, blueprint), part, local)
    once = cut(numbers, narrowed(window, width, blueprint), blueprint)
    assert all(torch.equal(twice[name], once[name]) for name in once)


@given(share=WIDTHS, columns_=st.integers(1, 8))
def test_more_columns_never_bring_less(share: float, columns_: int) -> None:
    slice_ = WIDE.prefix(share)
    fewer, more = (narrowed(slice_, min(1.0, n * 0.125), WIDE) for n in (columns_, columns_ + 1))
    small, large = sizes(fewer, WIDE), sizes(more, WIDE)
    assert all(small[axis] <= large[axis] for axis in small)
    if columns_ >= columns(share, 0.125):
        assert fewer == slice_  # with the last column all of it is there


def test_an_axis_that_only_some_slices_cut_stays_as_it_is() -> None:
    """Classes and inputs are no columns: they come with the first."""
    local = WIDE.local(narrowed(Slice(), 0.125, WIDE))
    assert local.shape("0.weight") == (5, 3)
    assert local.shape("4.weight") == (5, 10)
    assert local.shape("4.bias") == (5,)


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.25, 0.125, 0.0625])
def test_the_width_of_a_plain_cut_is_its_share(share: float) -> None:
    """Rounding up to whole channels makes small axes wider; the widest axis tells the share."""
    exact = min(math.ceil(share * axis - 1e-9) / axis for axis in (40, 80))
    assert width_of(WIDE.prefix(share), WIDE) == pytest.approx(exact)
    assert exact == pytest.approx(share, abs=1 / 40)


# --- AnycostFL's measure ------------------------------------------------------------------------


def alpha(slice_: Slice, blueprint: Blueprint) -> float:
    return anycost_alpha(channel_share(slice_, blueprint), trained_share(slice_, blueprint))


def test_1_12_alpha_is_the_width_squared() -> None:
    for share in (0.25, 0.5, 0.75, 1.0):
        assert alpha(WIDE.prefix(share), WIDE) == pytest.approx(share**2)
        assert alpha(rolled(share, 7, WIDE), WIDE) == pytest.approx(share**2)


def test_alpha_of_what_trains_fewer_layers_counts_their_parameters() -> None:
    """3 × 40 + 40, 40 × 80 + 80 and 80 × 5 + 5 parameters; at half the width, less."""
    assert alpha(Slice((), 2), WIDE) == pytest.approx(405 / (160 + 3280 + 405))
    half = 205 / (80 + 840 + 205)
    assert alpha(WIDE.prefix(0.5, 2), WIDE) == pytest.approx(0.25 * half)


def test_alpha_of_an_uneven_cut_goes_by_all_its_channels() -> None:
    """All of the first hidden layer, a tenth of the second: no single width says that."""
    first, second = WIDE.counts(1.0)
    assert WIDE.axes[second].size == 80
    assert width_of(Slice.of({second: range(8)}, WIDE), WIDE) == 1
    assert alpha(Slice.of({second: range(8)}, WIDE), WIDE) == pytest.approx((48 / 120) ** 2)
    assert alpha(Slice.of({first: range(4)}, WIDE), WIDE) == pytest.approx((84 / 120) ** 2)


@pytest.mark.parametrize("rounding", ["ceil", "round"])
@BLUEPRINTS
def test_a_narrower_model_never_has_a_larger_alpha(
    blueprint: Blueprint, rounding: Rounding
) -> None:
    shares = [k / 16 for k in range(1, 17)]
    found = [alpha(blueprint.prefix(share, rounding=rounding), blueprint) for share in shares]
    assert found == sorted(found)
    assert found[-1] == 1
