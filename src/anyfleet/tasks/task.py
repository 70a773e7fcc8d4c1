"""What is to be learned: a traced model with its first weights, and everybody's data."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from anyfleet.elastic import Blueprint, trace
from anyfleet.tasks.augment import Augment
from anyfleet.tasks.data import Data, materialise
from anyfleet.tasks.objective import Objective, accuracy, cross_entropy
from anyfleet.tasks.split import Cut, Split, union

Params = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A learning problem, divided among devices.

    `train` is the store of all rows that devices own; `shares` are the training rows of each device
    and `held_out` its own test rows, all of them rows of `train`. No device owns a row of `server`,
    and `server` and `test` have no row in common. `classes` is the width of the model's output.
    """

    name: str
    blueprint: Blueprint
    params: Params
    buffers: Params
    classes: int
    loss: Objective
    metrics: Mapping[str, Objective]
    train: Data
    shares: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    test: Data
    server: Data
    augment: Augment | None = None

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.shares)

    def build(self, seed: int) -> "Task":
        """Itself: a task that exists stands wherever one that is yet to be built may stand."""
        return self

    def data(self, device: int) -> Data:
        """Training data of a device."""
        return self.train.rows(self.shares[device])

    def own_test(self, device: int) -> Data:
        """Test data of a device."""
        return self.train.rows(self.held_out[device])

    def labels(self, device: int) -> Tensor:
        """Which classes (or tokens) occur in a device's training data: bool [classes].

        Where targets are floats there are no classes to miss, and all are true.
        """
        return self._labels[device]

    @cached_property
    def _labels(self) -> tuple[Tensor, ...]:
        if self.train.y.is_floating_point():
            return (torch.ones(self.classes, dtype=torch.bool),) * self.devices
        return tuple(
            self.train.y[rows].flatten().long().bincount(minlength=self.classes) > 0
            for rows in self.shares
        )

    def to(self, where: torch.dtype | torch.device) -> "Task":
        """The same task in another precision (float tensors only) or on another device."""

        def move(tensor: Tensor) -> Tensor:
            keeps_type = isinstance(where, torch.dtype) and not tensor.is_floating_point()
            return tensor if keeps_type else tensor.to(where)

        return replace(
            self,
            params={name: move(tensor) for name, tensor in self.params.items()},
            buffers={name: move(tensor) for name, tensor in self.buffers.items()},
            train=self.train.map(move),
            test=self.test.map(move),
            server=self.server.map(move),
        )

    @classmethod
    def of(  # noqa: PLR0913 - the user's front door: separate choices, all but two with defaults
        cls,
        module: nn.Module,
        train: "Dataset[Any] | Data",
        test: "Dataset[Any] | Data | None" = None,
        *,
        split: Split = Split(),  # noqa: B008 - immutable
        loss: Objective = cross_entropy,
        metrics: Mapping[str, Objective] | None = None,
        state: Params | None = None,
    ) -> "Task":
        """A user's own model and data; see `task_of_rows` for what is checked.

        `state` is a state_dict to start from, otherwise the module's present weights count;
        parameters with `requires_grad=False` stay as they are. Data sets are read once. Without
        `test`, the devices' own test rows are also the common test set. Without `metrics`, integer
        targets are judged by accuracy.
        """
        store = materialise(train)
        chosen = {"accuracy": accuracy} if not store.y.is_floating_point() else {}
        return task_of_rows(
            _prepared(module, state),
            store,
            split.cut(store),
            test=None if test is None else materialise(test),
            loss=loss,
            metrics=chosen if metrics is None else dict(metrics),
        )


def task_of_rows(
    module: nn.Module,
    store: Data,
    cut: Cut,
    *,
    test: Data | None,
    loss: Objective,
    metrics: Mapping[str, Objective],
) -> Task:
    """A task from rows that are divided already.

    Checks on two samples that model, targets, loss and metrics fit each other.
    """
    example = Data(store.x[:2], store.y[:2])
    output = _try(module, example.x)
    _check_targets(store.y, output)
    for what, objective in {"loss": loss, **metrics}.items():
        _check_per_sample(what, objective(output, example.y), len(example))
    blueprint = trace(module, (example.x,))
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return Task(
        name=type(module).__name__,
        blueprint=blueprint,
        params={name: weights[name] for name in blueprint.params},
        buffers={name: weights[name] for name in blueprint.buffers},
        classes=_width(output),
        loss=loss,
        metrics=metrics,
        train=store,
        shares=cut.shares,
        held_out=cut.held_out,
        test=_all_held_out(store, cut) if test is None else test,
        server=cut.server,
    )


def pooled(task: Task) -> Task:
    """The same data on a single device: the centralised reference."""
    return replace(
        task,
        name=f"{task.name}, pooled",
        shares=(union(task.shares),),
        held_out=(union(task.held_out),),
    )


def _prepared(module: nn.Module, state: Params | None) -> nn.Module:
    """A copy: the user's module stays as it was."""
    own = copy.deepcopy(module)
    if state is not None:
        own.load_state_dict(dict(state))
    return own


def _try(module: nn.Module, x: Tensor) -> Tensor:
    trial = copy.deepcopy(module).eval()
    with torch.no_grad():
        output = trial(x)
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(x):
        raise ValueError("Task: the model must return one tensor with a row for each sample.")
    return output


def _width(output: Tensor) -> int:
    return output.shape[-1] if output.ndim > 1 else 1


def _check_targets(targets: Tensor, output: Tensor) -> None:
    classes = _width(output)
    if targets.is_floating_point() or targets.ndim != output.ndim - 1:
        return
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"Task: targets run from {low} to {high}, but the model has {classes} outputs. "
            f"Number classes from 0, or widen the last layer."
        )


def _check_per_sample(what: str, values: Tensor, samples: int) -> None:
    if values.shape != (samples,):
        raise ValueError(
            f"Task: {what} must give one value per sample ([{samples}] for {samples} samples), got "
            f'shape {list(values.shape)}. Leave out the mean over the batch (reduction="none").'
        )


def _all_held_out(store: Data, cut: Cut) -> Data:
    rows = union(cut.held_out)
    if not len(rows):
        raise ValueError("Task: there is no test data. Give `test`, or a test_share above 0.")
    return store.rows(rows)
