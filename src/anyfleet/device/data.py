"""The data of a device: what its owner's function makes, or what an .npz file holds.

They stay on the device. They are checked against the model before the device joins a fleet, on two
samples and on all targets, so that a mistake shows at once and not in the middle of a round.
"""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from anyfleet.core.evaluation import measure
from anyfleet.device.bundle import Bundle
from anyfleet.device.device_task import DeviceTask
from anyfleet.elastic import EVALUATE, WHOLE
from anyfleet.errors import BadName, MissingData, refuse
from anyfleet.tasks.data import Data, materialise
from anyfleet.tasks.losses import cross_entropy
from anyfleet.tracebacks import BUILDING, during

_PAIR = 2
_FORMS = "module:factory, where factory() makes the data set, or FILE.npz with arrays x and y"


@dataclass(frozen=True, eq=False)
class OwnData:
    """The samples of a device: for training, and for its own test."""

    train: Data
    test: Data


def own_data(source: str, bundle: Bundle) -> OwnData:
    """Return the data that `source` names, checked against the model of the bundle.

    A module is looked for in the working directory, too: it is the owner's own code.
    """
    found = _of_file(Path(source)) if source.endswith(".npz") else _of_factory(source)
    refuse(_faults(found, bundle))
    return found


# --- where data come from -----------------------------------------------------------------------


def _of_file(file: Path) -> OwnData:
    try:
        with np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except FileNotFoundError as error:
        raise MissingData(f"--data {file}: there is no such file.") from error
    except (OSError, ValueError, EOFError) as error:
        raise MissingData(f"--data {file} cannot be read: {error}") from error
    for one, other in (("x", "y"), ("test_x", "test_y")):
        if (one in arrays) != (other in arrays) or ("x" not in arrays):
            raise MissingData(
                f"--data {file} has the arrays {', '.join(arrays) or '(none)'}; due are x and y, "
                "and for a test test_x and test_y."
            )
    train = _rows(arrays["x"], arrays["y"], str(file))
    if "test_x" not in arrays:
        return OwnData(train, Data(train.x[:0], train.y[:0]))
    return OwnData(train, _rows(arrays["test_x"], arrays["test_y"], str(file)))


def _rows(x: Any, y: Any, source: str) -> Data:
    """Return inputs and targets as data; raise MissingData if they are not rows of numbers."""
    try:
        return Data(torch.as_tensor(x), torch.as_tensor(y))
    except (TypeError, ValueError, RuntimeError) as error:
        raise MissingData(f"--data {source} does not hold rows of numbers: {error}") from error


def _of_factory(source: str) -> OwnData:
    """Return what a function of the owner makes."""
    module_name, _, name = source.partition(":")
    if not module_name or not name.isidentifier():
        raise BadName(f"--data {source} is not of the form {_FORMS}.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with during(what=f"--data {source}", when=BUILDING):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the owner's own one imports
        raise BadName(
            f"--data {source}: there is no module {module_name} here or among the installed "
            "packages."
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise BadName(f"--data {source}: {module_name} has no function {name}.")
    with during(what=f"--data {source}", when=BUILDING):
        return _split(factory(), source)


def _split(made: Any, source: str) -> OwnData:
    """Return what a factory made as data: (x, y), a data set, or a pair of either."""
    pair = isinstance(made, tuple | list) and len(made) == _PAIR
    if pair and not all(isinstance(each, Tensor | np.ndarray) for each in made):
        train, test = (_data(each, source) for each in made)
        return OwnData(train, test)
    train = _data(made, source)
    return OwnData(train, Data(train.x[:0], train.y[:0]))


def _data(made: Any, source: str) -> Data:
    if isinstance(made, Data | Dataset):
        return materialise(made, f"--data {source}")
    if isinstance(made, tuple | list) and len(made) == _PAIR:
        return _rows(made[0], made[1], source)
    raise BadName(
        f"--data {source} made a {type(made).__name__}; due is (x, y), a torch Dataset, "
        "anyfleet.tasks.Data, or a pair (training, test) of these."
    )


# --- whether they fit the model -------------------------------------------------------------------


def _faults(found: OwnData, bundle: Bundle) -> Iterator[str]:
    if not len(found.train):
        yield "The device has no training samples. Give it data, or do not let it join."
        return
    for what, data in (("training", found.train), ("test", found.test)):
        yield from _value_faults(data, what, bundle)
    if len(found.test) and found.test.x.shape[1:] != found.train.x.shape[1:]:
        yield (
            f"Test samples have the shape {list(found.test.x.shape[1:])}, training samples "
            f"{list(found.train.x.shape[1:])}. Give both the same transform."
        )
        return
    yield from _trial_faults(found, bundle)


def _value_faults(data: Data, what: str, bundle: Bundle) -> Iterator[str]:
    for name, part in (("input", data.x), ("target", data.y)):
        if part.is_floating_point() and not bool(part.isfinite().all()):
            bad = int((~part.isfinite().reshape(len(part), -1).all(1)).sum())
            yield (
                f"{bad} of {len(part)} {what} samples have a number in their {name} that is "
                "infinite or NaN. Leave them out, or fill them in."
            )
    if bundle.functions.loss is not cross_entropy or not data.y.numel():
        return
    if data.y.is_floating_point() or data.y.dtype == torch.bool:
        yield f"{what} targets are {data.y.dtype}, but classes are whole numbers."
    elif int(data.y.min()) < 0 or int(data.y.max()) >= bundle.classes:
        yield (
            f"{what} targets run from {int(data.y.min())} to {int(data.y.max())}, but the model "
            f"has {bundle.classes} classes. Number them from 0, as the server does."
        )


def _trial_faults(found: OwnData, bundle: Bundle) -> Iterator[str]:
    """Yield why the model and its loss cannot be computed on two samples."""
    numbers = next(iter(bundle.params.values())).dtype
    inputs = found.train.x
    if inputs.is_floating_point() and inputs.dtype != numbers:
        yield f"Inputs are {inputs.dtype}, but the model computes with {numbers}. Convert them."
        return
    two = Data(inputs[:2], found.train.y[:2])
    task = DeviceTask(bundle, 0, two, two)
    local = bundle.blueprint.local(WHOLE)
    try:
        report = measure(task, local, bundle.params, bundle.buffers, two, EVALUATE)
    except Exception as error:  # noqa: BLE001 - a model meets shapes that nobody thought of
        yield (
            f"The model fails on inputs of shape {list(inputs.shape[1:])} ({inputs.dtype}) and "
            f"targets of shape {list(two.y.shape[1:])} ({two.y.dtype}): "
            f"{type(error).__name__}: {error}. Give the samples the shape that the server's have."
        )
        return
    if not np.isfinite(report["loss"]):
        yield f"The loss of the first samples is {report['loss']}, which is not finite."
