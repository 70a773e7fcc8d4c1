"""`anyfleet fleet show` and `anyfleet fleet profile`: fleets, and this machine as a row of one."""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_type_hints

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from anyfleet import config, names, world
from anyfleet.analysis.fleet_portrait import HOURS, Portrait, portray, varies
from anyfleet.analysis.plots import NoPictures, draw_fleet
from anyfleet.arrays import Floats
from anyfleet.cli.run import RUNS
from anyfleet.cli.screen import console
from anyfleet.cli.tables import grid
from anyfleet.core.limits import MOST_DEVICES
from anyfleet.core.objectives import Task
from anyfleet.elastic import Slice
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import build, load
from anyfleet.hardware.probes import Peak, Sample, measure, standard, weigh
from anyfleet.hardware.profile import Profile, as_toml, conclude, slices
from anyfleet.store import fresh
from anyfleet.world import Fleet, Group, World
from anyfleet.world.quantities import bounds

DEVICES = 20  # if neither the fleet nor a task says how many


@dataclass(frozen=True)
class Described:
    """The field of a run file that describes a fleet."""

    fleet: Fleet


@dataclass(frozen=True)
class Look:
    """How a fleet is shown: with how many devices, drawn with which seed, in which file."""

    devices: int | None = None
    seed: int = 0
    out: Path | None = None


def show_fleet(name: str, overrides: Sequence[str], *, allow: Sequence[str], look: Look) -> None:
    """Show a fleet as tables and as a picture; everything is checked before that."""
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
    """Return the names of fleets: the functions of `anyfleet.world` that make one."""
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
    """Return the fleet of a file, which need not have a task or a method."""
    if "fleet" not in source.data:
        raise ConfigError([Problem("fleet", f"{name} has no table [fleet] or [[fleet.groups]].")])
    only = replace(source, data={"fleet": source.data["fleet"]})
    described: Described = only.load(Described)
    return described.fleet


def _asked(source: config.Source) -> int | None:
    """Return how many devices the task of a run file has, or None if it does not say."""
    task: Any = source.data.get("task")
    devices = task.get("devices") if isinstance(task, Mapping) else None
    return devices if isinstance(devices, int) and devices > 0 else None


def _populated(fleet: Fleet, devices: int, seed: int) -> World:
    if devices > MOST_DEVICES:
        told = f"has {devices:,} devices, more than {MOST_DEVICES:,}. Ask for fewer."
        raise ConfigError([Problem("fleet", told)])
    try:
        # Without a task, owners are those that the fleet itself names.
        owners = [*fleet.owners, *[""] * devices][:devices] if fleet.owners else ()
        return fleet.build(np.ones(devices, dtype=np.int64), seed, owners)
    except ValueError as error:
        raise ConfigError([Problem("fleet", str(error))]) from error


def _free(out: Path | None, name: str) -> Path:
    if out is None:
        return fresh(RUNS, f"fleet-{name}") / "fleet.png"
    if out.exists():
        raise FileExistsError(f"{out} already exists; choose another file, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Field:
    """A field of the tables: values [hours, devices] in the unit of its head."""

    head: str
    values: Floats
    usual: float | None = None  # not shown if all devices have this value


def _computing(seen: Portrait) -> Iterator[Field]:
    (memory, _) = bounds(Group().memory)
    yield Field("level", seen.level[np.newaxis].astype(np.float64))
    yield Field("GFLOP/s", seen.speed / 1e9)
    yield Field("J/GFLOP", seen.energy)
    yield Field("ms/step", seen.overhead * 1e3, 0.0)
    yield Field("memory GB", seen.memory / 1e9, memory / 1e9)
    yield Field("battery kJ", seen.battery / 1e3, math.inf)
    yield Field("J an order", seen.budget, math.inf)


def _reaching(seen: Portrait) -> Iterator[Field]:
    (distance, _) = bounds(Group().distance)
    yield Field("Mbit/s up", seen.bit_rate_up / 1e6)
    yield Field("Mbit/s down", seen.bit_rate_down / 1e6)
    yield Field("metres", seen.distance, distance)
    yield Field("online %", 100.0 * seen.online.mean(axis=0, keepdims=True), 100.0)
    yield Field("dies %", 100.0 * seen.mortality, 0.0)


def _tables(seen: Portrait, made: World, width: int) -> Iterator[Table]:
    """Yield tables of the groups: what their devices can do, and how they are reached."""
    told = _told(_computing(seen))
    rows = _rows(seen, told)
    counts = [f"{count:,}" for count in seen.counts]
    cells = {name: (n, *rows[name]) for name, n in zip(seen.names, counts, strict=True)}
    yield grid(("devices", *(field.head for field in told)), cells, width)
    told = _told(_reaching(seen))
    rows = _rows(seen, told)
    heads = [field.head for field in told]
    if made.lossy:
        heads.append("columns lost")
        lost = map(_lost, made.groups)
        rows = {name: [*rows[name], each] for name, each in zip(seen.names, lost, strict=True)}
    yield grid(heads, rows, width)


def _told(fields: Iterable[Field]) -> list[Field]:
    return [each for each in fields if each.usual is None or np.any(each.values != each.usual)]


def _rows(seen: Portrait, fields: Sequence[Field]) -> dict[str, list[str]]:
    return {
        name: [_range(field.values[:, seen.group == number]) for field in fields]
        for number, name in enumerate(seen.names)
    }


def _lost(group: Group) -> str:
    if group.column_loss.minimum_bit_rate is not None:
        return f"below {_short(group.column_loss.minimum_bit_rate / 1e6)} Mbit/s"
    low, high = bounds(group.column_loss.error)
    return f"{_ends(100 * low, 100 * high)} %"


def _range(values: Floats) -> str:
    """Return the median and, if values differ, the least and the most of them."""
    if not values.size:
        return "–"
    middle = _short(float(np.median(values)))
    if not varies(values):
        return middle
    return f"{middle} ({_ends(float(values.min()), float(values.max()))})"


def _ends(low: float, high: float) -> str:
    return _short(low) if low == high else f"{_short(low)}–{_short(high)}"


def _short(value: float) -> str:
    """Return a number with three significant digits."""
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
        f"{HOURS} hours, with a round each. Random numbers are drawn with seed {made.seed}."
    )
    yield made.assignment
    if len(seen.device) < len(made):
        yield f"Shown are {len(seen.device):,} of the devices."
    if any(link.shared for link in made.links):
        yield "Bit rates are those of a device alone on its link; active devices share a band."


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


# --- profile ------------------------------------------------------------------------------------


def profile_machine(
    out: Path | None,
    *,
    file: Path | None = None,
    allow: Sequence[str] = (),
    batch: int = 16,
    name: str = "this machine",
) -> None:
    """Measure this machine, show how well one row of a fleet explains it, append it to a file.

    Measured are slices of the model in a run file, or of three usual networks (specification §C).
    Nothing is measured before the file is known to be TOML that can take a row.
    """
    screen = console()
    if out is not None:
        _extended(out, "[[fleet.groups]]\n")
    tasks = standard(batch) if file is None else {file.stem: build(load(file, (), allow))}
    samples, peaks = _measured(tasks, batch, screen)
    found = conclude(samples, peaks)
    screen.print(_table(found, screen.width))
    errors = [abs(found.fitted.error(sample)) for sample in samples]
    screen.print(f"\nMedian error {median(errors):.0%}, largest {max(errors):.0%}.")
    for peak in peaks:
        screen.print(
            f"{peak.net}: training takes {peak.measured / 1e6:,.1f} MB at its peak; "
            f"planners count {peak.predicted / 1e6:,.1f} MB.",
            markup=False,
        )
    row = as_toml(found, name)
    screen.print(f"\n{row}", markup=False)
    if out is not None:
        out.write_text(_extended(out, row), encoding="utf-8")
        screen.print(f"Written to {out}.", markup=False, soft_wrap=True)


def _measured(
    tasks: Mapping[str, Task], batch: int, screen: Console
) -> tuple[list[Sample], list[Peak]]:
    wanted = [(net, slice_) for net, task in tasks.items() for slice_ in slices(task)]
    samples = [measure(net, tasks[net], each, batch) for net, each in _shown(wanted, screen)]
    return samples, [weigh(net, task, batch) for net, task in tasks.items()]


def _shown(wanted: Sequence[tuple[str, Slice]], screen: Console) -> Iterator[tuple[str, Slice]]:
    """Yield what to measure, with a bar on a terminal and a line for each network elsewhere."""
    if screen.is_terminal:
        yield from track(wanted, "measuring", console=screen)
        return
    said = ""
    for net, slice_ in wanted:
        if net != said:
            screen.print(f"measuring {net}", markup=False)
        said = net
        yield net, slice_


def _extended(file: Path, row: str) -> str:
    """Return the text of a file with one more row; raise ConfigError if that is not TOML."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    text = f"{before.rstrip()}\n\n{row}" if before.strip() else row
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = Problem(str(file), f"no [[fleet.groups]] can be added at its end: {error}")
        raise ConfigError([problem]) from error
    return text


def _table(found: Profile, width: int) -> Table:
    """Return a row for each slice: milliseconds of one local step."""
    rows = {}
    for sample in found.samples:
        depth = (
            f", trained from layer {sample.first_trained_layer}"
            if sample.first_trained_layer
            else ""
        )
        measured = 1e3 * sample.seconds / sample.local_steps
        fitted = 1e3 * found.fitted.seconds(sample) / sample.local_steps
        cells = (f"{measured:,.2f}", f"{fitted:,.2f}", f"{found.fitted.error(sample):+.0%}")
        rows[f"{sample.net} width {sample.width:.3g}{depth}"] = cells
    return grid(("measured ms", "fitted ms", "error"), rows, width)
