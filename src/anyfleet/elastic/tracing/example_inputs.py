"""The example inputs of a trace: checked, and explained where they do not fit."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anyfleet.errors import TraceError

_WANTED = (
    "Hand in one tensor, or a tuple of tensors in the order of forward()'s arguments, each with "
    "the batch first"
)


def checked(module: object, example_inputs: Any) -> tuple[Tensor, ...]:
    """Return the inputs as a tuple; raise TraceError that says what to hand in instead."""
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else _kind(module)
        raise TraceError(
            f"a trace takes a torch module, got {given}. Hand in an instance of nn.Module; put a "
            "plain function into the forward() of one."
        )
    problem = _problem(example_inputs)
    if problem:
        raise TraceError(f"example_inputs{problem}")
    _refuse_lazy(module)
    return (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)


def _problem(given: Any) -> str:
    if isinstance(given, Tensor):
        return "" if given.ndim else f" is a tensor without dimensions. {_WANTED}."
    if isinstance(given, Mapping):
        names = ", ".join(str(name) for name in given) or "nothing"
        return (
            f" is a mapping ({names}). {_WANTED}; where forward() itself takes a mapping, wrap it "
            "in a module whose forward() takes the tensors and puts the mapping together."
        )
    if not isinstance(given, tuple | list):
        return f" is {_kind(given)}. {_WANTED}."
    if not given:
        return f" is empty. {_WANTED}."
    return next((p for i, item in enumerate(given) if (p := _item(i, item))), "")


def _item(place: int, item: Any) -> str:
    if isinstance(item, Tensor):
        return "" if item.ndim else f"[{place}] is a tensor without dimensions. {_WANTED}."
    if item is None:
        return (
            f"[{place}] is None. Leave an optional argument out if it is the last one, or wrap the "
            "module in one whose forward() takes tensors only and passes None on."
        )
    if isinstance(item, tuple | list | Mapping):
        return (
            f"[{place}] is {_kind(item)}. {_WANTED}; where forward() takes tensors in groups, "
            "wrap it in a module whose forward() takes them one by one."
        )
    return (
        f"[{place}] is {_kind(item)}. {_WANTED}; what is no tensor belongs into the module (an "
        "attribute, or functools.partial around forward())."
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _refuse_lazy(module: nn.Module) -> None:
    held = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in held if is_lazy(tensor)]
    if lazy:
        raise TraceError(
            f"{type(module).__name__} has lazy layers without weights yet ({', '.join(lazy)}). "
            "Call the module once on a sample, and trace it then."
        )
