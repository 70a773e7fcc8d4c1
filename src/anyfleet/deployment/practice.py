"""A practice fleet: everything that a real one has, on this machine's loopback.

The public commands are started as processes of their own, exactly as an engineer would start them
on several machines. What came out is compared with the simulator.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from anyfleet.core.loop import run as play_rounds
from anyfleet.core.messages import Conditions, Params
from anyfleet.deployment.serving import read_arrivals
from anyfleet.elastic.tracing.aliases import complete
from anyfleet.errors import AnyfleetError
from anyfleet.experiment import Prepared
from anyfleet.runtime import Simulated
from anyfleet.runtime.replayed import Arrived, Replayed

_PATIENCE = 120.0  # seconds for a command that ends by itself, and for a device to make its key
_LEAVE = 15.0  # seconds for a device to leave
_ADDRESS = "127.0.0.1"
_FASTEST, _LINKS = 64e6, 3  # bits per second of the second device; different links after it


@dataclass(frozen=True)
class Practice:
    """What is practised: a run file with changes, so many devices, in a folder."""

    file: Path
    overrides: tuple[str, ...]
    allow: tuple[str, ...]
    folder: Path
    identical: bool  # equal threads and given conditions, so that the simulator can be matched

    @property
    def fleet(self) -> Path:
        """The folder of the fleet."""
        return self.folder / "fleet"

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    def device(self, number: int) -> Path:
        """Return the folder of a device."""
        return self.folder / name_of(number)


class Compared(NamedTuple):
    """The model of a real run beside that of the simulator."""

    parameters: int
    differing: int  # numbers that are not the same bits
    largest: float  # difference
    replayed: bool  # whether the simulator had the arrivals of the real run


def name_of(number: int) -> str:
    """Return the name of a device."""
    return f"device-{number}"


def command(*words: str) -> list[str]:
    """Return the words that start a command of this very Anyfleet."""
    return [sys.executable, "-m", "anyfleet.cli", *words]


def practise(practice: Practice, prepared: Prepared) -> Iterator[str]:
    """Practise a run on as many devices as its task has; yield lines about what happens.

    Raise AnyfleetError with the end of what a command printed if it fails.
    """
    allow = [word for name in practice.allow for word in ("--allow", name)]
    port, count = free_port(), prepared.task.devices
    file, fleet = str(practice.file), str(practice.fleet)
    address = f"{_ADDRESS}:{port}"
    with ExitStack() as stack:
        # The bundle is that of the changed run file.
        _finished("fleet", "init", fleet, file, *practice.overrides, "--address", address, *allow)
        yield f"{practice.fleet}: a fleet at {address}, with its own authority and keys"
        for number in range(count):
            stack.enter_context(_device(practice, prepared, number))
        for number in range(count):
            key = practice.device(number) / "device.pub"
            _awaited(key, practice.device(number) / "log.txt")
            _finished("fleet", "add", fleet, name_of(number), "--key", str(key))
        yield f"{count} devices are enrolled, each a process with its own key and data"
        words = ["--out", str(practice.run), "--wait-for", str(count), *allow]
        served = ("fleet", "serve", fleet, file, *practice.overrides, *words)
        yield from _told(*served)


@contextmanager
def _device(practice: Practice, prepared: Prepared, number: int) -> Iterator[None]:
    """Run a device until the block ends; if all is well, it has until then left by itself."""
    process = device_process(practice, prepared, number, "--once")
    try:
        yield
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def device_process(
    practice: Practice, prepared: Prepared, number: int, *options: str
) -> subprocess.Popen[bytes]:
    """Start a device as a process, with its own folder, its part of the data and its log."""
    home, task, world = practice.device(number), prepared.task, prepared.world
    shutil.copytree(practice.fleet / "device", home)
    data, test = task.data(number), task.own_test(number)
    arrays = {"x": data.x, "y": data.y, "test_x": test.x, "test_y": test.y}
    plain: dict[str, Any] = {name: each.cpu().numpy() for name, each in arrays.items()}
    np.savez(home / "data.npz", **plain)
    declared = world.declared
    words = ["--data", str(home / "data.npz"), *options]
    words += ["--level", str(declared.level[number])]
    words += ["--column-width", repr(float(declared.column_width[number]))]
    words += [word for name in practice.allow for word in ("--allow", name)]
    threads = 1 if practice.identical else 1 + number % 2
    words += ["--threads", str(threads)]
    if not practice.identical and number:  # the first has all of the link
        words += ["--bit-rate", str(_FASTEST / 4 ** ((number - 1) % _LINKS))]
    if practice.identical:
        given = home / "conditions.json"
        given.write_text(json.dumps(given_conditions(prepared, number)))
        words += ["--given-conditions", str(given)]
    with (home / "log.txt").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - our own command
            command("device", "join", str(home), *words),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )


def given_conditions(prepared: Prepared, number: int) -> dict[str, float]:
    """Return the conditions that a device has in the simulated fleet at the beginning."""
    found = conditions_at_start(prepared).take([number])
    known = {each.name: float(getattr(found, each.name)[0]) for each in fields(Conditions)}
    return {name: value for name, value in known.items() if not np.isnan(value)}


def conditions_at_start(prepared: Prepared) -> Conditions:
    """Return what the devices of the simulated fleet report at the beginning."""
    fleet = Simulated(prepared.task, prepared.world)
    return fleet.conditions(np.arange(prepared.task.devices))


def compare(practice: Practice, prepared: Prepared) -> Compared:
    """Compare the model of a practised run with that of the simulator, or of a replay."""
    real = safetensors.torch.load_file(practice.run / "model.safetensors")
    return compare_models(real, prepared, read_arrivals(practice.run))


def compare_models(real: Params, prepared: Prepared, arrivals: Sequence[Arrived]) -> Compared:
    """Compare the model of a run, or some tensors of it, with the simulator, or with a replay.

    A run is replayed if orders are still under way when its rounds end: then the order in which
    replies came in decides what is computed.
    """
    experiment, task = prepared.experiment, prepared.task
    asynchronous = any(method_is_asynchronous(prepared))
    if asynchronous:
        declared, known = prepared.world.declared, conditions_at_start(prepared)
        fleet = Replayed(task, declared, known, arrivals, experiment.limits)
        rounds = play_rounds(experiment.method, task, fleet, experiment.seed)
        *_, last = islice(rounds, experiment.rounds)
        tree: Params = {**last.params, **last.buffers}
    else:
        *_, result = prepared.play()
        tree = {**result.round.params, **result.round.buffers}
    expected = complete(tree, task.blueprint.aliases)
    return _compared(real, {name: expected[name] for name in real}, replayed=asynchronous)


def method_is_asynchronous(prepared: Prepared) -> Iterator[bool]:
    """Yield for each round of the simulated run whether orders were under way at its end."""
    rounds = play_rounds(
        prepared.experiment.method,
        prepared.task,
        Simulated(prepared.task, prepared.world),
        prepared.experiment.seed,
    )
    for _ in range(min(2, prepared.experiment.rounds)):
        yield bool(len(next(rounds).snapshot.under_way))


def _compared(real: Params, expected: Mapping[str, torch.Tensor], *, replayed: bool) -> Compared:
    differing, largest, count = 0, 0.0, 0
    for name, value in expected.items():
        other, count = real[name], count + value.numel()
        differing += _differing(other, value)
        if value.numel():
            largest = max(largest, float((other.double() - value.double()).abs().max()))
    return Compared(count, differing, largest, replayed)


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many numbers are not the same bits: -0.0 is not 0.0, and a NaN is itself."""
    if one.dtype != other.dtype:
        return other.numel()
    left, right = (
        each.contiguous().reshape(-1).view(torch.uint8).reshape(-1, other.element_size())
        for each in (one, other)
    )
    return int((left != right).any(dim=1).sum())


# --- commands as processes ------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _finished(*words: str) -> None:
    """Run a command; raise AnyfleetError with what it printed if it fails."""
    done = subprocess.run(  # noqa: S603 - our own command
        command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE,
        env=_environment(),
        check=False,
    )
    if done.returncode:
        raise AnyfleetError(f"`anyfleet {' '.join(words)}` failed:\n{done.stdout}")


def _told(*words: str) -> Iterator[str]:
    """Run a command, and yield its lines as they come."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            yield line.rstrip("\n")
        if process.wait():
            raise AnyfleetError(f"`anyfleet {' '.join(words)}` failed:\n{''.join(lines[-20:])}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(_PATIENCE)


def _awaited(file: Path, log: Path) -> None:
    """Wait until a device has made its key."""
    until = time.monotonic() + _PATIENCE
    while not file.is_file():
        if time.monotonic() > until:
            told = log.read_text(errors="replace")[-2000:]
            raise AnyfleetError(f"a device made no {file.name}. Its log:\n{told}")
        time.sleep(0.1)


def free_port() -> int:
    """Return a port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        return int(probe.getsockname()[1])


def devices_override(overrides: Sequence[str], count: int | None) -> list[str]:
    """Return the changes of a run file, with the number of devices if one is given."""
    return [*overrides, *([] if count is None else [f"task.devices={count}"])]
