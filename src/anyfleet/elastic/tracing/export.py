"""The export of a module as an ATen graph, without touching the module.

Two things that a forward pass does are not in its graph, and are watched while it is traced: a
backward pass of its own, which is refused, and whether it asks for its mode.
"""

import contextlib
import copy
import io
import logging
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import function
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from anyfleet.elastic.tracing.nested_calls import written_out
from anyfleet.errors import TraceError

# Stands for momentum=None (cumulative averages): the module would compute it from its counter,
# which export cannot do.
CUMULATIVE = -1.0
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
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


@dataclass(frozen=True)
class Exported:
    """The graph of a module in one mode, and what its placeholders hold."""

    graph: fx.Graph
    batch: int
    params: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: dict[str, Tensor]
    asks: bool  # forward() looks whether it is training


def export(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    training: bool = True,
    batch: int | None = None,
) -> Exported:
    """Trace a copy in one mode, with a batch size that can be recognised or a given one."""
    twin = copy.deepcopy(module)
    twin = twin.train() if training else twin.eval()
    for part in twin.modules():
        if isinstance(part, _BATCH_NORMS) and part.momentum is None:
            part.momentum = CUMULATIVE
    batch = batch or _unmistakable(twin, inputs)
    examples = tuple(x.new_empty((batch, *x.shape[1:])) for x in inputs)
    with _quiet(), watching(gradients=training) as seen, torch.enable_grad(), _plain_attention():
        try:
            program = torch.export.export(twin, examples, strict=False)
        except TraceError:
            raise
        except Exception as error:
            raise _explained(error) from error
    signature = program.graph_signature
    graph, renamed = written_out(program.graph_module, set(signature.inputs_to_buffers))
    return Exported(
        graph,
        batch,
        dict(signature.inputs_to_parameters),
        dict(signature.inputs_to_buffers),
        dict(signature.inputs_to_lifted_tensor_constants),
        tuple(str(name) for name in signature.user_inputs),
        tuple(renamed.get(str(name), str(name)) for name in signature.user_outputs),
        {
            **program.state_dict,
            **{k: v for k, v in program.constants.items() if isinstance(v, Tensor)},
        },
        seen.mode,
    )


def _unmistakable(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Return a prime that divides no size of the module and that nobody writes as a literal."""
    held = [*module.parameters(), *module.buffers()]
    sizes = {n for t in held for n in t.shape} | {n for x in inputs for n in x.shape[1:]}
    candidate = max([210, *(n for x in inputs for n in x.shape[1:])]) + 1
    while not _prime(candidate) or any(n % candidate == 0 for n in sizes):
        candidate += 1
    return candidate


def _prime(number: int) -> bool:
    return all(number % k for k in range(2, int(number**0.5) + 1))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what export prints about problems that we translate into one error."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Trace attention as in training: in evaluation torch has a fused call for a whole layer."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _explained(error: Exception) -> TraceError:
    text, at = str(error), _place(error)
    data_dependent = ("data-dependent", "DataDependent", "SymBool", "SymInt", "SymFloat")
    if any(word in text + type(error).__name__ for word in data_dependent):
        return TraceError(
            "The forward pass decides by the values of a tensor (an `if`, a loop, `.item()` or a "
            f"shape computed from values), so it has no fixed graph.{at}\n"
            "Compute both sides and choose with torch.where, or decide outside forward()."
        )
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return TraceError(
        f"The forward pass could not be traced: {reason}{at}\n"
        "Check that forward() runs on the example inputs with any batch size and uses only torch "
        "operators."
    )


def _place(error: Exception) -> str:
    """Return the last line of the user's own code on the way to the error."""
    foreign = (
        f"{Path(torch.__file__).parent}{os.sep}",
        f"{Path(__file__).parents[1]}{os.sep}",
        "<",
    )
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(foreign) and not _is_standard(f.filename)]
    return f"\nAt {own[-1].filename}:{own[-1].lineno}:\n    {own[-1].line}" if own else ""


def _is_standard(file: str) -> bool:
    """Return whether a file belongs to Python itself."""
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file


# --- what the graph does not show -----------------------------------------------------------------


@dataclass
class Seen:
    """The observations of a trace; `mode` is set once forward() asks whether it is training."""

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
    """Watch every `Function.apply`, also one that was bound before.

    A subclass inherits `apply` from `Function`, which calls that of its base class.
    """
    base: Any = function._SingleLevelFunction  # noqa: SLF001 - torch has no hook for it
    base.apply = classmethod(_applied)
    try:
        yield
    finally:
        del base.apply


def _applied(cls: Any, *args: Any, **options: Any) -> Any:
    """Call a Function; raise TraceError for one with a backward of its own."""
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
    """Return the last line of the user's own code that led here."""
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
