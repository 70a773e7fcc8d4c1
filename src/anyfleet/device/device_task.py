"""The task of a real device: the model of its bundle, and its own data alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from anyfleet.device.bundle import Bundle
from anyfleet.elastic import Blueprint, Params
from anyfleet.tasks.data import Data

MOST_NUMBER = 10**6  # of a device: a larger one is a mistake of the server


@dataclass(frozen=True, eq=False)
class DeviceTask:
    """A task of which one device knows the model and its own samples.

    It computes what the whole task computes for this device. Other devices, the server and the
    common test have no samples here.
    """

    bundle: Bundle
    number: int  # of this device in the fleet
    train: Data
    own: Data  # of its own test

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MOST_NUMBER:
            raise ValueError(f"DeviceTask.number must be in 0 … {MOST_NUMBER}, got {self.number}.")

    @property
    def blueprint(self) -> Blueprint:
        """The traced model."""
        return self.bundle.blueprint

    @property
    def params(self) -> Params:
        """The initial parameters of the whole model."""
        return self.bundle.params

    @property
    def buffers(self) -> Params:
        """The initial buffers of the whole model."""
        return self.bundle.buffers

    @property
    def devices(self) -> int:
        """The number of devices up to this one."""
        return self.number + 1

    @property
    def classes(self) -> int:
        """The size of the last axis of the model's output."""
        return self.bundle.classes

    @property
    def classified(self) -> bool:
        """Whether targets are class indices on that axis."""
        return self.bundle.classified

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of each sample."""
        return self.bundle.functions.loss

    @property
    def metrics(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """What else is measured of each sample, by name."""
        return self.bundle.functions.metrics

    @property
    def augment(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What changes the samples of a minibatch; None without any."""
        return self.bundle.functions.augment

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of data, which nobody names here."""
        return ("",) * self.devices

    @property
    def assignment(self) -> str:
        """A sentence that says how devices came to their data."""
        return "This device has its own data."

    @cached_property
    def test(self) -> Data:
        """The common test data: none."""
        return _nothing_of(self.train)

    @property
    def server(self) -> Data:
        """The samples of the server: none."""
        return self.test

    def data(self, device: int) -> Data:
        """Return the training data of this device; empty for another one."""
        return self.train if device == self.number else self.test

    def size(self, device: int) -> int:
        """Return the number of training samples of this device; 0 for another one."""
        return len(self.train) if device == self.number else 0

    def own_test(self, device: int) -> Data:
        """Return the test data of this device; empty for another one."""
        return self.own if device == self.number else self.test

    def labels(self, device: int) -> Tensor:
        """Return which classes occur in this device's training data: bool [classes].

        All are true where targets are not classes, none for another device.
        """
        return self._labels if device == self.number else torch.zeros_like(self._labels)

    @cached_property
    def _labels(self) -> Tensor:
        if not self.classified:
            return torch.ones(self.classes, dtype=torch.bool)
        targets = self.train.y
        known = targets[(targets >= 0) & (targets < self.classes)]
        return known.flatten().long().bincount(minlength=self.classes) > 0


def _nothing_of(data: Data) -> Data:
    """Return no rows of some data: the shapes of its samples are kept."""
    return Data(data.x[:0], data.y[:0])
