"""What is to be learned: a traced model with its first weights, and everybody's data."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from anyfleet.arguments import checked
from anyfleet.elastic import Blueprint, left_behind, require_faithful, trace
from anyfleet.errors import AnyfleetWarning
from anyfleet.tasks.augment import Augment
from anyfleet.tasks.data import Data, materialise
from anyfleet.tasks.losses import Goal, Objective, cross_entropy
from anyfleet.tasks.split import Cut, Split, union
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

    `train` is the store of all rows that devices own; `shares` are the training rows of each device
    and `held_out` its own test rows, all of them rows of `train`. No device owns a row of `server`,
    and `server` and `test` have no row in common. `classes` is the width of the model's output, and
    `classified` tells whether targets number its entries; if not (real numbers, counts, several
    labels at once, classes on another axis than the last), no device lacks a class.
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
    shares: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    test: Data
    server: Data
    classified: bool = False
    augment: Augment | None = None
    assignment: str = ""  # how devices came to their data, in words

    def __repr__(self) -> str:
        size = self.blueprint.numel()
        return f"Task({self.name!r}, devices={self.devices}, parameters={size})"

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

    def size(self, device: int) -> int:
        """How many training samples a device has, without copying them."""
        return len(self.shares[device])

    def own_test(self, device: int) -> Data:
        """Test data of a device."""
        return self.train.rows(self.held_out[device])

    def labels(self, device: int) -> Tensor:
        """Which classes (or tokens) occur in a device's training data: bool [classes].

        Where targets are no classes there are none to miss, and all are true.
        """
        return self._labels[device]

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """Whose data each device has; empty where that is nobody's, or several people's."""
        owners = self.train.owners
        if owners is None:
            return ("",) * self.devices
        return tuple(_only(self.train, owners[rows]) for rows in self.shares)

    @cached_property
    def _labels(self) -> tuple[Tensor, ...]:
        if not self.classified:
            return (torch.ones(self.classes, dtype=torch.bool),) * self.devices
        return tuple(_occurring(self.train.y[rows], self.classes) for rows in self.shares)

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
    @checked
    def of(  # noqa: PLR0913 - the user's front door: separate choices, all but two with defaults
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
        """A user's own model and data; see `task_of_rows` for what is checked.

        `state` is a state_dict to start from, otherwise the module's present weights count;
        parameters with `requires_grad=False` stay as they are. Data sets are read once. Without
        `test`, the devices' own test rows are also the common test set. `cross_entropy` makes
        targets classes, judged by accuracy unless there are other `metrics`. With another loss
        there are only the metrics you give; and say `classified=True` if targets are classes on the
        last axis of the output nevertheless (negative ones are passed over), so that methods that
        look at a device's labels do so. A run is judged by accuracy where there is one, else by the
        first of the metrics, else by the loss; which way is better, `Metric` tells
        by the name. The name is that of the module's class, unless given.
        """
        goal = Goal(loss, metrics, classified)
        check_given(module, train, goal)
        store = materialise(train, "training")
        task = task_of_rows(
            started(module, state),
            store,
            split.cut(store),
            test=None if test is None else materialise(test, "test"),
            goal=goal,
        )
        called = task.name if name is None else name
        return replace(task, augment=augment, name=called, assignment=split.told)


def task_of_rows(
    module: nn.Module, store: Data, cut: Cut, *, test: Data | None, goal: Goal
) -> Task:
    """A task from rows that are divided already.

    Checks the names of the metrics; that all numbers are finite; on two samples that model,
    targets, loss and metrics fit each other, and that the traced network is the function that the
    module is (see `anyfleet.elastic.require_faithful`).
    """
    check_names(goal)
    check_finite(store, cut, test)
    example = Data(store.x[:2], store.y[:2])
    output = tried(module, example.x)
    tests = _all_held_out(store, cut) if test is None else test
    classified = has_classes(goal, store.y, output)
    if goal.loss is cross_entropy:
        for targets in (store.y, tests.y):
            check_range(targets, width(output))
    check_objectives(goal, output, example)
    blueprint = trace(module, (example.x,))
    require_faithful(module, (example.x,), blueprint)
    for told in left_behind(module, blueprint):
        warnings.warn(f"Task: {told}.", AnyfleetWarning, stacklevel=3)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return Task(
        name=type(module).__name__,
        blueprint=blueprint,
        params={name: weights[name] for name in blueprint.params},
        buffers={name: weights[name] for name in blueprint.buffers},
        classes=width(output),
        loss=goal.loss,
        metrics=goal.judges,
        train=store,
        shares=cut.shares,
        held_out=cut.held_out,
        test=tests,
        server=cut.server,
        classified=classified,
    )


def pooled(task: Task) -> Task:
    """The same data on a single device: the centralised reference."""
    return replace(
        task,
        name=f"{task.name}, pooled",
        shares=(union(task.shares),),
        held_out=(union(task.held_out),),
    )


def _only(data: Data, owners: Tensor) -> str:
    """The name of the one owner of some rows, or nothing."""
    alone = len(owners) and bool((owners == owners[0]).all())
    return data.owner(int(owners[0])) if alone else ""


def _occurring(targets: Tensor, classes: int) -> Tensor:
    """Bool [classes]; what is no class (a mark for positions to leave out) is not counted."""
    known = targets[(targets >= 0) & (targets < classes)]
    return known.flatten().long().bincount(minlength=classes) > 0


def _all_held_out(store: Data, cut: Cut) -> Data:
    rows = union(cut.held_out)
    if not len(rows):
        raise ValueError("Task: there is no test data. Give `test`, or a test_share above 0.")
    return store.rows(rows)
