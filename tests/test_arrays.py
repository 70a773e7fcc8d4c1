"""Structs of arrays: rows are picked, joined and put; what rows share is listed once."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from anyfleet.arrays import Arrays, Floats, Ints, alike, among, grouped, join, listed


@dataclass(frozen=True, eq=False)
class Inner(Arrays):
    number: Ints
    count: Ints
    first: Ints
    points: Floats = listed("first")  # noqa: RUF009 - a field, as `dataclasses.field` makes it


@dataclass(frozen=True, eq=False)
class Outer(Arrays):
    id: Ints
    inner: Inner
    name: Ints
    names: tuple[str, ...] = listed("name")
    shared: int = 3


def made(start: int, names: tuple[str, ...]) -> Outer:
    """Three rows; each has as many points as its place, with its own number in them."""
    number, count = start + np.arange(3), np.arange(3)
    first = np.cumsum(count) - count
    inner = Inner(number, count, first, np.repeat(number, count).astype(np.float64))
    return Outer(number, inner, np.array([0, 1, -1]), names)


def told(struct: Outer) -> list[tuple[int, str, list[float]]]:
    """Return each row with its name and its points."""
    found = []
    for row in struct.rows():
        (first,), (count,), (name,) = row.inner.first, row.inner.count, row.name
        points = row.inner.points[first : first + count].tolist()
        found.append((int(row.id[0]), struct.names[name] if name >= 0 else "", points))
    return found


ONE, TWO = made(0, ("a", "b")), made(5, ("b", "c"))
ROWS = [(0, "a", []), (1, "b", [1.0]), (2, "", [2.0, 2.0])]
OTHERS = [(5, "b", []), (6, "c", [6.0]), (7, "", [7.0, 7.0])]


def test_rows_keep_what_they_list_when_they_are_joined_and_picked() -> None:
    both = join([ONE, TWO])
    assert told(both) == [*ROWS, *OTHERS]
    assert told(both.take([4, 0, 2])) == [OTHERS[1], ROWS[0], ROWS[2]]
    assert told(both.take(both.id > 1)) == [ROWS[2], *OTHERS]


def test_what_is_equal_is_listed_once_even_if_it_was_made_anew() -> None:
    """As in a run that was resumed, whose texts and slices are read and not those of the code."""
    again = made(5, ("".join(["b"]), ("c", "d")[0]))
    assert join([ONE, again]).names == ("a", "b", "c")


def test_rows_are_put_in_the_place_of_others() -> None:
    assert told(ONE.put(np.array([0, 2]), TWO.take([0, 1]))) == [OTHERS[0], ROWS[1], OTHERS[1]]
    assert told(ONE.put(np.arange(3), TWO)) == OTHERS
    assert told(ONE) == ROWS


def test_what_no_row_names_is_pruned() -> None:
    left = join([ONE, TWO]).take([1, 2, 5])
    assert left.names == ("a", "b", "c")
    assert left.pruned().names == ("b",)
    assert told(left.pruned()) == told(left)


def test_all_rows_are_the_struct_itself() -> None:
    assert ONE.take([0, 1, 2]) is ONE
    assert told(ONE.take([0, 2, 1])) == [ROWS[0], ROWS[2], ROWS[1]]


def test_other_columns_make_a_new_struct_and_unknown_ones_none() -> None:
    struct = made(0, ("a", "b"))
    changed = struct.having(id=struct.id + 7, shared=4)
    assert (changed.id.tolist(), changed.shared, changed.inner) == ([7, 8, 9], 4, struct.inner)
    assert struct.shared == 3
    with pytest.raises(TypeError, match="has not all of the columns ids"):
        struct.having(ids=struct.id)


def test_groups_have_equal_values_and_not_a_number_is_one() -> None:
    def groups(*columns: NDArray[np.float64]) -> list[list[int]]:
        return [rows.tolist() for rows in alike(*columns)]

    one, two = np.array([1.0, np.nan, 1.0, np.nan]), np.array([7.0, 2.0, 7.0, 2.0])
    assert groups(one, two) == [[0, 2], [1, 3]]
    assert groups(one, np.array([7.0, 2.0, 8.0, 2.0])) == [[0], [1, 3], [2]]
    assert groups(np.full(3, np.nan)) == [[0, 1, 2]]
    assert groups(np.empty(0)) == []


def test_numbers_far_apart_are_grouped_like_others() -> None:
    far: Ints = np.array([10**15, -4, 10**15, 7, -4])
    first, index = grouped(far, np.array([0, 1, 0, 1, 1]))
    assert first.tolist() == [0, 1, 3]
    assert index.tolist() == [0, 1, 0, 2, 1]
    many = [np.arange(40) * (each + 1) for each in range(4)]
    assert grouped(*many)[1].tolist() == list(range(40))


def test_numbers_are_looked_for_among_others() -> None:
    some: Ints = np.array([5, 1, 9, 4])
    assert among(some, np.array([1, 4, 8])).tolist() == [False, True, False, True]
    assert among(some, np.empty(0, dtype=np.int64)).tolist() == [False] * 4
    assert among(some[:0], some).tolist() == []


NUMBERS = st.lists(st.sampled_from([0.0, 1.0, -2.5, np.nan]), max_size=12)


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


def test_numbers_that_count_past_their_list_are_found() -> None:
    assert ONE.astray == ""
    assert replace(ONE, names=("a",)).astray == "name"
    assert replace(ONE, name=np.array([0, -2, 1])).astray == "name"
    assert ONE.take([]).astray == ""
