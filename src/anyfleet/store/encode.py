"""Values of a run as plain data: a JSON document, and blocks of memory beside it.

Numbers, texts, true, false and null stand for themselves; all else is an object whose first key
says what it is (docs/runs.md lists them). What is met twice is written once: it gets an `id`, and
later places say `{"ref": id}`. So what was shared in memory is shared again.
"""

import base64
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyfleet.errors import StoreError
from anyfleet.names import FrozenMapping
from anyfleet.store.blocks import Blocks, Node, checked

INLINE = 8  # elements; so few are written into the document
NUMBERS = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_LARGEST = 1 << 63
_ALLOWED = (
    "A state may hold None, bool, int, float, str, bytes, enums, lists, tuples, dicts, sets, "
    "dataclasses, NamedTuples, arrays of numbers and tensors. Without checkpoints "
    "(--checkpoint-every 0) it may hold anything, but the run cannot be resumed."
)


@dataclass(frozen=True, eq=False)
class Document:
    """A value as plain data: what JSON takes, and the blocks of its tensors by name."""

    root: Any
    blocks: Mapping[str, Tensor]


def encode(value: Any, known: Mapping[str, type]) -> Document:
    """Any value of a run.

    What has one of the `known` types belongs to the surroundings of a run and not to its state:
    the type's name here is written, and `decode` puts back what it is given by that name.
    """
    writer = _Writer(known)
    root = writer.node(value)
    return Document(root, writer.blocks.close())


def require_writable(value: Any, known: Mapping[str, type]) -> None:
    """Raise StoreError, with the place, for what `encode` could not write; copies no tensors."""
    _Writer(known).node(value)


def code_name(thing: Callable[..., Any]) -> str:
    """Module and place in it: also of a private or an inner class."""
    if "<" in thing.__qualname__:
        raise StoreError(
            f"`{thing.__qualname__}`, which is made inside a function; define it at the top of "
            "a module"
        )
    return f"{thing.__module__}:{thing.__qualname__}"


def number(value: float) -> float | str:
    """JSON has no infinite numbers, and none that are none."""
    return value if math.isfinite(value) else str(value)


@dataclass(eq=False)
class _Writer:
    known: Mapping[str, type]
    blocks: Blocks = field(default_factory=Blocks)
    _seen: dict[int, Node | None] = field(default_factory=dict)  # None: not complete yet
    _kept: list[object] = field(default_factory=list)  # so that no number is given again
    _path: list[str] = field(default_factory=list)
    _shared: int = 0

    def node(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is tuple and not value:
            return {"tuple": []}  # Python has one empty tuple only: nobody shares it on purpose
        if kind is int:
            return value if -_LARGEST <= value < _LARGEST else {"int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Enum):
            return {"enum": self._named(kind), "name": value.name}
        return self._once(value)

    def _once(self, value: Any) -> Node:
        """A reference to what was written before, or the node of what is new."""
        number = id(value)
        if number not in self._seen:
            self._seen[number] = None
            self._kept.append(value)
            made = self._compound(value)
            self._seen[number] = made
            return made
        node = self._seen[number]
        if node is None:
            raise StoreError(f"{self._where()} contains itself, and cannot be written.")
        if "id" not in node:
            self._shared += 1
            node["id"] = self._shared
        return {"ref": node["id"]}

    def _compound(self, value: Any) -> Node:
        for name, kind in self.known.items():
            if type(value) is kind:
                return {"known": name}
        write = _WRITERS.get(type(value))
        if write is not None:
            return write(self, value)
        if isinstance(value, np.generic):
            return self._scalar(value)
        if is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        if isinstance(value, tuple) and getattr(type(value), "_fields", None):
            return {"named": self._named(type(value)), "entries": self.entries(value)}
        if inspect.isfunction(value) or inspect.isclass(value):
            return {"code": self._named(value)}
        raise self._refusal(f"a `{type(value).__qualname__}`")

    # -- one kind of value each

    def _dataclass(self, value: Any) -> Node:
        held = {each.name: getattr(value, each.name) for each in fields(value)}
        return {"part": self._named(type(value)), "fields": self._values(held)}

    def mapping(self, key: str, value: Mapping[Any, Any]) -> Node:
        if all(type(name) is str for name in value):
            return {key: self._values(value)}
        pairs = [[self.node(name), self._inner(str(name), item)] for name, item in value.items()]
        return {key: pairs}

    def array(self, value: np.ndarray[Any, Any]) -> Node:
        if value.dtype.name not in NUMBERS:
            raise self._refusal(f"an array of {value.dtype}")
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        if value.size <= INLINE:
            flat = native.reshape(-1).tolist()
            return {"array": value.dtype.name, "shape": list(value.shape), "values": _plain(flat)}
        # Torch takes no negative strides, and warns of what cannot be written to.
        usable = native if native.flags.writeable and min(native.strides) >= 0 else native.copy()
        self._kept.append(usable)
        node = {"array": value.dtype.name}
        return self.blocks.add(torch.from_numpy(usable), node, self._where(), id(usable))

    def _scalar(self, value: np.generic) -> Node:
        if value.dtype.name not in NUMBERS:
            raise self._refusal(f"a `{type(value).__qualname__}`")
        (plain,) = _plain([value.item()])
        return {"scalar": value.dtype.name, "value": plain}

    def tensor(self, value: Tensor) -> Node:
        tensor = self._checked(value)
        kind = str(value.dtype).removeprefix("torch.")
        node: Node = {"tensor": kind}
        if value.device.type != "cpu":
            node["device"] = str(value.device)
        if value.numel() <= INLINE:
            flat = value.reshape(-1).tolist()
            return node | {"shape": list(value.shape), "values": _plain(flat)}
        return self.blocks.add(tensor, node, self._where())

    # -- what they share

    def _values(self, items: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._inner(name, item) for name, item in items.items()}

    def entries(self, items: Iterable[Any]) -> list[Any]:
        return [self._inner(str(row), item) for row, item in enumerate(items)]

    def _inner(self, name: str, value: Any) -> Any:
        self._path.append(name)
        made = self.node(value)
        self._path.pop()
        return made

    def _where(self) -> str:
        return ".".join(self._path)

    def _refusal(self, what: str) -> StoreError:
        return StoreError(
            f"{self._where()}: {what} cannot be written into a run folder. {_ALLOWED}"
        )

    def _named(self, thing: Callable[..., Any]) -> str:
        with self._explained():
            return code_name(thing)

    def _checked(self, tensor: Tensor) -> Tensor:
        with self._explained():
            return checked(tensor)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise self._refusal(str(error)) from error


def _plain(flat: list[Any]) -> list[Any]:
    return [number(value) if type(value) is float else value for value in flat]


_WRITERS: Mapping[type, Callable[[_Writer, Any], Node]] = {
    list: lambda writer, value: {"list": writer.entries(value)},
    tuple: lambda writer, value: {"tuple": writer.entries(value)},
    set: lambda writer, value: {"set": writer.entries(value)},
    frozenset: lambda writer, value: {"frozenset": writer.entries(value)},
    dict: lambda writer, value: writer.mapping("dict", value),
    MappingProxyType: lambda writer, value: writer.mapping("proxy", value),
    FrozenMapping: lambda writer, value: writer.mapping("frozen", value),
    bytes: lambda _, value: {"bytes": base64.b64encode(value).decode()},
    torch.dtype: lambda _, value: {"dtype": str(value).removeprefix("torch.")},
    np.ndarray: _Writer.array,
    Tensor: _Writer.tensor,
}
