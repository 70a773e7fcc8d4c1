"""Facts of a fleet and its data, as a run file describes them; no data set is read for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from anyfleet import config
from anyfleet.analysis.fleet_portrait import Portrait, portray
from anyfleet.core.limits import MOST_DEVICES
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import TaskSpec
from anyfleet.tasks import partition as partitions
from anyfleet.world import Fleet, World
from anyfleet.world.quantities import bounds

_DEVICES = 20  # if neither the fleet nor a task says how many
_HELD = 12  # bytes for each parameter: itself, its gradient, its momentum
_ALIKE = (partitions.Iid, partitions.LogNormalSizes, partitions.DirichletSizes)
_EVEN = 5.0  # a Dirichlet split with at least this alpha leaves devices alike
_BITS = 32  # of a parameter
_DIGITS = 4  # significant ones of every fact


class FleetFacts(msgspec.Struct, frozen=True):
    """What matters of a fleet and its data; None where the file does not say."""

    devices: int
    spread: float  # speed of the fastest device, divided by that of the slowest
    drop_outs: float  # share of orders that fail because a device dies or is not online
    lost_columns: float  # probability that a link loses a column
    limited_energy: bool  # some device has a battery, or joules that an order may cost
    upload: float | None = None  # seconds that the median device needs to send the whole model
    skewed: bool | None = None  # devices have different labels, or data of different owners
    too_small: float | None = None  # share of devices whose memory cannot hold the whole model

    def told(self) -> tuple[str, ...]:
        """Return the facts as people read them."""
        lines = [f"{self.devices} devices, the fastest {self.spread:.3g} times the slowest"]
        if self.upload is None:
            lines.append("no task: size of the model and skew of the data are not known")
        else:
            lines.append(f"the whole model takes the median device {self.upload:.3g} s to send")
        if self.skewed is not None:
            lines.append("data differ between devices" if self.skewed else "data are alike (iid)")
        if self.lost_columns:
            lines.append(f"links lose {100 * self.lost_columns:.3g} % of the columns")
        if self.drop_outs:
            lines.append(f"{100 * self.drop_outs:.3g} % of the orders fail with their device")
        if not self.lost_columns and not self.drop_outs:
            lines.append("links and devices are stable")
        if self.limited_energy:
            lines.append("energy is limited")
        if self.too_small:
            lines.append(f"{100 * self.too_small:.3g} % of the devices cannot hold the whole model")
        return tuple(lines)


@dataclass(frozen=True)
class _WithFleet:
    fleet: Fleet


@dataclass(frozen=True)
class _WithTask:
    task: TaskSpec


def facts_of(source: config.Source, name: str) -> FleetFacts:
    """Return the facts of a run file, or of a file that describes a fleet alone.

    Raise ConfigError with all that is wrong with its fleet and its task.
    """
    fleet, task = _read(source, name)
    world = _populated(fleet, fleet.size or _devices(task) or _DEVICES)
    seen, size = portray(world), _parameters(task)
    rates = np.median(seen.bit_rate_up)
    held = None if size is None else float(np.mean(seen.memory.min(axis=0) < _HELD * size))
    limits = np.concatenate([seen.battery.ravel(), seen.budget.ravel()])
    return FleetFacts(
        devices=len(world),
        spread=_short(float(seen.speed.mean(axis=0).max() / seen.speed.mean(axis=0).min())),
        drop_outs=_short(_failing(seen)),
        lost_columns=_short(_lost(world)),
        limited_energy=bool(np.isfinite(limits).any()),
        upload=None if size is None else _short(float(_BITS * size / rates)),
        skewed=_skewed(task),
        too_small=held,
    )


def _read(source: config.Source, name: str) -> tuple[Fleet, TaskSpec | None]:
    """Return the fleet of a file, and its task if it has one."""
    problems: list[Problem] = []
    if "fleet" not in source.data:
        problems.append(Problem("fleet", f"{name} has no table [fleet] or [[fleet.groups]]."))
    kinds: Mapping[str, type] = {"fleet": _WithFleet, "task": _WithTask}
    made: dict[str, Any] = {}
    for key, kind in kinds.items():
        if key in source.data:
            try:
                only = replace(source, data={key: source.data[key]})
                made[key] = getattr(only.load(kind), key)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made["fleet"], made.get("task")


def _populated(fleet: Fleet, devices: int) -> World:
    if devices > MOST_DEVICES:
        told = f"has {devices:,} devices, more than {MOST_DEVICES:,}."
        raise ConfigError([Problem("fleet", told)])
    try:
        owners = [*fleet.owners, *[""] * devices][:devices] if fleet.owners else ()
        return fleet.build(np.ones(devices, dtype=np.int64), 0, owners)
    except ValueError as error:
        raise ConfigError([Problem("fleet", str(error))]) from error


def _devices(task: TaskSpec | None) -> int | None:
    devices = getattr(task, "devices", None)
    return devices if isinstance(devices, int) else None


def _parameters(task: TaskSpec | None) -> int | None:
    """Return how many parameters the network of a task has; None if it does not name one."""
    model = getattr(task, "model", None)
    if model is None:
        return None
    return int(sum(parameter.numel() for parameter in model.make().parameters()))


def _skewed(task: TaskSpec | None) -> bool | None:
    """Return whether a task gives its devices data that differ; None if it does not say how."""
    partition = getattr(task, "partition", None)
    if partition is None or isinstance(partition, partitions.Given):
        return None
    if isinstance(partition, partitions.Dirichlet):
        return partition.alpha < _EVEN
    return not isinstance(partition, _ALIKE)


def _failing(seen: Portrait) -> float:
    """Return the share of orders that fail with their device: it dies, or is not online."""
    return float(np.mean(1 - (1 - seen.mortality) * seen.online))


def _lost(world: World) -> float:
    """Return the mean probability that a link loses a column, over the devices."""
    each = [math.fsum(bounds(group.column_loss.error)) / 2 for group in world.groups]
    return float(np.mean(np.array(each)[world.group]))


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
