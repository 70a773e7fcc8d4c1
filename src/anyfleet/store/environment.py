"""What a run's numbers depend on besides its configuration: libraries, machine, threads."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

import anyfleet
from anyfleet import config
from anyfleet.core.objectives import Task
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment
from anyfleet.store.blocks import content
from anyfleet.store.disk import write

FORMAT = 1
FILE = "environment.json"
_LIBRARIES = ("torch", "numpy", "constriction")


class Conditions(msgspec.Struct, frozen=True):
    """What numbers depend on; None: that library is not there."""

    anyfleet: str
    python: str
    torch: str | None
    numpy: str | None
    constriction: str | None
    platform: str
    processor: str
    device: str
    engine: Any  # as a run file has it
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)]  # far more end a process
    precision: Literal["float16", "bfloat16", "float32", "float64"]
    products: Literal["highest", "high", "medium"]
    task: str | msgspec.UnsetType = msgspec.UNSET  # unset: whoever recorded did not know it


class Change(msgspec.Struct, frozen=True):
    """A resumption under other conditions: what differs, and from which step on."""

    step: int
    differences: tuple[str, ...]


class Environment(msgspec.Struct, frozen=True):
    """What was recorded when a run began."""

    format: int
    config: str  # SHA-256 of the configuration without its number of rounds
    home: str  # the folder of the run file: code that it names may lie there
    conditions: Conditions
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
        raise StoreError(_not_there(folder, error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{file} is damaged: {error}.") from error
    if found.format != FORMAT:
        raise StoreError(f"{file} has format {found.format}; this version reads {FORMAT} only.")
    return found


def _not_there(folder: Path, error: OSError) -> str:
    if folder.is_file():
        start = f" To start a run file: anyfleet run {folder}" if folder.suffix == ".toml" else ""
        return f"{folder} is a file; what is resumed is the folder of a run.{start}"
    if isinstance(error, NotADirectoryError) or not folder.exists():
        return f"there is no folder {folder}. `anyfleet run` says which one it writes."
    if not isinstance(error, FileNotFoundError):
        return f"{folder / FILE} cannot be read: {error.strerror}. See to that."
    return (
        f"{folder} has no {FILE}, so it cannot be resumed: it is not the folder of a single "
        "run, or that was stopped before it began. Run it again."
    )


def observe(experiment: Experiment, task: Task | None = None) -> Conditions:
    """The conditions here and now."""
    found = {
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
    return msgspec.convert(found, Conditions)


def adopt(conditions: Conditions) -> None:
    """Sets what a process can choose, as it was recorded."""
    torch.set_num_threads(conditions.threads)
    torch.set_default_dtype(getattr(torch, conditions.precision))
    torch.set_float32_matmul_precision(conditions.products)


def differences(then: Conditions, now: Conditions) -> tuple[str, ...]:
    """Every condition that is not as it was; what one of them does not know is none."""
    pairs = [(name, getattr(then, name), getattr(now, name)) for name in then.__struct_fields__]
    return tuple(
        f"{name}: {_told(before)} then, {_told(after)} now"
        for name, before, after in pairs
        if before != after and msgspec.UNSET not in (before, after)
    )


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
