"""Tables of runs: where they ended, what a target cost, what equal budgets taught.

A cell is a mean over seeds, with half of the width of its 95 % confidence interval: "42.3 ±7.9". A
single seed has no interval. Nor have numbers that only some seeds have: "2 of 3: 13.8", or a column
"runs" counts them. Rows such as "heterofl − fedavg" are mean differences over the seeds that both
have.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from anyfleet.analysis.breakdown import Breakdown
from anyfleet.analysis.comparison import Comparison, Goal, compare
from anyfleet.analysis.equal_budgets import Resource, Within, ended_after, first_after
from anyfleet.analysis.intervals import Estimate
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import Runs, Spent, ToTarget, failure_counts, not_reached
from anyfleet.analysis.units import common_unit
from anyfleet.cli.screen import PlainTable
from anyfleet.core.ledger import Ledger
from anyfleet.experiment import RoundRecord

NOTHING = "–"  # in an empty cell; a column of nothing else is left out
_TINY, _HUGE = 1e-5, 1e5  # numbers below, and losses above, are written as powers of ten
_ROUNDING = 1e-6  # of a mean: a margin below is how numbers are rounded, not how seeds differ
_COUNT = re.compile(r"\d+ of \d+: ")  # of the seeds that have a number
_NAME_WIDTH = 8  # to which long names are folded if a table needs the room


# --- cells --------------------------------------------------------------------------------------

Form = Callable[[float, float], str]  # a mean and its margin as text; the margin may be NaN


def amount(mean: float, margin: float = math.nan) -> str:
    """Return a number as text: two significant digits or more, and as many of its margin."""
    if math.isnan(mean):
        return NOTHING
    if 0 < max(abs(mean), 0.0 if math.isnan(margin) else margin) < _TINY:
        return f"{mean:.1e}" if math.isnan(margin) else f"{mean:.1e} ±{margin:.1e}"
    return _fixed(mean, margin, 2)


def _fixed(mean: float, margin: float, digits: int) -> str:
    """Return a number with as many decimals as it needs for so many significant digits.

    One more if its margin needs it, or what shows one digit of a margin that is not mere rounding.
    A mean below its margin has the decimals of the margin.
    """
    own = _decimals(mean, digits)
    if 0 < margin < math.inf:
        wanted = _decimals(margin, 2)
        if margin >= abs(mean):
            own = wanted
        elif _ROUNDING * abs(mean) <= margin < 1:
            own = max(own, min(wanted, own + 1), _decimals(margin, 1))
    # Without a space after the sign, so that a narrow column puts the margin below the mean.
    text = f"{mean:z,.{own}f}"
    return text if math.isnan(margin) else f"{text} ±{margin:,.{own}f}"


def _decimals(value: float, digits: int) -> int:
    """Return how many decimals show so many significant digits, at least one below 1,000."""
    least = 0 if abs(value) >= 1000 or digits == 1 else 1
    if not 0 < abs(value) < math.inf:
        return least
    return max(least, digits - 1 - math.floor(math.log10(abs(value))))


def _count(mean: float, margin: float) -> str:
    """Return a count as text, without decimals if all seeds have the same."""
    alone = math.isnan(margin) or not margin
    return f"{mean:,.0f}" if alone and mean == round(mean) else amount(mean, margin)


def _share(mean: float, margin: float) -> str:
    return amount(100 * mean, 100 * margin)


def _exactly(mean: float, margin: float) -> str:
    """Return the value of a metric of any size as text, with four significant digits."""
    if _TINY <= max(abs(mean), 0.0 if math.isnan(margin) else margin) < _HUGE:
        return _fixed(mean, margin, 4)
    return f"{mean:.4g}" if math.isnan(margin) else f"{mean:.4g} ±{margin:.1e}"


def _scaled(size: float) -> Form:
    """Return how amounts are written in units of this size."""
    return lambda mean, margin: amount(mean / size, margin / size)


def _cell(found: Estimate, form: Form) -> str:
    """Return a mean over seeds as text; if only some seeds have a number, how many."""
    if not found.count or math.isnan(found.mean):
        return NOTHING
    told = form(found.mean, found.margin)
    return f"{found.count} of {found.of}: {told}" if found.selected else told


def _signed(form: Form) -> Form:
    """Return how differences are written: more has a sign, too."""
    return lambda mean, margin: ("+" if mean > 0 else "") + form(mean, margin)


# --- columns ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table: cells by name of a run, and differences from the reference."""

    head: str
    cells: Mapping[str, str]
    differences: Mapping[str, str]


@dataclass(frozen=True)
class Sheet:
    """A table as text: heads, and a row of cells for each name."""

    heads: tuple[str, ...]
    rows: Mapping[str, Sequence[str]]


def _column(found: Comparison, head: str, number: str) -> Column:
    """Return the column of a number of runs; "{}" in the head stands for its unit."""
    told = found.quantities[number]
    if told.metric is not None:
        return _scores(found, head, number, Metric(told.metric))
    if not told.unit:
        return _made(found, head, number, _count)
    means = (found.mean(number, name).mean for name in found.runs)
    unit = common_unit(means, told.unit)
    return _made(found, head.format(unit.name), number, _scaled(unit.size))


def _scores(found: Comparison, head: str, number: str, metric: Metric) -> Column:
    """Return the column of a metric, with "NaN" where one of the seeds has a broken model."""
    made = _made(found, head, number, _share if metric.share else _exactly)
    values = found.quantities[number].values
    broken = {name: "NaN" for name, group in values.items() if any(map(math.isnan, group.values()))}
    return Column(head, {**made.cells, **broken}, made.differences)


def _made(found: Comparison, head: str, number: str, form: Form) -> Column:
    return Column(
        head,
        {name: _cell(found.mean(number, name), form) for name in found.runs},
        {name: _cell(found.difference(number, name), _signed(form)) for name in found.runs},
    )


def _energy(found: Comparison, number: str, unmeasured: Collection[str]) -> Column:
    """Return a column of joules; "≥" says that not all orders of a run were measured."""
    made = _column(found, "{}", number)
    known = {
        name: NOTHING if {name, found.reference} & set(unmeasured) else told
        for name, told in made.differences.items()
    }
    least = {name: f"≥ {made.cells[name]}" for name in unmeasured}
    return Column(made.head, {**made.cells, **least}, known)


def _of_metric(found: Comparison, metric: Metric, head: str, number: str) -> Column:
    """Return the column of a score, for the runs that are measured by this metric."""
    made = _scores(found, head, number, metric)
    own = {name for name in found.runs if found.metric(name) == metric}
    cells = {name: told if name in own else NOTHING for name, told in made.cells.items()}
    known = {name: told if name in own else NOTHING for name, told in made.differences.items()}
    return Column(head, cells, known)


def _last_and_best(found: Comparison, prefix: str = "") -> Iterator[Column]:
    """Yield two columns for each metric: the last score, and the best."""
    for metric in found.metrics:
        unit = " %" if metric.share else ""
        best = f"best{unit}" if len(found.metrics) == 1 else f"best {metric.head}"
        yield _of_metric(found, metric, metric.head, f"{prefix}score")
        yield _of_metric(found, metric, best, f"{prefix}best")


def _uncounted(column: Column) -> Column:
    """Return a column for a table in which another one counts the seeds that have a number."""
    cells, differences = (
        {name: _COUNT.sub("", told) for name, told in texts.items()}
        for texts in (column.cells, column.differences)
    )
    return Column(column.head, cells, differences)


def _sheet(
    found: Comparison, columns: Sequence[Column], names: Collection[str] | None = None
) -> Sheet:
    """Return a table of some runs, or of all, with their differences from the reference.

    Of single seeds there are no differences: they would be arithmetic, and tell nothing more.
    """
    shown = [name for name in found.runs if names is None or name in names]
    others = [name for name in shown if name != found.reference]
    if max((len(found.common_seeds(name)) for name in others), default=0) < 2:
        others = []
    rows = {name: [column.cells[name] for column in columns] for name in shown}
    for name in others:
        if found.common_seeds(name):
            told = [column.differences[name] for column in columns]
            rows[f"{name} − {found.reference}"] = told
    return Sheet(tuple(column.head for column in columns), rows)


def _seeds(found: Comparison) -> Iterator[Column]:
    """Yield a column with the numbers of seeds if they differ."""
    counts = {name: str(len(group)) for name, group in found.runs.items()}
    if len(set(counts.values())) > 1:
        yield Column("seeds", counts, {n: str(len(found.common_seeds(n))) for n in found.runs})


# --- tables of a comparison ---------------------------------------------------------------------


def ends(found: Comparison, clock: str = "simulated") -> Sheet:
    """Return where runs ended: scores, time, the time to the target, energy, traffic, failures.

    "spread %" is the deviation of the accuracy over devices, if these were evaluated. `clock` says
    which time the seconds are of.
    """
    further = (name for name in found.quantities if name.startswith("metric_"))
    others = [name for name in further if name != "metric_loss"]
    columns = [*_seeds(found), *_last_and_best(found)]
    columns += [_column(found, Metric(o.removeprefix("metric_")).head, o) for o in others]
    columns.append(_column(found, f"{clock} {{}}", "seconds"))
    if found.metrics and found.goal.width is None and not math.isnan(found.target):
        columns.append(_to_target(found))
    unmeasured = found.quantities["unmeasured"].values
    least = [name for name, group in unmeasured.items() if any(group.values())]
    columns.append(_energy(found, "joules", least))
    columns.append(_column(found, "{} down", "bytes_down"))
    columns.append(_column(found, "{} up", "bytes_up"))
    columns.append(_column(found, "{}", "flops"))
    columns.append(_column(found, "failures", "failures"))
    columns.append(_column(found, "spread %", "deviation_over_devices"))
    return _sheet(found, columns)


def _to_target(found: Comparison) -> Column:
    """Return the column of seconds to the target, and how far runs came that all missed it."""
    made = _column(found, f"{{}} to {found.metrics[0].told(found.target)}", "target_seconds")
    missed = {
        name: how_many(list(group.values()))
        for name, group in found.costs.items()
        if made.cells[name] == NOTHING
    }
    return Column(made.head, {**made.cells, **missed}, made.differences)


def widths(found: Comparison) -> Sheet | None:
    """Return the last score of the shared models at every width that was evaluated.

    None if that is only the whole model, which `ends` has.
    """
    numbers = [name for name in found.quantities if name.startswith("score@")]
    # If devices' own models are evaluated, the shared one is of interest only if it was cut.
    shown = [
        name
        for name, group in found.runs.items()
        if group and (_cut(found, name, numbers) or not _on_devices(group))
    ]
    known = [
        number for number in numbers if any(found.quantities[number].values[name] for name in shown)
    ]
    if not set(known) - {"score@1"}:
        return None
    columns = [_width(found, number) for number in known]
    return _sheet(found, columns, shown)


def _cut(found: Comparison, name: str, numbers: Sequence[str]) -> bool:
    return sum(bool(found.quantities[number].values[name]) for number in numbers) > 1


def _on_devices(group: Mapping[int, Sequence[RoundRecord]]) -> bool:
    return any(not math.isnan(records[-1].on_devices) for records in group.values())


def _width(found: Comparison, number: str) -> Column:
    """Return the column of one width, in which every run is measured by its own metric."""
    head = f"width {number.removeprefix('score@')}"
    columns = [_of_metric(found, metric, head, number) for metric in found.metrics]
    cells, known = {}, {}
    for name in found.runs:
        told = [column for column in columns if column.cells[name] != NOTHING]
        cells[name] = told[0].cells[name] if told else NOTHING
        known[name] = told[0].differences[name] if told else NOTHING
    return Column(head, cells, known)


def width_title(found: Comparison) -> str:
    """Return the line above the table of `widths`."""
    names = ", ".join(metric.head for metric in found.metrics)
    return f"The shared model at the end, by width ({names}):"


def targets(found: Comparison) -> Sheet:
    """Return what the target cost the seeds that reached it: time, energy, traffic, rounds."""
    groups = {name: list(group.values()) for name, group in found.costs.items()}
    reached = {name: [each.spent for each in group] for name, group in groups.items()}
    both = {
        name: f"{found.difference('target_rounds', name).count} of {len(found.common_seeds(name))}"
        for name in found.runs
    }
    counts = Column("runs", {name: how_many(group) for name, group in groups.items()}, both)
    columns = [
        _column(found, "simulated {}", "target_seconds"),
        _energy(found, "target_joules", _unmeasured(reached)),
        _column(found, "{}", "target_bytes"),
        _column(found, "rounds", "target_rounds"),
    ]
    return _sheet(found, [counts, *map(_uncounted, columns)])


def _unmeasured(spent: Mapping[str, Sequence[Spent | None]]) -> list[str]:
    """Return the names of runs with orders whose joules are not known."""
    return [
        name for name, group in spent.items() if any(each and each.unmeasured for each in group)
    ]


def how_many(group: Sequence[ToTarget]) -> str:
    """Return how many runs reached a target, and how far the best of the others came."""
    if not group or math.isnan(group[0].target):
        return NOTHING
    metric, count = Metric(group[0].metric), sum(each.spent is not None for each in group)
    best = metric.best(each.best for each in group if not each.spent)
    if not count:
        return not_reached(best, metric, group[0].target)
    told = f"{count} of {len(group)}"
    return (
        told if count == len(group) else f"{told}, else best {metric.apart(best, group[0].target)}"
    )


def learned(found: Comparison, resource: Resource) -> Sheet:
    """Return the scores of runs within an amount of a resource, and all they had spent by then.

    The first column counts the seeds that were evaluated by then; runs that had ended count as they
    ended. `shortfalls` tells of the others.
    """
    lessons = found.lessons[resource]
    spent = {name: [each.spent for each in group.values()] for name, group in lessons.items()}
    counts = {n: f"{sum(map(bool, group))} of {len(group)}" for n, group in spent.items()}
    both = {
        name: f"{found.difference(f'{resource}_rounds', name).count} "
        f"of {len(found.common_seeds(name))}"
        for name in found.runs
    }
    columns = [
        *_last_and_best(found, f"{resource}_"),
        _column(found, "simulated {}", f"{resource}_seconds"),
        _energy(found, f"{resource}_joules", _unmeasured(spent)),
        _column(found, "{}", f"{resource}_bytes"),
        _column(found, "{}", f"{resource}_flops"),
        _column(found, "rounds", f"{resource}_rounds"),
    ]
    return _sheet(found, [Column("runs", counts, both), *map(_uncounted, columns)])


def shortfalls(runs: Mapping[str, Mapping[int, Within]]) -> Iterator[str]:
    """Yield a line for each name with runs that ended before an amount, or were evaluated later."""
    for name, group in runs.items():
        late = [each for each in group.values() if not each.spent]
        ended = [each for each in group.values() if each.spent and each.ended]
        told = [f"{len(ended)} of {len(group)} {ended_after(ended)}"] if ended else []
        told += [f"{len(late)} of {len(group)} {first_after(late)}"] if late else []
        if told:
            yield f"{name}: {', '.join(told)}."


# --- on the screen ------------------------------------------------------------------------------


def table(runs: Runs, target: float | None, width: int) -> Table:
    """Return one row per name: where it ended; one column has the seconds to the target, if any."""
    goal = Goal(target=math.nan if target is None else target)
    return drawn(ends(compare(runs, goal)), width)


def drawn(sheet: Sheet, width: int) -> Table:
    """Return a table for the screen, at most `width` wide if possible."""
    return grid(sheet.heads, sheet.rows, width)


def grid(heads: Sequence[str], rows: Mapping[str, Sequence[str]], width: int) -> Table:
    """Return a table of names and cells, at most `width` wide if possible, without empty columns.

    If lines would be longer, cells break between words, those of the widest columns first, and at
    last long names anywhere. Left to itself, rich would cut off the last columns.
    """
    every = zip(heads, *rows.values(), strict=True)
    columns = [column for column in every if any(cell != NOTHING for cell in column[1:])]
    names = max(map(len, rows), default=0)
    sizes = [max(map(len, column)) for column in columns]
    least = [max(len(word) for text in column for word in text.split()) for column in columns]
    while names + sum(sizes) + len(sizes) > width and sizes != least:
        widest = max(range(len(sizes)), key=lambda at: (sizes[at] > least[at], sizes[at]))
        sizes[widest] -= 1
    names = min(names, max(_NAME_WIDTH, width - sum(sizes) - len(sizes)))
    made = PlainTable(collapse_padding=True)
    made.add_column("", overflow="fold", width=names)
    for (head, *_), size in zip(columns, sizes, strict=True):
        made.add_column(head, justify="right", width=size)
    for place, name in enumerate(rows, start=1):
        made.add_row(name, *(column[place] for column in columns))
    return made


def failed_orders(ledger: Ledger) -> str:
    """Return how many orders failed and why ("3 of 40 orders failed: 3 died."), or ""."""
    counts = failure_counts(ledger)
    if not counts:
        return ""
    told = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"{sum(counts.values())} of {len(ledger)} orders failed: {told}."


# --- groups, devices and classes ----------------------------------------------------------------

_MOST_CLASSES = 12  # that have a row each


def apart(details: Sequence[Breakdown], width: int) -> Table:
    """Return accuracies in per cent by group, device and class, a column for each width."""
    columns = [dict(_accuracies(each)) for each in details]
    rows = {name: [amount(100 * column[name]) for column in columns] for name in columns[0]}
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
