"""Checkpoints of a run: folders `checkpoints/000012`, named by how many rounds are done.

    manifest.json         version of the format, checksums of the other two, lengths of the logs
    state.json            the state, as `encode` writes it
    tensors.safetensors   the memory of its tensors

A checkpoint appears as a whole, by renaming. The last two are kept, because a disk may lose one.
"""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from safetensors import SafetensorError

from anyfleet.arrays import Ints
from anyfleet.core import objectives
from anyfleet.elastic import Blueprint
from anyfleet.errors import StoreError
from anyfleet.experiment import State
from anyfleet.runtime.flower.fleet_state import FleetState
from anyfleet.runtime.simulated.failures import REASONS
from anyfleet.runtime.simulated.under_way import SimulatedState, UnderWay
from anyfleet.store import tensor_blocks
from anyfleet.store.disk import Damaged, Mark, force, force_folder, refuse_links, told
from anyfleet.store.serialisation import Document, decode, encode
from anyfleet.tasks import Task
from anyfleet.world import World

FORMAT = 2
KEPT = 2
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
# What a state refers to but does not hold: it is made again from the configuration.
SURROUNDINGS: Mapping[str, type] = {"task": Task, "blueprint": Blueprint, "world": World}


class Content(msgspec.Struct, frozen=True):
    """The length and the checksum of a file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The first file of a checkpoint: what the others must be, and how far the run is."""

    format: int
    rounds: int  # done
    seconds: float  # of wall-clock time spent on the run
    logs: dict[str, Mark]  # how far each goes
    files: dict[str, Content]


@dataclass(frozen=True)
class Progress:
    """How far a run is, besides its state."""

    rounds: int = 0  # done
    seconds: float = 0.0  # of wall-clock time spent on the run
    logs: Mapping[str, Mark] = field(default_factory=dict)  # how far each goes


def save(folder: Path, state: State, progress: Progress) -> None:
    """Write a checkpoint into a run folder, and remove those before the last two."""
    home = folder / "checkpoints"
    target = home / f"{progress.rounds:06d}"
    beside = home / f".{target.name}.part"
    document = encode(state, SURROUNDINGS)
    try:
        with told(target):
            home.mkdir(exist_ok=True)
            force_folder(folder)  # it lists the logs too
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            _fill(beside, document, progress)
            force_folder(beside)
            if target.exists():  # damaged, so that the run was resumed from an older one
                shutil.rmtree(target)
            beside.replace(target)
            force_folder(home)
    except StoreError:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _tidy(home)


def _fill(folder: Path, document: Document, progress: Progress) -> None:
    text = msgspec.json.encode(document.root)
    with (folder / STATE).open("wb") as out:
        out.write(text)
        force(out)
    with (folder / TENSORS).open("wb") as out:
        tensors = _Counted(out)
        tensor_blocks.write(tensors, document.blocks)
        force(out)
    manifest = Manifest(
        FORMAT,
        progress.rounds,
        progress.seconds,
        dict(progress.logs),
        {STATE: Content(len(text), hashlib.sha256(text).hexdigest()), TENSORS: tensors.content()},
    )
    with (folder / MANIFEST).open("wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        force(out)


class _Counted:
    """A file whose length and checksum are counted while it is written."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._hash, self._bytes = out, hashlib.sha256(), 0

    def write(self, content: bytes | memoryview, /) -> int:
        self._hash.update(content)
        self._bytes += len(content)
        return self._out.write(content)

    def content(self) -> Content:
        return Content(self._bytes, self._hash.hexdigest())


def _tidy(home: Path) -> None:
    """Remove old checkpoints; what cannot be removed is left, and the run goes on."""
    for old in [*found(home.parent)[KEPT:], *home.glob(".*.part")]:
        with suppress(OSError):
            shutil.rmtree(old)


def found(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, newest first."""
    home = folder / "checkpoints"
    if not home.is_dir():
        return []
    named = [each for each in home.iterdir() if each.name.isdecimal()]
    return sorted(named, key=lambda each: int(each.name), reverse=True)


def refuse_linked(folder: Path) -> None:
    """Raise StoreError if a checkpoint or one of its files is a link to somewhere else."""
    home = folder / "checkpoints"
    refuse_links(folder, [home.name])
    names = [each.name for each in home.iterdir()] if home.is_dir() else []
    refuse_links(home, names)
    for name in names:
        refuse_links(home / name, [MANIFEST, STATE, TENSORS])


def examine(checkpoint: Path) -> Progress:
    """Return how far a checkpoint is; raise StoreError if a file is not as it was written."""
    try:
        manifest = msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{checkpoint / MANIFEST} is damaged.") from error
    if manifest.format != FORMAT:
        raise StoreError(
            f"{checkpoint} has format {manifest.format}, but this version reads only {FORMAT}. "
            "Use the version of Anyfleet that wrote it (environment.json names it)."
        )
    if f"{manifest.rounds:06d}" != checkpoint.name:
        raise StoreError(f"{checkpoint / MANIFEST} is damaged.")
    for name in (STATE, TENSORS):
        if _content(checkpoint / name) != manifest.files.get(name):
            raise StoreError(f"{checkpoint / name} is damaged.")
    return Progress(manifest.rounds, manifest.seconds, manifest.logs)


def _content(file: Path) -> Content | None:
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256")
            return Content(opened.tell(), digest.hexdigest())
    except OSError:
        return None


def load(checkpoint: Path, task: objectives.Task, world: World, allow: Collection[str]) -> State:
    """Return the state of a checkpoint that `examine` accepted; raise Damaged if it is unusable."""
    try:
        root = msgspec.json.decode((checkpoint / STATE).read_bytes())
        document = Document(root, tensor_blocks.read(checkpoint / TENSORS))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{checkpoint} is damaged.") from error
    known = {"task": task, "blueprint": task.blueprint, "world": world}
    device = next((str(value.device) for value in task.params.values()), "cpu")
    state = decode(document, known, allow=allow, device=device)
    if wrong := _misfit(state, task, int(checkpoint.name)):
        raise Damaged(f"{wrong}.")
    found: State = state
    return found


def _misfit(state: Any, task: objectives.Task, rounds: int) -> str:
    """Return why a value is not the state of this run after so many rounds, or ""."""
    if type(state) is not State:
        return f"it holds a {type(state).__name__}, not the state of a run"
    snapshot, fleet = state.snapshot, state.fleet
    if type(fleet) not in (SimulatedState, FleetState):
        return f"its fleet is a {type(fleet).__name__}"
    # Devices of a real fleet join as they come.
    devices = len(fleet.losses) if isinstance(fleet, FleetState) else task.devices
    if (state.record.round_index + 1, len(snapshot.visits), len(snapshot.acknowledged)) != (
        rounds,
        devices,
        devices,
    ):
        return "it belongs to another round, or to another fleet"
    # With a normalisation of its own for every width, the model has further entries.
    both = ((task.params, snapshot.params), (task.buffers, snapshot.buffers))
    for before, now in both:
        for name, value in before.items():
            there = now.get(name)
            if there is None or (there.shape, there.dtype) != (value.shape, value.dtype):
                return f"its model has another {name} than the task"
    if isinstance(fleet, FleetState):
        orders = (*fleet.under_way, *fleet.offered)
        fits = all(len(each) == 1 and _within(each.device, devices) for each in orders)
        return "" if fits else "one of its orders is for a device that does not exist"
    return _misfit_of_fleet(fleet, task)


def _misfit_of_fleet(fleet: SimulatedState, task: objectives.Task) -> str:
    """Return why a fleet cannot go on, or "": it must not fail in the middle of a round."""
    missing, since = fleet.batteries
    if np.shape(fleet.losses) != (task.devices,):
        return "its devices are not those of the task"
    if np.shape(missing) != np.shape(since) or len(missing) not in (0, task.devices):
        return "its batteries are not those of the devices"
    if not fleet.states.fits(task):
        return "what its devices keep is not of the task"
    return "" if fleet.under_way is None else _misfit_of_orders(fleet.under_way, fleet, task)


def _misfit_of_orders(orders: UnderWay, fleet: SimulatedState, task: objectives.Task) -> str:
    """Return why the orders under way in a fleet cannot go on, or ""."""
    if not _within(orders.device, task.devices):
        return "one of its orders is for a device that does not exist"
    if not _within(orders.cohort, len(orders.cohorts)):
        return "one of its orders was never submitted"
    for number, each in enumerate(orders.cohorts):
        mine = orders.take(orders.cohort == number)
        for cohort in (each.sent, each.received):
            if not _within(mine.row, len(cohort)) or (cohort.id[mine.row] != mine.id).any():
                return "one of its orders is another one"
    told = (orders.reason, REASONS), (orders.detail, orders.details)
    replies = orders.replies.take(orders.carried_out)
    if not all(_within(index[index >= 0], len(texts)) for index, texts in told) or not _within(
        replies.stack_index, len(replies.stacks)
    ):
        return "one of its orders ends with nothing"
    for phases in (orders.download, orders.compute, orders.upload):
        some = phases.take(phases.changes > 0)
        if phases.points.shape[1:] != (3,) or not _within(
            np.array([some.first, some.first + some.changes - 1]), len(phases.points)
        ):
            return "a phase of one of its orders has no points"
    events = orders.events
    times = np.where(events.training, events.trained, events.ends)
    numbers = np.unique(events.sequence)
    if (
        len(numbers) < len(orders)
        or not _within(numbers, fleet.clock.sequence)
        or times.min() < fleet.clock.now
    ):
        return "its clock has events that have passed, or were never scheduled"
    return ""


def _within(numbers: Ints, count: int) -> bool:
    return bool(((numbers >= 0) & (numbers < count)).all())
