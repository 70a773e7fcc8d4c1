"""What arrives over a failing link is a prefix, with the law of FedResCuE's Appendix."""

import math
import tomllib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.config import dump, load, to_toml
from anyfleet.errors import ConfigError
from anyfleet.formulas.reference.lossy_links import mean_delivered
from anyfleet.world.column_loss import ColumnLoss
from anyfleet.world.distributions import Uniform

COUNT, EIGHT = 20_000, 8
ERRORS = (0.05, 0.15, 0.25, 0.3)


def keys_of(count: int, seed: int = 0) -> Tensor:
    return rng.fold(rng.root(seed, "loss"), torch.arange(count))


def law_of(error: float, columns: int) -> Floats:
    """P(J = j) for j = 0 … columns, written out."""
    ends = [(1 - error) ** j * error for j in range(columns)]
    return np.array([*ends, (1 - error) ** columns])


def check_law(arrived: Ints, expected: Floats) -> None:
    """Every frequency within five standard errors."""
    share = np.bincount(arrived, minlength=len(expected)) / len(arrived)
    assert len(share) == len(expected)
    error = np.sqrt(expected * (1 - expected) / len(arrived))
    assert (np.abs(share - expected) <= 5 * error).all()


# --- simulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_a_constant_error_delivers_by_the_law(error: float) -> None:
    arrived = ColumnLoss(error=error).delivered(keys_of(COUNT), np.full(COUNT, EIGHT))
    law = law_of(error, EIGHT)
    check_law(arrived, law)
    mean = mean_delivered(error, EIGHT)
    deviation = math.sqrt(law @ np.arange(EIGHT + 1) ** 2 - mean**2)
    assert abs(arrived.mean() - mean) < 5 * deviation / math.sqrt(COUNT)


@pytest.mark.parametrize("interval", [(0.1, 0.2), (0.0, 0.3), (0.0, 1.0)])
def test_an_interval_is_drawn_afresh_for_every_column(interval: tuple[float, float]) -> None:
    """Then only its mean matters; one draw for all columns would arrive more often."""
    columns = ColumnLoss(error=Uniform(*interval))
    arrived = columns.delivered(keys_of(COUNT, 1), np.full(COUNT, EIGHT))
    check_law(arrived, law_of(sum(interval) / 2, EIGHT))


def test_every_transmission_has_the_outage_of_its_link() -> None:
    outage = np.tile([0.0, 0.25, 1.0], COUNT)
    arrived = ColumnLoss(minimum_bit_rate=1e6).delivered(
        keys_of(3 * COUNT), np.full(3 * COUNT, EIGHT), outage
    )
    assert (arrived[0::3] == EIGHT).all()
    check_law(arrived[1::3], law_of(0.25, EIGHT))
    assert (arrived[2::3] == 0).all()


def test_transmissions_of_unequal_length() -> None:
    counts = np.tile([0, 1, 3, EIGHT], COUNT)
    arrived = ColumnLoss(error=0.15).delivered(keys_of(len(counts)), counts)
    for row, count in enumerate((0, 1, 3, EIGHT)):
        check_law(arrived[row::4], law_of(0.15, count))


def test_neighbouring_transmissions_are_independent() -> None:
    arrived = ColumnLoss(error=0.15).delivered(keys_of(COUNT), np.full(COUNT, EIGHT))
    assert abs(np.corrcoef(arrived[:-1], arrived[1:])[0, 1]) < 5 / math.sqrt(COUNT)


# --- properties -------------------------------------------------------------------------------

ANY_ERROR = st.floats(0, 1) | st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(
    lambda pair: pair[0] < pair[1]
).map(lambda pair: Uniform(*pair))
COUNTS = st.lists(st.integers(0, 20), max_size=12)


@given(ANY_ERROR, COUNTS, st.integers(0, 1000))
def test_no_more_arrives_than_was_sent(error: Any, counts: list[int], seed: int) -> None:
    sent = np.array(counts, dtype=np.int64)
    arrived = ColumnLoss(error=error).delivered(keys_of(len(counts), seed), sent)
    assert arrived.dtype == np.int64
    assert arrived.shape == sent.shape
    assert ((arrived >= 0) & (arrived <= sent)).all()


@given(ANY_ERROR, COUNTS, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_only_its_key_decides_about_a_transmission(
    error: Any, counts: list[int], seed: int, shuffle: Any
) -> None:
    """Neither its place in the batch, nor its company, nor when it is asked."""
    columns, keys = ColumnLoss(error=error), keys_of(len(counts), seed)
    sent = np.array(counts, dtype=np.int64)
    together = columns.delivered(keys, sent)
    order = list(range(len(counts)))
    shuffle.shuffle(order)
    chosen = np.array(order[: len(order) // 2 + 1], dtype=np.int64)
    assert (columns.delivered(keys[chosen], sent[chosen]) == together[chosen]).all()


@given(ANY_ERROR, COUNTS, st.integers(0, 1000))
def test_a_longer_transmission_begins_like_a_shorter_one(
    error: Any, counts: list[int], seed: int
) -> None:
    columns, keys = ColumnLoss(error=error), keys_of(len(counts), seed)
    sent = np.array(counts, dtype=np.int64)
    longer = columns.delivered(keys, sent + 5)
    assert (columns.delivered(keys, sent) == np.minimum(longer, sent)).all()


def test_certain_links() -> None:
    sent = np.array([1, 5, 8])
    assert (ColumnLoss().delivered(keys_of(3), sent) == sent).all()
    assert (ColumnLoss(error=1.0).delivered(keys_of(3), sent) == 0).all()


def test_whether_a_link_can_fail_at_all() -> None:
    assert not ColumnLoss(column_width=0.5).lossy
    assert not ColumnLoss(error=Uniform(0.0, 0.0)).lossy
    for columns in (
        ColumnLoss(error=0.1),
        ColumnLoss(error=Uniform(0, 0.1)),
        ColumnLoss(minimum_bit_rate=1.0),
    ):
        assert columns.lossy


# --- what is refused, and run files -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"column_width": 0.0}, "column_width"),
        ({"column_width": 1.5}, "column_width"),
        ({"column_width": math.nan}, "column_width"),
        ({"error": -0.1}, "error"),
        ({"error": 1.1}, "error"),
        ({"error": math.nan}, "error"),
        ({"error": Uniform(0.5, 1.5)}, "error"),
        ({"minimum_bit_rate": 0.0}, "minimum_bit_rate"),
        ({"minimum_bit_rate": math.inf}, "minimum_bit_rate"),
        ({"minimum_bit_rate": math.nan}, "minimum_bit_rate"),
        ({"minimum_bit_rate": 1e6, "error": 0.1}, "error and ColumnLoss.minimum_bit_rate"),
        (
            {"minimum_bit_rate": 1e6, "error": Uniform(0.0, 0.2)},
            "error and ColumnLoss.minimum_bit_rate",
        ),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"ColumnLoss\.{field} "):
        ColumnLoss(**fields)


def test_outage_and_minimum_bit_rate_belong_together() -> None:
    sent = np.array([8])
    with pytest.raises(ValueError, match="outage"):
        ColumnLoss(error=0.1).delivered(keys_of(1), sent, np.array([0.5]))
    with pytest.raises(ValueError, match="outage"):
        ColumnLoss(minimum_bit_rate=1e6).delivered(keys_of(1), sent)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    "columns",
    [
        ColumnLoss(),
        ColumnLoss(column_width=0.25, error=0.3),
        ColumnLoss(error=Uniform(0.1, 0.2)),
        ColumnLoss(minimum_bit_rate=1e6),
    ],
)
def test_columns_survive_a_file(columns: ColumnLoss, complete: bool) -> None:
    text = to_toml({"loss": dump(columns, complete=complete)})
    assert load(tomllib.loads(text)["loss"], ColumnLoss) == columns


def test_a_file_gives_a_number_or_a_law() -> None:
    law = {"use": "anyfleet.world.distributions:Uniform", "low": 0.1, "high": 0.2}
    assert load({"error": law}, ColumnLoss) == ColumnLoss(error=Uniform(0.1, 0.2))
    assert load({"error": 1}, ColumnLoss) == ColumnLoss(error=1.0)
    with pytest.raises(ConfigError, match=r"ColumnLoss\.error"):
        load({"error": law | {"high": 2.0}}, ColumnLoss)
