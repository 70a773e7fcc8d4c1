"""Data as tensors: inputs, targets and owners, read from any torch Dataset."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from anyfleet.tracebacks import BUILDING, during

_FIELDS = ("input", "target")
_EMPTY = "The {}data set is empty. Check where it is read from, and which samples it keeps."
_NO_ITEM = (
    "The items of a data set are (input, target) or (input, target, owner); this one gives {}."
)
_NO_OWNER = (
    "The third of (input, target, owner) must be one whole number or text for each sample, got {}. "
    "For a model with several inputs, join them in one tensor and let the module split it."
)


@dataclass(frozen=True, eq=False)
class Data:
    """Rows of inputs `x` and targets `y`; `owners` numbers the natural owner of each row, if any.

    The task decides what targets mean: classes, tokens, counts, real numbers. `names` has the names
    of the owners by number; without it, an owner's name is its number.
    """

    x: Tensor
    y: Tensor
    owners: Tensor | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.x, self.y, self.owners) if part is not None}
        if len(sizes) != 1:
            raise ValueError(f"Data: inputs, targets and owners differ in length: {sizes}.")
        if self.owners is not None and (self.owners.ndim != 1 or not _whole(self.owners)):
            raise ValueError(_NO_OWNER.format(_described(self.owners)))
        if self.names and self.owners is not None and len(self.owners):
            low, high = int(self.owners.min()), int(self.owners.max())
            if low < 0 or high >= len(self.names):
                raise ValueError(
                    f"Data.names has {len(self.names)} names, but owners run from {low} to {high}."
                )

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: Tensor) -> "Data":
        """Return copies of the given rows."""
        owners = None if self.owners is None else self.owners[index]
        return Data(self.x[index], self.y[index], owners, self.names)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Data":
        """Return the data with `change` applied to inputs and targets."""
        return Data(change(self.x), change(self.y), self.owners, self.names)

    def owner(self, number: int) -> str:
        """Return the name of an owner."""
        return self.names[number] if self.names else str(number)


def materialise(dataset: "Dataset[Any] | Data", what: str = "") -> Data:
    """Return all items of a data set, (input, target) or (input, target, owner), as tensors.

    Each item is read once. An owner is a whole number or a text; texts are numbered in alphabetical
    order. Raise ValueError if the data set is empty; the error calls it the `what` data set.
    """
    data = _materialised(dataset)
    if not len(data):
        raise ValueError(_EMPTY.format(f"{what} " if what else ""))
    return data


def _materialised(dataset: "Dataset[Any] | Data") -> Data:
    if isinstance(dataset, Data):
        return dataset
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) not in (2, 3):
            raise ValueError(_NO_ITEM.format(f"{len(dataset.tensors)} tensors"))
        x, y, *owners = dataset.tensors
        return Data(x, y, owners[0] if owners else None)
    fields = _fields(dataset)
    if not fields:
        return Data(torch.empty(0), torch.empty(0))
    x, y = (_stacked(items, what) for items, what in zip(fields, _FIELDS, strict=False))
    return Data(x, y, *(_owners(fields[2]) if len(fields) > 2 else ()))


def _fields(dataset: Dataset[Any]) -> list[tuple[Any, ...]]:
    items: list[Any] = []
    for item in _items(dataset):
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            size = f" of {len(item)}" if isinstance(item, tuple | list) else ""
            raise ValueError(_NO_ITEM.format(f"a {type(item).__name__}{size}"))
        if items and len(item) != len(items[0]):
            raise ValueError(_NO_ITEM.format(f"items of {len(items[0])} and of {len(item)}"))
        items.append(item)
    return list(zip(*items, strict=True))


def _stacked(items: tuple[Any, ...], what: str) -> Tensor:
    tensors = [_tensor(item) for item in items]
    first = tensors[0].shape
    for position, tensor in enumerate(tensors):
        if tensor.shape != first:
            raise ValueError(
                f"A data set must give items of one shape: its first {what} has {list(first)}, "
                f"number {position} has {list(tensor.shape)}. Pad or crop them in its transform."
            )
    return torch.stack(tensors)


def _owners(owners: tuple[Any, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Return the number of each row's owner, and the owners' names, or ()."""
    if all(isinstance(owner, str) for owner in owners):
        names = tuple(sorted(set(owners)))
        order = {name: number for number, name in enumerate(names)}
        return torch.tensor([order[name] for name in owners]), names
    numbers = [_tensor(owner) for owner in owners]
    for number in numbers:
        if number.ndim or not _whole(number):
            raise ValueError(_NO_OWNER.format(_described(number)))
    return torch.stack(numbers), ()


def _whole(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def _items(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yield every item; an error raised by the data set names the item."""
    name, end = type(dataset).__name__, object()
    places: Iterable[int] = itertools.count()
    with during(what=f"the data set {name}", when=BUILDING):
        if isinstance(dataset, IterableDataset):
            items = iter(dataset)
        else:
            places = range(len(dataset))  # type: ignore[arg-type]
            # Not iter(): a map-style data set may never raise the IndexError that would end it.
            items = (dataset[index] for index in places)
    for number in places:
        with during(what=f"item {number} of the data set {name}", when=BUILDING):
            item = next(items, end)
        if item is end:
            return
        yield item


def _tensor(item: Any) -> Tensor:
    try:
        return torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"A data set gave a {type(item).__name__}, which is not a tensor, array or number. "
            "Give the data set a transform that makes tensors."
        ) from error
