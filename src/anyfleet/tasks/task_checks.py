"""Checks of a user's model, state, targets, loss and metrics, tried on two samples.

Every error says what is wrong and what to do about it.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anyfleet.arguments import described
from anyfleet.elastic.tracing.aliases import aliases, complete
from anyfleet.errors import BadCall, refuse
from anyfleet.tasks.data import Data
from anyfleet.tasks.losses import Objectives
from anyfleet.tasks.split import Division
from anyfleet.tracebacks import BUILDING, during

_BLOCK = 4096  # rows that are checked together
_LISTED = 5  # devices that an error names one by one
_REMEDY = (
    "Leave such samples out, or fill them in; where a mark is meant (a mask of -inf, a missing "
    "target), use a finite number that model and loss recognise."
)


def check_given(module: Any, train: Any, objectives: Objectives) -> None:
    """Raise BadCall unless there are a model, a data set, and functions for loss and metrics."""
    if complaints := tuple(_argument_faults(module, train, objectives)):
        raise BadCall(*complaints)


def _argument_faults(module: Any, train: Any, objectives: Objectives) -> Iterator[str]:
    swapped = isinstance(train, nn.Module)
    if not isinstance(module, nn.Module):
        due = "Task.of.module must be a torch.nn.Module"
        given = described(module) + ("; is it the training data?" if swapped else "")
        yield f"{due}, got {given}{'' if given.endswith('?') else '.'}"
    if swapped:
        due = "Task.of.train must be a data set"
        yield f"{due}, got the model {type(train).__name__}. The model comes first, then the data."
    for what, function in {"loss": objectives.loss, **(objectives.metrics or {})}.items():
        if isinstance(function, type):
            hint = ' (reduction="none" for one of torch.nn)' if what == "loss" else ""
            yield (
                f"Task.of: {what} must be a function of (output, target), got the class "
                f"{function.__name__}; did you forget the parentheses{hint}?"
            )


def started(module: nn.Module, state: Mapping[str, Tensor] | None) -> nn.Module:
    """Return a copy of the module, with the weights of `state` if given."""
    own = copy.deepcopy(module)
    if state is not None:
        # A state may have a shared tensor under only one of its names.
        full = {**complete(state, aliases(own)), **state}
        _check_state(own, full)
        own.load_state_dict(full)
    return own


def tried(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output for a few samples; training mode and torch's generator do not change."""
    _check_parameters(module)
    trial = copy.deepcopy(module).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = trial(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        _raise_for(module, x, error)
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(x):
        raise ValueError("Task: the model must return one tensor with a row for each sample.")
    return output


def width(output: Tensor) -> int:
    """Return the size of the last axis; 1 for a model with one number per sample."""
    return output.shape[-1] if output.ndim > 1 else 1


def has_classes(objectives: Objectives, targets: Tensor, output: Tensor) -> bool:
    """Return whether targets are classes; raise ValueError if they should be but cannot be."""
    if not objectives.targets_are_classes:
        return False
    if targets.is_floating_point() or targets.shape[1:] != output.shape[1:-1]:
        raise ValueError(
            f"Task: classes are whole numbers, one for each row of the model's last axis: expected "
            f"targets of shape {_shape(('n', *output.shape[1:-1]))} for outputs of shape "
            f"{_shape(('n', *output.shape[1:]))}, got {targets.dtype} of shape "
            f"{_shape(('n', *targets.shape[1:]))}. Reshape the targets, or give a loss that fits "
            f"them (an item of a data set is input, target and perhaps owner, in this order)."
        )
    return True


def check_range(targets: Tensor, classes: int) -> None:
    """Raise ValueError unless every target is the index of an output."""
    if not targets.numel():
        return
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"Task: targets run from {low} to {high}, but the model has {classes} outputs. "
            f"Number classes from 0, or widen the last layer."
        )


def check_finite(store: Data, division: Division, test: Data | None) -> None:
    """Raise for inputs and targets that are infinite or NaN; the error names their devices."""
    refuse(_finite_faults(store, division, test))


def _finite_faults(store: Data, division: Division, test: Data | None) -> Iterator[str]:
    bad = _faulty_rows(store)
    if bad.any():
        owned = enumerate(zip(division.train_rows, division.test_rows, strict=True))
        found = {device: torch.cat(parts) for device, parts in owned}
        found = {device: rows[bad[rows]] for device, rows in found.items()}
        found = {device: rows for device, rows in found.items() if len(rows)}
        for device, rows in list(found.items())[:_LISTED]:
            first = int(rows.min())
            yield (
                f"Task: device {device} has {len(rows)} of {_size(division, device)} samples with "
                f"a number that is infinite or NaN, first in the {_which(store, first)} of row "
                f"{first}. {_REMEDY}"
            )
        if len(found) > _LISTED:
            yield f"Task: {len(found) - _LISTED} more devices have such samples."
    for whose, data in (("the server", division.server), ("the test set", test)):
        if data is not None and (bad := _faulty_rows(data)).any():
            first = int(bad.nonzero()[0])
            yield (
                f"Task: {whose} has {int(bad.sum())} of {len(data)} samples with a number that is "
                f"infinite or NaN, first in the {_which(data, first)} of its row {first}. {_REMEDY}"
            )


def _faulty_rows(data: Data) -> Tensor:
    """Return which rows have a number that is not finite: bool [rows]."""
    bad = torch.zeros(len(data), dtype=torch.bool)
    for part in (data.x, data.y):
        if (part.is_floating_point() or part.is_complex()) and not bool(part.sum().isfinite()):
            # Something in it is not finite, or the sum itself became too large.
            blocks = torch.split(part.unsqueeze(-1), _BLOCK)
            bad |= torch.cat([~block.isfinite().flatten(1).all(1) for block in blocks]).cpu()
    return bad


def _which(data: Data, row: int) -> str:
    return "target" if bool(data.x[row].isfinite().all()) else "input"


def _size(division: Division, device: int) -> int:
    return len(division.train_rows[device]) + len(division.test_rows[device])


def check_names(objectives: Objectives) -> None:
    """Raise unless every metric has a name that cannot be confused with another."""
    refuse(_name_fault(name) for name in objectives.metrics or {})


def _name_fault(name: Any) -> str:
    """Return why this cannot be the name of a metric, or ""."""
    if not isinstance(name, str):
        return f"Task: names of metrics must be text, got {name!r}. Write {str(name)!r}."
    if not name.strip():
        return f"Task: a metric has the empty name {name!r}. Give it a name."
    if name == "loss":
        return (
            'Task: a metric is called "loss", which is the name of the task\'s own loss. Choose '
            'another name ("test_loss"), or leave it out: the loss is measured in every evaluation.'
        )
    if "@" in name:
        return (
            f'Task: the metric {name!r} has "@" in its name, which is reserved for the width '
            f"at which a metric was measured. Call it {name.replace('@', '_at_')!r}, for example."
        )
    return ""


def check_objectives(objectives: Objectives, output: Tensor, example: Data) -> None:
    """Raise ValueError unless the loss and every metric give one value per sample."""
    for what, objective in {"loss": objectives.loss, **(objectives.metrics or {})}.items():
        try:
            with during(what, objective, when=BUILDING):
                values: Any = objective(output, example.y)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"Task: {what} fails on outputs of shape {_shape(output.shape)} and targets of "
                f"shape {_shape(example.y.shape)} ({error}). Give one that fits them."
            ) from error
        if not isinstance(values, Tensor) or values.shape != (len(example),):
            got = _shape(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"Task: {what} must give one value per sample ([{len(example)}] for "
                f"{len(example)} samples), got shape {got}. Leave out the mean over the batch "
                f'(reduction="none").'
            )
        if what == "loss" and _finite(output) and not _finite(values):
            raise ValueError(
                f"Task: loss gives {values.tolist()} for the first samples, although the model's "
                f"outputs are finite. Look for a logarithm or a quotient of 0, or for targets that "
                f"are not finite."
            )


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _check_parameters(module: nn.Module) -> None:
    name, parameters = type(module).__name__, dict(module.named_parameters())
    if not parameters:
        raise ValueError(
            f"Task: {name} has no parameters, so there is nothing to learn. Register its "
            f"layers as attributes of the module, or its tensors as nn.Parameter."
        )
    lazy = [key for key, tensor in module.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"Task: {name} has lazy layers without weights yet ({', '.join(lazy)}). Initialise "
            f"them first: call the module once on a sample."
        )


def _check_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    own = module.state_dict(keep_vars=True)
    shared = [name for name in own if name in state and not is_lazy(own[name])]
    found = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {_shape(state[name].shape)} instead of {_shape(own[name].shape)}"
            for name in shared
            if state[name].shape != own[name].shape
        ],
    }
    if any(found.values()):
        faults = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        raise ValueError(
            f"Task: state does not fit {type(module).__name__}. {faults}. To start from a part of "
            f"a state, complete it: {{**module.state_dict(), **state}}."
        )


def _raise_for(module: nn.Module, x: Tensor, error: Exception) -> NoReturn:
    known = {tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()}
    if known and x.is_floating_point() and x.dtype not in known:
        (other, *_) = known
        raise ValueError(
            f"Task: inputs are {x.dtype}, but the model is {other}. Convert the inputs to {other} "
            f"(x.to({other})); for another precision, build the task first and take task.to(dtype)."
        ) from error
    raise ValueError(
        f"Task: {type(module).__name__} fails on a batch of inputs of shape {_shape(x.shape)} and "
        f"{x.dtype} ({error}). A model takes one tensor, samples first; join several inputs in "
        f"one tensor, and let the module split it."
    ) from error


def _shape(sizes: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
