"""From files to tensors: limited, standardised; and networks whose weights follow from a seed."""

import hashlib
import platform
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anyfleet import cache
from anyfleet.names import Factory
from anyfleet.tasks.data import Data
from anyfleet.tasks.dataset_files import Images, Windows
from anyfleet.tasks.partition import IntArray
from anyfleet.tasks.split import number

Number = TypeVar("Number", np.uint8, np.float32)
_WORTH_KEEPING = 1 << 20  # numbers whose moments take longer than to look them up


def fresh_model(model: Factory, seed: int, **filled: Any) -> nn.Module:
    """Return a new network whose weights depend on `seed` alone; torch's generator is not used up.

    `filled` are options that follow from the data; those of `model` take precedence.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(seed, "model"))
        module = Factory(model.use, {**filled, **model.options}).make()
    if not isinstance(module, nn.Module):
        raise ValueError(f"model: {model.use} made a {type(module).__name__}, not a torch module.")
    return module


def chosen_rows(total: int, limit: int | None, key: int) -> IntArray:
    """Return all rows, or `limit` random ones, ascending."""
    if limit is None or limit >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng(key).choice(total, limit, replace=False))


def image_data(images: Images, limit: int | None, seed: int) -> tuple[Data, Data]:
    """Return training and test images, standardised by the colours of the training images."""
    train = chosen_rows(len(images.train_y), limit, number(seed, "limit train"))
    test = chosen_rows(len(images.test_y), limit, number(seed, "limit test"))
    pixels = images.train_x[train]
    mean, deviation = _moments(pixels)
    return (
        Data(_standard(pixels, mean, deviation), _long(images.train_y[train])),
        Data(_standard(images.test_x[test], mean, deviation), _long(images.test_y[test])),
    )


def standardised(train: Data, test: Data) -> tuple[Data, Data]:
    """Return images that are bytes, standardised by the colours of the training images."""
    mean, deviation = _moments(train.x.numpy())
    return (
        replace(train, x=_standard(train.x.numpy(), mean, deviation)),
        replace(test, x=_standard(test.x.numpy(), mean, deviation)),
    )


def sensor_data(
    windows: Windows, test_users: tuple[int, ...], limit: int | None, seed: int
) -> tuple[Data, Data | None]:
    """Return the windows of the users who train and of those who test, or None without any.

    Both are standardised by the former.
    """
    apart = np.isin(windows.user, np.array(test_users, dtype=windows.user.dtype))
    training, testing = np.flatnonzero(~apart), np.flatnonzero(apart)
    train = training[chosen_rows(len(training), limit, number(seed, "limit train"))]
    test = testing[chosen_rows(len(testing), limit, number(seed, "limit test"))]
    mean, deviation = _moments(windows.x[train])

    def data(rows: IntArray) -> Data:
        x = _standard(windows.x[rows], mean, deviation)
        return Data(x, _long(windows.y[rows]), _long(windows.user[rows]))

    return data(train), data(test) if len(test) else None


def _moments(x: NDArray[Number]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel [n, channel, …], in the units of `x`."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    mean, deviation = (each.reshape(shape) for each in _kept_moments(x))
    # A channel that never changes stays at zero instead of becoming infinite.
    deviation[deviation == 0] = 1.0
    return torch.from_numpy(mean).float(), torch.from_numpy(deviation).float()


def _kept_moments(x: NDArray[Number]) -> NDArray[np.float64]:
    """Return mean and deviation by channel [2, channels], out of the user's cache or computed now.

    Both take longer than all the rest of loading images. Sums are rounded as this machine does it.
    """
    computed = None if cache.home() is None else cache.computed_by(numpy=np.__version__)
    if computed is None or x.size < _WORTH_KEEPING:
        return _computed_moments(x)
    content = hashlib.sha256(np.ascontiguousarray(x).data).hexdigest()
    key = {
        **computed,
        "machine": [platform.machine(), platform.node()],
        "moments of": [content, str(x.dtype), [*x.shape], [*x.strides]],
    }
    kept = cache.read("images", key)
    if kept is not None and len(kept) == 2 * x.shape[1] * np.dtype(np.float64).itemsize:
        return np.frombuffer(kept, np.float64).reshape(2, -1).copy()
    found = _computed_moments(x)
    cache.write("images", key, found.tobytes())
    return found


def _computed_moments(x: NDArray[Number]) -> NDArray[np.float64]:
    axes = (0, *range(2, x.ndim))
    return np.stack([x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)])


def _standard(x: NDArray[Number], mean: Tensor, deviation: Tensor) -> Tensor:
    # The conversion makes a copy, so the rest may happen in place.
    return torch.from_numpy(x.astype(np.float32)).sub_(mean).div_(deviation)


def _long(values: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
