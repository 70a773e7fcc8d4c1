"""The state of a study on disk: what it is, so that the same study can go on in its folder."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

import anyfleet
from anyfleet import config
from anyfleet.analysis.comparison import Goal
from anyfleet.config.allowed_packages import trusted
from anyfleet.errors import ConfigError, Problem, StoreError
from anyfleet.experiment import from_source
from anyfleet.store.disk import Lock, force_folder, refuse_links, told, write
from anyfleet.store.study_folders import STUDY
from anyfleet.study.plan import Cell, Study, written

FILE = STUDY
FORMAT = 1
_BEGUN = frozenset({"lock", f".{FILE}.part"})  # all that a study has before its state is written
_MOST = 12  # differences that are told


class _Cell(msgspec.Struct, forbid_unknown_fields=True):
    seeds: Annotated[list[int], msgspec.Meta(min_length=1)]
    allow: list[str]
    home: str
    left_open: list[str]
    metrics: list[str]
    experiment: dict[str, Any]
    seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class _Study(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    kind: str
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)]  # far more would end the process
    executions: list[str]
    cells: Annotated[dict[str, _Cell], msgspec.Meta(min_length=1)]
    goal: dict[str, Any] = {}


def holds_study(folder: Path) -> bool:
    """Return whether a folder has the state of a study."""
    return (folder / FILE).is_file()


def record(folder: Path, study: Study) -> None:
    """Write the state of a study into its folder, as a whole."""
    count = len(study.runs())
    head = f"# Anyfleet {anyfleet.__version__}: a study of {count} runs."
    head += f" To go on: anyfleet resume {folder}\n\n"
    data = {
        "format": FORMAT,
        "kind": study.kind,
        "threads": study.threads,
        "executions": list(study.executions),
        "goal": {key: value for key, value in asdict(study.goal).items() if value is not None},
        "cells": {
            name: {
                "seeds": list(cell.seeds),
                "allow": list(cell.allow),
                "home": str(cell.home or ""),
                "left_open": list(cell.left_open),
                "metrics": list(cell.metrics),
                "seconds": cell.seconds,
                "experiment": written(cell.experiment),
            }
            for name, cell in study.cells.items()
        },
    }
    write(folder / FILE, (head + config.to_toml(data)).encode())


def read(folder: Path, allow: Sequence[str] = ()) -> Study:
    """Return the study in a folder; `allow` names packages whose code it may use.

    Raise StoreError if there is none that can be read, and ConfigError if one of its experiments
    cannot be made.
    """
    refuse_links(folder, [FILE, "lock"], ["lock"])
    file = folder / FILE
    try:
        found = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _Study)
        goal = config.load(found.goal, Goal)
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError, ConfigError, msgspec.ValidationError) as error:
        raise StoreError(
            f"{file} is damaged: {error}. Restore it, or name another folder."
        ) from error
    if found.format != FORMAT:
        raise StoreError(
            f"{file} has format {found.format}, but this version reads only {FORMAT}. Use the "
            "version of Anyfleet that wrote it."
        )
    cells = _loaded(found.cells, allow)
    executions = tuple(found.executions)
    study = Study(cells, found.kind, found.threads, goal, executions)
    # A stranger may have made the folder.
    refuse_links(folder, {part for run in study.runs() for part in _parts(run.folder)})
    return study


def _parts(folder: Path) -> tuple[str, str]:
    return str(folder.parent), str(folder)


def _loaded(cells: Mapping[str, _Cell], allow: Sequence[str]) -> dict[str, Cell]:
    """Return cells with their experiments; raise ConfigError with the problems of all."""
    settings = tuple(name for name in trusted() if name not in allow)
    granted = tuple(dict.fromkeys((*allow, *settings)))
    found: dict[str, Cell] = {}
    problems: dict[str, Problem] = {}
    for name, cell in cells.items():
        home = Path(cell.home) if cell.home and Path(cell.home).is_dir() else None
        asked = tuple(cell.allow)
        source = config.Source(cell.experiment, granted, home, (), asked, settings)
        try:
            experiment = from_source(source)
        except ConfigError as error:
            for each in error.problems:
                problems.setdefault(str(each), each.within(name))
            continue
        rest = (tuple(cell.left_open), tuple(cell.metrics), cell.seconds)
        found[name] = Cell(experiment, tuple(cell.seeds), granted, home, *rest)
    if problems:
        raise ConfigError([*problems.values()])
    return found


# --- folders ------------------------------------------------------------------------------------


def occupied(folder: Path) -> bool:
    """Return whether a folder has anything but the beginnings of a study."""
    if not folder.exists():
        return False
    return not folder.is_dir() or any(file.name not in _BEGUN for file in folder.iterdir())


def in_use(folder: Path) -> bool:
    """Return whether another process writes into the folder of a study."""
    if not (folder / "lock").is_file():
        return False
    try:
        Lock(folder).release()
    except StoreError:
        return True
    return False


def claim(folder: Path) -> Lock:
    """Make the folder of a new study, or take it if it is empty; return the right to write there.

    Raise FileExistsError if there is something else, and StoreError if another process has it.
    """
    if occupied(folder):
        if in_use(folder):
            Lock(folder)  # which says by whom
        raise FileExistsError(
            f"{folder} already exists and is not empty; choose another, or remove it."
        )
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        force_folder(folder.parent)
    return Lock(folder)


# --- is it the same study? ----------------------------------------------------------------------


def grown(folder: Path, there: Study, asked: Study) -> Study:
    """Return the study in a folder with the seeds that are asked for, which may be more.

    Raise StoreError, which says what differs, unless the runs are the same otherwise.
    """
    require_same(folder, there, asked)
    return replace(
        there,
        cells={name: _seeded(cell, asked.cells[name].seeds) for name, cell in there.cells.items()},
    )


def _seeded(cell: Cell, seeds: tuple[int, ...]) -> Cell:
    """Return an experiment of a study with these seeds."""
    if set(seeds) == set(cell.seeds):
        return cell
    return replace(cell, experiment=replace(cell.experiment, seed=seeds[0]), seeds=seeds)


def require_same(folder: Path, there: Study, asked: Study) -> None:
    """Raise StoreError, which says what differs, unless what is asked for has all runs there."""
    found = list(differences(there, asked))
    if not found:
        return
    listed = "".join(f"\n  {each}" for each in found[:_MOST])
    more = f"\n  and {len(found) - _MOST} more" if len(found) > _MOST else ""
    raise StoreError(
        f"{folder} holds another study:{listed}{more}\nName another folder with --out, or go on "
        f"with that study: anyfleet resume {folder}"
    )


def differences(there: Study, asked: Study) -> Iterator[str]:
    """Yield what differs in the runs of two studies, but for further seeds, as texts."""
    if there.threads != asked.threads:
        yield f"--threads: {there.threads} there, {asked.threads} asked for"
    for name in there.cells:
        if name not in asked.cells:
            yield f"{name}: runs there, not asked for"
    for name, cell in asked.cells.items():
        if name not in there.cells:
            yield f"{name}: asked for, not there"
            continue
        other = there.cells[name]
        if not set(other.seeds) <= set(cell.seeds):
            yield (
                f"{name}: seeds {_listed(other.seeds)} there, {_listed(cell.seeds)} asked for; "
                "seeds can be added to a study, but not left out"
            )
        before, now = dict(_flat(other.data())), dict(_flat(cell.data()))
        for path in dict.fromkeys((*before, *now)):
            both = path in before and path in now
            if path != "seed" and not (both and _equal(before[path], now[path])):
                one, two = (
                    config.toml_value(each[path]) if path in each else "nothing"
                    for each in (before, now)
                )
                yield f"{name}: {path}: {one} there, {two} asked for"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested tables with its path."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _equal(one: Any, two: Any) -> bool:
    """Return whether two plain values mean the same in a run file, where 1 may stand for 1.0."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_equal, one, two))
    if isinstance(one, bool) != isinstance(two, bool):
        return False
    return bool(one == two) or config.toml_value(one) == config.toml_value(two)  # nan is nan
