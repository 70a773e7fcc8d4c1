"""Whom the shared model of a run serves: groups, devices and classes, as a table."""

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from anyfleet.analysis.breakdown import Breakdown
from anyfleet.cli.screen import grid, number

_MOST_CLASSES = 12  # that are told one by one


def apart(details: Sequence[Breakdown], width: int) -> Table:
    """Accuracies in per cent, one column for each width of the model; there is at least one."""
    columns = [dict(_accuracies(each)) for each in details]
    rows = {name: [number(100 * column[name]) for column in columns] for name in columns[0]}
    return grid([f"width {each.width:g}" for each in details], rows, width)


def _accuracies(details: Breakdown) -> Iterator[tuple[str, float]]:
    """Named, as far as they were asked for: by group, over devices, by class."""
    yield from ((f"group: {name}", share) for name, share in details.groups.items())
    if details.devices:
        over = details.fairness
        yield "devices: mean", over.mean
        yield "devices: deviation", over.deviation
        yield "devices: worst", over.worst
        yield "devices: 10th percentile", over.tenth
    yield from _classes(details.classes)


def _classes(classes: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Each of a few; of many, the ends."""
    if len(classes) <= _MOST_CLASSES:
        yield from ((f"class {name}", share) for name, share in enumerate(classes))
        return
    known = [share for share in classes if not math.isnan(share)]
    yield "classes: best", max(known, default=math.nan)
    yield "classes: worst", min(known, default=math.nan)
