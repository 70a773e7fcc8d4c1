"""What a run's numbers depend on besides its configuration: libraries, machine, threads."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

import anyfleet
from anyfleet import config
from anyfleet.errors import StoreError
from anyfleet.store.blocks import content
from anyfleet.store.disk import write
from anyfleet.study import Experiment
from anyfleet.types import Task

FORMAT = 1
FILE = "environment.json"
_LIBRARIES = ("torch", "numpy", "constriction")


class Change(msgspec.Struct, frozen=True):
    """A resumption under other conditions: what differs, and from which step on."""

    step: int
    differences: tuple[str, ...]


class Environment(msgspec.Struct, frozen=True):
    """What was recorded when a run began."""

    format: int
    config: str  # SHA-256 of the configuration without its number of rounds
    home: str  # the folder of the run file: code that it names may lie there
    conditions: dict[str, Any]
    checkpoint_every: int | None  # steps; None: by the time they take
    changes: tuple[Change, ...] = ()


def record(folder: Path, environment: Environment) -> None:
    """Writes it into the run folder."""
    text = msgspec.json.format(msgspec.json.encode(environment), indent=2)
    write(folder / FILE, text + b"\n")


def read(folder: Path) -> Environment:
    """What was recorded in a run folder."""
    file = folder / FILE
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Environment)
    except OSError as error:
        raise StoreError(
            f"{folder} has no {FILE}, so it cannot be resumed: it is not the folder of a single "
            "run, or that was stopped before it began. Run it again."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} is damaged: {error}.") from error
    if found.format != FORMAT:
        raise StoreError(f"{file} has format {found.format}; this version reads {FORMAT} only.")
    return found


def observe(experiment: Experiment, task: Task | None = None) -> dict[str, Any]:
    """The conditions here and now, by name."""
    return {
        "anyfleet": anyfleet.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": _device(),
        "engine": config.dump(experiment.engine, complete=True),
        "threads": torch.get_num_threads(),
        "precision": str(torch.get_default_dtype()).removeprefix("torch."),
        "products": torch.get_float32_matmul_precision(),
        **({} if task is None else {"task": fingerprint(task)}),
    }


def adopt(conditions: Mapping[str, Any]) -> None:
    """Sets what a process can choose, as it was recorded."""
    torch.set_num_threads(int(conditions["threads"]))
    torch.set_default_dtype(getattr(torch, conditions["precision"]))
    torch.set_float32_matmul_precision(conditions["products"])


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Every condition that is not as it was."""
    names = [name for name in now if name in then and then[name] != now[name]]
    return tuple(f"{name}: {_told(then[name])} then, {_told(now[name])} now" for name in names)


def digest(data: Mapping[str, Any]) -> str:
    """Of a configuration. A run may become longer: how many rounds it has does not count."""
    rest = {key: value for key, value in data.items() if key not in ("rounds", "allow")}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def fingerprint(task: Task) -> str:
    """Of the model as it begins and of who has how much data; changed data of one size pass."""
    found = hashlib.sha256()
    for name, value in {**task.params, **task.buffers}.items():
        found.update(name.encode())
        found.update(content(value))
    found.update(str([task.size(device) for device in range(task.devices)]).encode())
    found.update(content(task.server.y))
    return found.hexdigest()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    device = torch.get_default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _told(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
