"""Plain data back into the values of a run. Only classes of allowed packages are ever named.

Of Anyfleet itself these are the classes that states consist of (`names.STATES`), and the fields of
an instance must be of the types that its class declares. Instances are made by the construction of
their dataclass and of nothing else: a document holds data, no code.
"""

import base64
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays
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
from anyfleet.store.blocks import view
from anyfleet.store.disk import Damaged
from anyfleet.store.encode import NUMBERS, Document
from anyfleet.store.fields import misfit, uneven

# The classes of other modules that a state may consist of.
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
    """The inverse of `encode`.

    Classes may come from `anyfleet` and the packages in `allow`. Tensors that were not in plain
    memory are put onto `device`. The blocks must be flat, as `blocks.read` gives them.
    """
    try:
        return _Reader(document.blocks, known, allow, device).value(document.root)
    except StoreError:
        raise
    except BadName as error:
        raise StoreError(str(error)) from error
    except Exception as error:  # what damaged data do to constructors is theirs to choose
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
                f"{node['part']} had the fields {', '.join(held)} when the run was written: "
                "the code has changed since."
            )
        if lies_within(kind.__module__, (OWN,)) and (wrong := misfit(kind, held)):
            raise Damaged(f"a value of the run cannot be read: {wrong}.")
        made = kind(**{name: held[name] for name, given in known.items() if given})
        for name, item in held.items():
            # Exactly what was there, whatever the construction makes of it.
            object.__setattr__(made, name, item)
        if isinstance(made, Arrays) and (wrong := uneven(made)):
            raise Damaged(f"a value of the run cannot be read: {wrong}.")
        if isinstance(made, Factory):  # whoever makes one answers for its name
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
        """Moved once, so that the tensors in it share it there too."""
        if device != "cpu" and name not in self._moved:
            self._moved[name] = self.blocks[name].to(device)
        return self._moved.get(name, self.blocks[name])

    def code(self, name: str) -> Any:
        """The class or function of that name, and no other thing."""
        if name in _BESIDES:
            return _BESIDES[name]
        module_name, _, place = name.partition(":")
        if lies_within(module_name, (OWN,)):
            if not lies_within(module_name, STATES):
                raise StoreError(f"{name} is nothing that the state of a run consists of.")
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
            raise StoreError(f"there is no {name} here, which the run was made with.") from error
        if not callable(found) or (found.__module__, found.__qualname__) != (module_name, place):
            raise StoreError(f"{name} is not defined there: it cannot be used.")
        return found


def _numbers(values: Iterable[Any]) -> list[Any]:
    """With what JSON cannot say."""
    return [float(value) if isinstance(value, str) else value for value in values]


def _known_numbers(name: str) -> str:
    if name not in NUMBERS:
        raise StoreError(f"{name} is no type of numbers that a run is written with.")
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
