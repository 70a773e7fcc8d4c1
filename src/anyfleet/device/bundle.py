"""The bundle of a fleet: all that a device must have of a task before its first order.

It is a folder with three files:

    bundle.json           loss, metrics and augmentation by name, the classes, the digest
    blueprint.msgpack     the traced model (`Blueprint.to_bytes`)
    tensors.safetensors   the initial parameters and buffers

It holds no code, no tracer and no sample. Functions are named by the rule of `anyfleet.names`, so a
device runs only what `anyfleet.tasks` exports and what its owner allows.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from anyfleet import config
from anyfleet.core.objectives import Task
from anyfleet.elastic import Blueprint, Params
from anyfleet.errors import AnyfleetError, ConfigError, Problem, StoreError
from anyfleet.store import disk
from anyfleet.tasks.augment import Augment
from anyfleet.tasks.losses import Objective

FORMAT = 1
_HOMES = dict.fromkeys(("loss", "metrics", "augment"), "anyfleet.tasks")
_FILES = ("bundle.json", "blueprint.msgpack", "tensors.safetensors")
_AGAIN = "Copy the folder from the server again."


@dataclass(frozen=True)
class Functions:
    """The functions of a task."""

    loss: Objective
    metrics: Mapping[str, Objective]
    augment: Augment | None = None


@dataclass(frozen=True, eq=False)
class Bundle:
    """A task without its data: the traced model, how it begins, and what is measured."""

    blueprint: Blueprint
    params: Params
    buffers: Params
    functions: Functions
    classes: int
    classified: bool

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the content, in hexadecimal digits."""
        found = hashlib.sha256(self.blueprint.digest)
        plain = [_named(self.functions), self.classes, self.classified]
        found.update(msgspec.json.encode(plain, order="sorted"))
        for name, tensor in sorted(_tensors(self).items()):
            head = [name, str(tensor.dtype), list(tensor.shape)]
            found.update(msgspec.json.encode(head))
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of bundle.json."""

    format: int
    functions: dict[str, Any]
    classes: int
    classified: bool
    digest: str


def bundle_of(task: Task, allow: Collection[str] = ()) -> Bundle:
    """Return the bundle of a task; raise ConfigError for functions that no device could find."""
    functions = Functions(task.loss, task.metrics, cast("Augment | None", task.augment))
    _loaded(_named(functions), allow)
    return Bundle(
        blueprint=task.blueprint,
        params={name: value.cpu() for name, value in task.params.items()},
        buffers={name: value.cpu() for name, value in task.buffers.items()},
        functions=functions,
        classes=task.classes,
        classified=task.classified,
    )


def write_bundle(task: Task, folder: Path, allow: Collection[str] = ()) -> Bundle:
    """Write the bundle of a task into a folder, which is made, and return it.

    `allow` are the packages besides Anyfleet that devices are told to allow.
    """
    bundle = bundle_of(task, allow)
    described = _Description(
        format=FORMAT,
        functions=_named(bundle.functions),
        classes=bundle.classes,
        classified=bundle.classified,
        digest=bundle.digest,
    )
    with disk.told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    disk.write(folder / "blueprint.msgpack", bundle.blueprint.to_bytes())
    disk.write(folder / "tensors.safetensors", save(_tensors(bundle)))
    text = msgspec.json.format(msgspec.json.encode(described, order="sorted"))
    disk.write(folder / "bundle.json", text + b"\n")
    return bundle


def read_bundle(folder: Path, allow: Collection[str] = ()) -> Bundle:
    """Return the bundle in a folder; raise StoreError if it is damaged, ConfigError for names."""
    described, blueprint, tensors = _read(folder)
    if described.format != FORMAT:
        raise StoreError(
            f"{folder} has format {described.format}; this version of Anyfleet reads {FORMAT}. "
            "Install the version that the server has."
        )
    functions = _loaded(described.functions, allow)
    if missing := [n for n in (*blueprint.params, *blueprint.buffers) if n not in tensors]:
        raise StoreError(f"{folder}: the model has no tensor {missing[0]!r}. {_AGAIN}")
    bundle = Bundle(
        blueprint=blueprint,
        params={name: tensors[name] for name in blueprint.params},
        buffers={name: tensors[name] for name in blueprint.buffers},
        functions=functions,
        classes=described.classes,
        classified=described.classified,
    )
    if bundle.digest != described.digest:
        raise StoreError(f"{folder} differs from what the server wrote. {_AGAIN}")
    return bundle


def _read(folder: Path) -> tuple[_Description, Blueprint, dict[str, Tensor]]:
    """Return the content of the three files."""
    disk.refuse_links(folder, _FILES)
    try:
        described, blueprint, tensors = ((folder / name).read_bytes() for name in _FILES)
        return (
            msgspec.json.decode(described, type=_Description),
            Blueprint.from_bytes(blueprint),
            # In torch's own memory, which is aligned: other memory could give other bits.
            {name: value.clone() for name, value in load(tensors).items()},
        )
    except FileNotFoundError as error:
        raise StoreError(f"there is no {error.filename}. {_AGAIN}") from error
    except OSError as error:
        raise StoreError(f"{folder} cannot be read: {error.strerror}. Mend that.") from error
    except (msgspec.MsgspecError, SafetensorError, UnicodeDecodeError, AnyfleetError) as error:
        raise StoreError(f"{folder} is damaged: {error}. {_AGAIN}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # of a damaged blueprint
        raise StoreError(f"{folder} is damaged: {error!r}. {_AGAIN}") from error


def _named(functions: Functions) -> dict[str, Any]:
    """Return the functions of a task as plain data."""
    held = {"loss": functions.loss, "metrics": functions.metrics, "augment": functions.augment}
    try:
        return dict(config.dump({name: each for name, each in held.items() if each is not None}))
    except ConfigError as error:
        raise ConfigError(map(_advised, error.problems)) from error


def _advised(problem: Problem) -> Problem:
    advice = "A device must be able to find it by its name: put it at the top of a module that is"
    return Problem(problem.path, f"{problem.message} {advice} installed there, too.")


def _loaded(plain: Mapping[str, Any], allow: Collection[str]) -> Functions:
    return config.load(dict(plain), Functions, allow=allow, homes=_HOMES)


def _tensors(bundle: Bundle) -> dict[str, Tensor]:
    return {
        name: value.detach().contiguous()
        for name, value in (*bundle.params.items(), *bundle.buffers.items())
    }
