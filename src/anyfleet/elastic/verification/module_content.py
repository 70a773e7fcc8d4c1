"""What decides how a module computes: its classes, attributes and buffers, but not its weights."""

import functools
import hashlib
import sys
import sysconfig
import weakref
from collections.abc import Hashable, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

_DEEPEST = 40
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
# Compared by identity: whoever made a new function or class may have meant another.
_CODE = (FunctionType, BuiltinFunctionType, type)
# Packages whose code is known by their version or, our own, by its source; and Python's own.
_KNOWN = frozenset({"anyfleet", "torch"})
_PYTHON = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
# Where torch keeps the hooks on the gradient of a parameter.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Where torch and Python show what does not say itself where it is from.
_SHOWN_IN = ("torch", "torch.nn.functional", "types")


class UnknownContent(Exception):
    """Something in a module whose content cannot be told."""


def content_of(module: nn.Module) -> Hashable:
    """Return what a module is made of, equal for equal modules; weights count by their shape.

    Raise UnknownContent if that cannot be told.
    """
    return _content(module, 0)


def hooked(tensor: Tensor) -> bool:
    """Return whether there is a hook on the gradient of a tensor."""
    return any(getattr(tensor, hooks, None) for hooks in _HOOKS)


def content_digest(module: nn.Module) -> bytes:
    """Return the SHA-256 of a module's content, the same in every process.

    Raise UnknownContent if that cannot be told, and if the module uses code other than that of
    Anyfleet, torch and Python, which may change without notice.
    """
    tensors = (*module.parameters(), *module.buffers())
    usual = all(type(each) in (nn.Parameter, Tensor) and not hooked(each) for each in tensors)
    everywhere: Any = nn.modules.module
    if not usual or everywhere._has_any_global_hook():  # noqa: SLF001 - it has no public name
        raise UnknownContent
    return hashlib.sha256(msgspec.msgpack.encode(_named(content_of(module)))).digest()


def _content(value: Any, depth: int) -> Hashable:
    """Return what a value is made of, equal for equal values; tensors that are weights by shape."""
    if depth > _DEEPEST:
        raise UnknownContent
    inner = functools.partial(_content, depth=depth + 1)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _CODE):
        return value
    if isinstance(value, nn.Parameter):
        return value.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), _bytes(value)
    if isinstance(value, weakref.ref):
        return weakref.ref
    if isinstance(value, functools.partial):
        return type(value), inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, nn.Module):
        return type(value), inner({k: v for k, v in vars(value).items() if k != "training"})
    if isinstance(value, Mapping):
        return type(value), tuple((inner(k), inner(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(inner(item) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(inner(item) for item in value)
    raise UnknownContent


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).digest()


def _named(content: Hashable) -> Any:
    """Return content as plain data: classes and functions by their names."""
    if isinstance(content, tuple):
        return [type(content).__name__, *map(_named, content)]
    if isinstance(content, frozenset):
        return ["frozenset", *sorted(msgspec.msgpack.encode(_named(item)) for item in content)]
    if isinstance(content, _CODE):
        return ["code", _name(content)]
    if isinstance(content, Enum):
        return ["enum", _name(type(content)), content.name]
    return [type(content).__name__, repr(content)]


def _name(code: Any) -> str:
    """Return the place where a class or function of known code is found."""
    own = getattr(code, "__module__", None) or ""
    places = (own, *_SHOWN_IN) if not own or _is_known(own.partition(".")[0]) else ()
    for place in places:
        found: Any = sys.modules.get(place)
        for part in code.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is code:
            return f"{place}:{code.__qualname__}"
    raise UnknownContent


def _is_known(package: str) -> bool:
    """Return whether a package is known; a user's file may have the name of one of Python's."""
    if package in _KNOWN:
        return True
    if package not in sys.stdlib_module_names:
        return False
    origin = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None)
    if not isinstance(origin, str) or origin in ("built-in", "frozen"):
        return origin is not None
    file = Path(origin).resolve()
    return any(map(file.is_relative_to, _PYTHON)) and "site-packages" not in file.parts
