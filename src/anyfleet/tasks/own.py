"""The task of a user's own model and data, for run files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from anyfleet.arguments import checked
from anyfleet.names import Factory
from anyfleet.tasks.augment import Augment
from anyfleet.tasks.data import Data
from anyfleet.tasks.data_loading import fresh_model
from anyfleet.tasks.losses import Objective, cross_entropy
from anyfleet.tasks.partition import Iid, Partition
from anyfleet.tasks.split import Split
from anyfleet.tasks.task import Task
from anyfleet.tracebacks import BUILDING, during

_IID = Iid()
Source = Dataset[Any] | Data


@checked
@dataclass(frozen=True)
class Own:
    """A task of any torch module and any data set, given by name; see `Task.of` for the rest.

    `data` makes one data set or a pair (training, test). `loss` and `metrics` name functions of
    (output, target). With a loss of one's own, `classified` says whether targets are classes.
    `state` is a safetensors file with the weights to start from; a relative path is relative to
    the run file. `devices` to `split_seed` are as in every task.
    """

    model: Factory  # makes the network
    data: Factory  # makes the data set or (training, test)
    loss: Objective = cross_entropy  # of (output, target)
    metrics: Mapping[str, Objective] = field(default_factory=dict)  # of (output, target), by name
    classified: bool = False  # whether targets are classes
    state: Path | str | None = None  # safetensors file with the weights to start from
    devices: int = 20  # among which the samples are divided
    partition: Partition = _IID  # how they are divided
    test_share: float = 0.1  # of a device's samples, for its own test
    server: int = 0  # samples set aside for the server
    augment: Augment | None = None  # how the samples of a minibatch are varied
    split_seed: int | None = None  # of the partition; none: the run's seed

    def __post_init__(self) -> None:
        self._split(0)

    def build(self, seed: int) -> Task:
        """Return the task: make model and data, and divide the data."""
        with during(what=f"data = {self.data.use}", when=BUILDING):
            made = self.data.make()
        train, test = _pair(made)
        return Task.of(
            fresh_model(self.model, seed),
            train,
            test,
            split=self._split(seed),
            loss=self.loss,
            metrics=self.metrics or None,
            classified=self.classified,
            state=None if self.state is None else _read_state(Path(self.state)),
            augment=self.augment,
        )

    def _split(self, seed: int) -> Split:
        return Split(
            devices=self.devices,
            partition=self.partition,
            test_share=self.test_share,
            server=self.server,
            seed=seed if self.split_seed is None else self.split_seed,
        )


def _pair(made: Any) -> tuple[Source, Source | None]:
    if not isinstance(made, tuple):
        return made, None
    if len(made) != 2:
        raise ValueError(f"data must make one data set or (training, test), got {len(made)}.")
    return made


def _read_state(file: Path) -> Mapping[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"state: {file} is not a readable safetensors file ({error}).") from error
