"""What each codec makes of an update: the examples of METHODS, and the plain formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.core.slots import Codec, Compressed
from anyfleet.errors import BadMessage
from anyfleet.formulas import fedhq_weights
from anyfleet.formulas.reference import (
    fedhq_quantisation_levels,
    qsgd,
    qsgd_values,
    stc_bits,
    stc_golomb_position_bits,
    stc_position_entropy,
    stc_sparse_ternary,
)
from anyfleet.parts.codec import ErrorFeedback, Hq, Qsgd, Stc, TopK, Uveq
from anyfleet.parts.codec.qsgd import bucket_norms, bucket_sizes, quantised, uniforms
from anyfleet.parts.codec.ranking import largest, largest_nonzero_parts, largest_parts
from anyfleet.parts.codec.topk import Places, top


def around(*sizes: int, rows: int = 1, dtype: torch.dtype = torch.float64) -> MessageLayout:
    keys = rng.fold(rng.root(9, "quantisers"), torch.arange(rows))
    return MessageLayout(
        {f"{at}": TensorLayout((n,), (n,)) for at, n in enumerate(sizes)}, dtype, keys
    )


def sent(codec: Codec, *values: Tensor, rate: float = math.nan) -> Compressed:
    """Of vectors, or of stacks of them."""
    rows = [each if each.ndim > 1 else each[None] for each in values]
    count = len(rows[0])
    place = around(*(each.shape[1] for each in rows), rows=count, dtype=rows[0].dtype)
    tree = {f"{at}": each for at, each in enumerate(rows)}
    return codec.compress(tree, torch.full((count,), rate, dtype=torch.float64), place, {})


def plain(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- top-k ------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(1, 7),
)
def test_1_13_exactly_the_largest_ties_to_the_lower_index(rows: list[list[int]], k: int) -> None:
    sizes = torch.tensor(rows, dtype=torch.float32)
    flags = largest(sizes, k)
    for row, kept in zip(rows, flags, strict=True):
        assert kept.nonzero()[:, 0].tolist() == sorted(
            sorted(range(7), key=lambda at: (-row[at], at))[:k]
        )


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_1_13_of_the_largest_those_that_are_not_0(rows: list[list[int]], k: int, m: int) -> None:
    sizes, within = torch.tensor(rows, dtype=torch.float32), (4, 3)
    flags = largest_parts(sizes, within, (k, m)) & (sizes > 0)
    assert torch.equal(largest_nonzero_parts(sizes, within, (k, m)), flags)


def test_1_13_a_share_of_every_tensor_or_of_all() -> None:
    rows, within = plain(1, 2, 3, 4, -9, 8, 0)[None], (4, 3, 0)
    assert top(rows, within, 0.5).tolist() == [[False, False, True, True, True, True, False]]
    assert top(rows, within, 0.01).tolist() == [[False, False, False, True, True, False, False]]
    assert top(rows, (7,), 0.4).tolist() == [[False, False, False, True, True, True, False]]
    # 0.07 × 100 is more than 7 in binary.
    assert top(torch.ones(1, 100), (100,), 0.07).sum() == 7
    assert top(torch.ones(1, 0), (0,), 0.5).tolist() == [[]]


def test_kept_entries_side_by_side_and_back() -> None:
    kept = torch.tensor([[True, False, True, True], [False, False, True, False]])
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    places = Places.of(kept, (2, 2), (1, 2))
    packed = places.gathered(rows)
    assert packed.tolist() == [[1, 3, 4], [0, 7, 0]]
    assert places.spread(packed).tolist() == (rows * kept).tolist()


def test_a_stage_sends_the_largest_as_they_are() -> None:
    found = sent(TopK(0.4), plain(0.1, -0.9, 0.5, 0.05, -0.3))
    assert found.received["0"].tolist() == [[0, -0.9, 0.5, 0, 0]]
    assert found.kept["0"].tolist() == [[0, 1, 1, 0, 0]]
    assert float(found.distortion[0]) == pytest.approx((0.01 + 0.0025 + 0.09) / 1.1625)


def test_a_stage_leaves_the_rate_to_what_follows() -> None:
    update = rng.normal(rng.root(1, "rate"), 20_000)
    for rate in (1 / 33, 1 / 15):
        bits = float(sent(TopK(0.15, Uveq()), update, rate=rate).bits.sum())
        assert 0.94 * rate <= bits / (32 * 20_000) <= rate


# --- sparse ternary ---------------------------------------------------------------------------


def test_1_13_stc_example() -> None:
    v = plain(0.1, -0.9, 0.5, 0.05, -0.3)
    found = sent(ErrorFeedback(Stc(2 / 5)), v)
    assert found.received["0"][0].tolist() == pytest.approx([0, -0.7, 0.7, 0, 0])
    assert found.state["0"][0].tolist() == pytest.approx([0.1, -0.2, -0.2, 0.05, -0.3])
    assert found.symbols.scales["0"].tolist() == [[pytest.approx(0.7)]]
    golomb = 10**5 * stc_golomb_position_bits(0.05)
    assert golomb == pytest.approx(578611.8, rel=1e-6)


def test_1_13_edges() -> None:
    nothing = sent(Stc(0.5), plain(0, 0, 0, 0))
    assert not nothing.kept["0"].any()
    assert not nothing.received["0"].any()
    # The magnitude is the mean over all that were chosen; the sign of 0 is 0.
    some = sent(Stc(1.0), plain(2, 0))
    assert some.received["0"].tolist() == [[1, 0]]
    assert some.kept["0"].tolist() == [[1, 0]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 1.0))
def test_1_13_stc_is_the_formula(seed: int, keep: float) -> None:
    v = rng.normal(rng.root(seed, "stc"), 50)
    found = sent(ErrorFeedback(Stc(keep)), v)
    expected = stc_sparse_ternary(v.numpy(), keep)
    assert found.received["0"][0].numpy() == pytest.approx(expected.sent, rel=1e-6)
    assert found.state["0"][0].numpy() == pytest.approx(expected.residual, abs=1e-6)


def test_1_13_gaps_that_are_coded_take_less_than_golomb() -> None:
    size, keep = 200_000, 0.05
    v = rng.normal(rng.root(3, "golomb"), size, torch.float32)
    found = sent(Stc(keep), v)
    positions = found.kept["0"][0].nonzero()[:, 0].numpy()
    assert len(positions) == keep * size
    golomb = stc_bits(positions, size, keep)
    bound = len(positions) * (stc_position_entropy(keep) + 1)
    assert bound <= float(found.bits.sum()) <= min(golomb, 1.02 * bound)


def test_one_magnitude_for_all_tensors_travels_once() -> None:
    a, b = plain(4, -1, 0, 0), plain(0, 2, 0, 0)
    found = sent(Stc(2 / 8, "model"), a, b)
    assert found.received["0"].tolist() == [[3, 0, 0, 0]]
    assert found.received["1"].tolist() == [[0, 3, 0, 0]]
    assert found.symbols.scales.keys() == {"0"}
    place = around(4, 4)
    packed = Stc(2 / 8).pack(sent(Stc(2 / 8), a, b).symbols, place)
    with pytest.raises(BadMessage, match="number of scales"):
        Stc(2 / 8, "model").unpack(packed, place)
    two = replace(sent(Uveq(), a, b).symbols, scales={"0": a[None, :1], "1": b[None, :1]})
    with pytest.raises(BadMessage, match="number of scales"):
        Uveq().unpack(Uveq().pack(two, place), place)


# --- stochastic levels ------------------------------------------------------------------------


def test_1_14_qsgd_example() -> None:
    v = plain(3, -4)
    rows = 1000
    found = sent(Qsgd(4), v.expand(rows, -1))
    values = {tuple(row) for row in found.received["0"].tolist()}
    assert values == {(2.5, -3.75), (2.5, -5.0), (3.75, -3.75), (3.75, -5.0)}
    up = (found.symbols.quantisation_levels["0"] == torch.tensor([3, -4])).double().mean(dim=0)
    # Four standard deviations of a share.
    for share, chance in zip(up.tolist(), (0.4, 0.2), strict=True):
        assert share == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / rows))
    variance = (found.received["0"] - v).square().sum(dim=1).mean()
    assert float(variance) == pytest.approx(0.625, abs=0.12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 20), st.sampled_from([None, 4, 512]))
def test_1_14_qsgd_is_the_formula(seed: int, levels: int, bucket: int | None) -> None:
    v = rng.normal(rng.root(seed, "qsgd"), 30)
    place = around(30)
    norms, buckets = bucket_norms(v[None], (30,), bucket), bucket_sizes((30,), bucket)
    draws = uniforms(v[None], (30,), ("0",), place)
    found, scales = quantised(v[None], plain(levels), draws, buckets, norms)
    u = rng.uniform(rng.fold(place.key, "0"), 30)[0].numpy()
    expected = qsgd(v.numpy(), levels, u, bucket)
    assert found[0].tolist() == expected.levels.tolist()
    assert scales[0].numpy() * levels == pytest.approx(expected.norms, rel=1e-6)
    back = sent(Qsgd(levels, bucket), v).received["0"][0].numpy()
    values = qsgd_values(expected, levels, bucket)
    assert back == pytest.approx(values, rel=1e-6, abs=1e-12)


def test_1_14_an_entry_that_is_the_norm_has_the_last_level() -> None:
    found = sent(Qsgd(16, 1), torch.rand(200, dtype=torch.float32) + 0.1)
    assert (found.symbols.quantisation_levels["0"] == 16).all()


def test_1_14_no_entry_is_a_level_above_its_norm_by_rounding() -> None:
    """The seventh part of some numbers, as a scale of 32 bits, goes into them more than 7 times."""
    rows = torch.linspace(0.1, 1.1, 200, dtype=torch.float32)[:, None]
    step = (rows.double() / 7).float()
    assert (rows / step > 7).any()
    steps = torch.full((200,), 7.0, dtype=torch.float64)
    found, scales = quantised(rows, steps, torch.zeros_like(rows), (1,), rows.double())
    assert torch.equal(scales, step)
    assert (found == 7).all()


def test_1_14_buckets_count_kept_entries_in_order() -> None:
    # Kept: 3, 4 and 6, 8, in buckets of two.
    v = plain(3, 0.1, -4, 0.1, 0.1, 6, 8, 0.1)
    found = sent(TopK(0.5, Qsgd(10, 2)), v)
    assert found.symbols.scales["0"].tolist() == [pytest.approx([0.5, 1.0])]
    assert found.received["0"][0].tolist() == pytest.approx([3, 0, -4, 0, 0, 6, 8, 0])


# --- levels by channel ------------------------------------------------------------------------


def test_1_16_the_most_levels_that_fit() -> None:
    update = rng.normal(rng.root(7, "channel"), 30_000, torch.float32)
    codec, size = Hq(keep=0.3), 32 * 30_000
    bits = np.array(
        [float(sent(TopK(0.3, Qsgd(s)), update).bits.sum()) for s in codec.quantisation_levels]
    )
    rates = torch.tensor([0.035, 0.05, 0.0625, 0.075, 1.0], dtype=torch.float64)
    place = around(30_000, rows=5, dtype=torch.float32)
    # All with the draws of the first: those of the messages measured above.
    place = MessageLayout(place.tensors, place.dtype, place.key[:1].expand(5))
    found = codec.compress({"0": update.expand(5, -1)}, rates, place, {})
    levels = [
        fedhq_quantisation_levels(bits, float(r) * size, np.array(codec.quantisation_levels))
        for r in rates
    ]
    assert len(set(levels)) > 3
    for row, level in enumerate(levels):
        assert torch.equal(
            found.received["0"][row], sent(TopK(0.3, Qsgd(level)), update).received["0"][0]
        )
    assert (found.bits.sum(dim=1) <= rates * size).all()
    # Better channels, smaller errors, larger weights.
    assert (found.distortion.diff() <= 0).all()
    weights = fedhq_weights(found.distortion.numpy())
    assert (np.diff(weights) >= 0).all()


def test_1_16_a_poor_channel_keeps_fewer_entries() -> None:
    update = rng.normal(rng.root(7, "poor"), 30_000, torch.float32).expand(2, -1)
    rates = torch.tensor([0.01, 0.2], dtype=torch.float64)
    found = Hq(keep=0.3).compress(
        {"0": update}, rates, around(30_000, rows=2, dtype=torch.float32), {}
    )
    kept = found.kept["0"].sum(dim=1)
    assert kept.tolist() == [1125, 9000]
    assert (found.bits.sum(dim=1) <= rates * 32 * 30_000).all()
