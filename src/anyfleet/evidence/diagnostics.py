"""Diagnostics on the page of an item: what figures show that are not about scores.

A diagnostic of a round is a number, a number for each device, numbers for blocks of the model, or a
list of devices. Here each becomes one number for each group of devices that the item names: the
mean over the devices of the group, the sum over blocks, how many of the group are listed.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from anyfleet.analysis.intervals import estimate
from anyfleet.evidence.items import Item
from anyfleet.evidence.measured import Found
from anyfleet.evidence.results import CellResult

ALL = "all"  # the group of an item that names none


def summary(value: Any, group: range | None) -> float:
    """Return a diagnostic of a round as one number for a group of devices; NaN: it has none.

    None is the group of all devices.
    """
    if isinstance(value, Mapping):
        return _mean([v for key, v in value.items() if group is None or int(key) in group])
    if isinstance(value, list | tuple):
        if any(isinstance(each, float) for each in value):
            return math.fsum(value)
        return float(sum(group is None or each in group for each in value))
    return math.nan if value is None else float(value)


def table(item: Item, there: Found) -> Iterator[str]:
    """Yield the diagnostics of an item's runs as a section of its page; nothing without any."""
    rows = [row for name in item.diagnostics for row in _rows(item, there, name)]
    if not rows:
        return
    yield from ("", "## Diagnostics", "")
    yield "| diagnostic | case, method | devices | first round | last round | mean of all rounds |"
    yield "|---|---|---|---|---|---|"
    yield from rows
    yield from (
        "",
        "Means over the devices of a group, or how many of it are listed; over seeds, ±",
    )
    yield "half of the 95 % interval. Angles are in radians."


def _rows(item: Item, there: Found, name: str) -> Iterator[str]:
    for (case, method), cell in there.cells.items():
        for told, group in (_groups(item) if _by_device(cell, name) else {ALL: None}).items():
            rounds = [
                [summary(each, group) for each in run.diagnostics.get(name, ())]
                for run in cell.runs.values()
            ]
            known = [[each for each in row if not math.isnan(each)] for row in rounds]
            if not all(known) or not known:
                continue
            ends = ([row[0] for row in known], [row[-1] for row in known], [*map(_mean, known)])
            cells = " | ".join(map(_told, ends))
            yield f"| {name} | {case}, {method} | {told} | {cells} |"


def _groups(item: Item) -> Mapping[str, range | None]:
    return item.groups or {ALL: None}


def _by_device(cell: CellResult, name: str) -> bool:
    """Return whether a diagnostic has something for each device, or lists devices."""
    values = [each for run in cell.runs.values() for each in run.diagnostics.get(name, ())]
    return any(
        isinstance(each, Mapping)
        or (isinstance(each, list | tuple) and not any(isinstance(v, float) for v in each))
        for each in values
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _told(values: list[float]) -> str:
    found = estimate(values)
    margin = "" if math.isnan(found.margin) else f" ± {found.margin:.2g}"
    return f"{found.mean:.3g}{margin}"
