"""How a run is carried out: on which device of torch, by which engine, in which precision."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from anyfleet import config
from anyfleet.core.objectives import Task
from anyfleet.errors import AnyfleetWarning, ConfigError, Problem
from anyfleet.runtime.simulated.engines import Engine, Stacked

Auto = Literal["auto"]

_DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")


class Wanted(Protocol):
    """What says how a run is to be carried out: an experiment, or a part of one."""

    @property
    def engine(self) -> Engine | Auto:
        """The engine, or "auto"."""

    @property
    def device(self) -> str:
        """The device of torch, or "auto"."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run that say how it is to be carried out."""

    engine: Engine | Auto = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if wrong := misnamed(self.device):
            raise ValueError(wrong)


@dataclass(frozen=True)
class Execution:
    """What the last bits of a run depend on: runs with the same one can be compared bit by bit."""

    device: str  # of torch: "cpu", "cuda:0"
    engine: Any  # as a run file has it
    precision: str  # of local training
    why: str = ""  # how the engine was chosen; "": the user named it

    def __str__(self) -> str:
        engine = engine_name(self.engine)
        if self.why:
            engine = f"{engine} ({self.why}; pin it with {' and '.join(self.pins)})"
        return f"device {self.device}, engine {engine}, {self.precision}"

    @property
    def pins(self) -> tuple[str, ...]:
        """The lines of a run file, or overrides of one, that give a run this engine and no other.

        On a GPU they name the device, too.
        """
        pairs = {**self.engine, "use": _short(self.engine["use"])}.items()
        options = ", ".join(config.to_toml({key: value}).strip() for key, value in pairs)
        device = () if self.device == "cpu" else (f'device = "{self.device}"',)
        return (f"engine = {{ {options} }}", *device)

    def differences(self, other: "Execution") -> tuple[str, ...]:
        """Return what differs in another execution, as texts; how it was chosen does not matter."""
        pairs = (
            ("device", self.device, other.device),
            ("engine", engine_name(self.engine), engine_name(other.engine)),
            ("precision", self.precision, other.precision),
        )
        return tuple(f"{name} {one} then, {two} now" for name, one, two in pairs if one != two)


def execution_of(task: Task, engine: Engine, why: str = "") -> Execution:
    """Return how a task is carried out by an engine, where its tensors are.

    Warn about what the engine is told and cannot do there.
    """
    tensor = next(iter(task.params.values()), torch.empty(0))
    here, own = tensor.device.type, str(tensor.dtype).removeprefix("torch.")
    asked = engine.precision if isinstance(engine, Stacked) else "float32"
    # Products in bfloat16 are for every device, those in tf32 are not; both are of float32.
    used = own == "float32" and (asked == "bf16" or here == "cuda")
    if not used and asked != "float32":
        where = "this task" if own != "float32" else f"device {tensor.device}"
        _warn(f'engine.precision = "{asked}" has no effect: {where} computes in {own}')
    if isinstance(engine, Stacked) and engine.compile and here != "cuda":
        _warn(f"engine.compile has no effect on device {tensor.device}: it is for GPUs")
    return Execution(str(tensor.device), written(engine), asked if used else own, why)


def _warn(text: str) -> None:
    warnings.warn(f"{text}.", AnyfleetWarning, stacklevel=3)


def written(engine: Engine) -> Any:
    """Return an engine as a run file has it; as a text if no file can have it."""
    try:
        return config.dump(engine)
    except ConfigError:
        return repr(engine)


def misnamed(device: str) -> str:
    """Return why a text does not name a device of torch that runs can have, or ""."""
    if _DEVICES.fullmatch(device):
        return ""
    return f'device must be "auto", "cpu", "cuda" or one such as "cuda:1", got {device!r}.'


def absent(device: str) -> str:
    """Return why a device is not there to be used, and what to do; "" if it is."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return ""
    if not torch.cuda.is_available():
        return (
            f'"{device}" asks for a GPU, but torch finds no CUDA device here; use "cpu", or "auto" '
            "for a GPU where there is one."
        )
    count = torch.cuda.device_count()
    if int(number or 0) < count:
        return ""
    there = ", ".join(f'"cuda:{index}"' for index in range(count))
    return f'"{device}" does not exist; there are {there}.'


def device_for(wanted: Wanted) -> torch.device:
    """Return the device of torch for a run.

    "auto" is a GPU if there is one and the engine makes use of it, which one that trains a device
    after the other does not.
    """
    if wanted.device != "auto":
        return torch.device(wanted.device)
    stacks = wanted.engine == "auto" or isinstance(wanted.engine, Stacked)
    return torch.device("cuda" if stacks and torch.cuda.is_available() else "cpu")


@runtime_checkable
class Movable(Protocol):
    """A task whose tensors can be moved."""

    def to(self, where: torch.device) -> Task:
        """Return the task on another device of torch."""


def placed(task: Task, wanted: Wanted) -> Task:
    """Return the task with its tensors on the device of a run; itself if they are there.

    A task on a GPU stays there unless the run names another device.
    """
    device = device_for(wanted)
    here = next((value.device for value in task.params.values()), device)
    stays = wanted.device == "auto" and here.type != "cpu"
    if stays or (here.type == device.type and device.index in (None, here.index)):
        return task
    if isinstance(task, Movable):
        return task.to(device)
    told = f"a {type(task).__name__} has no `to` that would move it to {device}; use {here}."
    raise ConfigError([Problem("device", told)])


def engine_name(engine: Any) -> str:
    """Return an engine, as a run file has it, in a few words: `Stacked(chunk=8)`."""
    if not isinstance(engine, Mapping):
        return str(engine)
    options = ", ".join(f"{key}={value!r}" for key, value in engine.items() if key != "use")
    return f"{_short(engine['use'])}({options})" if options else _short(engine["use"])


def _short(value: Any) -> Any:
    """Return a name without its package: what a run file may write."""
    return value.rpartition(":")[2] if isinstance(value, str) else value
