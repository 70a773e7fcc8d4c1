"""Diagnostics on the page of an item: what figures show that are not about scores.

A diagnostic of a round is a number, a number for each device, numbers for blocks of the model, or a
list of devices. Here each becomes one number for each group of devices that the item names: the
mean over the devices of the group, the sum over blocks, how many of the group are listed.
"""

import math
from collections.abc import Iterator, Mapping

from anyfleet.analysis.intervals import estimate
from anyfleet.evidence.items import Item
from anyfleet.evidence.measured import Found, by_round, mean
from anyfleet.evidence.results import CellResult

ALL = "all"  # the group of an item that names none
_SHOWN = 10  # rounds in a table of devices, at most


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
    for name in item.diagnostics if not item.groups else ():
        for (case, method), cell in there.cells.items():
            yield from _devices(name, f"{case}, {method}", cell)


def _devices(name: str, told: str, cell: CellResult) -> Iterator[str]:
    """Yield a diagnostic of each device over the rounds of the first run, as a table."""
    seed, run = min(cell.runs.items())
    rounds = run.diagnostics.get(name, ())
    devices = {int(key) for each in rounds if isinstance(each, Mapping) for key in each}
    if not devices:
        return
    last = len(rounds) - 1
    shown = sorted({round(last * place / (_SHOWN - 1)) for place in range(_SHOWN)})
    yield from ("", f"### {name} by device: {told}, seed {seed}", "")
    yield f"| device | {' | '.join(f'round {index + 1}' for index in shown)} |"
    yield "|---|" + "---|" * len(shown)
    for device in sorted(devices):
        values = (rounds[index].get(str(device)) for index in shown)
        yield f"| {device} | {' | '.join(_number(value) for value in values)} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _rows(item: Item, there: Found, name: str) -> Iterator[str]:
    for (case, method), cell in there.cells.items():
        for told, group in (_groups(item) if _by_device(cell, name) else {ALL: None}).items():
            known = [by_round(run, name, group) for run in cell.runs.values()]
            if not all(known) or not known:
                continue
            ends = ([row[0] for row in known], [row[-1] for row in known], [*map(mean, known)])
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


def _told(values: list[float]) -> str:
    found = estimate(values)
    margin = "" if math.isnan(found.margin) else f" ± {found.margin:.2g}"
    return f"{found.mean:.3g}{margin}"
