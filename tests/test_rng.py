"""Every random number has an address."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from anyfleet import rng


def test_the_same_address_gives_the_same_numbers() -> None:
    first = rng.uniform(rng.fold(rng.root(7, "train"), 3), 10)
    assert torch.equal(first, rng.uniform(rng.fold(rng.root(7, "train"), 3), 10))


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


def test_streams_vectorise() -> None:
    keys = rng.fold(rng.root(0, "v"), torch.arange(5))
    stacked = vmap(lambda key: rng.uniform(rng.fold(key, 9), 4))(keys)
    assert torch.equal(stacked, torch.stack([rng.uniform(rng.fold(k, 9), 4) for k in keys]))
