"""The safety net under the tracer: a blueprint that is not its module's own function is refused.

The check (`verify`) is made once for the same content: what a module is made of, its code, its
attributes and its buffers, but not its weights, which the check draws at random.
"""

import functools
import hashlib
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.verification.verify import Report, verify
from anyfleet.errors import VerifyError

_DEEPEST = 40
_SHOWN = 3  # problems in a message; the others follow from them
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
# Compared by identity: whoever made a new function or class may have meant another.
_CODE = (FunctionType, BuiltinFunctionType, type)


def require_faithful(
    module: nn.Module, example_inputs: tuple[Tensor, ...], blueprint: Blueprint
) -> None:
    """Raise VerifyError unless the blueprint computes what the module does, as `verify` says.

    Takes a fraction of a second for a small network and a few seconds for a large one; nothing for
    one that was checked before in this process. Neither the module nor a random generator changes.
    """
    report = _report(module, example_inputs, blueprint)
    if report.ok:
        return
    (first, *_) = (check for check in report.checks if not check.ok)
    problems = "\n".join(f"  {problem}" for problem in report.problems[:_SHOWN])
    raise VerifyError(
        f"{type(module).__name__}: the traced network is not the function that the module is, so "
        f"that devices would train another one. Tried on two samples, with random weights:\n"
        f"{problems}\n{first.advice}"
    )


def _report(module: nn.Module, inputs: tuple[Tensor, ...], blueprint: Blueprint) -> Report:
    shapes = tuple((x.dtype, tuple(x.shape[1:])) for x in inputs)
    try:
        content = (_content(module, 0), shapes)
    except _UnknownError:
        return verify(module, inputs, blueprint, trials=1)
    return _of_content(_Case(content, blueprint, [(module, inputs)]))


@dataclass(frozen=True)
class _Case:
    """The content that decides a check; `subject` is what is checked, and is let go afterwards."""

    content: Hashable
    blueprint: Blueprint
    subject: list[tuple[nn.Module, tuple[Tensor, ...]]] = field(compare=False)


@functools.lru_cache(maxsize=256)
def _of_content(case: _Case) -> Report:
    module, inputs = case.subject.pop()
    return verify(module, inputs, case.blueprint, trials=1)


class _UnknownError(Exception):
    """Something in a module whose content cannot be told."""


def _content(value: Any, depth: int) -> Hashable:
    """Return what a value is made of, equal for equal values; tensors that are weights by shape."""
    if depth > _DEEPEST:
        raise _UnknownError
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
    raise _UnknownError


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).digest()
