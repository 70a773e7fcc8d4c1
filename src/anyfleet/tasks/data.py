"""Samples and targets as tensors, and any torch Dataset turned into them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset


@dataclass(frozen=True, eq=False)
class Data:
    """Rows of inputs `x` and targets `y`; `owners` numbers the natural owner of each row, if any.

    Integer targets are classes (or tokens, one per position); floats are numbers to be met.
    """

    x: Tensor
    y: Tensor
    owners: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.x, self.y, self.owners) if part is not None}
        if len(sizes) != 1:
            raise ValueError(f"Data: inputs, targets and owners differ in length: {sizes}.")

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: Tensor) -> "Data":
        """Copies of the given rows."""
        owners = None if self.owners is None else self.owners[index]
        return Data(self.x[index], self.y[index], owners)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Data":
        """`change` applied to inputs and targets."""
        return Data(change(self.x), change(self.y), self.owners)


def materialise(dataset: "Dataset[Any] | Data") -> Data:
    """Every item of a data set, read once: (input, target) or (input, target, owner)."""
    if isinstance(dataset, Data):
        return dataset
    if isinstance(dataset, TensorDataset):
        return Data(*dataset.tensors)
    columns = tuple(zip(*_items(dataset), strict=True))
    if len(columns) not in (2, 3):
        raise ValueError(
            "A data set must not be empty, and its items are (input, target) or "
            "(input, target, owner)."
        )
    return Data(*(torch.stack([_tensor(item) for item in column]) for column in columns))


def _items(dataset: Dataset[Any]) -> Iterable[Any]:
    if isinstance(dataset, IterableDataset):
        return dataset
    # Not iter(): a map-style data set may lack the IndexError that would end it.
    return (dataset[index] for index in range(len(dataset)))  # type: ignore[arg-type]


def _tensor(item: Any) -> Tensor:
    try:
        return torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"A data set gave a {type(item).__name__}, which is no tensor, array or number. "
            "Give the data set a transform that makes tensors."
        ) from error
