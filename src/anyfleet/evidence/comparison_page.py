"""The page of the comparison: who wins where, at equal time, energy and bytes."""

from collections.abc import Iterator

from anyfleet.analysis.units import quantity
from anyfleet.evidence.comparison import BUDGETS, Comparison, Interval, Row
from anyfleet.evidence.items import Item

UNITS = {"seconds": "s", "joules": "J", "bytes": "B"}
NAMES = {"seconds": "time", "joules": "energy", "bytes": "bytes"}
PICTURE = "pictures/comparison.png"
_COLLAPSE = 0.1  # of accuracy, below the worst trial
_NOTHING = "–"

_HEAD = """\
# All methods, one fleet: who wins where

The papers compare few methods each, on tasks and fleets of their own. Here all methods meet on the
same fleet, at equal time, energy and bytes. `python -m tools.comparison` writes this page, its
picture and the rows that `anyfleet methods --advise` reads from `evidence/comparison/`: nobody
types a number into them. `anyfleet reproduce comparison/comparison` plays all runs.
"""

_ADVICE = """\
## Advice for a fleet

`anyfleet methods --advise fleet.toml` reads the fleet of a run file, and the task if it has one. It
looks for the cases most like it: by how unequal the devices are, how long the whole model takes to
send, whether the data are skewed, and how often devices and links fail. The methods with the
largest mean gain in these cases are its answer, with the rows that say so. Time and bytes count,
and energy where the fleet has batteries or budgets. Who cannot run there is no candidate: a method
that the library refuses, or one that trains the whole model where some devices cannot hold it.
"""

_BESIDE = """\
## Beside PracMHBench

PracMHBench ([arXiv 2509.08750](https://arxiv.org/abs/2509.08750), DAC 2025) asks a related
question: which algorithm of model-heterogeneous learning pays under the limits of edge devices. It
sorts the algorithms into classes, limits what devices can compute, send or hold, and compares them
on several data sets by several metrics. There the limit decides which model a device trains. Here
it is the other way round: the fleet is fixed, every method does with it what its paper says, and
the limit is the budget of time, energy or bytes at which all of them are read off. So methods that
change no model (compression, weighting, selection) stand in the same table, and so does what
failing links cost. Limits of memory are theirs alone: no device of this fleet is too small for the
whole model. Ours alone, as far as their summary tells, are the stated number of tuning trials for
each method in each case, failing links, and paired intervals over seeds.
"""


def page(item: Item, comparison: Comparison | None) -> str:
    """Return the page of a comparison in Markdown; None: it was not run yet."""
    lines = _unknown(item) if comparison is None else _lines(item, comparison)
    return "\n".join(lines) + "\n"


def _unknown(item: Item) -> Iterator[str]:
    yield _HEAD
    yield "It was not run yet. What is to be compared:"
    yield ""
    yield from (f"- {choice}" for choice in item.choices)
    yield from ("", _ADVICE, _BESIDE.rstrip())


def _lines(item: Item, comparison: Comparison) -> Iterator[str]:
    yield _HEAD
    yield (
        f"It is small: {item.paper.devices} devices, a budget of {comparison.rounds} rounds of "
        f"{comparison.reference}, little data (see the protocol). It tells who learns fastest at "
        "first, not who ends best."
    )
    yield ""
    yield f"![Gains over {comparison.reference}, method by case, for three budgets]({PICTURE})"
    yield ""
    yield winners(comparison)
    yield from _protocol(item, comparison)
    yield _ADVICE
    yield _BESIDE
    yield "## All rows"
    yield ""
    yield (
        f"Score in per cent for each budget; in brackets the gain over {comparison.reference} in "
        "points with its paired 95 % interval. † marks a method whose runs ended before they had "
        "used up the budget: it counts as it ended."
    )
    for name in comparison.cases:
        yield from _case(name, comparison)


def winners(comparison: Comparison) -> str:
    """Return the table of the best method in each case, for each budget."""
    heads = [f"best for equal {NAMES[budget]}" for budget in BUDGETS]
    lines = [
        "## Who wins where",
        "",
        f"| case | {comparison.reference} | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(heads),
    ]
    for case in comparison.cases:
        own = comparison.of(case)[comparison.reference]
        marks = [comparison.best(case, budget) for budget in BUDGETS]
        best = [_winner(row, budget) for row, budget in zip(marks, BUDGETS, strict=True)]
        base = " / ".join(_percent(own.scores.get(budget)) for budget in BUDGETS)
        lines.append(f"| {case} | {base} | {' | '.join(best)} |")
    told = (
        f"The gain over {comparison.reference} in points; bold where its paired 95 % interval lies "
        "above 0. Of many methods the best one is partly lucky: look at the intervals of its "
        "neighbours, too."
    )
    collapsed = [*_collapsed(comparison)]
    return "\n".join((*lines, "", told, *([""] if collapsed else []), *collapsed, ""))


def _collapsed(comparison: Comparison) -> Iterator[str]:
    """Yield the cases in which the reference ended far below its trials."""
    for case in comparison.cases:
        row = comparison.of(case)[comparison.reference]
        mean = None if row.final is None else row.final.mean
        if mean is not None and row.tried is not None and mean < row.tried - _COLLAPSE:
            yield (
                f"- In {case}, {row.method} ended {100 * (row.tried - mean):.0f} points below its "
                "worst trial with the same value: gains over it are as large there for that reason."
            )


def _winner(row: Row | None, budget: str) -> str:
    if row is None:
        return _NOTHING
    gain = row.gains[budget]
    sure = gain.low is not None and gain.low > 0
    told = f"{row.method} {_points(gain.mean)}"
    return f"**{told}**" if sure else told


def _protocol(item: Item, comparison: Comparison) -> Iterator[str]:
    tuning = comparison.tuning
    tried = sum(row.trials for row in comparison.rows)
    runs = sum(1 for row in comparison.rows if not row.refused) * comparison.seeds
    minutes = sum(row.minutes for row in comparison.rows)
    values = ", ".join(f"{value:g}" for value in tuning.values)
    yield "## Protocol"
    yield ""
    several = tuning.trials > 1
    seeds = f"seed{'s' if several else ''} {', '.join(map(str, tuning.seeds))}"
    yield (
        f"- Every method has {len(tuning.values) * tuning.trials} trials in every case: "
        f"`{tuning.key}` from {values}, {seeds}, {100 * tuning.length:g} % of its rounds. The "
        f"value {'whose worst trial' if several else 'whose trial'} has the best last score wins. "
        f"In all {tried} trials."
    )
    tuned = [row.value for row in comparison.rows if row.value is not None]
    largest, smallest = (tuned.count(edge(tuning.values)) for edge in (max, min))
    yield (
        f"- In {largest} of {len(tuned)} cells the largest value won, in {smallest} the smallest: "
        "there one beyond might be better still."
    )
    yield (
        f"- Then {comparison.seeds} seeds: {runs} runs. {comparison.reference} has "
        f"{comparison.rounds} rounds; a method whose rounds are cheaper has more of them, so that "
        f"it can spend the budgets. Trials and runs took {minutes:.0f} minutes, one by one."
    )
    yield (
        f"- The budgets are {_share(tuning.budget)} tuned {comparison.reference} spends in its run "
        "with the same seed. The trials are not charged to them: every method has as many. A "
        "method counts with its last evaluation within a budget."
    )
    yield "- Gains are differences of the same seed: same data, same fleet, same initial model."
    yield from (f"- {choice}" for choice in item.choices)
    yield ""


def _share(share: float) -> str:
    return "what" if share == 1 else f"{100 * share:g} % of what"


def _case(name: str, comparison: Comparison) -> Iterator[str]:
    case = comparison.cases[name]
    amounts = ", ".join(quantity(case.budgets[each], UNITS[each]) for each in BUDGETS)
    heads = " | ".join(f"equal {NAMES[each]}" for each in BUDGETS)
    key = comparison.tuning.key.rpartition(".")[2]
    yield from ("", f"### {name}", "", f"{'; '.join(case.facts.told())}. Budgets: {amounts}.", "")
    yield f"| method | {heads} | end of the run | {key} | trials |"
    yield "|---|---|---|---|---|---|---|"
    refused: dict[str, list[str]] = {}
    for row in comparison.of(name).values():
        if row.refused:
            refused.setdefault(row.refused, []).append(row.method)
            cells = " | ".join(["cannot run"] + [_NOTHING] * 5)
        else:
            told = [_entry(row, each, row.method == comparison.reference) for each in BUDGETS]
            cells = " | ".join((*told, _percent(row.final), f"{row.value:g}", f"{row.trials}"))
        yield f"| {row.method} | {cells} |"
    for why, methods in refused.items():
        yield from ("", f"Cannot run: {', '.join(methods)}. The library says: {why}")


def _entry(row: Row, budget: str, itself: bool) -> str:
    mark = "†" if budget in row.ended else ""
    told = f"{_percent(row.scores.get(budget))}{mark}"
    gain = row.gains.get(budget)
    if itself or gain is None or gain.mean is None:
        return told
    if gain.low is None or gain.high is None:
        return f"{told} ({_points(gain.mean)})"
    return f"{told} ({_points(gain.mean)}; {_points(gain.low)} to {_points(gain.high)})"


def _percent(over: Interval | None) -> str:
    return _NOTHING if over is None or over.mean is None else f"{100 * over.mean:.1f}"


def _points(share: float | None) -> str:
    return _NOTHING if share is None else f"{100 * share:+.1f}"
