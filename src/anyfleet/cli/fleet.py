"""`anyfleet fleet show`: who the devices of a fleet are, as a table and as a picture."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from rich.table import Table

from anyfleet import config, names, world
from anyfleet.analysis.fleet_portrait import HOURS, Portrait, portray, varies
from anyfleet.analysis.plots import NoPictures, draw_fleet
from anyfleet.arrays import Floats
from anyfleet.cli.record import RUNS
from anyfleet.cli.screen import console, grid
from anyfleet.core.messages import MOST_DEVICES
from anyfleet.errors import ConfigError, Problem
from anyfleet.store import fresh
from anyfleet.world import Fleet, Group, World
from anyfleet.world.quantities import bounds

DEVICES = 20  # where neither the fleet nor a task says how many


@dataclass(frozen=True)
class Described:
    """The part of a run file that describes a fleet."""

    fleet: Fleet


@dataclass(frozen=True)
class Look:
    """How a fleet is looked at: with how many devices, drawn with which seed, into which file."""

    devices: int | None = None
    seed: int = 0
    out: Path | None = None


def show_fleet(name: str, overrides: Sequence[str], *, allow: Sequence[str], look: Look) -> None:
    """Everything is checked before anything is drawn."""
    source = _source(name, overrides, allow)
    fleet = _fleet(source, name)
    made = _populated(fleet, look.devices or fleet.size or _asked(source) or DEVICES, look.seed)
    file = _free(look.out, Path(name).stem)
    portrait, screen = portray(made), console()
    title = f"{Path(name).stem}: {_many(len(made), 'device')}"
    for table in _tables(portrait, made, screen.width):
        screen.print(table)
        screen.print()
    for line in _totals(portrait, made):
        screen.print(line, markup=False, soft_wrap=True)
    try:
        draw_fleet(file, portrait, title=title)
    except NoPictures as missing:
        screen.print(f"({missing})", markup=False)
    else:
        screen.print(f"Picture: {file}", markup=False, soft_wrap=True)


def presets() -> tuple[str, ...]:
    """The fleets that have a name: what makes one, in `anyfleet.world`."""
    functions = {name: getattr(world, name) for name in names.public_names("anyfleet.world")}
    return tuple(
        name
        for name, thing in functions.items()
        if not isinstance(thing, type) and get_type_hints(thing).get("return") is Fleet
    )


def _source(name: str, overrides: Sequence[str], allow: Sequence[str]) -> config.Source:
    if name in presets():
        return config.Source(config.override({"fleet": {"use": name}}, overrides), tuple(allow))
    if name.endswith(".csv"):
        table = {"fleet": {"use": "Table", "file": name}}
        return config.Source(config.override(table, overrides), tuple(allow))
    if not Path(name).exists() and not name.endswith(".toml"):
        known = ", ".join(presets())
        hint = names.near(name, presets()) or "."
        message = f"is neither a file nor one of the known fleets ({known}){hint}"
        raise ConfigError([Problem(name, message)])
    return config.read(name, overrides, allow)


def _fleet(source: config.Source, name: str) -> Fleet:
    """Only the fleet is looked at: a file need not have a task or a method."""
    if "fleet" not in source.data:
        raise ConfigError([Problem("fleet", f"{name} has no table [fleet] or [[fleet.groups]].")])
    only = replace(source, data={"fleet": source.data["fleet"]})
    described: Described = only.load(Described)
    return described.fleet


def _asked(source: config.Source) -> int | None:
    """How many devices the task of a whole run file has, when it says so."""
    task: Any = source.data.get("task")
    devices = task.get("devices") if isinstance(task, Mapping) else None
    return devices if isinstance(devices, int) and devices > 0 else None


def _populated(fleet: Fleet, devices: int, seed: int) -> World:
    if devices > MOST_DEVICES:
        told = f"has {devices} devices, and {MOST_DEVICES:,} are the most. Ask for fewer."
        raise ConfigError([Problem("fleet", told)])
    try:
        # Without a task there are the owners whom the fleet names itself.
        owners = [*fleet.owners, *[""] * devices][:devices] if fleet.owners else ()
        return fleet.build(np.ones(devices, dtype=np.int64), seed, owners)
    except ValueError as error:
        raise ConfigError([Problem("fleet", str(error))]) from error


def _free(out: Path | None, name: str) -> Path:
    if out is None:
        return fresh(RUNS, f"fleet-{name}") / "fleet.png"
    if out.exists():
        raise FileExistsError(f"{out} is there already: name another, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """What is told of each group: numbers [hours, devices] in the unit of the head."""

    head: str
    values: Floats
    usual: float | None = None  # not worth a column when everybody has it


def _computing(seen: Portrait) -> Iterator[Column]:
    (memory, _) = bounds(Group().memory)
    yield Column("level", seen.level[np.newaxis].astype(np.float64))
    yield Column("GFLOP/s", seen.speed / 1e9)
    yield Column("J/GFLOP", seen.energy)
    yield Column("ms/step", seen.overhead * 1e3, 0.0)
    yield Column("memory GB", seen.memory / 1e9, memory / 1e9)
    yield Column("battery kJ", seen.battery / 1e3, math.inf)
    yield Column("J an order", seen.budget, math.inf)


def _reaching(seen: Portrait) -> Iterator[Column]:
    (distance, _) = bounds(Group().distance)
    yield Column("Mbit/s up", seen.bit_rate_up / 1e6)
    yield Column("Mbit/s down", seen.bit_rate_down / 1e6)
    yield Column("metres", seen.distance, distance)
    yield Column("online %", 100.0 * seen.online.mean(axis=0, keepdims=True), 100.0)
    yield Column("dies %", 100.0 * seen.mortality, 0.0)


def _tables(seen: Portrait, made: World, width: int) -> Iterator[Table]:
    """One row per group: what its devices can do, and how they are reached."""
    told = _told(_computing(seen))
    rows = _rows(seen, told)
    counts = [f"{count:,}" for count in seen.counts]
    cells = {name: (n, *rows[name]) for name, n in zip(seen.names, counts, strict=True)}
    yield grid(("devices", *(column.head for column in told)), cells, width)
    told = _told(_reaching(seen))
    rows = _rows(seen, told)
    heads = [column.head for column in told]
    if made.lossy:
        heads.append("columns lost")
        lost = map(_lost, made.groups)
        rows = {name: [*rows[name], each] for name, each in zip(seen.names, lost, strict=True)}
    yield grid(heads, rows, width)


def _told(columns: Iterable[Column]) -> list[Column]:
    return [each for each in columns if each.usual is None or np.any(each.values != each.usual)]


def _rows(seen: Portrait, columns: Sequence[Column]) -> dict[str, list[str]]:
    return {
        name: [_range(column.values[:, seen.group == number]) for column in columns]
        for number, name in enumerate(seen.names)
    }


def _lost(group: Group) -> str:
    if group.column_loss.minimum_bit_rate is not None:
        return f"below {_short(group.column_loss.minimum_bit_rate / 1e6)} Mbit/s"
    low, high = bounds(group.column_loss.error)
    return f"{_ends(100 * low, 100 * high)} %"


def _range(values: Floats) -> str:
    """The median and, where there are several numbers, from where to where they go."""
    if not values.size:
        return "–"
    middle = _short(float(np.median(values)))
    if not varies(values):
        return middle
    return f"{middle} ({_ends(float(values.min()), float(values.max()))})"


def _ends(low: float, high: float) -> str:
    return _short(low) if low == high else f"{_short(low)}–{_short(high)}"


def _short(value: float) -> str:
    """Three digits."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _totals(seen: Portrait, made: World) -> Iterator[str]:
    speed = np.median(seen.speed, axis=0)
    ratio = (
        f"the fastest is {_short(float(speed.max() / speed.min()))} times as fast as the slowest"
    )
    contrast = ratio if varies(speed) else "all are equally fast"
    groups = _many(len(made.groups), "group")
    yield f"{_many(len(made), 'device')} in {groups}; {contrast}."
    yield (
        "Numbers are medians; in brackets, the least and the most of a group's devices over "
        f"{HOURS} hours, each a round. Distributions are drawn with seed {made.seed}."
    )
    yield made.assignment
    if len(seen.device) < len(made):
        yield f"Looked at {len(seen.device):,} of the devices."
    if any(link.shared for link in made.links):
        yield "Rates are those of a device that is alone on the air; active ones share a band."


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
