"""Reproducing an item: its experiments as one study, and the results of the study."""

import hashlib
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from os import environ
from pathlib import Path
from typing import Any

import torch

from anyfleet import config
from anyfleet.analysis.comparison import Goal
from anyfleet.analysis.summaries import Runs
from anyfleet.errors import ConfigError, Problem
from anyfleet.evidence.items import Item, digest
from anyfleet.evidence.measured import Cells, Key, label, serves
from anyfleet.evidence.results import BY_DEVICE, CellResult, Results, Series, series
from anyfleet.experiment import Experiment, RoundRecord, from_source
from anyfleet.runtime.simulated.engines import cores
from anyfleet.store import read_ledger, read_wall_seconds
from anyfleet.study import Cell, Study

COMMIT = "ANYFLEET_COMMIT"  # environment variable for copies of the project without its history


@dataclass(frozen=True)
class Extent:
    """How much of an item is run: which cases and methods, how many seeds, and if for a look."""

    seeds: int
    cases: tuple[str, ...] = ()  # none: all
    methods: tuple[str, ...] = ()  # as the columns of the table are called; none: all
    quick: bool = False


@dataclass(frozen=True)
class Reproduction:
    """An item as a study; equal experiments of several cases are played once."""

    item: Item
    study: Study
    names: Mapping[Key, str]  # of the cell of the study that each case with each method is
    shared: Mapping[Key, str] = field(default_factory=dict)  # items that have the results already
    known: tuple[Key, ...] = ()  # of which all results are there, where only others were asked for
    # Of the cells as the recipe has them: in a study that goes on, 1 may have become 1.0.
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A short text that is the same for equal studies."""
        parts = [f"{digest(cell.experiment)} {cell.seeds}" for cell in self.study.cells.values()]
        return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:8]


def reproduction(
    item: Item,
    extent: Extent,
    *,
    threads: int = 1,
    over: Mapping[str, Any] | None = None,
    elsewhere: Cells | None = None,
    there: Results | None = None,
    begun: Mapping[str, Sequence[int]] | None = None,
) -> Reproduction:
    """Return an item as a study; `over` names an engine and a device of torch.

    Experiments whose seeds are all among the results of other items, `elsewhere`, are left out, and
    so is every run whose result is among those that are `there` already, unless it is one of those
    that have `begun` (seeds by name), with which a study goes on. Raise ConfigError with all
    that is wrong with its experiments, and for cases and methods that it lacks.
    """
    require_known(item, extent)
    methods = [name for column in extent.methods for name in item.best.get(column, (column,))]
    cells: dict[str, Cell] = {}
    names: dict[Key, str] = {}
    known_as: dict[str, str] = {}  # names by digest
    shared: dict[Key, str] = {}
    known: list[Key] = []
    problems: list[Problem] = []
    for case, column in item.pairs():
        if extent.cases and case.name not in extent.cases:
            continue
        if methods and column.name not in methods:
            continue
        name = label(case, column)
        try:
            experiment = from_source(item.source(case, column, quick=extent.quick, over=over))
        except ConfigError as error:
            problems += [each.within(name) for each in error.problems]
            continue
        if owner := _owner(item, experiment, extent.seeds, elsewhere or {}):
            shared[case.name, column.name] = owner
            continue
        going_on = (begun or {}).get(name, ())
        seeds = _left(item, experiment, extent.seeds, there, going_on)
        if not seeds:
            known.append((case.name, column.name))
            continue
        key = digest(experiment)
        same = known_as.setdefault(key, name)
        names[case.name, column.name] = same
        if same == name:
            cells[name] = _cell(experiment, seeds, item.home)
    if problems:
        raise ConfigError(problems)
    study = Study(cells, "reproduce", threads, Goal())
    digests = {name: key for key, name in known_as.items()}
    return Reproduction(item, study, names, shared, tuple(known), digests)


def _left(
    item: Item, experiment: Experiment, count: int, there: Results | None, begun: Sequence[int]
) -> tuple[int, ...]:
    """Return the seeds of so many that have begun, or whose results are not there."""
    cell = there.cells.get(digest(experiment)) if there is not None else None
    known = cell.runs if cell is not None and serves(item, cell) else {}
    return tuple(s for s in _seeds(experiment, count) if s not in known or s in begun)


def _owner(item: Item, experiment: Experiment, seeds: int, elsewhere: Cells) -> str:
    """Return the other item that has the results of an experiment already, or ""."""
    owner, cell = elsewhere.get(digest(experiment), ("", None))
    if cell is None or owner == item.name or not serves(item, cell):
        return ""
    return owner if set(_seeds(experiment, seeds)) <= set(cell.runs) else ""


def require_known(item: Item, extent: Extent) -> None:
    """Raise ConfigError for cases and methods that an item lacks."""
    unknown = [
        Problem(option, f"there is no {name!r}; there are {'; '.join(known)}.")
        for option, names, known in (
            ("--case", extent.cases, tuple(item.cases)),
            ("--method", extent.methods, item.columns),
        )
        for name in names
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)


def _cell(experiment: Experiment, seeds: tuple[int, ...], home: Path | None) -> Cell:
    open_ = tuple(
        key
        for key, value in (("engine", experiment.engine), ("device", experiment.device))
        if value == "auto"
    )
    return Cell(replace(experiment, seed=seeds[0]), seeds, (), home, open_)


def _seeds(experiment: Experiment, count: int) -> tuple[int, ...]:
    """Return so many seeds, counted up from the experiment's own."""
    return tuple(range(experiment.seed, experiment.seed + count))


@dataclass(frozen=True)
class Origin:
    """Where results come from: the command, and the date and the commit when it began."""

    command: str
    date: str
    commit: str


def origin(item: Item, command: str) -> Origin:
    """Return where the results of a command that begins now come from."""
    return Origin(command, f"{datetime.now(UTC):%Y-%m-%d}", commit(item.home))


def results_of(found: Reproduction, runs: Runs, origin: Origin, folder: Path) -> Results:
    """Return the results of a study in a folder; cells without a finished run are left out."""
    homes = {(run.name, run.seed): folder / run.folder for run in found.study.runs()}
    cells: dict[str, CellResult] = {}
    for (case, method), name in found.names.items():
        cell, done = found.study.cells[name], runs.get(name, {})
        key = found.digests[name]
        if not done or key in cells:
            continue
        keys = [each for each, same in found.names.items() if same == name]
        cells[key] = CellResult(
            digest=key,
            case=case,
            method=method,
            rounds=cell.experiment.rounds,
            devices=_devices(cell.experiment),
            machine=machine(cell.experiment),
            date=origin.date,
            commit=origin.commit,
            minutes=round(math.fsum(read_wall_seconds(homes[name, s]) for s in done) / 60, 2),
            runs={seed: _series(found.item, r, homes[name, seed]) for seed, r in done.items()},
            command=origin.command,
            also=tuple(each for each in keys if each != (case, method)),
        )
    return Results(found.item.name, cells=cells)


def _series(item: Item, records: Sequence[RoundRecord], home: Path) -> Series:
    """Return a run at its evaluations; its ledger is read only if the item asks for it."""
    asked = any(name in BY_DEVICE for name in item.diagnostics)
    return series(records, item.diagnostics, read_ledger(home) if asked else None)


def _devices(experiment: Experiment) -> int:
    """Return how many devices a task has, as its description says."""
    data = config.dump(experiment.task, complete=True)
    return int(_number(data) or 0)


def _number(data: Any) -> int | None:
    """Return the number of devices in the plain data of a task, or in a part of it."""
    if not isinstance(data, Mapping):
        return None
    if isinstance(data.get("devices"), int):
        return int(data["devices"])
    found = (_number(value) for value in data.values())
    return next((each for each in found if each is not None), None)


def machine(experiment: Experiment) -> str:
    """Return on what an experiment was carried out, as people say it."""
    told = [f"{cores()} cores", platform.machine()]
    if experiment.device.startswith("cuda") and torch.cuda.is_available():
        told.insert(0, torch.cuda.get_device_name())
    if experiment.engine != "auto":
        precision = getattr(experiment.engine, "precision", "")
        told.append(f"{type(experiment.engine).__name__} {precision}".strip())
    return ", ".join(told)


def commit(folder: Path | None) -> str:
    """Return the commit of the project's copy, "+" after it if files differ; "" if nobody knows."""
    if told := environ.get(COMMIT):
        return told
    head = _git(folder, "rev-parse", "--short", "HEAD")
    changed = head and _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if changed else head


def _git(folder: Path | None, *words: str) -> str:
    """Return what git says in a folder; "" if it is not there, or if the folder has no history."""
    command = ("git", "-C", str(folder or "."), *words)
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own words
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
