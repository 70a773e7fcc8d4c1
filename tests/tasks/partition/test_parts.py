"""What every partition promises, and the exact counts that specification §B states for each."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet import config
from anyfleet.tasks.partition import (
    BalancedClasses,
    ByOwner,
    Case1,
    Case2,
    ClassCounts,
    Contiguous,
    DeviceRows,
    Dirichlet,
    DirichletSizes,
    Domains,
    Given,
    Iid,
    IntArray,
    LogNormalSizes,
    Mixed,
    Partition,
    SigmaRho,
    TwoClassDisjoint,
    XClass,
)

CLASSES = 10
LABELS: IntArray = np.random.default_rng(7).permutation(np.repeat(np.arange(CLASSES), 300))
OWNERS: IntArray = np.random.default_rng(8).permutation(np.repeat(np.arange(5), 600))

# part, devices, whether no row may lie on two devices
ALL: list[tuple[Partition, int, bool]] = [
    (Iid(), 7, True),
    (Iid(samples=30), 10, True),
    (Iid(share=0.2), 20, True),
    (LogNormalSizes(), 20, True),
    (DirichletSizes(), 20, True),
    (Contiguous(), 7, True),
    (Given(((0, 3), (3, 5, 1))), 2, False),
    (XClass(classes=2, samples=60), 10, False),
    (ClassCounts((1, 2, 10), samples=60), 3, False),
    (Mixed(iid=3, classes=2, samples=60), 10, False),
    (Case1(samples=60), 10, False),
    (Case2(samples=60), 10, False),
    (SigmaRho(sigma=0.3, rho=2, samples=20), 50, False),
    (TwoClassDisjoint(samples=30), 100, True),
    (BalancedClasses(), 20, True),
    (Dirichlet(), 10, True),
    (ByOwner(), 4, True),
    (Domains(share=0.5), 10, True),
]
IDS = [repr(part) for part, _, _ in ALL]


def divided(part: Partition, devices: int, key: int = 0) -> DeviceRows:
    return part(LABELS, devices, key=key, owners=OWNERS)


def classes_of(rows: IntArray) -> Counter[int]:
    return Counter(LABELS[rows].tolist())


@pytest.mark.parametrize(("part", "devices", "disjoint"), ALL, ids=IDS)
def test_every_device_gets_ascending_rows_without_repeats(
    part: Partition, devices: int, disjoint: bool
) -> None:
    shares = divided(part, devices)
    assert len(shares) == devices
    for rows in shares:
        assert rows.dtype == np.int64
        assert len(rows) > 0
        assert (np.diff(rows) > 0).all()
        assert rows[0] >= 0
        assert rows[-1] < len(LABELS)
    if disjoint:
        together = np.concatenate(shares)
        assert len(np.unique(together)) == len(together)


@pytest.mark.parametrize(("part", "devices", "disjoint"), ALL, ids=IDS)
def test_the_key_decides_everything(part: Partition, devices: int, disjoint: bool) -> None:
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    first = divided(part, devices, key=3)
    np.random.seed(1)  # noqa: NPY002
    again = divided(part, devices, key=3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    if type(part) not in (Given, Contiguous):
        other = divided(part, devices, key=4)
        assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("part", [part for part, _, _ in ALL], ids=IDS)
def test_written_down_and_read_back_it_is_the_same(part: Partition) -> None:
    assert config.load(config.dump(part)) == part


def test_iid_divides_evenly_or_by_number_or_by_share() -> None:
    assert sorted(len(rows) for rows in divided(Iid(), 7)) == [428, 428, 428, 429, 429, 429, 429]
    assert {len(rows) for rows in divided(Iid(samples=30), 10)} == {30}
    assert {len(rows) for rows in divided(Iid(share=0.2), 20)} == {30}


@pytest.mark.parametrize("x", [1, 2, 10])
def test_x_class_takes_its_samples_from_at_most_x_classes(x: int) -> None:
    for rows in divided(XClass(classes=x, samples=200), 12):
        assert len(rows) == 200
        # With 200 of 300 x rows, missing one of the x classes altogether is next to impossible.
        assert len(classes_of(rows)) == x


def test_class_sets_of_x_class_differ_between_devices() -> None:
    sets = {frozenset(classes_of(rows)) for rows in divided(XClass(classes=2, samples=60), 20)}
    assert len(sets) > 5


def test_class_counts_are_followed_one_by_one() -> None:
    counts = (1, 1, 1, 2, 2, 10)
    shares = divided(ClassCounts(counts, samples=150), 6)
    assert tuple(len(classes_of(rows)) for rows in shares) == counts


@pytest.mark.parametrize("iid", [0, 3, 10])
def test_mixed_puts_disjoint_iid_devices_first(iid: int) -> None:
    shares = divided(Mixed(iid=iid, classes=1, samples=200), 10)
    assert [len(classes_of(rows)) for rows in shares] == [10] * iid + [1] * (10 - iid)
    for one, two in combinations(shares[:iid], 2):
        assert not np.intersect1d(one, two).size


def test_case_1_uses_every_number_of_classes_once() -> None:
    shares = divided(Case1(samples=300), 10)
    numbers = [len(classes_of(rows)) for rows in shares]
    assert sorted(numbers) == list(range(1, 11))
    assert numbers != sorted(numbers)


def test_case_2_has_a_poor_half_and_a_rich_half() -> None:
    numbers = [len(classes_of(rows)) for rows in divided(Case2(samples=300), 40)]
    assert set(numbers[:20]) == {1, 2, 3, 4, 5}
    assert set(numbers[20:]) == {6, 7, 8, 9, 10}


@pytest.mark.parametrize(("sigma", "rho"), [(0.2, 1), (0.3, 2), (0.5, 1), (0.0, 2)])
def test_sigma_rho_counts_exactly(sigma: float, rho: int) -> None:
    shares = divided(SigmaRho(sigma=sigma, rho=rho, samples=40), 50)
    even = round(50 * sigma)
    for rows in shares[:even]:
        assert len(rows) == 40
        assert len(classes_of(rows)) > rho
    for rows in shares[even:]:
        assert list(classes_of(rows).values()) == [40 // rho] * rho


@given(devices=st.integers(1, 60), key=st.integers(0, 2**62))
def test_two_class_devices_hold_equal_halves_and_labels_stay_balanced(
    devices: int, key: int
) -> None:
    shares = divided(TwoClassDisjoint(samples=20), devices, key)
    owners: Counter[int] = Counter()
    for rows in shares:
        held = classes_of(rows)
        assert sorted(held.values()) == [10, 10]
        owners.update(held.keys())
    often = [owners[label] for label in range(CLASSES)]
    assert max(often) - min(often) <= 1
    assert len(np.unique(np.concatenate(shares))) == 20 * devices


def test_two_class_split_can_use_up_all_data() -> None:
    # As on CIFAR-10: 100 devices x 30 samples are all 3,000 rows.
    shares = divided(TwoClassDisjoint(samples=30), 100)
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(3000))


def test_two_class_split_of_two_classes() -> None:
    labels = np.repeat(np.arange(2), 50)
    shares = TwoClassDisjoint(samples=20)(labels, 5, key=1)
    assert all(Counter(labels[rows].tolist()) == {0: 10, 1: 10} for rows in shares)


@given(sigma=st.integers(1, 10), devices=st.integers(10, 40), key=st.integers(0, 2**62))
def test_balanced_classes_share_owners_and_samples_evenly(
    sigma: int, devices: int, key: int
) -> None:
    shares = divided(BalancedClasses(sigma), devices, key)
    held = [classes_of(rows) for rows in shares]
    assert all(len(counts) == sigma for counts in held)
    parts = [[counts[label] for counts in held if label in counts] for label in range(CLASSES)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(max(sizes) - min(sizes) <= 1 and sum(sizes) == 300 for sizes in parts)


def test_twenty_devices_with_two_labels_give_four_owners_each() -> None:
    owners: Counter[int] = Counter()
    for rows in divided(BalancedClasses(2), 20):
        owners.update(classes_of(rows).keys())
    assert set(owners.values()) == {4}


def test_dirichlet_uses_all_rows_and_alpha_sets_the_skew() -> None:
    def top_share(alpha: float) -> float:
        shares = divided(Dirichlet(alpha), 10)
        assert len(np.concatenate(shares)) == len(LABELS)
        return float(np.mean([max(classes_of(r).values()) / len(r) for r in shares]))

    assert top_share(100.0) < 0.15
    assert top_share(0.1) > 0.25


def test_dirichlet_repeats_its_draw_until_everybody_has_the_minimum() -> None:
    for key in range(5):
        assert min(len(rows) for rows in divided(Dirichlet(0.1, minimum=50), 8, key)) >= 50


@pytest.mark.parametrize("part", [LogNormalSizes(minimum=12), DirichletSizes(minimum=12)])
def test_quantity_skew_uses_all_rows_in_unequal_shares(part: Partition) -> None:
    sizes = [len(rows) for rows in divided(part, 20)]
    assert sum(sizes) == len(LABELS)
    assert min(sizes) >= 12
    assert max(sizes) > 3 * min(sizes)


def test_quantity_skew_of_zero_is_even() -> None:
    assert {len(rows) for rows in divided(LogNormalSizes(sigma=0.0), 20)} == {150}


def test_contiguous_runs_follow_each_other() -> None:
    assert np.array_equal(np.concatenate(divided(Contiguous(), 7)), np.arange(len(LABELS)))


def test_by_owner_gives_each_device_all_rows_of_one_owner() -> None:
    shares = divided(ByOwner(), 5)
    for owner, rows in enumerate(shares):
        assert np.array_equal(rows, np.flatnonzero(owner == OWNERS))


def test_by_owner_leaves_out_small_owners() -> None:
    owners = np.array([4, 4, 4, 2, 2, 9])
    shares = ByOwner(minimum=2)(np.zeros(6, np.int64), 2, key=0, owners=owners)
    assert [rows.tolist() for rows in shares] == [[3, 4], [0, 1, 2]]


def test_domains_give_two_users_half_of_the_share_each() -> None:
    # S2: 371 samples are 5 % of a domain of 7,430.
    owners = np.repeat(np.arange(5), 7430)
    shares = Domains()(np.zeros(len(owners), np.int64), 10, key=0, owners=owners)
    assert [len(rows) for rows in shares] == [186, 185] * 5
    assert [set(owners[rows].tolist()) for rows in shares] == [{d // 2} for d in range(10)]


def test_given_rows_are_given_back() -> None:
    assert [rows.tolist() for rows in divided(Given(((5, 1), (7,))), 2)] == [[1, 5], [7]]
