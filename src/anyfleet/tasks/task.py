"""Tasks: what is learned, a traced model with its initial weights and the data of all devices."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from anyfleet.arguments import checked
from anyfleet.elastic import Blueprint, left_behind, traced
from anyfleet.errors import AnyfleetWarning
from anyfleet.tasks.augment import Augment
from anyfleet.tasks.data import Data, materialise
from anyfleet.tasks.losses import Objective, Objectives, cross_entropy
from anyfleet.tasks.split import Division, Split, union
from anyfleet.tasks.task_checks import (
    check_finite,
    check_given,
    check_names,
    check_objectives,
    check_range,
    has_classes,
    started,
    tried,
    width,
)

Params = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A learning problem, divided among devices.

    `train` holds all rows of the devices; `train_rows` are the training rows of each device and
    `test_rows` its own test rows. No device has a row of `server`, and `server` and `test` have no
    row in common. `classes` is the size of the last axis of the model's output. `classified` says
    whether targets are class indices on that axis. If not (real numbers, counts, several labels at
    once, classes on another axis), every device counts as having all classes.
    """

    unwritable: ClassVar[str] = (
        "a built task cannot be written to a run file; use anyfleet.tasks.Own."
    )

    name: str
    blueprint: Blueprint
    params: Params
    buffers: Params
    classes: int
    loss: Objective
    metrics: Mapping[str, Objective]
    train: Data
    train_rows: tuple[Tensor, ...]
    test_rows: tuple[Tensor, ...]
    test: Data
    server: Data
    classified: bool = False
    augment: Augment | None = None
    assignment: str = ""  # a sentence that says how devices came to their data

    def __repr__(self) -> str:
        size = self.blueprint.numel()
        return f"Task({self.name!r}, devices={self.devices}, parameters={size})"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.train_rows)

    def build(self, seed: int) -> "Task":
        """Return the task itself, so that a built task can stand for one that is described."""
        return self

    def data(self, device: int) -> Data:
        """Return the training data of a device."""
        return self.train.rows(self.train_rows[device])

    def size(self, device: int) -> int:
        """Return the number of training samples of a device, without copying them."""
        return len(self.train_rows[device])

    def own_test(self, device: int) -> Data:
        """Return the test data of a device."""
        return self.train.rows(self.test_rows[device])

    def labels(self, device: int) -> Tensor:
        """Return which classes (or tokens) occur in a device's training data: bool [classes].

        All are true where targets are not classes.
        """
        return self._labels[device]

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """The owner of the data of each device; "" where there is none, or more than one."""
        owners = self.train.owners
        if owners is None:
            return ("",) * self.devices
        return tuple(_only(self.train, owners[rows]) for rows in self.train_rows)

    @cached_property
    def _labels(self) -> tuple[Tensor, ...]:
        if not self.classified:
            known = torch.ones(self.classes, dtype=torch.bool, device=self.train.y.device)
            return (known,) * self.devices
        return tuple(_occurring(self.train.y[rows], self.classes) for rows in self.train_rows)

    def to(self, where: torch.dtype | torch.device) -> "Task":
        """Return the task in another precision (float tensors only) or on another torch device."""

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
    @checked
    def of(
        cls,
        module: nn.Module,
        train: "Dataset[Any] | Data",
        test: "Dataset[Any] | Data | None" = None,
        *,
        split: Split = Split(),  # noqa: B008 - immutable
        loss: Objective = cross_entropy,
        metrics: Mapping[str, Objective] | None = None,
        classified: bool = False,
        state: Params | None = None,
        augment: Augment | None = None,
        name: str | None = None,
    ) -> "Task":
        """Return the task of a user's own model and data; `task_of_rows` says what is checked.

        `state` is a state_dict to start from; without it the module's present weights are used.
        Parameters with `requires_grad=False` stay as they are. Data sets are read once. Without
        `test`, the devices' own test rows are also the common test set. With `cross_entropy`
        targets are classes, and accuracy is measured unless `metrics` are given. With another loss
        only the given metrics are measured. Set `classified=True` if targets are nevertheless
        classes on the last axis of the output (negative ones are ignored), so that methods can
        look at the labels of a device. The first metric of a run is accuracy where there is one,
        else the first of the metrics, else the loss; `Metric` knows by the name which direction is
        better. The name is that of the module's class unless given.
        """
        objectives = Objectives(loss, metrics, classified)
        check_given(module, train, objectives)
        store = materialise(train, "training")
        task = task_of_rows(
            started(module, state),
            store,
            split.divide(store),
            test=None if test is None else materialise(test, "test"),
            objectives=objectives,
        )
        task_name = task.name if name is None else name
        return replace(task, augment=augment, name=task_name, assignment=split.assignment)


def task_of_rows(
    module: nn.Module, store: Data, division: Division, *, test: Data | None, objectives: Objectives
) -> Task:
    """Return a task of rows that are divided already.

    Raise ValueError unless the metrics have usable names, all numbers are finite, and on two
    samples model, targets, loss and metrics fit each other and the traced network computes what
    the module does (see `anyfleet.elastic.require_faithful`).
    """
    check_names(objectives)
    check_finite(store, division, test)
    example = Data(store.x[:2], store.y[:2])
    output = tried(module, example.x)
    tests = _all_test_rows(store, division) if test is None else test
    classified = has_classes(objectives, store.y, output)
    if objectives.loss is cross_entropy:
        for targets in (store.y, tests.y):
            check_range(targets, width(output))
    check_objectives(objectives, output, example)
    blueprint = traced(module, (example.x,))
    for warning in left_behind(module, blueprint):
        warnings.warn(f"Task: {warning}.", AnyfleetWarning, stacklevel=3)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return Task(
        name=type(module).__name__,
        blueprint=blueprint,
        params={name: weights[name] for name in blueprint.params},
        buffers={name: weights[name] for name in blueprint.buffers},
        classes=width(output),
        loss=objectives.loss,
        metrics=objectives.all_metrics,
        train=store,
        train_rows=division.train_rows,
        test_rows=division.test_rows,
        test=tests,
        server=division.server,
        classified=classified,
    )


def pooled(task: Task) -> Task:
    """Return the task with all data on a single device: the centralised reference."""
    return replace(
        task,
        name=f"{task.name}, pooled",
        train_rows=(union(task.train_rows),),
        test_rows=(union(task.test_rows),),
    )


def _only(data: Data, owners: Tensor) -> str:
    """Return the name of the only owner of some rows, or ""."""
    alone = len(owners) and bool((owners == owners[0]).all())
    return data.owner(int(owners[0])) if alone else ""


def _occurring(targets: Tensor, classes: int) -> Tensor:
    """Return bool [classes]; targets that are not a class (marks to ignore) do not count."""
    known = targets[(targets >= 0) & (targets < classes)]
    return known.flatten().long().bincount(minlength=classes) > 0


def _all_test_rows(store: Data, division: Division) -> Data:
    rows = union(division.test_rows)
    if not len(rows):
        raise ValueError("Task: there is no test data. Give `test`, or a test_share above 0.")
    return store.rows(rows)
