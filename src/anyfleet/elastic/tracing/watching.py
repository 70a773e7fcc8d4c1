"""What a forward pass does that its graph does not show: own backward passes, and its mode."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import function
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from anyfleet.errors import TraceError

# With the separator: torchvision lies beside torch and is the user's code.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_UTILITIES = f"{_TORCH}nn{os.sep}utils"
_FOREIGN = (_TORCH, str(Path(__file__).parents[1]) + os.sep, "<")
# Tracing hooks into classes of torch, so only one thread may do it at a time.
_LOCK = threading.RLock()
# Parts of torch that are Functions by construction and have no backward of their own making.
_HARMLESS = ("torch._higher_order_ops", "torch._export", "torch.fx")
_OWN_BACKWARD = (
    "is a torch.autograd.Function with a backward of its own. A program keeps only what it "
    "computes forward, so that its gradient would be lost.{at}\n"
    "Write it with plain operators: a straight-through estimator of q as x + (q(x) - x).detach(), "
    "a reversed gradient as (1 + s) * x.detach() - s * x, a scaled one as s * x + (1 - s) * "
    "x.detach(). Where the backward is the derivative of the forward, call the operators of the "
    "forward without the Function."
)


@dataclass
class Seen:
    """What was noticed; `mode` is set once forward() asks whether it is training."""

    mode: bool = False


@contextmanager
def watching(*, gradients: bool) -> Iterator[Seen]:
    """Notice reads of `training` while a module is being traced.

    Where its gradients count, refuse a custom backward.
    """
    seen = Seen()
    with _LOCK, _functions() if gradients else nullcontext(), _modes(seen):
        yield seen


@contextmanager
def _functions() -> Iterator[None]:
    """Every `Function.apply` comes by here, also one that was bound before.

    A subclass inherits `apply` from `Function`, which calls that of its base class.
    """
    base: Any = function._SingleLevelFunction  # noqa: SLF001 - torch has no hook for it
    base.apply = classmethod(_applied)
    try:
        yield
    finally:
        del base.apply


def _applied(cls: Any, *args: Any, **options: Any) -> Any:
    tracked = torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, options))
    )
    if cls is checkpoint.CheckpointFunction:
        # What it computes twice to save memory is needed once. Without an input that has a
        # gradient it gives none to the parameters either.
        run, _, *given = args
        with torch.set_grad_enabled(tracked):
            return run(*given)
    if tracked and not cls.__module__.startswith(_HARMLESS) and not _is_hook(cls):
        raise TraceError(f"{cls.__qualname__} {_OWN_BACKWARD.format(at=_caller())}")
    base: Any = super(function._SingleLevelFunction, cls)  # noqa: SLF001
    return base.apply(*args, **options)


def _is_hook(cls: Any) -> bool:
    return bool(cls.__module__ == "torch.nn.modules._functions" and "Hook" in cls.__name__)


def _caller() -> str:
    """The last line of the user's own code that led here."""
    own = [f for f in traceback.extract_stack() if not f.filename.startswith(_FOREIGN)]
    return f"\nAt {own[-1].filename}:{own[-1].lineno}:\n    {own[-1].line}" if own else ""


@contextmanager
def _modes(seen: Seen) -> Iterator[None]:
    """Notice who reads `module.training`; what torch's own layers do with it is known."""

    def read(module: nn.Module) -> bool:
        if _counts(module, sys._getframe(1).f_code.co_filename):  # noqa: SLF001
            seen.mode = True
        if "training" not in vars(module):
            raise AttributeError("training")
        found: bool = vars(module)["training"]
        return found

    def write(module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value

    watched: Any = nn.Module
    watched.training = property(read, write)
    try:
        yield
    finally:
        del watched.training


def _counts(module: nn.Module, reader: str) -> bool:
    if isinstance(module, _InstanceNorm):
        return module.track_running_stats
    # What its parametrizations do with it (spectral norm iterates in training only) is not known.
    return not reader.startswith(_TORCH) or reader.startswith(_UTILITIES)
