"""Tasks that a run file can name: each builds a `Task` from a seed.

They share these fields. `model` makes the network. `devices`, `partition`, `test_share` (share of a
device's rows for its own test) and `server` (samples set aside for the server) are those of
`Split`. `limit` is the largest number of training and of test samples to load. `split_seed` fixes
the data and its partition, so that runs with different seeds share them; without it they follow
the seed of the run.

Pixels and sensor readings are standardised: minus the mean, divided by the deviation of their
channel over the loaded training samples. Scaling to [0, 1] first makes no difference.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from anyfleet.arguments import checked
from anyfleet.names import Factory
from anyfleet.tasks import dataset_files as files
from anyfleet.tasks import zoo
from anyfleet.tasks.augment import Augment
from anyfleet.tasks.data import Data
from anyfleet.tasks.data_loading import chosen_rows, fresh_model, image_data, sensor_data
from anyfleet.tasks.digits import DOMAINS, digit_data
from anyfleet.tasks.losses import Objectives
from anyfleet.tasks.partition import ByOwner, Domains, Iid, Partition
from anyfleet.tasks.split import Split, number
from anyfleet.tasks.synthetic import Generator
from anyfleet.tasks.task import Task, pooled, task_of_rows
from anyfleet.tasks.text import text_windows

# The volunteers of the published test set of UCI HAR.
UCI_TEST_USERS = (2, 4, 9, 10, 12, 13, 18, 20, 24)

_CNN_MNIST = Factory.of(zoo.cnn_mnist)
_MCMAHAN = Factory.of(zoo.mcmahan_cnn)
_CNN_CIFAR = Factory.of(zoo.cnn_cifar)
_DIGITS_NET = Factory.of(zoo.digits_net)
_HAR_CNN = Factory.of(zoo.har_cnn)
_TRANSFORMER = Factory.of(zoo.Transformer)
_LOGISTIC = Factory.of(zoo.logistic, features=60)
_IID = Iid()
_DOMAINS = Domains()
_PEOPLE = ByOwner()
_SPEAKERS = ByOwner(minimum=10)
_GENERATOR = Generator()


class TaskSpec(Protocol):
    """A task that is described but not built yet."""

    def build(self, seed: int) -> Task:
        """Return the task; the same seed gives the same task."""


@dataclass(frozen=True)
class _Divided:
    """The fields that all data sets have in common."""

    model: Factory = _CNN_MNIST  # makes the network
    devices: int = 100  # among which the samples are divided
    partition: Partition = _IID  # how they are divided
    test_share: float = 0.1  # of a device's samples, for its own test
    server: int = 1000  # samples set aside for the server
    limit: int | None = None  # most training and test samples to load; none: all
    split_seed: int | None = None  # of data and partition; none: the run's seed

    def __post_init__(self) -> None:
        self._split(0)
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}.")

    def _split(self, seed: int) -> Split:
        return Split(
            devices=self.devices,
            partition=self.partition,
            test_share=self.test_share,
            server=self.server,
            seed=_data_seed(self.split_seed, seed),
        )


@dataclass(frozen=True)
class _Pictures(_Divided):
    """The fields of a data set of images."""

    augment: Augment | None = None  # how the images of a minibatch are varied

    def _build(self, images: files.Images, seed: int, name: str) -> Task:
        train, test = image_data(images, self.limit, _data_seed(self.split_seed, seed))
        model, split = fresh_model(self.model, seed), self._split(seed)
        return Task.of(model, train, test, split=split, name=name, augment=self.augment)


@checked
@dataclass(frozen=True)
class Embedded(_Pictures):
    """The Fashion-MNIST subset inside the package: 12,000 + 2,000 grey images, ten classes.

    It is meant for first trials, so its default network is small.
    """

    devices: int = 20
    server: int = 500

    def build(self, seed: int) -> Task:
        return self._build(files.embedded_images(), seed, "Fashion-MNIST subset")


@checked
@dataclass(frozen=True)
class FashionMnist(_Pictures):
    """Fashion-MNIST from disk: 60,000 + 10,000 grey images."""

    model: Factory = _MCMAHAN

    def build(self, seed: int) -> Task:
        return self._build(files.idx_images("fashion-mnist"), seed, "Fashion-MNIST")


@checked
@dataclass(frozen=True)
class Mnist(_Pictures):
    """MNIST from disk: 60,000 + 10,000 grey images."""

    model: Factory = _MCMAHAN

    def build(self, seed: int) -> Task:
        return self._build(files.idx_images("mnist"), seed, "MNIST")


@checked
@dataclass(frozen=True)
class Cifar10(_Pictures):
    """CIFAR-10 from disk: 50,000 + 10,000 colour images.

    FedPMT's split into 100 devices with 500 samples of two classes needs every image: set
    `server=0, test_share=0`.
    """

    model: Factory = _CNN_CIFAR

    def build(self, seed: int) -> Task:
        return self._build(files.cifar10_images(), seed, "CIFAR-10")


@checked
@dataclass(frozen=True)
class DigitsFive(_Divided):
    """Digits of five domains, 3 x 28 x 28: MNIST from disk, and four stand-ins made from it.

    A domain has 7,438 training and 2,000 test images, whatever the seed; no two share an image of
    MNIST. `trained` says which domains have training data: "all", "tested", or names. `tested` is
    the domain whose test images are the common test set, or "all".
    """

    model: Factory = _DIGITS_NET
    devices: int = 10
    partition: Partition = _DOMAINS
    test_share: float = 0.0
    server: int = 0
    trained: tuple[str, ...] = ("all",)  # domains with training data; or "all", or "tested"
    tested: str = "all"  # domain whose test images are the common test set

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("all", *DOMAINS)
        if self.tested not in known:
            raise ValueError(f'tested must be one of {_quoted(known)}; got "{self.tested}".')
        known = ("all", "tested", *DOMAINS)
        if not self.trained or not set(self.trained) <= set(known):
            raise ValueError(f"trained must be some of {_quoted(known)}; got {self.trained}.")

    def build(self, seed: int) -> Task:
        train, test = digit_data(self.limit, _data_seed(self.split_seed, seed))
        wanted = [self.tested if name == "tested" else name for name in self.trained]
        train, test = _of_domains(train, wanted), _of_domains(test, [self.tested])
        model, split = fresh_model(self.model, seed), self._split(seed)
        return Task.of(model, train, test, split=split, name="DigitsFive with stand-ins")


@checked
@dataclass(frozen=True)
class Har(_Divided):
    """Human activities in sensor windows [6, 128]; owners are the people who wore the sensor.

    The data of `test_users` are the common test set. With `test_users=()` all people train, and
    the devices' own test rows are the common test set; neighbouring windows overlap by half, so
    these rows are not independent of the training rows.
    """

    model: Factory = _HAR_CNN
    devices: int = 21
    partition: Partition = _PEOPLE
    test_share: float = 0.2
    server: int = 200
    test_users: tuple[int, ...] = UCI_TEST_USERS  # people whose data are the common test set

    def build(self, seed: int) -> Task:
        windows = files.har_windows()
        data_seed = _data_seed(self.split_seed, seed)
        train, test = sensor_data(windows, self.test_users, self.limit, data_seed)
        model, split = fresh_model(self.model, seed), self._split(seed)
        return Task.of(model, train, test, split=split, name="HAR")


@checked
@dataclass(frozen=True)
class Shakespeare(_Divided):
    """Next-character prediction in windows of `length`; owners are the speakers of the plays.

    The vocabulary is every character of the text. The model is made with `vocabulary` and `length`.
    The devices' own test rows together are the common test set.
    """

    model: Factory = _TRANSFORMER
    partition: Partition = _SPEAKERS
    test_share: float = 0.2
    server: int = 500
    length: int = 64  # characters of a window

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}.")

    def build(self, seed: int) -> Task:
        speeches = files.shakespeare_speeches()
        windows = text_windows([speech.text for speech in speeches], self.length)
        rows = chosen_rows(
            len(windows.x), self.limit, number(_data_seed(self.split_seed, seed), "limit")
        )
        x, y, owners = (torch.from_numpy(part[rows]) for part in windows[:3])
        store = Data(x, y, owners, tuple(speech.client for speech in speeches))
        sizes = {"vocabulary": len(windows.vocabulary), "length": self.length}
        module = fresh_model(self.model, seed, **sizes)
        return Task.of(module, store, split=self._split(seed), name="Shakespeare")


@checked
@dataclass(frozen=True)
class Synthetic:
    """The synthetic task of FedPNS (specification §B), with the data that `data` generates.

    The server's samples are i.i.d. ones.

    The devices' own test rows together are the common test set.
    """

    model: Factory = _LOGISTIC  # makes the network
    data: Generator = _GENERATOR  # makes the data of every device
    test_share: float = 0.2  # of a device's samples, for its own test
    server: int = 500  # samples set aside for the server
    split_seed: int | None = None  # of the data; none: the run's seed

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share must lie in (0, 1), got {self.test_share}.")
        if self.server < 0:
            raise ValueError(
                f"server must be at least 0, the number of samples it keeps; got {self.server}."
            )

    def build(self, seed: int) -> Task:
        seed_of_data = _data_seed(self.split_seed, seed)
        key = number(seed_of_data, "synthetic")
        store, division = self.data.generate(key, test_share=self.test_share, server=self.server)
        task = task_of_rows(
            fresh_model(self.model, seed),
            store,
            division,
            test=None,
            objectives=Objectives(),
        )
        sentence = f"{self.data} makes the data of every device, with seed {seed_of_data}."
        return replace(task, name="Synthetic", assignment=sentence)


@checked
@dataclass(frozen=True)
class Pooled:
    """The data of all devices of another task on a single device: the centralised reference."""

    inner: TaskSpec  # the task whose data are pooled

    def build(self, seed: int) -> Task:
        return pooled(self.inner.build(seed))


def _of_domains(data: Data, wanted: Collection[str]) -> Data:
    """Return the rows of the domains that are wanted; "all" are all."""
    if "all" in wanted or data.owners is None:
        return data
    numbers = torch.tensor([DOMAINS.index(name) for name in wanted])
    return data.rows(torch.isin(data.owners, numbers).nonzero().squeeze(1))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _data_seed(split_seed: int | None, seed: int) -> int:
    return seed if split_seed is None else split_seed
