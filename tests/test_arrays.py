"""Structs of arrays: rows that are alike, and lists without what no row has."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Arrays, Ints, alike, grouped, listed

NUMBERS = st.lists(st.sampled_from([0.0, 1.0, -2.5, np.nan]), max_size=12)


@dataclass(frozen=True, eq=False)
class Named(Arrays):
    """Rows with names that they share."""

    number: Ints
    name_index: Ints
    names: tuple[str, ...] = listed("name_index")


@given(NUMBERS, st.integers(0, 3))
def test_rows_that_are_alike_have_one_number_and_nan_is_nan(values: list[float], of: int) -> None:
    column, other = np.array(values), np.arange(len(values)) % (of + 1)
    first, index = grouped(column, other)
    pairs = [(str(a), b) for a, b in zip(values, other.tolist(), strict=True)]
    different = list(dict.fromkeys(pairs))
    assert [pairs[row] for row in first] == different
    assert [different[number] for number in index] == pairs
    groups = alike(column, other)
    assert [row for rows in groups for row in rows] == sorted(
        range(len(pairs)), key=lambda row: (different.index(pairs[row]), row)
    )
    assert [pairs[rows[0]] for rows in groups] == different


def test_what_no_row_has_is_not_listed() -> None:
    rows = Named(np.arange(4), np.array([2, -1, 0, 2]), ("a", "b", "c"))
    left = rows.take([0, 1, 3]).pruned()
    assert left.names == ("c",)
    assert left.name_index.tolist() == [0, -1, 0]
    assert rows.pruned().names == ("a", "c")
    assert rows.take([1]).pruned().names == ()
