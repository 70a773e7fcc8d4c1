"""From a module to its ATen graph, without touching the module."""

import contextlib
import copy
import io
import logging
import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from anyfleet.elastic.tracing.nested_calls import written_out
from anyfleet.elastic.tracing.watching import watching
from anyfleet.errors import TraceError

# Stands for momentum=None (cumulative averages): the module would compute it from its counter,
# which export cannot do.
CUMULATIVE = -1.0
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Exported:
    """The graph in one mode, and what its placeholders hold."""

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
    """A prime that divides no size of the module and that nobody would write as a literal."""
    held = [*module.parameters(), *module.buffers()]
    sizes = {n for t in held for n in t.shape} | {n for x in inputs for n in x.shape[1:]}
    candidate = max([210, *(n for x in inputs for n in x.shape[1:])]) + 1
    while not _prime(candidate) or any(n % candidate == 0 for n in sizes):
        candidate += 1
    return candidate


def _prime(number: int) -> bool:
    return all(number % k for k in range(2, int(number**0.5) + 1))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export prints graphs and warnings about what we translate into one error."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as in training: in evaluation torch has a fused call for a whole layer."""
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
    """The last line of the user's own code on the way to the error."""
    foreign = (
        f"{Path(torch.__file__).parent}{os.sep}",
        f"{Path(__file__).parents[1]}{os.sep}",
        "<",
    )
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(foreign) and not _is_standard(f.filename)]
    return f"\nAt {own[-1].filename}:{own[-1].lineno}:\n    {own[-1].line}" if own else ""


def _is_standard(file: str) -> bool:
    """Whether a file belongs to Python itself."""
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
