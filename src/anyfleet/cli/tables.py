"""Tables of runs: where they ended, what a target cost, what equal budgets taught."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from anyfleet.analysis.breakdown import Breakdown
from anyfleet.analysis.equal_budgets import Within, ended_after, first_after
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.plots import Runs
from anyfleet.analysis.summaries import (
    Spent,
    Summary,
    ToTarget,
    at_widths,
    evaluated,
    failure_counts,
    metric_of,
    not_reached,
    spread,
    summarise,
    to_target,
)
from anyfleet.cli.screen import PlainTable
from anyfleet.core.ledger import Ledger
from anyfleet.experiment import RoundRecord

NOTHING = "–"  # in an empty cell; a column of nothing else is left out
_TINY = 1e-5  # amounts below are written as powers of ten
_NAME_WIDTH = 8  # to which long names are folded if a table needs the room


@dataclass(frozen=True)
class Unit:
    """A unit of energy."""

    name: str
    size: float  # joules


_UNITS = (Unit("MJ", 1e6), Unit("kJ", 1e3), Unit("J", 1.0), Unit("mJ", 1e-3))


def _energy(joules: Iterable[float]) -> Unit:
    """Return the largest unit in which the largest amount is at least 1."""
    most = max(joules, default=1.0)
    return next((unit for unit in _UNITS if most >= unit.size), _UNITS[-1])


def _joules(unit: Unit, *spent: Summary | Spent) -> str:
    """Return the joules of some runs; "≥" says that not all of their orders were measured."""
    told = number(*(each.joules / unit.size for each in spent))
    return f"≥ {told}" if any(each.unmeasured for each in spent) else told


def table(runs: Runs, target: float | None, width: int) -> Table:
    """Return one row per name: where it ended, as means over its seeds with deviations.

    One column has the seconds to the target, if there is one. "spread %" is the deviation of the
    accuracy over devices, if these were evaluated.
    """
    ends = {name: [summarise(records) for records in group] for name, group in runs.items()}
    unit = _energy(end.joules for group in ends.values() for end in group)
    metrics = metrics_of(runs)
    others = dict.fromkeys(each for group in ends.values() for end in group for each in end.others)
    heads = [*_score_heads(metrics), *(Metric(name).head for name in others), "simulated s"]
    heads += [] if target is None else [f"s to {metrics[0].told(target)}"]
    heads += [unit.name, "MB down", "MB up", "GFLOP", "failures", "spread %"]
    rows = {
        name: (
            *_scores(metrics, _known(group, ends[name])),
            *(_other(Metric(other), ends[name]) for other in others),
            *_cells(group, ends[name], target, unit),
            _over_devices(ends[name]),
        )
        for name, group in runs.items()
    }
    return grid(heads, rows, width)


def metrics_of(runs: Runs) -> list[Metric]:
    """Return the metrics by which runs are measured, each once; there is at least one run."""
    found = (metric_of(records) for group in runs.values() for records in group)
    return list(dict.fromkeys(found))


def _score_heads(metrics: Sequence[Metric]) -> Iterator[str]:
    """Yield the heads of a metric: the last score, and the best."""
    for metric in metrics:
        unit = " %" if metric.share else ""
        yield metric.head
        yield f"best{unit}" if len(metrics) == 1 else f"best {metric.head}"


_Scores = Sequence[tuple[Metric, float, float]]  # of evaluated runs: metric, last score, best


def _known(group: Sequence[Sequence[RoundRecord]], ends: Sequence[Summary]) -> _Scores:
    """Return the scores of runs; none if one was never evaluated: a mean would mislead."""
    if not all(evaluated(records) for records in group):
        return ()
    return [(Metric(end.metric), end.score, end.best) for end in ends]


def _scores(metrics: Sequence[Metric], known: _Scores) -> Iterator[str]:
    """Yield the cells under the heads of `_score_heads`."""
    for metric in metrics:
        own = [(last, best) for other, last, best in known if other == metric]
        yield from (scored(metric, [pair[place] for pair in own]) for place in (0, 1))


def _other(metric: Metric, ends: Sequence[Summary]) -> str:
    told = [end.others[metric.name] for end in ends if metric.name in end.others]
    return scored(metric, told if len(told) == len(ends) else ())


def scored(metric: Metric, values: Sequence[float]) -> str:
    """Return scores of several seeds as a cell; "NaN" if one is that of a broken model."""
    if any(math.isnan(value) for value in values):
        return "NaN"
    scaled = [metric.scale * value for value in values]
    return number(*scaled) if metric.share else _exactly(*scaled)


def by_width(runs: Runs, width: int) -> Table | None:
    """Return the last score of the shared models at every width that was evaluated.

    None if that is only the whole model, which `table` has.
    """
    ends = {name: [at_widths(records) for records in group] for name, group in runs.items()}
    # If devices' own models are evaluated, the shared one is of interest only if it was cut.
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
    """Return the line above the table of `by_width`."""
    names = ", ".join(metric.head for metric in metrics_of(runs))
    return f"The shared model at the end, by width ({names}):"


def _at(metric: Metric, ends: Sequence[Mapping[float, float]], width: float) -> str:
    known = [end[width] for end in ends if width in end]
    return scored(metric, known if len(known) == len(ends) else ())


def targets(runs: Mapping[str, Sequence[ToTarget]], width: int) -> Table:
    """Return what a target cost those that reached it: time, energy, traffic, rounds."""
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
    """Return what several seeds spent on a target; if not all reached it, how many and how far."""
    reached = [amount(each.spent) for each in group if each.spent]
    if not reached:
        return how_many(group)
    if len(reached) == len(group):
        return _finely(*reached)
    count, _, far = how_many(group).partition(",")
    return f"{count} runs: {_finely(*reached)};{far}"


def how_many(group: Sequence[ToTarget]) -> str:
    """Return how many runs reached a target, and how far the best of the others came."""
    if not group or math.isnan(group[0].target):
        return NOTHING
    metric, count = Metric(group[0].metric), sum(each.spent is not None for each in group)
    best = metric.best(each.best for each in group if not each.spent)
    if not count:
        return not_reached(best, metric)
    told = f"{count} of {len(group)}"
    return told if count == len(group) else f"{told}, else best {metric.told(best)}"


def learned(runs: Mapping[str, Sequence[Within]], width: int) -> Table:
    """Return the scores of runs within an amount, one row per name, and all they had spent by then.

    Numbers are means of the runs that were evaluated by then, which the first column counts; runs
    that had ended count as they ended. `shortfalls` tells of the others.
    """
    unit = _energy(each.spent.joules for group in runs.values() for each in group if each.spent)
    metrics = list(dict.fromkeys(Metric(each.metric) for group in runs.values() for each in group))
    heads = ("runs", *_score_heads(metrics), "simulated s", unit.name, "MB", "GFLOP", "rounds")
    rows = {name: tuple(_lessons(group, metrics, unit)) for name, group in runs.items()}
    return grid(heads, rows, width)


def _lessons(group: Sequence[Within], metrics: Sequence[Metric], unit: Unit) -> Iterator[str]:
    spent = [each.spent for each in group if each.spent]
    yield f"{len(spent)} of {len(group)}"
    known = [(Metric(each.metric), each.score, each.best) for each in group if each.spent]
    yield from _scores(metrics, known)
    yield _finely(*(each.time for each in spent))
    yield _joules(unit, *spent)
    yield megabytes(*(each.bytes for each in spent))
    yield _finely(*(each.flops / 1e9 for each in spent))
    yield number(*(each.rounds for each in spent))


def shortfalls(runs: Mapping[str, Sequence[Within]]) -> Iterator[str]:
    """Yield a line for each name with runs that ended before an amount, or were evaluated later."""
    for name, group in runs.items():
        late = [each for each in group if not each.spent]
        ended = [each for each in group if each.spent and each.ended]
        told = [f"{len(ended)} of {len(group)} {ended_after(ended)}"] if ended else []
        told += [f"{len(late)} of {len(group)} {first_after(late)}"] if late else []
        if told:
            yield f"{name}: {', '.join(told)}."


def grid(heads: Sequence[str], rows: Mapping[str, Sequence[str]], width: int) -> Table:
    """Return a table of names and cells, at most `width` wide if possible, without empty columns.

    If lines would be longer, cells break between words, and long names anywhere. Left to itself,
    rich would cut off the last columns.
    """
    every = zip(heads, *rows.values(), strict=True)
    columns = [column for column in every if any(cell != NOTHING for cell in column[1:])]
    names = max(map(len, rows))
    sizes = [max(map(len, column)) for column in columns]
    if names + sum(sizes) + len(sizes) > width:
        sizes = [max(len(word) for text in column for word in text.split()) for column in columns]
        names = min(names, max(_NAME_WIDTH, width - sum(sizes) - len(sizes)))
    made = PlainTable(collapse_padding=True)
    made.add_column("", overflow="fold", width=names)
    for (head, *_), size in zip(columns, sizes, strict=True):
        made.add_column(head, justify="right", width=size)
    for place, name in enumerate(rows, start=1):
        made.add_row(name, *(column[place] for column in columns))
    return made


def _cells(
    group: Sequence[Sequence[RoundRecord]],
    ends: Sequence[Summary],
    target: float | None,
    unit: Unit,
) -> Iterator[str]:
    yield _finely(*(end.time for end in ends))
    if target is not None:
        costs = [to_target(records, target) for records in group]
        yield over_seeds(costs, lambda spent: spent.time)
    yield _joules(unit, *ends)
    yield megabytes(*(end.down for end in ends))
    yield megabytes(*(end.up for end in ends))
    yield _finely(*(end.flops / 1e9 for end in ends))
    failures = [end.failures for end in ends]
    yield number(*failures) if len(set(failures)) > 1 else str(failures[0])


def _over_devices(ends: Sequence[Summary]) -> str:
    told = [end.fairness.deviation if end.fairness else math.nan for end in ends]
    return number(*(100 * deviation for deviation in told))


def failed_orders(ledger: Ledger) -> str:
    """Return how many orders failed and why ("3 of 40 orders failed: 3 died."), or ""."""
    counts = failure_counts(ledger)
    if not counts:
        return ""
    told = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"{sum(counts.values())} of {len(ledger)} orders failed: {told}."


def megabytes(*amounts: float) -> str:
    """Return bytes in megabytes, with more digits for small messages."""
    return _finely(*(amount / 1e6 for amount in amounts))


def _exactly(*values: float) -> str:
    """Return numbers with four significant digits, for a metric of any size."""
    if not values:
        return NOTHING
    over = spread(values)
    mean = f"{over.mean:.4g}"
    return mean if math.isnan(over.deviation) else f"{mean} ±{over.deviation:.2g}"


def _finely(*values: float) -> str:
    """Return numbers with two or more significant digits if they are below 1."""
    if not 0 < max(values, default=0.0) < 1 or any(math.isnan(value) for value in values):
        return number(*values)
    over = spread(values)
    if over.mean < _TINY:
        mean = f"{over.mean:.1e}"
        return mean if math.isnan(over.deviation) else f"{mean} ±{over.deviation:.1e}"
    return number(*values, digits=max(3, 1 - math.floor(math.log10(over.mean))))


def number(*values: float, digits: int = 1) -> str:
    """Return one value, or the mean and the deviation of several; "–" if one is NaN."""
    if not values or any(math.isnan(value) for value in values):
        return NOTHING
    over = spread(values)
    digits = digits if abs(over.mean) < 1000 else 0
    mean = f"{over.mean:,.{digits}f}"
    # Without a space after the sign, so that a narrow column puts the deviation below the mean.
    return mean if math.isnan(over.deviation) else f"{mean} ±{over.deviation:,.{digits}f}"


# --- groups, devices and classes ----------------------------------------------------------------

_MOST_CLASSES = 12  # that have a row each


def apart(details: Sequence[Breakdown], width: int) -> Table:
    """Return accuracies in per cent by group, device and class, a column for each width."""
    columns = [dict(_accuracies(each)) for each in details]
    rows = {name: [number(100 * column[name]) for column in columns] for name in columns[0]}
    return grid([f"width {each.width:g}" for each in details], rows, width)


def _accuracies(details: Breakdown) -> Iterator[tuple[str, float]]:
    """Yield names and accuracies: by group, over devices, by class, as asked for."""
    yield from ((f"group: {name}", share) for name, share in details.groups.items())
    if details.devices:
        over = details.fairness
        yield "devices: mean", over.mean
        yield "devices: deviation", over.deviation
        yield "devices: worst", over.worst
        yield "devices: 10th percentile", over.tenth
    yield from _classes(details.classes)


def _classes(classes: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield the accuracy of each class if there are few, or the best and the worst."""
    if len(classes) <= _MOST_CLASSES:
        yield from ((f"class {name}", share) for name, share in enumerate(classes))
        return
    known = [share for share in classes if not math.isnan(share)]
    yield "classes: best", max(known, default=math.nan)
    yield "classes: worst", min(known, default=math.nan)
