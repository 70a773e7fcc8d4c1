import contextlib
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.errors import AnyfleetWarning
from anyfleet.tasks import (
    ByOwner,
    Contiguous,
    Data,
    Dirichlet,
    Domains,
    Given,
    Iid,
    Partition,
    Split,
    XClass,
)
from anyfleet.tasks.partition import DeviceRows, IntArray
from anyfleet.tasks.split import Division, number, union

DATA = Data(torch.arange(400), torch.arange(400) % 10, torch.arange(400) // 50)


def rows_of(cut: Division) -> tuple[set[int], set[int], set[int]]:
    return (
        set(union(cut.train_rows).tolist()),
        set(union(cut.test_rows).tolist()),
        set(cut.server.x.tolist()),
    )


@given(
    partition=st.sampled_from([Iid(), Dirichlet(1.0), XClass(2, samples=40), ByOwner()]),
    share=st.floats(0, 0.5),
    server=st.integers(0, 100),
    seed=st.integers(0, 1000),
)
def test_nobody_trains_on_test_or_server_rows(
    partition: Partition, share: float, server: int, seed: int
) -> None:
    cut = Split(8, partition, test_share=share, server=server, seed=seed).divide(DATA)
    trained, tested, kept = rows_of(cut)
    assert not trained & tested
    assert not (trained | tested) & kept
    assert len(cut.server) == server
    assert len(cut.train_rows) == len(cut.test_rows) == 8


def test_disjoint_partitions_lose_nothing() -> None:
    trained, tested, kept = rows_of(Split(8, Iid(), test_share=0.25, server=80).divide(DATA))
    assert (len(trained), len(tested), len(kept)) == (240, 80, 80)
    cut = Split(8, Iid(), test_share=0.25, server=80).divide(DATA)
    assert [len(rows) for rows in cut.train_rows] == [30] * 8
    assert [len(rows) for rows in cut.test_rows] == [10] * 8


def test_partitions_see_labels_and_owners_of_the_rows_that_remain() -> None:
    cut = Split(8, ByOwner(), test_share=0.2, server=37).divide(DATA)
    assert DATA.owners is not None
    for device, (trained, tested) in enumerate(zip(cut.train_rows, cut.test_rows, strict=True)):
        assert set(DATA.owners[torch.cat([trained, tested])].tolist()) == {device}
    skewed = Split(4, XClass(1, samples=20), test_share=0.2, server=37).divide(DATA)
    for trained, tested in zip(skewed.train_rows, skewed.test_rows, strict=True):
        assert len(set(DATA.y[torch.cat([trained, tested])].tolist())) == 1


def test_every_device_that_can_spare_a_row_has_a_test_row() -> None:
    tiny = Split(20, Iid(), test_share=0.01).divide(DATA)
    assert {len(rows) for rows in tiny.test_rows} == {1}
    assert all(not len(rows) for rows in Split(20, Iid(), test_share=0).divide(DATA).test_rows)


def test_the_seed_decides() -> None:
    def signature(seed: int) -> list[list[int]]:
        cut = Split(5, Iid(), test_share=0.2, server=9, seed=seed).divide(DATA)
        return [part.tolist() for part in (*cut.train_rows, *cut.test_rows, cut.server.x)]

    np.random.seed(3)  # noqa: NPY002 - the global generators must not matter
    torch.manual_seed(3)
    assert signature(1) == signature(1)
    assert signature(1) != signature(2)


def test_purposes_have_different_numbers() -> None:
    drawn = {number(seed, purpose) for seed in range(20) for purpose in ("a", "b")}
    assert len(drawn) == 40
    assert min(drawn) >= 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": 0}, "devices"),
        ({"test_share": 1.0}, "test_share"),
        ({"test_share": -0.1}, "test_share"),
        ({"server": -1}, "server"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(**fields)  # type: ignore[arg-type]


def test_infeasible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="server asks for 400 of 400"):
        Split(server=400).divide(DATA)
    with pytest.raises(ValueError, match="no training data left"):
        Split(5, Iid(samples=1), test_share=0.9).divide(DATA)


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(1.0), XClass(2, samples=20), Contiguous()])
def test_owners_that_a_partition_ignores_are_told_with_the_way_out(partition: Partition) -> None:
    with pytest.warns(AnyfleetWarning, match="5 of 5 devices have rows of several") as told:
        Split(5, partition).divide(DATA)
    assert len(told) == 1
    assert f"use partition=ByOwner() instead of {partition}" in str(told[0].message)


class InPairs:
    """Two owners for each device."""

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        assert owners is not None
        return tuple(np.flatnonzero(owners // 2 == device) for device in range(devices))


@pytest.mark.parametrize(
    ("split", "data"),
    [
        (Split(8, ByOwner()), DATA),
        (Split(3, ByOwner()), DATA),
        (Split(16, Domains(2, share=0.5)), DATA),
        (Split(4, InPairs()), DATA),
        (Split(8, Iid()), Data(DATA.x, DATA.y)),
        (Split(8, Iid()), Data(DATA.x, DATA.y, torch.zeros(400, dtype=torch.int64))),
    ],
)
def test_no_word_of_owners_that_are_not_mixed(split: Split, data: Data) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split.divide(data)


def test_a_server_that_leaves_too_little_says_what_would_fit() -> None:
    with pytest.raises(ValueError, match=r"leaves 0 to 8 devices: 384 would leave each"):
        Split(8, server=500).divide(DATA)
    with pytest.raises(
        ValueError,
        match=r"out of 3\. Use fewer devices\. And server asks for 397 .* 384 would leave",
    ):
        Split(8, server=397).divide(DATA)
    with pytest.raises(ValueError, match=r"500 devices: even without that .* out of 400\."):
        Split(500, server=400).divide(DATA)
    with pytest.raises(
        ValueError, match=r"^Iid cannot give 500 devices .* out of 400\. Use fewer devices\.$"
    ):
        Split(500).divide(DATA)
    assert len(Split(8, server=392, test_share=0).divide(DATA).train_rows) == 8


@pytest.mark.parametrize("test_share", [0.0, 0.1, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("samples", [50, 113, 400])
@pytest.mark.parametrize("partition", [Iid(), Dirichlet(1.0), XClass(2, samples=10), Contiguous()])
def test_what_a_server_is_told_to_keep_does_fit(
    partition: Partition, samples: int, test_share: float
) -> None:
    data = Data(DATA.x[:samples], DATA.y[:samples])
    split = Split(3, partition, test_share=test_share, server=samples + 5)
    with pytest.raises(ValueError, match=r"server asks for") as refused:
        split.divide(data)
    found = re.search(r"devices: (?:at most )?(\d+) would leave", str(refused.value))
    if found is None:  # then indeed nothing does
        assert "even without that there are too few. device" in str(refused.value)
        with pytest.raises(ValueError, match="no training data left"):
            replace(split, server=0).divide(data)
        return
    fits = int(found[1])
    cut = replace(split, server=fits).divide(data)
    assert all(map(len, cut.train_rows))
    assert all(map(len, cut.test_rows)) or not test_share
    if partition == Iid():  # and it is the most
        with contextlib.suppress(ValueError):
            more = replace(split, server=fits + 1).divide(data)
            assert test_share
            assert not all(map(len, more.test_rows))


def test_a_split_says_how_data_are_divided() -> None:
    assert (
        Split(2, ByOwner(), seed=3).assignment
        == "ByOwner(minimum=1) divides the data, with seed 3."
    )
    rows = (tuple(range(200)), tuple(range(200, 400)))
    assert Split(2, Given(rows)).assignment == "Given divides the data, with seed 0."
