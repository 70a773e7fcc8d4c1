"""The environment of a run: libraries, machine and threads, on which its numbers depend too."""

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
from anyfleet.runtime.simulated.execution import device_for, engine_name
from anyfleet.store.disk import write
from anyfleet.store.tensor_blocks import content

FORMAT = 1
FILE = "environment.json"
_LIBRARIES = ("torch", "numpy", "constriction")


class Conditions(msgspec.Struct, frozen=True):
    """What numbers depend on; None for a library that is not installed."""

    anyfleet: str
    python: str
    torch: str | None
    numpy: str | None
    constriction: str | None
    platform: str
    processor: str
    device: str
    engine: Any  # as a run file has it
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)]  # far more would end the process
    precision: Literal["float16", "bfloat16", "float32", "float64"]
    products: Literal["highest", "high", "medium"]
    task: str | msgspec.UnsetType = msgspec.UNSET  # unset: not known when it was recorded


class Change(msgspec.Struct, frozen=True):
    """A resumption under other conditions: what differs, and after how many rounds."""

    rounds: int
    differences: tuple[str, ...]


class Environment(msgspec.Struct, frozen=True):
    """The record of where and how a run began."""

    format: int
    config: str  # SHA-256 of the configuration without its number of rounds
    home: str  # the folder of the run file: code that it names may lie there
    conditions: Conditions
    checkpoint_every: int | None  # rounds; None: as often as a share of the time allows
    changes: tuple[Change, ...] = ()


def record(folder: Path, environment: Environment) -> None:
    """Write the record into a run folder."""
    text = msgspec.json.format(msgspec.json.encode(environment), indent=2)
    write(folder / FILE, text + b"\n")


def read(folder: Path) -> Environment:
    """Return the record in a run folder; raise StoreError if there is none that can be used."""
    file = folder / FILE
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Environment)
    except OSError as error:
        raise StoreError(_not_there(folder, error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{file} is damaged: {error}.") from error
    if found.format != FORMAT:
        raise StoreError(
            f"{file} has format {found.format}, but this version reads only {FORMAT}. Use the "
            "version of Anyfleet that wrote it."
        )
    return found


def _not_there(folder: Path, error: OSError) -> str:
    if folder.is_file():
        start = f" To start a run file: anyfleet run {folder}" if folder.suffix == ".toml" else ""
        return f"{folder} is a file; name the folder of a run.{start}"
    if isinstance(error, NotADirectoryError) or not folder.exists():
        return f"{folder} does not exist. `anyfleet run` prints the name of the folder it writes."
    if not isinstance(error, FileNotFoundError):
        return f"{folder / FILE} cannot be read: {error.strerror}. Mend that."
    return (
        f"{folder} has no {FILE}, so it cannot be resumed: it is not the folder of a single "
        "run, or the run was stopped before it began. Run it again."
    )


def observe(experiment: Experiment, task: Task | None = None) -> Conditions:
    """Return the conditions here and now."""
    found = {
        "anyfleet": anyfleet.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": _device(experiment, task),
        "engine": config.dump(experiment.engine, complete=True),
        "threads": torch.get_num_threads(),
        "precision": str(torch.get_default_dtype()).removeprefix("torch."),
        "products": torch.get_float32_matmul_precision(),
        **({} if task is None else {"task": fingerprint(task)}),
    }
    return msgspec.convert(found, Conditions)


def adopt(conditions: Conditions) -> None:
    """Set threads and precision of this process as recorded."""
    torch.set_num_threads(conditions.threads)
    torch.set_default_dtype(getattr(torch, conditions.precision))
    torch.set_float32_matmul_precision(conditions.products)


def differences(then: Conditions, now: Conditions) -> tuple[str, ...]:
    """Return every condition that has changed, as texts; one that is unset has not."""
    pairs = [(name, getattr(then, name), getattr(now, name)) for name in then.__struct_fields__]
    return tuple(
        f"{name}: {_told(before)} then, {_told(after)} now"
        for name, before, after in pairs
        if before != after and msgspec.UNSET not in (before, after)
    )


def digest(data: Mapping[str, Any]) -> str:
    """Return a checksum of a configuration, without its rounds: a run may become longer."""
    rest = {key: value for key, value in data.items() if key not in ("rounds", "allow")}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def fingerprint(task: Task) -> str:
    """Return a checksum of the initial model and of the sizes of all data, not of the data."""
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


def _device(experiment: Experiment, task: Task | None) -> str:
    """Return the device of torch that trains; of a GPU its model, since the number may change."""
    tensors = [] if task is None else [*task.params.values()]
    device = tensors[0].device if tensors else device_for(experiment)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return engine_name(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
