"""What a run folder tells: the experiment, every step, every order."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyfleet
from anyfleet import config
from anyfleet.analysis.breakdown import Breakdown
from anyfleet.analysis.diagnosis import read_diagnostics
from anyfleet.core.ledger import Ledger
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, RoundRecord
from anyfleet.store import environment
from anyfleet.store.disk import damaged_line, read_log


def describe(experiment: Experiment, allow: Sequence[str] = ()) -> str:
    """An experiment as a run file."""
    trusted = "".join(f" --allow {name}" for name in allow)
    again = f"anyfleet run config.toml{trusted}"
    head = f"# Anyfleet {anyfleet.__version__}, as it ran. Again: {again}\n\n"
    allowed = {"allow": {"packages": list(allow)}} if allow else {}
    return head + config.to_toml({**config.dump(experiment, complete=True), **allowed})


def read_rounds(folder: str | Path) -> tuple[RoundRecord, ...]:
    """Return the steps of the run in a folder; `StoreError` for a folder that is no run."""
    file = run_folder(folder) / "rounds.jsonl"
    return rounds_of(read_log(file), file)


def rounds_of(rows: Sequence[Mapping[str, Any]], file: Path) -> tuple[RoundRecord, ...]:
    """Return the steps that the lines of a log tell of; `StoreError` where one tells of none."""
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(_point(row))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise damaged_line(file, number, error) from error
    return tuple(found)


def read_ledger(folder: str | Path) -> Ledger:
    """Return every order of the run in a folder; `StoreError` for a folder that is no run."""
    file = run_folder(folder) / "ledger.jsonl"
    return orders_of(read_log(file), file)


def orders_of(rows: list[dict[str, Any]], file: Path) -> Ledger:
    """Return the orders that the lines of a log tell of; `StoreError` where one tells of none."""
    try:
        return Ledger.from_dicts(rows)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{file} does not hold orders: {error}. Make the run again.") from error


def run_folder(folder: str | Path) -> Path:
    """Return the folder of a run; `StoreError` that says what is missing for any other."""
    path = Path(folder)
    if not path.is_dir():
        told = "is a file" if path.exists() else "is not there"
        raise StoreError(f"{path} {told}. Name the folder of a run, as `anyfleet run` says it.")
    if (path / environment.FILE).is_file():
        return path
    inner = sorted(
        {mark.parent for depth in ("*", "*/*") for mark in path.glob(f"{depth}/{environment.FILE}")}
    )
    several = f" It holds other folders of runs: name one, such as {inner[0]}." if inner else ""
    raise StoreError(
        f"{path} is no run: it has no {environment.FILE}, which a run has from its start.{several}"
    )


def _point(data: Mapping[str, Any]) -> RoundRecord:
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
    """JSON has no NaN: None stands for it."""
    return math.nan if value is None else value
