"""Which channels sub-models are made of."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import nn

from anyfleet import rng
from anyfleet.core.index_sets import pack_slice, unpack_slice
from anyfleet.core.messages import SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import PlanningState, plan_cohort
from anyfleet.core.server import Server
from anyfleet.core.slots import Extract
from anyfleet.core.view import Request, View
from anyfleet.elastic import EVALUATE, WHOLE, Blueprint, Slice, apply, cut, dense, paste, trace
from anyfleet.formulas.sub_models import fedrolex_window, kept_channels
from anyfleet.methods import fedavg
from anyfleet.parts.extract import Leading, Random, Rolling
from anyfleet.parts.plan import WidthByLevel, WidthMenu
from anyfleet.runtime import Simulated
from tests.helpers import nets, small

EVERYBODY = np.arange(8)


@cache
def twins(first: int = 5, second: int = 5) -> Blueprint:
    """Two hidden layers."""
    module = nn.Sequential(
        nn.Linear(3, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2)
    )
    return trace(module, torch.zeros(2, 3))


@cache
def seen() -> View:
    task = small.task()
    return Server(fedavg(), task, Simulated(task, small.world(task)), 0).view()


def cut_out(
    part: Extract, size: SubModelSize, blueprint: Blueprint, *, step: int = 0, key: int = 0
) -> Slice:
    view = replace(seen(), blueprint=blueprint, round_index=step)
    return part(size, view, None, rng.fold(rng.root(0, "test"), key), 1 if part.personal else None)


def issued(method: Method, *, step: int = 0, seed: int = 0) -> Cohort:
    """The orders that the server would draft for all devices, who came to every round before."""
    visits, never = np.full(8, step), np.zeros(8, dtype=np.int64)
    state = PlanningState(seed, 0, visits, never, dict.fromkeys(method.policies()))
    view = replace(seen(), round_index=step)
    return plan_cohort(Request(), EVERYBODY, method=method, view=view, state=state).orders


def random_method(*shares: float) -> Method:
    return replace(fedavg(), plan=WidthByLevel(shares), extract=Random())


# --- random -----------------------------------------------------------------------------------


def test_every_set_of_channels_is_equally_likely() -> None:
    """2 of 5 channels: ten sets, and chi-square with nine degrees of freedom, at one in 1,000."""
    blueprint, rounds = twins(), 2000
    drawn = [cut_out(Random(), SubModelSize(0.4), blueprint, key=k) for k in range(rounds)]
    for axis in ("0", "2"):
        counts = Counter(slice_.kept(axis) for slice_ in drawn)
        assert set(counts) == set(combinations(range(5), 2))
        expected = rounds / 10
        assert sum((n - expected) ** 2 / expected for n in counts.values()) < 27.9


def test_layers_draw_independently_of_each_other() -> None:
    blueprint, rounds = twins(), 2000
    drawn = [cut_out(Random(), SubModelSize(0.4), blueprint, key=k) for k in range(rounds)]
    equal = sum(slice_.kept("0") == slice_.kept("2") for slice_ in drawn)
    assert abs(equal - rounds / 10) < 5 * (rounds * 0.1 * 0.9) ** 0.5


def test_random_channels_differ_by_device_and_by_round_and_by_seed() -> None:
    method = random_method(0.5)
    one, two = issued(method), issued(method, step=1)
    other = issued(method, seed=1)
    assert len({*one.slices, *two.slices, *other.slices}) == 24
    assert issued(method).slices == one.slices


def test_a_device_draws_the_same_whoever_else_is_asked() -> None:
    view, method = seen(), random_method(0.5)
    zeros = np.zeros(8, dtype=np.int64)
    state = PlanningState(0, 0, zeros, zeros, dict.fromkeys(method.policies()))
    alone = plan_cohort(Request(), np.array([3]), method=method, view=view, state=state)
    assert alone.orders.slice_of(0) == issued(method).slice_of(3)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.01])
def test_random_slices_have_the_wanted_size_in_ascending_order(share: float) -> None:
    blueprint = small.task().blueprint
    want = SubModelSize(share, first_trained_layer=1)
    slice_ = cut_out(Random(), want, blueprint)
    assert slice_.first_trained_layer == 1
    assert slice_.shape(blueprint) == want.prefix(blueprint).shape(blueprint)
    assert all(
        len(kept) == kept_channels(share, blueprint.axes[axis].size) for axis, kept in slice_.keep
    )
    assert all(list(kept) == sorted(set(kept)) for _, kept in slice_.keep)
    if share == 1:
        assert slice_ == Slice(first_trained_layer=1)


def test_entries_of_a_menu_lie_inside_each_other() -> None:
    method = replace(random_method(1.0), plan=WidthMenu((0.7, 0.4, 0.1)))
    for menu in issued(method).menus:
        for larger, smaller in pairwise(menu):
            assert smaller != larger
            for axis, kept in smaller.keep:
                assert set(kept) <= set(larger.kept(axis) or ())


@pytest.mark.parametrize("part", [Random(), Rolling()])
def test_a_test_of_some_width_takes_the_leading_channels(part: Extract) -> None:
    blueprint = twins()
    size, view = SubModelSize(0.4), replace(seen(), blueprint=blueprint, round_index=3)
    tested = part.for_evaluation(size, view, None, rng.root(0, "test"))
    assert tested == cut_out(Leading(), size, blueprint)
    assert tested != cut_out(part, size, blueprint, step=3)


# --- rolling ----------------------------------------------------------------------------------

WINDOWS = [(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 0), (4, 0, 1), (0, 1, 2)]


def test_1_6_windows() -> None:
    """specification §1.6: K=5, n=3."""
    blueprint, want = twins(), SubModelSize(0.6)
    found = [cut_out(Rolling(), want, blueprint, step=step) for step in range(6)]
    assert [slice_.kept("0") for slice_ in found] == [slice_.kept("2") for slice_ in found]
    assert [slice_.kept("0") for slice_ in found] == WINDOWS
    formula = [tuple(fedrolex_window(5, 3, step).tolist()) for step in range(6)]
    assert formula == WINDOWS


def test_windows_of_other_steps_and_of_the_other_way() -> None:
    blueprint, want = twins(), SubModelSize(0.6)
    two = [cut_out(Rolling(2), want, blueprint, step=t).kept("0") for t in range(3)]
    assert two == [(0, 1, 2), (2, 3, 4), (4, 0, 1)]
    back = [cut_out(Rolling(-1), want, blueprint, step=t).kept("0") for t in range(3)]
    assert back == [(0, 1, 2), (4, 0, 1), (3, 4, 0)]
    with pytest.raises(ValueError, match=r"Rolling\.shift must not be 0"):
        Rolling(0)


def test_layers_of_different_widths_have_different_periods() -> None:
    blueprint = twins(5, 7)
    slice_ = cut_out(Rolling(), SubModelSize(0.4), blueprint, step=6)
    assert slice_.kept("0") == (1, 2)
    assert slice_.kept("2") == (6, 0, 1)


def test_all_devices_share_the_start_and_the_round_moves_it() -> None:
    method = replace(fedavg(), plan=WidthByLevel((0.5, 0.25)), extract=Rolling())
    view = seen()
    for step in (0, 3):
        for slice_ in issued(method, step=step).slices:
            assert {kept[0] for _, kept in slice_.keep} == {step}
    assert view.blueprint.axes["0"].size > 3


def test_a_whole_layer_keeps_its_natural_order_in_every_round() -> None:
    blueprint = small.task().blueprint
    for step in range(5):
        assert cut_out(Rolling(), SubModelSize(1.0), blueprint, step=step) == WHOLE
    mixed = SubModelSize(1.0, axis_widths=(("8", 0.5),))
    assert [axis for axis, _ in cut_out(Rolling(), mixed, blueprint, step=3).keep] == ["8"]


def test_a_window_that_wraps_keeps_its_order_in_cut_paste_and_on_the_wire() -> None:
    blueprint = twins()
    slice_ = cut_out(Rolling(), SubModelSize(0.6), blueprint, step=4)
    params = {n: torch.randn(blueprint.shape(n)) for n in blueprint.params}
    part = cut(params, slice_, blueprint)
    assert torch.equal(part["0.weight"], params["0.weight"][[4, 0, 1]])
    assert torch.equal(part["2.weight"], params["2.weight"][[4, 0, 1]][:, [4, 0, 1]])
    back = paste({n: -v for n, v in part.items()}, params, slice_, blueprint)
    assert torch.equal(back["0.weight"][[0, 1, 4]], -params["0.weight"][[0, 1, 4]])
    assert torch.equal(back["0.weight"][[2, 3]], params["0.weight"][[2, 3]])
    assert unpack_slice(pack_slice(slice_, blueprint), blueprint) == slice_


# --- both -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [Random(), Rolling()], ids=["random", "rolling"])
@pytest.mark.parametrize("net", ["lenet", "resnet_basic", "resnet_bottleneck", "mobilenet"])
def test_the_small_model_is_the_whole_one_with_the_other_channels_zeroed(
    net: str, part: Extract
) -> None:
    """Where skip connections are added, all summands must have kept the same channels."""
    known = nets.traced(net)
    blueprint, params, buffers = known.blueprint, known.params, known.buffers
    slice_ = cut_out(part, SubModelSize(0.5), blueprint, step=5, key=7)
    assert len(slice_.keep) == len(blueprint.counts(1.0))
    assert slice_ != blueprint.prefix(0.5)
    nothing = {name: torch.zeros_like(value) for name, value in params.items()}
    zeroed = paste(cut(params, slice_, blueprint), nothing, slice_, blueprint)
    expected, _ = apply(blueprint, zeroed, buffers, known.inputs, EVALUATE)
    module = dense(blueprint, slice_, params, buffers).eval()
    torch.testing.assert_close(module(known.inputs), expected)
    assert not torch.allclose(expected, known.module.eval()(known.inputs))
