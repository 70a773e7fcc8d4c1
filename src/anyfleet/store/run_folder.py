"""The folder of a run: its files, how one is made, and what can be read from it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import anyfleet
from anyfleet import config
from anyfleet.analysis.breakdown import Breakdown
from anyfleet.analysis.diagnosis import read_diagnostics
from anyfleet.core.ledger import Ledger
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, RoundRecord
from anyfleet.store import environment
from anyfleet.store.disk import damaged_line, force_folder, read_log, told

LOGS = ("ledger.jsonl", "rounds.jsonl")
# The other files of a run folder, each written as a whole.
FILES = (
    "config.toml",
    "curves.png",
    "environment.json",
    "model.safetensors",
    "papers.bib",
    "remarks.json",
    "summary.json",
)


def fresh(parent: str | Path, name: str) -> Path:
    """Make a new folder `name`, or `name-2`, `name-3`, …: the first that does not exist."""
    parent, number = Path(parent), 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            with told(path):
                path.mkdir(parents=True)
                force_folder(path.parent)
        except FileExistsError:
            number += 1
        else:
            return path


def claim(path: str | Path) -> Path:
    """Make this folder, or take it if it is empty; raise FileExistsError if it is not."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(
            f"{path} already exists and is not empty; choose another, or remove it."
        )
    with told(path):
        path.mkdir(parents=True, exist_ok=True)
        force_folder(path.parent)
    return path


def describe(experiment: Experiment, allow: Sequence[str] = ()) -> str:
    """Return an experiment as the text of a run file."""
    trusted = "".join(f" --allow {name}" for name in allow)
    again = f"anyfleet run config.toml{trusted}"
    head = f"# Anyfleet {anyfleet.__version__}, as it ran. Again: {again}\n\n"
    allowed = {"allow": {"packages": list(allow)}} if allow else {}
    return head + config.to_toml({**config.dump(experiment, complete=True), **allowed})


def read_rounds(folder: str | Path) -> tuple[RoundRecord, ...]:
    """Return the records of all rounds in a run folder; raise StoreError for any other folder."""
    file = run_folder(folder) / "rounds.jsonl"
    return rounds_of(read_log(file), file)


def rounds_of(rows: Sequence[Mapping[str, Any]], file: Path) -> tuple[RoundRecord, ...]:
    """Return the records of rounds in the lines of a log; raise StoreError for a wrong line."""
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(_record(row))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise damaged_line(file, number, error) from error
    return tuple(found)


def read_wall_seconds(folder: str | Path) -> float:
    """Return the seconds of wall time that a run has taken, all its resumptions together.

    Raise StoreError for a folder without a summary: the run has not ended.
    """
    file = run_folder(folder) / "summary.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Summary).wall_seconds
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{file} cannot be read: {error}. Resume the run to its end.") from error


class _Summary(msgspec.Struct):
    wall_seconds: float


def read_ledger(folder: str | Path) -> Ledger:
    """Return the ledger of all orders in a run folder; raise StoreError for any other folder."""
    file = run_folder(folder) / "ledger.jsonl"
    return orders_of(read_log(file), file)


def orders_of(rows: list[dict[str, Any]], file: Path) -> Ledger:
    """Return the ledger in the lines of a log; raise StoreError if they hold none."""
    try:
        return Ledger.from_dicts(rows)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(
            f"{file} is damaged, or another version of Anyfleet wrote it: {error}. Run it again."
        ) from error


def run_folder(folder: str | Path) -> Path:
    """Return the folder of a run; raise StoreError, which says what is missing, for any other."""
    path = Path(folder)
    if not path.is_dir():
        why = "is a file" if path.exists() else "does not exist"
        raise StoreError(f"{path} {why}. Name the folder of a run, as `anyfleet run` prints it.")
    if (path / environment.FILE).is_file():
        return path
    inner = sorted(
        {mark.parent for depth in ("*", "*/*") for mark in path.glob(f"{depth}/{environment.FILE}")}
    )
    several = (
        f" It holds the folders of several runs: name one, such as {inner[0]}." if inner else ""
    )
    raise StoreError(f"{path} is not the folder of a run: it has no {environment.FILE}.{several}")


def _record(data: Mapping[str, Any]) -> RoundRecord:
    inner = {
        "scores": _numbers(data["scores"]),
        "diagnostics": read_diagnostics(data.get("diagnostics", {})),
    }
    details = tuple(_breakdown(each) for each in data.get("details", ()))
    return RoundRecord(**_numbers(data) | inner | {"details": details})


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
    """Return a value of JSON, in which None stands for NaN."""
    return math.nan if value is None else value
