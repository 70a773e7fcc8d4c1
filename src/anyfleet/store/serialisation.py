"""Values of a run as plain data, and back: a JSON document, and blocks of memory beside it.

Numbers, texts, true, false and null stand for themselves. Everything else is an object whose first
key says what it is; docs/runs.md lists them. What occurs twice is written once: it gets an `id`,
and later places say `{"ref": id}`. So what was shared in memory is shared again.

When a document is read, only classes of allowed packages are ever named. Of Anyfleet itself these
are the classes that states consist of (`names.STATES`), and the fields of an instance must be of
the types that its class declares. Instances are made by the constructor of their dataclass and by
nothing else: a document holds data, not code.
"""

import base64
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays
from anyfleet.config.signatures import hints_of
from anyfleet.core.arriving import LateArrays
from anyfleet.errors import BadName, StoreError
from anyfleet.experiment import RoundRecord, State
from anyfleet.names import (
    HOMES,
    OWN,
    STATES,
    Factory,
    FrozenMapping,
    find,
    how_to_allow,
    lies_within,
)
from anyfleet.store.disk import Damaged
from anyfleet.store.tensor_blocks import Blocks, Node, checked, view

INLINE = 8  # elements of an array or tensor that are written into the document itself
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
    """A value as plain data: a tree that JSON takes, and the blocks of its tensors by name."""

    root: Any
    blocks: Mapping[str, Tensor]


def encode(value: Any, known: Mapping[str, type]) -> Document:
    """Return a value of a run as a document; raise StoreError, with the place, if it cannot be.

    A value of one of the `known` types belongs to the surroundings of a run, not to its state: only
    its name there is written, and `decode` puts back what it is given by that name.
    """
    writer = _Writer(known)
    root = writer.node(value)
    return Document(root, writer.blocks.close())


def require_writable(value: Any, known: Mapping[str, type]) -> None:
    """Raise StoreError, with the place, for a value that `encode` cannot write; copy no tensors."""
    _Writer(known).node(value)


def code_name(thing: Callable[..., Any]) -> str:
    """Return the module of a class or function and its place in it, private or inner ones too."""
    if "<" in thing.__qualname__:
        raise StoreError(
            f"`{thing.__qualname__}`, which is made inside a function; define it at the top of "
            "a module"
        )
    return f"{thing.__module__}:{thing.__qualname__}"


def number(value: float) -> float | str:
    """Return a number as JSON can hold it: inf and NaN as strings."""
    return value if math.isfinite(value) else str(value)


@dataclass(eq=False)
class _Writer:
    known: Mapping[str, type]
    blocks: Blocks = field(default_factory=Blocks)
    _seen: dict[int, Node | None] = field(default_factory=dict)  # by id(); None: being written
    _kept: list[object] = field(default_factory=list)  # alive, so that no id() is used twice
    _path: list[str] = field(default_factory=list)
    _shared: int = 0

    def node(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is tuple and not value:
            return {"tuple": []}  # Python has one empty tuple: nobody shares it on purpose
        if kind is int:
            return value if -_LARGEST <= value < _LARGEST else {"int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Enum):
            return {"enum": self._named(kind), "name": value.name}
        return self._once(value)

    def _once(self, value: Any) -> Node:
        """Return a reference to a value that was written before, or the node of a new one."""
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

    # -- one type of value each

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
        # Torch takes no negative strides, and warns of read-only arrays.
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

    # -- what these share

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
    LateArrays: lambda writer, value: writer.mapping("dict", value),  # nobody reads them late
    MappingProxyType: lambda writer, value: writer.mapping("proxy", value),
    FrozenMapping: lambda writer, value: writer.mapping("frozen", value),
    bytes: lambda _, value: {"bytes": base64.b64encode(value).decode()},
    torch.dtype: lambda _, value: {"dtype": str(value).removeprefix("torch.")},
    np.ndarray: _Writer.array,
    Tensor: _Writer.tensor,
}


# --- reading ------------------------------------------------------------------------------------

# Classes outside `names.STATES` that a state may consist of.
_BESIDES = {
    f"{each.__module__}:{each.__qualname__}": each for each in (Factory, RoundRecord, State)
}


def decode(
    document: Document,
    known: Mapping[str, object],
    *,
    allow: Collection[str] = (),
    device: str = "cpu",
) -> Any:
    """Return the value of a document that `encode` made; raise StoreError if it cannot be used.

    Classes may come from `anyfleet` and the packages in `allow`. Tensors that were not on the CPU
    are put onto `device`. The blocks must be flat, as `tensor_blocks.read` gives them.
    """
    try:
        return _Reader(document.blocks, known, allow, device).value(document.root)
    except StoreError:
        raise
    except BadName as error:
        raise StoreError(str(error)) from error
    except Exception as error:  # damaged data can make a constructor fail in any way
        raise Damaged(f"a value of the run cannot be read: {error!r}.") from error


@dataclass(eq=False)
class _Reader:
    blocks: Mapping[str, Tensor]
    known: Mapping[str, object]
    allow: Collection[str]
    device: str
    _shared: dict[int, Any] = field(default_factory=dict)
    _moved: dict[str, Tensor] = field(default_factory=dict)

    def value(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "ref" in node:
            return self._shared[node["ref"]]
        made = _READERS[next(iter(node))](self, node)
        if "id" in node:
            self._shared[node["id"]] = made
        return made

    def entries(self, nodes: Iterable[Any]) -> list[Any]:
        return [self.value(node) for node in nodes]

    def items(self, written: Any) -> dict[Any, Any]:
        pairs = written.items() if isinstance(written, dict) else written
        return {self.value(key): self.value(item) for key, item in pairs}

    def dataclass(self, node: Mapping[str, Any]) -> Any:
        kind: Any = self.code(node["part"])
        held = self.items(node["fields"])
        known = {each.name: each.init for each in fields(kind)} if is_dataclass(kind) else {}
        if known.keys() != held.keys():
            raise StoreError(
                f"{node['part']} had the fields {', '.join(held)} when the run was written, and "
                "the code has changed since. Resume it with the version that wrote it."
            )
        if lies_within(kind.__module__, (OWN,)) and (wrong := misfit(kind, held)):
            raise Damaged(f"a value of the run cannot be read: {wrong}.")
        made = kind(**{name: held[name] for name, given in known.items() if given})
        for name, item in held.items():
            # Exactly what was there, whatever the constructor made of it.
            object.__setattr__(made, name, item)
        if isinstance(made, Arrays) and (wrong := _uneven(made)):
            raise Damaged(f"a value of the run cannot be read: {wrong}.")
        if isinstance(made, Factory):  # a name in it must be allowed too
            find(made.use, self.allow, HOMES.values())
        return made

    def named_tuple(self, node: Mapping[str, Any]) -> Any:
        kind = self.code(node["named"])
        if not (isinstance(kind, type) and issubclass(kind, tuple)):
            raise StoreError(f"{node['named']} was a NamedTuple when the run was written.")
        entries = self.entries(node["entries"])
        names: tuple[str, ...] = getattr(kind, "_fields", ())
        if len(names) != len(entries):
            raise Damaged(f"{node['named']} has {len(names)} entries, and not {len(entries)}.")
        held = dict(zip(names, entries, strict=True))
        wrong = misfit(kind, held) if lies_within(kind.__module__, (OWN,)) else ""
        if wrong:
            raise Damaged(f"a value of the run cannot be read: {wrong}.")
        return tuple.__new__(kind, entries)

    def enum(self, node: Mapping[str, Any]) -> Enum:
        kind = self.code(node["enum"])
        if not (isinstance(kind, type) and issubclass(kind, Enum)):
            raise StoreError(f"{node['enum']} was an Enum when the run was written.")
        return kind[node["name"]]

    def array(self, node: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        if "block" in node:
            return view(self.blocks[node["block"]], node).numpy()
        values = np.array(_numbers(node["values"]), dtype=_known_numbers(node["array"]))
        return values.reshape(node["shape"])

    def scalar(self, node: Mapping[str, Any]) -> Any:
        (value,) = _numbers([node["value"]])
        return np.dtype(_known_numbers(node["scalar"])).type(value)

    def tensor(self, node: Mapping[str, Any]) -> Tensor:
        device = self.device if "device" in node else "cpu"
        if "block" in node:
            return view(self._block(node["block"], device), node)
        flat = torch.tensor(_numbers(node["values"]), dtype=_dtype(node["tensor"]), device=device)
        return flat.reshape(node["shape"])

    def _block(self, name: str, device: str) -> Tensor:
        """Return a block on a device, moved once: its tensors share it there too."""
        if device != "cpu" and name not in self._moved:
            self._moved[name] = self.blocks[name].to(device)
        return self._moved.get(name, self.blocks[name])

    def code(self, name: str) -> Any:
        """Return the class or function of that name; raise StoreError for any other name."""
        if name in _BESIDES:
            return _BESIDES[name]
        module_name, _, place = name.partition(":")
        if lies_within(module_name, (OWN,)):
            if not lies_within(module_name, STATES):
                raise StoreError(f"{name} cannot be in the state of a run.")
        elif not lies_within(module_name, self.allow):
            packages = ", ".join((OWN, *self.allow))
            raise StoreError(
                f"{name} is outside the allowed packages ({packages}). {how_to_allow(module_name)}"
            )
        try:
            found: Any = importlib.import_module(module_name)
            for part in place.split("."):
                found = vars(found)[part]
        except (ImportError, KeyError, TypeError) as error:
            raise StoreError(f"the run was made with {name}, which does not exist here.") from error
        if not callable(found) or (found.__module__, found.__qualname__) != (module_name, place):
            raise StoreError(f"{name} cannot be used: it is not defined in that module.")
        return found


def _numbers(values: Iterable[Any]) -> list[Any]:
    """Return numbers with inf and NaN, which are strings in JSON."""
    return [float(value) if isinstance(value, str) else value for value in values]


def _known_numbers(name: str) -> str:
    if name not in NUMBERS:
        raise StoreError(f"a run has no numbers of type {name}.")
    return name


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise StoreError(f"this torch has no {name}.")
    return found


_READERS: Mapping[str, Callable[[_Reader, Any], Any]] = {
    "int": lambda _, node: int(node["int"]),
    "float": lambda _, node: float(node["float"]),
    "bytes": lambda _, node: base64.b64decode(node["bytes"]),
    "dtype": lambda _, node: _dtype(node["dtype"]),
    "list": lambda reader, node: reader.entries(node["list"]),
    "tuple": lambda reader, node: tuple(reader.entries(node["tuple"])),
    "set": lambda reader, node: set(reader.entries(node["set"])),
    "frozenset": lambda reader, node: frozenset(reader.entries(node["frozenset"])),
    "dict": lambda reader, node: reader.items(node["dict"]),
    "proxy": lambda reader, node: MappingProxyType(reader.items(node["proxy"])),
    "frozen": lambda reader, node: FrozenMapping(reader.items(node["frozen"])),
    "part": _Reader.dataclass,
    "named": _Reader.named_tuple,
    "enum": _Reader.enum,
    "array": _Reader.array,
    "scalar": _Reader.scalar,
    "tensor": _Reader.tensor,
    "code": lambda reader, node: reader.code(node["code"]),
    "known": lambda reader, node: reader.known[node["known"]],
}


# --- types of fields ----------------------------------------------------------------------------

# Numbers of numpy stand for plain ones, and whole numbers for others.
_WIDER: Mapping[type, Any] = {
    bool: bool | np.bool_,
    int: int | np.integer,
    float: int | float | np.number,
}


def misfit(kind: type, held: Mapping[str, Any]) -> str:
    """Return which field has a value of another type than its class declares, or ""."""
    hints = _hints(kind)
    for name, value in held.items():
        if not _fits(value, hints.get(name, Any)):
            return f"{kind.__name__}.{name} holds a {type(value).__name__}"
    return ""


def _uneven(made: Arrays) -> str:
    """Return which field of a struct of arrays has not one sensible entry per row, or ""."""
    # What rows list together has an entry for each different one, not for each row.
    held = {e.name: getattr(made, e.name) for e in fields(made) if not e.metadata}
    arrays = {
        name: value
        for name, value in held.items()
        if isinstance(value, np.ndarray | Tensor | tuple | Arrays)
    }
    counts = {name: _entries(value) for name, value in arrays.items()}
    rows = next(iter(counts.values()), 0)
    wrong = [name for name, count in counts.items() if count != rows or count < 0]
    if wrong:
        return f"{type(made).__name__}.{wrong[0]} has not one entry per row"
    index = made.astray
    return f"{type(made).__name__}.{index} counts past the end of its list" if index else ""


def _entries(array: Any) -> int:
    """Return how many entries an array has; -1 for a single number."""
    single = isinstance(array, np.ndarray | Tensor) and array.ndim == 0
    return -1 if single else len(array)


@lru_cache(maxsize=1024)
def _hints(kind: type) -> dict[str, Any]:
    return hints_of(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value may be of that type; a type that says nothing takes any value."""
    origin = typing.get_origin(hint)
    # An alias by `type` (numpy's NDArray from Python 3.12 on) stands for what it is made of.
    aliased = getattr(origin or hint, "__value__", None)
    if aliased is not None:
        return _fits(value, aliased)
    if origin is typing.Annotated:
        return _fits(value, typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, inner) for inner in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and _fit_each(value, typing.get_args(hint))
    if origin is list:
        return isinstance(value, list) and _fit_each(tuple(value), (*typing.get_args(hint), ...))
    if origin is Callable:
        return callable(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _fit_items(value, typing.get_args(hint))
    if hint is None or hint is types.NoneType:
        return value is None
    plain = origin or hint
    if plain is Any or not isinstance(plain, type) or getattr(plain, "_is_protocol", False):
        return True
    return isinstance(value, _WIDER.get(plain, plain))


def _fit_each(value: tuple[Any, ...], inner: tuple[Any, ...]) -> bool:
    if len(inner) == 2 and inner[1] is ...:
        return all(_fits(each, inner[0]) for each in value)
    return len(value) == len(inner) and all(map(_fits, value, inner))


def _fit_items(value: Mapping[Any, Any], inner: tuple[Any, ...]) -> bool:
    return not inner or all(
        _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
    )
