"""Atoms: merging and splitting keep every product consistent."""

import hypothesis.strategies as st
from hypothesis import given

from anyfleet.elastic.tracing.axes import Product, atoms, freeze, fresh, mark, size, unify


def product(*sizes: int) -> Product:
    return tuple(atom for n in sizes for atom in fresh(n))


def sizes_of(found: Product) -> list[int]:
    return [atom.size for atom in atoms(found)]


def test_equal_sizes_become_one_axis() -> None:
    one, other = fresh(6), fresh(6)
    assert unify(one, other)
    assert atoms(one) == atoms(other)
    freeze(other, "because")
    assert [atom.why for atom in atoms(one)] == ["because"]


def test_a_flattened_map_splits_into_its_factors() -> None:
    flat, channels = fresh(24), product(6, 2, 2)
    assert unify(channels, flat)
    assert sizes_of(flat) == [6, 2, 2]
    assert atoms(flat) == atoms(channels)


def test_a_third_factorisation_refines_all() -> None:
    flat = fresh(24)
    assert unify(flat, product(6, 4))
    assert unify(product(2, 12), flat)
    assert sizes_of(flat) == [2, 3, 4]


def test_factors_that_do_not_align_are_refused() -> None:
    assert not unify(product(4, 9), product(6, 6))


def test_parts_inherit_reason_and_mark() -> None:
    whole = fresh(12, "kernel")
    mark(whole, "groups")
    assert unify(whole, product(3, 4))
    assert {(atom.why, atom.mark) for atom in atoms(whole)} == {("kernel", "groups")}


def test_size_one_is_the_empty_product() -> None:
    assert fresh(1) == ()
    assert size(()) == 1


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.data())
def test_any_grouping_of_factors_unifies(factors: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
    starts = [0, *cuts[:-1]]
    grouped = [size(product(*factors[a:b])) for a, b in zip(starts, cuts, strict=True)]
    fine, coarse = product(*factors), product(*grouped)
    assert unify(coarse, fine)
    assert atoms(coarse) == atoms(fine)
    assert size(atoms(coarse)) == size(atoms(fine))
    assert unify(fine, coarse)
