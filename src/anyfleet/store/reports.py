"""What a run folder tells: the experiment, every step, every order."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyfleet
from anyfleet import config
from anyfleet.breakdown import Breakdown
from anyfleet.diagnosis import read_notes
from anyfleet.errors import StoreError
from anyfleet.ledger import Entries
from anyfleet.store.disk import read_log
from anyfleet.study import Experiment, Point


def describe(experiment: Experiment, allow: Sequence[str] = ()) -> str:
    """An experiment as a run file."""
    trusted = "".join(f" --allow {name}" for name in allow)
    again = f"anyfleet run config.toml{trusted}"
    head = f"# Anyfleet {anyfleet.__version__}, as it ran. Again: {again}\n\n"
    allowed = {"allow": {"packages": list(allow)}} if allow else {}
    return head + config.to_toml({**config.dump(experiment, complete=True), **allowed})


def read_points(folder: Path) -> tuple[Point, ...]:
    """The steps of a run that lies in `folder`."""
    file = folder / "points.jsonl"
    return points_of(read_log(file), file)


def points_of(rows: Sequence[Mapping[str, Any]], file: Path) -> tuple[Point, ...]:
    """The steps that lines of a log tell of; an error where they tell of something else."""
    try:
        return tuple(_point(row) for row in rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{file} is damaged: a line of it is no step of a run.") from error


def read_ledger(folder: Path) -> Entries:
    """Every order of a run that lies in `folder`."""
    file = folder / "ledger.jsonl"
    return entries_of(read_log(file), file)


def entries_of(rows: list[dict[str, Any]], file: Path) -> Entries:
    """The orders that lines of a log tell of; an error where they tell of something else."""
    try:
        return Entries.of(rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{file} is damaged: a line of it is no order of a run.") from error


def _point(data: Mapping[str, Any]) -> Point:
    inner = {"scores": _numbers(data["scores"]), "notes": read_notes(data.get("notes", {}))}
    details = tuple(_breakdown(each) for each in data.get("details", ()))
    return Point(**_numbers(data) | inner | {"details": details})


def _breakdown(data: Mapping[str, Any]) -> Breakdown:
    return Breakdown(
        data["width"],
        tuple(map(_number, data["classes"])),
        tuple(map(_number, data["devices"])),
        _numbers(data["groups"]),
    )


def _numbers(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in table.items()}


def _number(value: Any) -> Any:
    """JSON has no NaN: None stands for it."""
    return math.nan if value is None else value
