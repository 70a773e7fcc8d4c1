"""What commands show: progress while they run, a table when they are done."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anyfleet.analysis.equal_budgets import Within, ended_after, first_after
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.plots import Runs
from anyfleet.analysis.summaries import (
    Spent,
    Summary,
    ToTarget,
    at_widths,
    evaluated,
    losses,
    metric_of,
    not_reached,
    spread,
    summarise,
    to_target,
)
from anyfleet.core.ledger import Ledger
from anyfleet.experiment import RoundRecord

Show = Callable[[RoundRecord], None]
_PLAIN_LINES = 10  # of progress per run, where there is no terminal
_PLAIN_WIDTH = 120  # of tables, there
NOTHING = "–"  # in a cell; a column of nothing else is left out
_TINY = 1e-5  # amounts below are written as powers of ten
_NAME_WIDTH = 8  # to which long names are folded, where a table needs the place


def console() -> Console:
    """The standard output. Without a terminal rich writes plain text."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


@contextmanager
def progress(screen: Console, name: str, rounds: int, done: int = 0) -> Iterator[Show]:
    """Shows points as they come: a live bar on a terminal, some plain lines elsewhere."""
    if not screen.is_terminal:
        every = max(1, rounds // _PLAIN_LINES)

        def line(point: RoundRecord) -> None:
            if point.round_index % every == 0 or point.round_index + 1 == rounds:
                screen.print(f"{name}: step {point.round_index + 1}/{rounds}, {_status(point)}")

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
        yield lambda point: bar.update(task, advance=1, status=_status(point))


def _status(point: RoundRecord) -> str:
    metric = Metric(point.metric)
    score = f"{metric.name} {metric.told(point.score)}" if point.evaluated() else "not evaluated"
    return f"{score} after {seconds(point.time)} simulated"


@dataclass(frozen=True)
class Unit:
    """In which energies are told."""

    name: str
    size: float  # joules


_UNITS = (Unit("MJ", 1e6), Unit("kJ", 1e3), Unit("J", 1.0), Unit("mJ", 1e-3))


def _energy(joules: Iterable[float]) -> Unit:
    """The largest unit in which the largest amount is at least one."""
    most = max(joules, default=1.0)
    return next((unit for unit in _UNITS if most >= unit.size), _UNITS[-1])


def table(runs: Runs, target: float, width: int) -> Table:
    """One row per name: means over its seeds, with deviations when there are several.

    The spread is the deviation over devices, where these were told apart.
    """
    ends = {name: [summarise(points) for points in group] for name, group in runs.items()}
    unit = _energy(end.joules for group in ends.values() for end in group)
    judges = metrics(runs)
    others = dict.fromkeys(each for group in ends.values() for end in group for each in end.others)
    heads = [*_judged(judges), *(Metric(name).head for name in others), "simulated s"]
    heads += [f"s to {judges[0].told(target)}", unit.name, "MB down", "MB up", "GFLOP", "lost"]
    heads += ["spread %"]
    rows = {
        name: (
            *_scores(judges, _known(group, ends[name])),
            *(_other(Metric(other), ends[name]) for other in others),
            *_cells(group, ends[name], target, unit),
            _over_devices(ends[name]),
        )
        for name, group in runs.items()
    }
    return grid(heads, rows, width)


def metrics(runs: Runs) -> list[Metric]:
    """What runs are judged by, each once; there is at least one run."""
    found = (metric_of(points) for group in runs.values() for points in group)
    return list(dict.fromkeys(found))


def _judged(judges: Sequence[Metric]) -> Iterator[str]:
    """The heads of what runs are judged by: where it ended, and the best."""
    for metric in judges:
        unit = " %" if metric.share else ""
        yield metric.head
        yield f"best{unit}" if len(judges) == 1 else f"best {metric.head}"


_Scores = Sequence[tuple[Metric, float, float]]  # of evaluated runs: metric, last score, best


def _known(group: Sequence[Sequence[RoundRecord]], ends: Sequence[Summary]) -> _Scores:
    """None at all when a run was never evaluated: a mean over the others would mislead."""
    if not all(evaluated(points) for points in group):
        return ()
    return [(Metric(end.metric), end.score, end.best) for end in ends]


def _scores(judges: Sequence[Metric], known: _Scores) -> Iterator[str]:
    """The cells under `_judged`."""
    for metric in judges:
        own = [(last, best) for judge, last, best in known if judge == metric]
        yield from (scored(metric, [pair[place] for pair in own]) for place in (0, 1))


def _other(metric: Metric, ends: Sequence[Summary]) -> str:
    told = [end.others[metric.name] for end in ends if metric.name in end.others]
    return scored(metric, told if len(told) == len(ends) else ())


def scored(metric: Metric, values: Sequence[float]) -> str:
    """Scores of several seeds under the head of their metric; those of a broken model are NaN."""
    if any(math.isnan(value) for value in values):
        return "NaN"
    scaled = [metric.scale * value for value in values]
    return number(*scaled) if metric.share else _exactly(*scaled)


def by_width(runs: Runs, width: int) -> Table | None:
    """What the shared models were worth at the end, at every width that was evaluated.

    None where that is nothing but the whole model, which `table` has.
    """
    ends = {name: [at_widths(points) for points in group] for name, group in runs.items()}
    # Where devices' own models are judged, the shared one is of interest only if it was cut.
    shown = [
        name
        for name, group in runs.items()
        if len(ends[name][0]) > 1 or math.isnan(group[0][-1].on_devices)
    ]
    widths = sorted({each for name in shown for end in ends[name] for each in end}, reverse=True)
    if set(widths) <= {1.0}:
        return None
    rows = {
        name: [_at(metric_of(runs[name][0]), ends[name], each) for each in widths] for name in shown
    }
    return grid([f"width {each:g}" for each in widths], rows, width)


def width_title(runs: Runs) -> str:
    """The line above `by_width`."""
    names = ", ".join(metric.head for metric in metrics(runs))
    return f"The shared model at the end, by width ({names}):"


def _at(metric: Metric, ends: Sequence[Mapping[float, float]], width: float) -> str:
    known = [end[width] for end in ends if width in end]
    return scored(metric, known if len(known) == len(ends) else ())


def targets(runs: Mapping[str, Sequence[ToTarget]], width: int) -> Table:
    """What a target cost those that reached it, one row per name: time, energy, traffic, rounds."""
    spent = [each.spent for group in runs.values() for each in group if each.spent]
    unit = _energy(each.joules for each in spent)
    amounts: dict[str, Callable[[Spent], float]] = {
        "simulated s": lambda each: each.time,
        unit.name: lambda each: each.joules / unit.size,
        "MB": lambda each: each.bytes / 1e6,
        "rounds": lambda each: each.rounds,
    }
    rows = {}
    for name, group in runs.items():
        reached = [each.spent for each in group if each.spent]
        costs = [_finely(*map(amount, reached)) for amount in amounts.values()]
        rows[name] = [how_many(group), *costs]
    return grid(("runs", *amounts), rows, width)


def over_seeds(group: Sequence[ToTarget], amount: Callable[[Spent], float]) -> str:
    """What several seeds spent on a target; how many and how far, when not all got there."""
    reached = [amount(each.spent) for each in group if each.spent]
    if not reached:
        return how_many(group)
    if len(reached) == len(group):
        return _finely(*reached)
    count, _, far = how_many(group).partition(",")
    return f"{count} runs: {_finely(*reached)};{far}"


def how_many(group: Sequence[ToTarget]) -> str:
    """How many runs reached a target, and how far the best of the others came."""
    if not group or math.isnan(group[0].target):
        return NOTHING
    metric, count = Metric(group[0].metric), sum(each.spent is not None for each in group)
    best = metric.best(each.best for each in group if not each.spent)
    if not count:
        return not_reached(best, metric)
    told = f"{count} of {len(group)}"
    return told if count == len(group) else f"{told}, else best {metric.told(best)}"


def learned(runs: Mapping[str, Sequence[Within]], width: int) -> Table:
    """What the same amount taught, one row per name, and all that had been spent by then.

    Means of the runs that were evaluated by then, which the first column counts; those that had
    ended count as they ended. What to know of the others is in `shortfalls`.
    """
    unit = _energy(each.spent.joules for group in runs.values() for each in group if each.spent)
    judges = list(dict.fromkeys(Metric(each.metric) for group in runs.values() for each in group))
    heads = ("runs", *_judged(judges), "simulated s", unit.name, "MB", "GFLOP", "rounds")
    rows = {name: tuple(_lessons(group, judges, unit)) for name, group in runs.items()}
    return grid(heads, rows, width)


def _lessons(group: Sequence[Within], judges: Sequence[Metric], unit: Unit) -> Iterator[str]:
    spent = [each.spent for each in group if each.spent]
    yield f"{len(spent)} of {len(group)}"
    known = [(Metric(each.metric), each.score, each.best) for each in group if each.spent]
    yield from _scores(judges, known)
    yield _finely(*(each.time for each in spent))
    yield number(*(each.joules / unit.size for each in spent))
    yield megabytes(*(each.bytes for each in spent))
    yield _finely(*(each.flops / 1e9 for each in spent))
    yield number(*(each.rounds for each in spent))


def shortfalls(runs: Mapping[str, Sequence[Within]]) -> Iterator[str]:
    """A line for each name with runs that ended before an amount or were evaluated after it."""
    for name, group in runs.items():
        late = [each for each in group if not each.spent]
        ended = [each for each in group if each.spent and each.ended]
        told = [f"{len(ended)} of {len(group)} {ended_after(ended)}"] if ended else []
        told += [f"{len(late)} of {len(group)} {first_after(late)}"] if late else []
        if told:
            yield f"{name}: {', '.join(told)}."


def grid(heads: Sequence[str], rows: Mapping[str, Sequence[str]], width: int) -> Table:
    """Names and numbers, at most `width` wide if possible; without columns that hold nothing.

    Where lines would be longer, cells break between words and long names anywhere. Left to itself,
    rich would rather cut off the last columns.
    """
    every = zip(heads, *rows.values(), strict=True)
    columns = [column for column in every if any(cell != NOTHING for cell in column[1:])]
    names = max(map(len, rows))
    sizes = [max(map(len, column)) for column in columns]
    if names + sum(sizes) + len(sizes) > width:
        sizes = [max(len(word) for text in column for word in text.split()) for column in columns]
        names = min(names, max(_NAME_WIDTH, width - sum(sizes) - len(sizes)))
    made = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    made.add_column("", overflow="fold", width=names)
    for (head, *_), size in zip(columns, sizes, strict=True):
        made.add_column(head, justify="right", width=size)
    for place, name in enumerate(rows, start=1):
        made.add_row(name, *(column[place] for column in columns))
    return made


def _cells(
    group: Sequence[Sequence[RoundRecord]], ends: Sequence[Summary], target: float, unit: Unit
) -> Iterator[str]:
    yield _finely(*(end.time for end in ends))
    yield over_seeds([to_target(points, target) for points in group], lambda spent: spent.time)
    yield number(*(end.joules / unit.size for end in ends))
    yield megabytes(*(end.down for end in ends))
    yield megabytes(*(end.up for end in ends))
    yield _finely(*(end.flops / 1e9 for end in ends))
    lost = [end.lost for end in ends]
    yield number(*lost) if len(set(lost)) > 1 else str(lost[0])


def _over_devices(ends: Sequence[Summary]) -> str:
    told = [end.fairness.deviation if end.fairness else math.nan for end in ends]
    return number(*(100 * deviation for deviation in told))


def lost_orders(entries: Ledger) -> str:
    """How many orders were lost and why: "3 of 40 orders lost: 2 died, 1 too late."."""
    counts = losses(entries)
    if not counts:
        return ""
    told = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"{sum(counts.values())} of {len(entries)} orders lost: {told}."


def seconds(value: float) -> str:
    """Simulated time."""
    return f"{value:.3g} s" if 0 < value < 1 else f"{value:,.1f} s"


def megabytes(*amounts: float) -> str:
    """Of bytes; what codecs leave of a message is often a small part of one."""
    return _finely(*(amount / 1e6 for amount in amounts))


def _exactly(*values: float) -> str:
    """With four digits that count: what a metric of one's own measures may have any size."""
    if not values:
        return NOTHING
    over = spread(values)
    mean = f"{over.mean:.4g}"
    return mean if math.isnan(over.deviation) else f"{mean} ±{over.deviation:.2g}"


def _finely(*values: float) -> str:
    """With more digits, where one would say nothing: two that count, or more."""
    if not 0 < max(values, default=0.0) < 1 or any(math.isnan(value) for value in values):
        return number(*values)
    over = spread(values)
    if over.mean < _TINY:
        mean = f"{over.mean:.1e}"
        return mean if math.isnan(over.deviation) else f"{mean} ±{over.deviation:.1e}"
    return number(*values, digits=max(3, 1 - math.floor(math.log10(over.mean))))


def number(*values: float, digits: int = 1) -> str:
    """One value, or the mean and the deviation of several; "–" when one of them is NaN."""
    if not values or any(math.isnan(value) for value in values):
        return NOTHING
    over = spread(values)
    digits = digits if abs(over.mean) < 1000 else 0
    mean = f"{over.mean:,.{digits}f}"
    # Without a space after the sign, so that a narrow column puts the deviation below the mean.
    return mean if math.isnan(over.deviation) else f"{mean} ±{over.deviation:,.{digits}f}"
