"""Blueprints of modules, traced and checked once: what comes of it is kept in the user's cache."""

from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from anyfleet import cache
from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.tracing.aliases import aliases
from anyfleet.elastic.verification.module_content import UnknownContent, content_digest


def traced(module: nn.Module, example_inputs: tuple[Tensor, ...]) -> Blueprint:
    """Return the blueprint of a module as `trace` does, once `require_faithful` agrees with it.

    It comes out of the user's cache if an equal module was traced before. A module with code other
    than that of Anyfleet and torch is always traced. Raise TraceError and VerifyError as they do.
    """
    key = _key(module, example_inputs)
    found = None if key is None else _read(key)
    if found is None:
        found = _traced(module, example_inputs)
        if key is not None:
            cache.write("networks", key, found.to_bytes())
    return found


def _traced(module: nn.Module, inputs: tuple[Tensor, ...]) -> Blueprint:
    # They take a second to import, and seldom have work to do.
    from anyfleet.elastic.tracing.tracer import trace
    from anyfleet.elastic.verification.faithful import require_faithful

    blueprint = trace(module, inputs)
    require_faithful(module, inputs, blueprint)
    return blueprint


def _key(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any] | None:
    """Return what a blueprint depends on; None if that cannot be told."""
    computed = cache.computed_by(torch=str(torch.__version__))
    if cache.home() is None or computed is None:
        return None
    try:
        content = content_digest(module)
    except UnknownContent:
        return None
    return {
        **computed,
        "content": content.hex(),
        "parameters": [[name, *_form(each)] for name, each in module.named_parameters()],
        "buffers": [[name, *_form(each)] for name, each in module.named_buffers()],
        "tensors": [*module.state_dict()],
        "aliases": aliases(module),
        "inputs": [_form(each) for each in inputs],
        "number": str(torch.get_default_dtype()),
    }


def _form(tensor: Tensor) -> list[Any]:
    device, shape, strides = str(tensor.device), [*tensor.shape], [*tensor.stride()]
    return [str(tensor.dtype), device, shape, strides, tensor.requires_grad]


def _read(key: dict[str, Any]) -> Blueprint | None:
    content = cache.read("networks", key)
    try:
        return None if content is None else Blueprint.from_bytes(bytes(content))
    except (msgspec.MsgspecError, RecursionError):
        return None
