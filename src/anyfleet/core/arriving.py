"""Numbers on their way to the host: an accelerator computes them while the host goes on.

Whoever reads one waits for it, so nothing that reads need know. The host gains by reading late:
what a round is ended with, and the next one begun with, is mostly known before its numbers are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Transfer:
    """Numbers that travel to the host together, in double precision."""

    def __init__(self, flat: Tensor) -> None:
        self._arrived: NDArray[np.float64] | None = None
        if flat.device.type == "cpu":
            self._arrived = flat.double().numpy()
            return
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._host.copy_(flat, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(flat.device))

    @property
    def awaited(self) -> bool:
        """Whether the numbers are on the host, and known to be."""
        return self._arrived is not None

    def values(self) -> NDArray[np.float64]:
        """Return the numbers; wait for them if they are still computed."""
        if self._arrived is None:
            self._done.synchronize()
            self._arrived = self._host.double().numpy()
        return self._arrived


class LateArray:
    """An array that is a part of a transfer; its shape is known at once."""

    def __init__(self, transfer: Transfer, begin: int, shape: Sequence[int]) -> None:
        self._transfer, self._begin, self.shape = transfer, begin, tuple(shape)

    @property
    def awaited(self) -> bool:
        """Whether nobody would have to wait for the numbers."""
        return self._transfer.awaited

    def values(self) -> NDArray[np.float64]:
        """Return the array; wait for its numbers if they are still computed."""
        end = self._begin + int(np.prod(self.shape, dtype=np.int64))
        return self._transfer.values()[self._begin : end].reshape(self.shape)


class LateArrays(Mapping[str, NDArray[Any]]):
    """Arrays by name, of which some may be on their way; who looks one up waits for it."""

    def __init__(self, arrays: Mapping[str, NDArray[Any] | LateArray]) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, name: str) -> NDArray[Any]:
        found = self._arrays[name]
        return found.values() if isinstance(found, LateArray) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays  # a mapping's own would look it up, and wait

    def named(self, names: Mapping[str, str]) -> Mapping[str, NDArray[Any]]:
        """Return some of the arrays under other names, given the present name of each."""
        found = {name: self._arrays[known] for name, known in names.items()}
        there = {name: each for name, each in found.items() if not isinstance(each, LateArray)}
        return there if len(there) == len(found) else LateArrays(found)

    @property
    def awaited(self) -> bool:
        """Whether nobody would have to wait for any of the arrays."""
        late = (each for each in self._arrays.values() if isinstance(each, LateArray))
        return all(each.awaited for each in late)

    def example(self) -> dict[str, NDArray[Any]]:
        """Return arrays of the same names and shapes, with zeros for those on their way."""
        return {
            name: np.zeros(each.shape) if isinstance(each, LateArray) else each
            for name, each in self._arrays.items()
        }


def awaited(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether nobody would have to wait for any of the arrays."""
    return not isinstance(arrays, LateArrays) or arrays.awaited


def example(arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Return arrays of the same names and shapes, of which none is on its way."""
    return arrays.example() if isinstance(arrays, LateArrays) else arrays


def on_its_way(numbers: Sequence[Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Send numbers to the host, and return what waits for them and returns them as arrays."""
    (found,) = on_host([{str(place): each for place, each in enumerate(numbers)}])
    return lambda: list(found.values())


def on_host(stacks: Sequence[Mapping[str, Tensor]]) -> list[LateArrays]:
    """Return the tensors [devices, …] of stacks in double precision; nobody waits for them yet.

    Those of one accelerator travel together: every single transfer would wait for its own turn.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Tensor]]] = {}
    for number, columns in enumerate(stacks):
        for name, column in columns.items():
            alike.setdefault((column.device, column.dtype), []).append((number, name, column))
    found: list[dict[str, NDArray[Any] | LateArray]] = [{} for _ in stacks]
    for (device, _), some in alike.items():
        if device.type == "cpu":
            for number, name, column in some:
                found[number][name] = column.double().numpy()
            continue
        transfer, begin = Transfer(torch.cat([each.reshape(-1) for *_, each in some])), 0
        for number, name, column in some:
            found[number][name] = LateArray(transfer, begin, column.shape)
            begin += column.numel()
    return [LateArrays(each) for each in found]
