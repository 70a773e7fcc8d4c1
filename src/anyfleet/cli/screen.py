"""The screen: the console, plain lines and tables, the progress of runs, and lines of JSON."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.segment import Segment
from rich.table import Column, Table

from anyfleet.analysis.metric import Metric
from anyfleet.experiment import RoundRecord
from anyfleet.study.events import Advanced, Begun, Ended, Event, Noted
from anyfleet.study.plan import PlannedRun

Show = Callable[[RoundRecord], None]
Tell = Callable[[Event], None]
SIMULATED, REAL = "simulated", "real"  # times that the seconds of a run may be of
_PLAIN_LINES = 10  # of progress for each run, without a terminal
_PLAIN_WIDTH = 120  # of tables, without a terminal or COLUMNS
_WIDE = 110  # columns of a terminal with room for long bars


def console() -> Console:
    """Return the standard output; without a terminal, plain text as wide as COLUMNS says."""
    screen = Console(highlight=False)
    if screen.is_terminal:
        return screen
    columns = os.environ.get("COLUMNS", "")
    wide = int(columns) if columns.isascii() and columns.isdigit() else 0
    return Console(highlight=False, width=wide or _PLAIN_WIDTH)


def errors() -> Console:
    """Return the standard error: progress is shown there, so that the output is nothing else."""
    return Console(highlight=False, stderr=True)


def silent() -> Console:
    """Return a console that shows nothing, where the output is lines of JSON."""
    return Console(highlight=False, quiet=True)


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


# --- progress -----------------------------------------------------------------------------------


@dataclass
class Pace:
    """How fast rounds come: those that were seen, and their seconds."""

    rounds: int = 0
    seconds: float = 0.0

    def told(self, left: int) -> str:
        """Return the wall seconds of a round and the time that so many more take; or ""."""
        if not self.rounds:
            return ""
        each = self.seconds / self.rounds
        return f"{seconds(each)} a round, {duration(each * left)} left"


@contextmanager
def progress(
    screen: Console, name: str, rounds: int, done: int = 0, clock: str = SIMULATED
) -> Iterator[Show]:
    """Yield what shows each round: one live line on a terminal, some plain lines elsewhere.

    `clock` says which time the seconds of a run are of.
    """
    pace, began, scores = Pace(), time.monotonic(), _Scores()

    def status(record: RoundRecord) -> str:
        pace.rounds, pace.seconds = pace.rounds + 1, time.monotonic() - began
        score = scores.told(name, record.round_index + 1, record.metric, record.score)
        left = pace.told(rounds - record.round_index - 1)
        return f"{score}, {seconds(record.time)} {clock}, {left}"

    if not screen.is_terminal:
        every = max(1, rounds // _PLAIN_LINES)

        def line(record: RoundRecord) -> None:
            told, number = status(record), record.round_index + 1
            if record.round_index % every == 0 or number == rounds:
                show(screen, f"{name}: round {number}/{rounds}, {told}")

        yield line
        return
    with _live(screen) as bar:
        task = bar.add_task(name, total=rounds, completed=done, status="")

        def advance(record: RoundRecord) -> None:
            bar.update(task, completed=record.round_index + 1, status=status(record))

        yield advance


def _live(screen: Console) -> Progress:
    """Return live lines; where they are too long the bar goes first, and then the end is cut."""
    whole = Column(no_wrap=True, overflow="ellipsis")
    return Progress(
        # Names may have square brackets, which are no markup.
        TextColumn("{task.description:<12}", markup=False, table_column=whole),
        BarColumn(bar_width=20 if screen.width >= _WIDE else 4),
        TextColumn(
            "{task.completed:.0f}/{task.total:.0f}  {task.fields[status]}",
            markup=False,
            table_column=whole.copy(),
        ),
        console=screen,
    )


class _Scores:
    """The last score of every run, which is shown until there is another one."""

    def __init__(self) -> None:
        self._last: dict[object, tuple[int, float]] = {}

    def told(self, run: object, rounds: int, metric: str, score: float) -> str:
        """Return the score of a run after so many rounds, or the last one with its round."""
        if not math.isnan(score):
            self._last[run] = rounds, score
        if run not in self._last:
            return "not evaluated yet"
        at, last = self._last[run]
        return _scored(metric, last) + ("" if at == rounds else f" (round {at})")


def _scored(metric: str, value: float) -> str:
    return f"{metric} {Metric(metric).told(value)}"


def seconds(value: float) -> str:
    """Return seconds of simulated time as people write them."""
    return f"{value:.3g} s" if 0 < value < 1 else f"{value:,.1f} s"


def duration(value: float) -> str:
    """Return seconds as hours, minutes and seconds, without what is too fine to matter."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


# --- progress of a study ------------------------------------------------------------------------


@contextmanager
def study_progress(screen: Console, runs: Sequence[PlannedRun], finished: int) -> Iterator[Tell]:
    """Yield what shows the events of a study: `runs` are left, and so many are finished already.

    On a terminal there is one live line for all, and one for each run under way. Elsewhere there is
    one plain line for each run that ends.
    """
    planned = len(runs) + finished
    if not screen.is_terminal:
        last: dict[PlannedRun, Advanced] = {}
        ended = [finished]

        def line(event: Event) -> None:
            if isinstance(event, Advanced):
                last[event.run] = event
            elif isinstance(event, Ended):
                ended[0] += event.how == "finished"
                show(screen, f"{_ending(event, last.get(event.run))} ({ended[0]} of {planned})")

        yield line
        return
    with _live(screen) as bar:
        yield _Lines(bar, runs, finished).tell


def _ending(event: Ended, last: Advanced | None) -> str:
    """Return how a run ended, in a line."""
    if event.how == "finished":
        told = f", {_scored(last.metric, last.score)}" if last else ""
        return f"{event.run}: finished{told}"
    return f"{event.run}: {event.how}: {event.told}"


class _Lines:
    """The live lines of a study."""

    def __init__(self, bar: Progress, runs: Sequence[PlannedRun], finished: int) -> None:
        self._bar, self._began = bar, time.monotonic()
        self._left = {run: run.rounds for run in runs}  # rounds
        self._played = 0
        self._scores = _Scores()
        self._paces: dict[PlannedRun, Pace] = {}
        self._lines: dict[PlannedRun, TaskID] = {}
        total = len(runs) + finished
        self._all = bar.add_task("all runs", total=total, completed=finished, status="")

    def tell(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Begun):
            self._left[event.run] = event.run.rounds - event.rounds
            self._paces[event.run] = Pace()
            self._lines[event.run] = self._bar.add_task(
                str(event.run), total=event.run.rounds, completed=event.rounds, status=""
            )
        elif isinstance(event, Advanced):
            self._advance(event)
        elif isinstance(event, Ended):
            self._left.pop(event.run, None)
            if event.run in self._lines:
                self._bar.remove_task(self._lines.pop(event.run))
            if event.how == "finished":
                self._bar.update(self._all, advance=1)
            else:
                show(self._bar.console, _ending(event, None))

    def _advance(self, event: Advanced) -> None:
        pace, left = self._paces[event.run], event.run.rounds - event.rounds
        pace.rounds, pace.seconds = pace.rounds + 1, pace.seconds + event.seconds
        score = self._scores.told(event.run, event.rounds, event.metric, event.score)
        told = f"{score}, {pace.told(left)}"
        self._bar.update(self._lines[event.run], completed=event.rounds, status=told)
        self._left[event.run] = left
        self._played += 1
        each = (time.monotonic() - self._began) / self._played
        told = f"{duration(each * sum(self._left.values()))} left"
        self._bar.update(self._all, status=told)


# --- JSON lines ---------------------------------------------------------------------------------


def put_line(out: TextIO, event: str, **values: object) -> None:
    """Write one object of JSON as a line: what happened, and its values; NaN becomes null."""
    out.write(msgspec.json.encode({"event": event, **values}).decode() + "\n")
    out.flush()


def put_event(out: TextIO, event: Event, **more: object) -> None:
    """Write an event of a study, or of a single run, as a line of JSON, with `more` values."""
    if isinstance(event, Noted):
        put_line(out, "note", text=event.text, **more)
        return
    values: dict[str, object] = {"run": event.run.name, "seed": event.run.seed, **more}
    if isinstance(event, Begun):
        put_line(out, "begun", **values, rounds=event.rounds, planned=event.run.rounds)
    elif isinstance(event, Advanced):
        values |= {"round": event.rounds, "planned": event.run.rounds, "metric": event.metric}
        values |= {"score": event.score, "time": event.time, "seconds": event.seconds}
        put_line(out, "round", **values)
    else:
        put_line(out, "run", **values, ended=event.how, told=event.told)
