"""What commands show: progress while they run, a table when they are done."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anyfleet.report import Runs
from anyfleet.study import Point, best, reached, spread, summarise

Show = Callable[[Point], None]
_PLAIN_LINES = 10  # of progress per run, where there is no terminal


def console() -> Console:
    """The standard output. Without a terminal rich writes plain text."""
    return Console(highlight=False)


@contextmanager
def progress(screen: Console, name: str, rounds: int) -> Iterator[Show]:
    """Shows points as they come: a live bar on a terminal, some plain lines elsewhere."""
    if not screen.is_terminal:
        every = max(1, rounds // _PLAIN_LINES)

        def line(point: Point) -> None:
            if point.step % every == 0 or point.step + 1 == rounds:
                screen.print(f"{name}: step {point.step + 1}/{rounds}, {_status(point)}")

        yield line
        return
    bar = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=screen,
    )
    with bar:
        task = bar.add_task(name, total=rounds, status="")
        yield lambda point: bar.update(task, advance=1, status=_status(point))


def _status(point: Point) -> str:
    return f"accuracy {percent(point.accuracy)} after {seconds(point.time)} simulated"


def table(runs: Runs, target: float) -> Table:
    """One row per name: means over its seeds, with deviations when there are several."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("")
    heads = ("accuracy", "best", "simulated time", f"time to {percent(target)}")
    for head in (*heads, "MB down", "MB up", "GFLOP", "lost"):
        made.add_column(head, justify="right")
    for name, group in runs.items():
        made.add_row(name, *_cells(group, target))
    return made


def _cells(group: Sequence[Sequence[Point]], target: float) -> Iterator[str]:
    ends = [summarise(points) for points in group]
    yield percent(*(end.accuracy for end in ends))
    yield percent(*(end.best for end in ends))
    yield seconds(*(end.time for end in ends))
    yield time_to(group, target)
    yield number(*(end.down / 1e6 for end in ends))
    yield number(*(end.up / 1e6 for end in ends))
    yield number(*(end.flops / 1e9 for end in ends))
    yield number(*(end.lost for end in ends), digits=0)


def time_to(group: Sequence[Sequence[Point]], target: float) -> str:
    """Simulated time of the first evaluation at or above the target, where all get there."""
    if math.isnan(target):
        return "–"
    found = [reached(points, target) for points in group]
    times = [point.time for point in found if point is not None]
    if len(times) == len(group):
        return seconds(*times)
    if times:
        return f"{len(times)} of {len(group)} runs"
    return f"not reached (best {percent(max(best(points) for points in group))})"


def percent(*values: float) -> str:
    """Shares as percentages."""
    text = number(*(100 * value for value in values))
    return text if text == "–" else f"{text} %"


def seconds(*values: float) -> str:
    """Simulated time."""
    text = number(*values)
    return text if text == "–" else f"{text} s"


def number(*values: float, digits: int = 1) -> str:
    """One value, or the mean and the deviation of several."""
    if any(math.isnan(value) for value in values):
        return "–"
    over = spread(values)
    mean = f"{over.mean:,.{digits}f}"
    return mean if math.isnan(over.deviation) else f"{mean} ± {over.deviation:.{digits}f}"
