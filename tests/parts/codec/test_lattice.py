"""UVeQFed: lattices, dither, and messages that meet a rate (specification §1.15)."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.formulas.reference import (
    uveq,
    uveq_lattice,
    uveq_lattice_indices,
    uveq_values,
    uveq_variance,
)
from anyfleet.parts.codec import Uveq
from anyfleet.parts.codec.lattice import blocks, dither, entries, nearest, points
from tests.parts.codec.test_quantisers import around, plain, sent


def test_1_15_uveq_example() -> None:
    """METHODS: step .5, v=(.6, -.8), z=(.1, -.2), the dither not yet in units of the step."""
    v, z = plain(0.6, -0.8)[None, None], plain(0.1, -0.2)[None, None]
    back = 0.5 * points(nearest((v + z) / 0.5)) - z
    assert back.flatten().tolist() == pytest.approx([0.4, -0.8])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_1_15_the_nearest_point_of_hexagons(seed: int) -> None:
    at = blocks(3 * rng.normal(rng.root(seed, "points"), 80)[None], 2)
    found = entries(points(nearest(at)), 80).reshape(-1, 2).numpy()
    basis = uveq_lattice(1.0)
    plane = entries(at, 80).reshape(-1, 2).numpy()
    expected = uveq_lattice_indices(plane, basis) @ basis
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dimension", [1, 2])
def test_1_15_dither_is_even_on_a_cell(dimension: Literal[1, 2]) -> None:
    count = 20_000
    u = rng.uniform(rng.root(1, "dither"), count * dimension)[None]
    shift, side = dither(blocks(u, dimension))
    found = shift * side
    # In the cell around 0, all over it, and as far from 0 as is known of even ones.
    assert not nearest(found).any()
    basis = uveq_lattice(1.0, dimension)
    variance = uveq_variance(1.0, basis)
    tolerance = 5 * math.sqrt(2 / (count * dimension))
    assert float(found.square().mean()) == pytest.approx(variance, rel=tolerance)
    for axis in found[0]:
        assert float(axis.mean()) == pytest.approx(0, abs=5 * math.sqrt(variance / count))
    if dimension == 2:
        # Turned by a sixth, the cell is itself: as far along other axes.
        turned = found[0, 0] * math.cos(math.pi / 3) + found[0, 1] * math.sin(math.pi / 3)
        for axis in (*found[0], turned):
            assert float(axis.square().mean()) == pytest.approx(
                variance, rel=5 * math.sqrt(2 / count)
            )


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("size", [4001, 4000])
def test_1_15_errors_do_not_depend_on_the_update(dimension: Literal[1, 2], size: int) -> None:
    codec = Uveq(1.5, dimension)
    update = rng.normal(rng.root(2, "lattice"), size)
    # The second as coarse for its entries as the first, though these are quite different ones.
    other = update.abs().sqrt() * torch.where(torch.arange(size) % 3 == 0, 1.0, 0.0)
    for v in (update, other):
        found = sent(codec, v)
        step = float(found.symbols.scales["0"][0, 0])
        error = (found.received["0"][0] - v) / step
        variance = uveq_variance(1.0, uveq_lattice(1.0, dimension))
        # The fourth moment of a cell is below twice the squared variance.
        assert float(error.mean()) == pytest.approx(0, abs=5 * math.sqrt(variance / size))
        assert float(error.square().mean()) == pytest.approx(variance, rel=5 / math.sqrt(size))
        assert float((error * v / v.norm()).sum()) == pytest.approx(0, abs=5 * math.sqrt(variance))


@pytest.mark.parametrize("dimension", [1, 2])
def test_1_15_uveq_is_the_formula(dimension: Literal[1, 2]) -> None:
    codec, size = Uveq(2.0, dimension), 101
    v = rng.normal(rng.root(4, "formula"), size)
    found = sent(codec, v)
    step = float(found.symbols.scales["0"][0, 0])
    basis = uveq_lattice(1.0, dimension)
    shift, side = codec._dither(blocks(v[None], dimension), (size,), ("0",), around(size))
    noise = (shift * side)[0].T.numpy()
    indices = uveq(v.numpy(), step, basis, noise)
    expected = uveq_values(indices, step, basis, noise, size)
    assert found.received["0"][0].numpy() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("bits", [0.8, 2.0, 5.0])
def test_1_15_the_message_meets_its_rate(dimension: Literal[1, 2], bits: float) -> None:
    update = rng.normal(rng.root(8, "rate"), 40_000, torch.float32)
    stack = torch.stack([update, update.square() * update.sign(), 1e-3 * update])
    for found in (
        sent(Uveq(bits, dimension), stack),
        sent(Uveq(9.0, dimension), stack, rate=bits / 32),
    ):
        each = found.bits.sum(dim=1) / 40_000
        assert (each <= bits).all()
        assert (each >= 0.95 * bits).all()
    # The same numbers in other units.
    assert float(found.distortion[2]) == pytest.approx(float(found.distortion[0]), rel=0.15)


def test_1_15_a_lattice_is_never_coarser_than_a_message_is_worth() -> None:
    update = rng.normal(rng.root(8, "coarse"), 5000)
    found = sent(Uveq(), update, rate=1e-4)
    assert float(found.symbols.scales["0"]) == pytest.approx(
        16 * float(update.square().mean()) ** 0.5
    )


@pytest.mark.parametrize("codec", [Uveq(bits_each=20), Uveq(bits_each=12, dimension=1)])
def test_fine_lattices_do_not_depend_on_the_rest_of_a_stack(codec: Uveq) -> None:
    """Rows of unlike tails, whose levels go far beyond any table, meet their rate alike."""
    key = rng.fold(rng.root(4, "fine"), torch.arange(3))
    rows = rng.normal(key, 3_000) ** torch.tensor([[1], [5], [9]])
    layouts = {"w": TensorLayout((3_000,), (3_000,))}
    rate = torch.full((3,), torch.nan, dtype=torch.float64)
    together = codec.compress({"w": rows}, rate, MessageLayout(layouts, torch.float64, key), {})
    for row in range(3):
        alone = MessageLayout(layouts, torch.float64, key[row : row + 1])
        one = codec.compress({"w": rows[row : row + 1]}, rate[:1], alone, {})
        assert torch.equal(
            one.symbols.quantisation_levels["w"][0], together.symbols.quantisation_levels["w"][row]
        )
        assert torch.equal(one.bits[0], together.bits[row])
        assert 0.9 * codec.bits_each <= float(one.bits.sum()) / 3_000 <= codec.bits_each
