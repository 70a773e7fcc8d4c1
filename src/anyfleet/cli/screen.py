"""The screen: the console, plain lines and tables, and the progress of a run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from anyfleet.analysis.metric import Metric
from anyfleet.experiment import RoundRecord

Show = Callable[[RoundRecord], None]
_PLAIN_LINES = 10  # of progress for each run, without a terminal
_PLAIN_WIDTH = 120  # of tables, without a terminal or COLUMNS


def console() -> Console:
    """Return the standard output; without a terminal, plain text as wide as COLUMNS says."""
    screen = Console(highlight=False)
    if screen.is_terminal:
        return screen
    columns = os.environ.get("COLUMNS", "")
    wide = int(columns) if columns.isascii() and columns.isdigit() else 0
    return Console(highlight=False, width=wide or _PLAIN_WIDTH)


class PlainTable(Table):
    """A table without lines, whose rows have no blanks at their end."""

    def __init__(self, *, collapse_padding: bool = False) -> None:
        super().__init__(
            box=None, header_style="bold", pad_edge=False, collapse_padding=collapse_padding
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Without a title a table is nothing but segments.
        written = super().__rich_console__(console, options)
        segments = (each for each in written if isinstance(each, Segment))
        for line in Segment.split_lines(segments):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                text, style, control = line.pop()
                line.append(Segment(text.rstrip(), style, control))
            yield from line
            yield Segment.line()


def show(screen: Console, text: str) -> None:
    """Print a text as it is, in lines as long as they are."""
    screen.print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(screen: Console, name: str, rounds: int, done: int = 0) -> Iterator[Show]:
    """Yield what shows each round: a live bar on a terminal, some plain lines elsewhere."""
    if not screen.is_terminal:
        every = max(1, rounds // _PLAIN_LINES)

        def line(record: RoundRecord) -> None:
            if record.round_index % every == 0 or record.round_index + 1 == rounds:
                screen.print(f"{name}: round {record.round_index + 1}/{rounds}, {_status(record)}")

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
        task = bar.add_task(name, total=rounds, completed=done, status="")
        yield lambda record: bar.update(task, advance=1, status=_status(record))


def _status(record: RoundRecord) -> str:
    metric = Metric(record.metric)
    score = f"{metric.name} {metric.told(record.score)}" if record.evaluated() else "not evaluated"
    return f"{score} after {seconds(record.time)} simulated"


def seconds(value: float) -> str:
    """Return seconds of simulated time as people write them."""
    return f"{value:.3g} s" if 0 < value < 1 else f"{value:,.1f} s"
