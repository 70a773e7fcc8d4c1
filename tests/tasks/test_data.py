from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from anyfleet.tasks import Data
from anyfleet.tasks.data import materialise


class Endless(Dataset[Any]):
    """A map-style data set without IndexError; counts how often it is read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index % len(self.items)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2), 0), (torch.zeros(2), 1)])


def test_every_item_is_read_once() -> None:
    dataset = Endless([(np.full((3,), n, dtype=np.float32), n) for n in range(4)])
    data = materialise(dataset)
    assert dataset.reads == 4
    assert data.x.tolist() == [[n] * 3 for n in range(4)]
    assert data.y.tolist() == [0, 1, 2, 3]
    assert data.y.dtype == torch.int64
    assert data.owners is None


def test_a_third_entry_is_the_owner() -> None:
    data = materialise(Endless([(torch.zeros(1), 0.5, 7), (torch.zeros(1), 1.5, 9)]))
    assert data.owners is not None
    assert data.owners.tolist() == [7, 9]
    assert data.y.dtype == torch.float32


def test_streams_tensors_and_data_serve_too() -> None:
    assert materialise(Stream()).y.tolist() == [0, 1]
    x, y = torch.zeros(3, 2), torch.arange(3)
    assert materialise(TensorDataset(x, y)).y is y
    data = Data(x, y)
    assert materialise(data) is data


def test_owners_may_have_names() -> None:
    data = materialise(Endless([(torch.zeros(1), 0, name) for name in ("eve", "ann", "eve")]))
    assert data.owners is not None
    assert data.owners.tolist() == [1, 0, 1]


@pytest.mark.parametrize("third", [torch.zeros(2), torch.tensor([1, 2]), 0.5, True])
def test_an_owner_is_one_whole_number_or_text(third: Any) -> None:
    with pytest.raises(ValueError, match=r"third of .*several inputs"):
        materialise(Endless([(torch.zeros(1), torch.zeros(2), third)] * 2))
    with pytest.raises(ValueError, match=r"third of .*several inputs"):
        materialise(TensorDataset(torch.zeros(2, 1), torch.zeros(2, 3), torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ((torch.zeros(3), 1), r"first input has \[2\], number 1 has \[3\]"),
        ((torch.zeros(2), [1, 2]), r"first target has \[\], number 1 has \[2\]"),
    ],
)
def test_ragged_items_are_refused(second: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        materialise(Endless([(torch.zeros(2), 0), second]))


@pytest.mark.parametrize(
    "items",
    [[(1,)], [(1, 2, 3, 4)], [(1, 2), (1, 2, 3)], [{"x": 1, "y": 2}], [torch.zeros(2)]],
)
def test_other_items_are_refused(items: list[Any]) -> None:
    with pytest.raises(ValueError, match="input, target"):
        materialise(Endless(items))


def test_what_is_no_tensor_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="transform"):
        materialise(Endless([(object(), 1)]))


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        Data(torch.zeros(3), torch.zeros(2))


def test_rows_are_taken_from_all_columns() -> None:
    data = Data(torch.arange(5), torch.arange(5) * 10, torch.arange(5) * 100)
    some = data.rows(torch.tensor([3, 1]))
    assert (some.x.tolist(), some.y.tolist()) == ([3, 1], [30, 10])
    assert some.owners is not None
    assert some.owners.tolist() == [300, 100]


def test_texts_keep_the_names_of_the_owners() -> None:
    items = [(0, 1, "zoe"), (0, 1, "ada"), (0, 1, "zoe")]
    data = materialise(Endless(items))
    assert data.names == ("ada", "zoe")
    assert data.owners is not None
    assert [data.owner(int(number)) for number in data.owners] == ["zoe", "ada", "zoe"]
    assert data.rows(torch.tensor([1])).names == data.map(torch.clone).names == data.names
    assert Data(torch.zeros(1), torch.zeros(1), torch.tensor([7])).owner(7) == "7"
    with pytest.raises(ValueError, match=r"Data\.names has 2 names, but owners run from 0 to 2"):
        Data(torch.zeros(2), torch.zeros(2), torch.tensor([0, 2]), ("ada", "zoe"))


@pytest.mark.parametrize(
    "nothing",
    [Endless([]), TensorDataset(torch.zeros(0, 2), torch.zeros(0)), Data(*torch.zeros(2, 0))],
)
def test_an_empty_data_set_says_so(nothing: Any) -> None:
    with pytest.raises(ValueError, match=r"The test data set is empty\. Check where"):
        materialise(nothing, "test")
    with pytest.raises(ValueError, match=r"^The data set is empty"):
        materialise(nothing)
