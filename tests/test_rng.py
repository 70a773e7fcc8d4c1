"""Every random number has an address."""

import math
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from anyfleet import rng


def test_the_same_address_gives_the_same_numbers() -> None:
    first = rng.uniform(rng.fold(rng.root(7, "train"), 3), 10)
    assert torch.equal(first, rng.uniform(rng.fold(rng.root(7, "train"), 3), 10))


def test_an_address_below_a_purpose_is_that_of_folds() -> None:
    folded = rng.fold(rng.fold(rng.root(7, "train"), 3), -2)
    assert torch.equal(rng.root(7, "train", 3, -2), folded)


def test_neighbouring_addresses_give_unrelated_numbers() -> None:
    root = rng.root(7, "train")
    drawn = torch.stack([rng.uniform(rng.fold(root, i), 4000) for i in range(5)])
    correlation = torch.corrcoef(drawn) - torch.eye(5)
    assert correlation.abs().max() < 0.06


def test_seed_purpose_and_order_of_folds_matter() -> None:
    keys = [
        rng.root(0, "a"),
        rng.root(1, "a"),
        rng.root(0, "b"),
        rng.fold(rng.fold(rng.root(0, "a"), 1), 2),
        rng.fold(rng.fold(rng.root(0, "a"), 2), 1),
        rng.fold(rng.root(0, "a"), "1"),
    ]
    assert len({int(key) for key in keys}) == len(keys)


def test_uniform_and_normal_have_their_moments() -> None:
    key = rng.root(0, "moments")
    u, z = rng.uniform(key, 100_000), rng.normal(key, 100_000)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() * 12 - 1) < 0.02
    assert z.isfinite().all()
    assert abs(z.mean()) < 0.02
    assert abs(z.std() - 1) < 0.01


def test_float32_uniform_never_reaches_one() -> None:
    assert rng.uniform(rng.root(0, "x"), 200_000, torch.float32).max() < 1


@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 1000))
def test_a_permutation_does_not_depend_on_padding(real: int, padding: int, seed: int) -> None:
    key = rng.root(seed, "order")
    alone = rng.permutation(key, torch.ones(real, dtype=torch.bool))
    padded = rng.permutation(key, torch.arange(real + padding) < real)
    assert torch.equal(padded[:real], alone)
    assert alone.sort().values.tolist() == list(range(real))


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 1000))
def test_a_sample_is_distinct_sorted_and_in_range(population: int, count: int, seed: int) -> None:
    drawn = rng.sample(rng.root(seed, "s"), population, min(count, population)).tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(count, population)
    assert all(0 <= value < population for value in drawn)


@pytest.mark.parametrize("size", [0, 1, 7, 4096, 4097, 30_000])
def test_draws_give_every_number_once(size: int) -> None:
    drawn = torch.cat(list(rng.draws(rng.root(3, "draws"), size)))
    assert torch.equal(drawn.sort().values, torch.arange(size))
    assert size < 2 or not torch.equal(drawn, torch.arange(size))


def test_draws_are_lazy_and_addressed() -> None:
    key, size = rng.root(0, "draws"), 10**12
    first = torch.cat(list(islice(rng.draws(key, size), 3)))
    assert len(first) == 512 + 1024 + 2048
    assert torch.equal(first, torch.cat(list(islice(rng.draws(key, size), 3))))
    other = torch.cat(list(islice(rng.draws(rng.root(1, "draws"), size), 3)))
    assert not set(first.tolist()) & set(other.tolist())
    assert 0 <= first.min() <= first.max() < size


def chi_square(places: torch.Tensor, cells: int) -> float:
    """Of counts against equal shares, as standard deviations from its expectation."""
    counts = torch.bincount(places, minlength=cells).double()
    expected = len(places) / cells
    statistic = float(((counts - expected) ** 2).sum() / expected)
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("size", [40, 5000])
def test_every_number_is_equally_likely_at_every_place(size: int) -> None:
    runs = 3000 if size == 40 else 300
    orders = torch.stack(
        [torch.cat(list(rng.draws(rng.root(seed, "law"), size))) for seed in range(runs)]
    )
    # First place, around the change from drawing to shuffling, and last.
    for place in (0, 1, size // 2, size - 1):
        assert abs(chi_square(orders[:, place] * 20 // size, 20)) < 4
    # Where a given number comes, and which of two neighbours comes first.
    where = orders.argsort(dim=-1)
    for number in (0, size // 3, size - 1):
        assert abs(chi_square(where[:, number] * 20 // size, 20)) < 4
    before = (where[:, :-1] < where[:, 1:]).double().mean(dim=-1)
    # Of n - 1 neighbours with correlation -1/3 each: variance (n + 1) / (12 (n - 1) ** 2).
    deviation = ((size + 1) / 12 / runs) ** 0.5 / (size - 1)
    assert abs(float(before.mean()) - 0.5) < 4 * deviation


def test_whole_numbers_below_a_size_that_divides_badly_are_even() -> None:
    # Two thirds of the range: the remainder alone would give the lower half twice the weight.
    size = 2**62 * 2 // 3
    drawn = torch.cat([rng._below(rng.root(seed, "even"), size, 300) for seed in range(20)])
    share = float((drawn < size // 2).double().mean())
    assert abs(share - 0.5) < 4 * 0.5 / len(drawn) ** 0.5


@pytest.mark.parametrize("count", [0, 1, 512, 3000, 20_000, 20_001])
def test_a_sample_of_many_is_distinct_and_sorted(count: int) -> None:
    drawn = rng.sample(rng.root(0, "many"), 20_000, count)
    assert len(drawn) == min(count, 20_000)
    assert (drawn.diff() > 0).all()


def test_a_sample_of_a_large_population_is_spread_evenly() -> None:
    drawn = torch.cat([rng.sample(rng.root(seed, "wide"), 10**6, 100) for seed in range(50)])
    assert abs(chi_square(drawn * 20 // 10**6, 20)) < 4


def test_streams_vectorise() -> None:
    keys = rng.fold(rng.root(0, "v"), torch.arange(5))
    stacked = vmap(lambda key: rng.uniform(rng.fold(key, 9), 4))(keys)
    assert torch.equal(stacked, torch.stack([rng.uniform(rng.fold(k, 9), 4) for k in keys]))


def test_the_last_uniform_number_is_no_infinite_normal_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(rng, "uniform", lambda *given: ends)
    assert torch.isfinite(rng.normal(rng.root(0, "x"), 2)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_for_stacks_and_at_places_are_those_of_their_keys(dtype: torch.dtype) -> None:
    keys = rng.fold(rng.root(1, "stack"), torch.arange(3))
    # More than a block, and no whole number of them.
    every = rng.uniform(keys, 9_001, dtype)
    assert torch.equal(rng.uniforms(keys, 9_001, dtype), every)
    assert torch.equal(rng.uniforms(keys[:1], 9_001, dtype), every[:1])
    row = torch.arange(20_000) % 3
    place = torch.arange(20_000) * 7 % 9_001
    assert torch.equal(rng.uniforms_at(keys[row], place, dtype), every[row, place])
    assert rng.uniforms(keys, 0, dtype).shape == (3, 0)


# Negative numbers, both ends of 64 bits, and the number whose successor wraps around.
NUMBERS = (0, 1, -1, 12345, (1 << 62) + 3, -(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("value", [*NUMBERS, "step", torch.tensor(5), torch.arange(-2, 5)], ids=str)
@pytest.mark.parametrize("key", [torch.tensor(NUMBERS[4]), torch.tensor(NUMBERS)], ids=["one", "7"])
def test_a_key_on_the_host_is_the_one_that_a_device_computes(
    key: torch.Tensor, value: int | str | torch.Tensor
) -> None:
    number = rng.number_of(value) if isinstance(value, str) else value
    by_tensors = rng._mix(
        (key ^ rng._mix(key + rng._GOLDEN)) + (torch.as_tensor(number) + 1) * rng._GOLDEN
    )
    found = rng.fold(key, value)
    assert found.dtype == torch.int64
    assert torch.equal(found, by_tensors)
    # Mapped, the hash is that of tensors.
    mapped = vmap(lambda each: rng.fold(each, value))(key.reshape(-1))
    assert torch.equal(mapped[0].reshape(-1)[:1], by_tensors.reshape(-1)[:1])


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_on_the_host_are_those_that_a_device_computes(
    count: int, dtype: torch.dtype
) -> None:
    keys = torch.tensor(NUMBERS)
    draws: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda key: rng.bits(key, count),
        lambda key: rng.uniform(key, count, dtype),
        lambda key: rng.normal(key, count, dtype),
    ]
    for draw in draws:
        # Mapped, they are computed by tensors, as on an accelerator.
        mapped = vmap(draw)(keys)
        assert torch.equal(draw(keys), mapped)
        assert torch.equal(draw(keys[2]), mapped[2])


def test_a_traced_fold_stays_a_function_of_its_key() -> None:
    key = rng.root(0, "traced")
    traced = make_fx(lambda own: rng.fold(own, 3))(key)
    assert torch.equal(traced(rng.fold(key, 1)), rng.fold(rng.fold(key, 1), 3))
