"""The screen: the console, plain lines, and the progress of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anyfleet.analysis.metric import Metric
from anyfleet.experiment import RoundRecord

Show = Callable[[RoundRecord], None]
_PLAIN_LINES = 10  # of progress for each run, without a terminal
_PLAIN_WIDTH = 120  # of tables, without a terminal


def console() -> Console:
    """Return the standard output; without a terminal rich writes plain text."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


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
