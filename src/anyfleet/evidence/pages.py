"""Pages: an item with the paper's numbers beside ours, and the list of all verdicts.

Pages follow from recipes and result files alone: nobody types a number into them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from anyfleet.analysis.intervals import estimate
from anyfleet.analysis.units import quantity
from anyfleet.evidence import diagnostics
from anyfleet.evidence.calculations import calculated
from anyfleet.evidence.items import Case, Item, is_cost
from anyfleet.evidence.measured import (
    Amount,
    Found,
    Key,
    amounts,
    best_variant,
    found,
    with_best,
)
from anyfleet.evidence.results import CellResult, Results
from anyfleet.evidence.tuning import chosen, tuned
from anyfleet.evidence.verdicts import RULE, Gain, Verdict, Word, exactly, verdicts
from anyfleet.experiment import Experiment

_UNITS: Mapping[str, str] = {"seconds": "s", "joules": "J", "bytes": "B", "flops": "FLOP"}
_NOTHING = "–"


@dataclass(frozen=True)
class Standing:
    """An item with what was found of it."""

    item: Item
    results: Results | None
    there: Found
    verdicts: tuple[Verdict, ...]

    @property
    def state(self) -> str:
        """Where the item stands, in a few words."""
        if self.item.calculate:
            return _calculated_state(self.item)
        if self.there.stale:
            return f"stale ({len(self.there.stale)} cells)"
        if not self.there.cells:
            return "not run"
        words = [verdict.word for verdict in self.verdicts]
        counts = {word: words.count(word) for word in dict.fromkeys(words)}
        told = ", ".join(f"{count} {word}" for word, count in counts.items()) or "run"
        whole = len(self.there.cells) + len(self.there.missing)
        part = f"; {len(self.there.cells)} of {whole} cells" if self.there.missing else ""
        return f"{told}{part}"


def standing_of(
    item: Item, results: Results | None, experiments: Mapping[Key, Experiment] | None = None
) -> Standing:
    """Return where an item stands; of one whose methods are tuned, where the tuned methods do.

    `experiments` are those of the item, which saves making them again.
    """
    if item.tuning and results is not None:
        there = found(tuned(item, chosen(item, results)), results)
    else:
        there = found(item, results, experiments)
    return Standing(item, results, there, verdicts(item, there))


# --- one item -------------------------------------------------------------------------------------


def item_page(standing: Standing, experiments: Sequence[Standing] = ()) -> str:
    """Return the page of an item in Markdown; `experiments` are those that explain it."""
    return "\n".join(_item_lines(standing, experiments)) + "\n"


def minutes_of(standing: Standing) -> str:
    """Return how long the runs of an item took, in words; "–" if none was run."""
    cells = _distinct(standing)
    return f"{math.fsum(cell.minutes for cell in cells):.1f} min" if cells else _NOTHING


def _distinct(standing: Standing) -> list[CellResult]:
    """Return the cells of an item, each once: several cases may share one."""
    return [*{cell.digest: cell for cell in standing.there.cells.values()}.values()]


def _item_lines(standing: Standing, experiments: Sequence[Standing]) -> Iterator[str]:
    item = standing.item
    yield f"# {item.document}, {item.where}: {item.title}"
    yield ""
    yield from _scale(standing)
    yield ""
    yield from (f"`{command}`" for command in _commands(standing))
    if item.note:
        yield from ("", item.note)
    yield from _tables(standing)
    yield from diagnostics.table(item, standing.there)
    yield from _claims(standing)
    if item.choices:
        yield from ("", "## What the document leaves open", "")
        yield from (f"- {choice}" for choice in item.choices)
    yield from _failing(standing, experiments)
    for each in experiments:
        yield from ("", f"## Experiment: {each.item.title}", "")
        yield f"[{each.item.name}]({each.item.name.partition('/')[2]}.md): {each.state}."
        yield from _claims(each, head=False)


def _scale(standing: Standing) -> Iterator[str]:
    """Yield the scale of the paper, and the one at which the item was run."""
    item, cells = standing.item, _distinct(standing)
    if item.calculate:
        yield "Calculated, not run."
        return
    paper = item.paper
    rounds = "rounds not given" if paper.rounds is None else _count(paper.rounds, "round")
    yield (
        f"The document's scale: {rounds}, {_count(paper.devices, 'device')}, "
        f"{_count(paper.seeds, 'run')}."
    )
    if not cells:
        yield f"Ours: {standing.state}."
        return
    machines, dates, commits = _where(cells)
    spent = f"{math.fsum(cell.minutes for cell in cells):.1f} minutes"
    yield f"Ours: {_ours_scale(cells)}; {machines}; {dates}; commit {commits}; {spent}."
    if standing.there.stale or standing.there.missing:
        yield f"Not everything was run: {standing.state}."


def _ours_scale(cells: Sequence[CellResult]) -> str:
    rounds, devices, seeds = (
        _range(sorted(numbers))
        for numbers in (
            {cell.rounds for cell in cells},
            {cell.devices for cell in cells},
            {len(cell.runs) for cell in cells},
        )
    )
    return f"{rounds} rounds, {devices} devices, {seeds} seeds"


def _where(cells: Sequence[CellResult]) -> tuple[str, str, str]:
    """Return machines, dates and commits of cells, each once."""
    return (
        "; ".join(dict.fromkeys(cell.machine for cell in cells)),
        ", ".join(dict.fromkeys(cell.date for cell in cells)),
        ", ".join(dict.fromkeys(cell.commit or "unknown" for cell in cells)),
    )


def _commands(standing: Standing) -> tuple[str, ...]:
    """Return the commands that the runs of an item come from; without any the one to give."""
    known = dict.fromkeys(cell.command for cell in _distinct(standing) if cell.command)
    return tuple(known) or (f"anyfleet reproduce {standing.item.name}",)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _tables(standing: Standing) -> Iterator[str]:
    """Yield a table for each measure: the document's number, then ours with its interval."""
    item = standing.item
    ours = calculated(item) if item.calculate else None
    for measure in item.measures:
        columns = item.columns
        there = with_best(item, standing.there, measure)
        yield from ("", f"## {_headline(measure)}", "")
        yield f"| case | {' | '.join(columns)} |"
        yield "|---|" + "---|" * len(columns)
        for case in item.cases.values():
            row = [
                _calculated_entry(case, name, measure, ours)
                if ours is not None
                else _entry(there, case, name, measure) + _variant(standing, case, name, measure)
                for name in columns
            ]
            yield f"| {_case(case, measure)} | {' | '.join(row)} |"
    yield ""
    yield "The document's number stands first, ours after it in bold, ± half of its 95 % interval."


def _case(case: Case, measure: str) -> str:
    target = case.target is not None and is_cost(measure)
    return f"{case.name} (to {100 * case.target:g} %)" if target and case.target else case.name


def _headline(measure: str) -> str:
    kind, _, width = measure.partition("@")
    names = {
        "rounds": "Rounds to the target",
        "seconds": "Simulated time to the target",
        "joules": "Energy to the target",
        "bytes": "Bytes to the target",
        "flops": "Operations to the target",
        "score": "Final accuracy",
        "best": "Best accuracy",
        "operations": "Operations of a step",
    }
    return names.get(kind, kind) + (f" at width {width}" if width else "")


def _variant(standing: Standing, case: Case, method: str, measure: str) -> str:
    """Return which variant of a method a number is of, in brackets; "" if it has none."""
    if method not in standing.item.best:
        return ""
    best = best_variant(standing.item, standing.there, case, method, measure)
    return "" if best is None else f" ({best.removeprefix(f'{method}, ')})"


def _entry(there: Found, case: Case, method: str, measure: str) -> str:
    row = case.paper.get(measure, {})
    printed = _NOTHING
    if method in row:
        value = row[method]
        printed = "not reached" if value is None else _told(measure, value)
    cell = there.cells.get((case.name, method))
    if cell is None:
        if (case.name, method) in there.stale:
            return f"{printed} / stale"
        known = (case.name, method) in there.missing
        return f"{printed} / not run" if known else (printed if method in row else _NOTHING)
    return f"{printed} / **{_ours(amounts(case, cell, measure), measure)}**"


def _ours(values: Mapping[int, Amount], measure: str) -> str:
    if not values:
        return "not measured"
    missed = [each for each in values.values() if not each.reached]
    if len(missed) == len(values):
        return "not reached"
    mean = estimate([each.value for each in values.values()])
    margin = "" if math.isnan(mean.margin) else f" ± {_told(measure, mean.margin)}"
    least = f", {len(missed)} of {len(values)} not reached" if missed else ""
    return f"{'≥ ' if missed else ''}{_told(measure, mean.mean)}{margin}{least}"


def _told(measure: str, value: float) -> str:
    if measure in _UNITS:
        return quantity(value, _UNITS[measure])
    if measure == "rounds":
        return f"{value:.4g}"
    return f"{value:,.0f}" if measure == "operations" else f"{100 * value:.2f} %"


def _claims(standing: Standing, *, head: bool = True) -> Iterator[str]:
    if not standing.verdicts:
        return
    if head:
        yield from ("", "## Claims and verdicts")
    yield ""
    yield "| claim | against | by | the document's gain | ours (95 % interval) | verdict |"
    yield "|---|---|---|---|---|---|"
    for verdict in standing.verdicts:
        claim = verdict.claim
        claimed = _claimed(verdict)
        ours = _NOTHING if verdict.gain is None else _interval(verdict.gain)
        by = _headline(claim.by).lower()
        word = f"**{verdict.word}**: {verdict.why}"
        against = claim.against(verdict.other)
        yield f"| {claim.text} | {against} | {by} | {claimed} | {ours} | {word} |"


def _failing(standing: Standing, experiments: Sequence[Standing]) -> Iterator[str]:
    """Yield the claims that fail, each with the experiments in which the same question does not."""
    fails = [each for each in standing.verdicts if _fails(each)]
    if fails:
        yield from ("", "## Why claims fail", "")
    for verdict in fails:
        claim = f"{verdict.claim.text.removesuffix('.')} (against {verdict.other})"
        flips = [
            f"[{each.item.title}]({each.item.name.partition('/')[2]}.md), "
            f"{other.claim.better} against {other.other}: {_interval(other.gain)}"
            for each in (standing, *experiments)
            for other in each.verdicts
            if other.gain is not None and other.above and _answers(each.item, other, verdict)
        ]
        told = f"it holds in {'; '.join(flips)}." if flips else "cause not found."
        yield f"- {claim}: {told}"


def _answers(item: Item, found: Verdict, asked: Verdict) -> bool:
    """Return whether a verdict of an item is about the same question as another verdict.

    It has the same measure and opponent, or one that stands for it, and the same cases; an
    experiment that has none of these cases may have others.
    """
    column = item.methods.get(found.other)
    opponent = (column.stands_for if column else "") or found.other
    same = (opponent, found.claim.by) == (asked.other, asked.claim.by)
    elsewhere = not any(case in item.cases for case in asked.claim.cases)
    return same and (elsewhere or set(found.claim.cases) <= set(asked.claim.cases))


def _fails(verdict: Verdict) -> bool:
    """Return whether no part of an interval lies above no gain, at whatever scale."""
    return verdict.gain is not None and verdict.gain.high <= verdict.gain.none


def _claimed(verdict: Verdict) -> str:
    """Return the gain that the document claims, in words."""
    gain, claim = verdict.claimed, verdict.claim
    if claim.within:
        return f"about equal (within {100 * claim.within:g} points)"
    if gain is None:
        return "direction only"
    return f"× {gain:.3g}" if is_cost(claim.by) else f"{100 * gain:+.2f} points"


def _interval(gain: Gain) -> str:
    scale = 100.0 if gain.kind == "points" else 1.0
    form = {"ratio": ".3g", "points": "+.2f", "plain": "+.3g"}[gain.kind]
    mean, low, high = (format(scale * each, form) for each in (gain.mean, gain.low, gain.high))
    before, unit = "× " if gain.kind == "ratio" else "", " points" if gain.kind == "points" else ""
    known = not math.isnan(gain.low)
    return f"{before}{mean}{unit}" + (f" ({low} to {high})" if known else "")


# --- calculated items -----------------------------------------------------------------------------


def _calculated_entry(
    case: Case, method: str, measure: str, ours: Mapping[tuple[str, str], float]
) -> str:
    printed = case.paper.get(measure, {}).get(method)
    value = ours.get((case.name, method))
    if printed is None and value is None:
        return _NOTHING
    told = _NOTHING if printed is None else _told(measure, printed)
    return told if value is None else f"{told} / **{_told(measure, value)}**"


def _calculated_state(item: Item) -> str:
    ours = calculated(item)
    rows = [
        (printed, ours.get((case.name, method)))
        for case in item.cases.values()
        for row in case.paper.values()
        for method, printed in row.items()
        if printed is not None
    ]
    equal = [value for printed, value in rows if value is not None and exactly(value, printed)]
    if len(equal) == len(rows):
        return f"reproduced exactly: {len(rows)} numbers"
    return f"not reproduced: {len(rows) - len(equal)} of {len(rows)} numbers differ"


# --- all items ------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Evidence

What the documents claim, and what came of it in our runs. This page and those that it leads to are
written by `python -m tools.pages` from the recipes (`recipes/DOCUMENT/ITEM.toml`) and from the
result files that `anyfleet reproduce` writes (`evidence/`): nobody types a number into them.

    anyfleet reproduce --list                   # all items, what each takes, and where it stands
    anyfleet reproduce thesis/table_3_1         # play it, and write the result file
    anyfleet reproduce thesis/table_3_1 --quick # a look in seconds; nothing is written
"""
_WRITING = """\
## How an item is written

A recipe has the runs, the numbers that the document prints, and its claims, in one file:

```text
title = "FedAdp needs fewer rounds than FedAvg"
where = "Table 3.1"
paper = { rounds = 300, devices = 10, seeds = 1 }    # the document's scale
seeds = 5                                   # ours
measures = ["rounds", "best"]               # to the target: rounds, seconds, joules, bytes, flops;
                                            # of all evaluations, or of the last: best, score@0.5
baseline = "FedAvg"                         # must have the accuracy that the document prints
choices = ["The thesis does not say …; here …"]

[run]                                       # what all runs have in common: keys of a run file
rounds = 300

[cases."MNIST, 5+5, one class"]             # rows of the table
target = 0.95
run.task.partition = { use = "Mixed", iid = 5, classes = 1, samples = 600 }
paper.rounds = { FedAvg = 133, FedAdp = 61 }    # as printed, in SI units; or "not reached"

[methods.FedAdp]                            # columns of the table
method = { use = "fedadp", lr = 0.01 }
best = { key = "method.sharpness", values = [3, 5, 7] }    # if the best of several is reported

[[claims]]
text = "FedAdp reaches the target in fewer rounds than FedAvg."
better = "FedAdp"
than = ["FedAvg"]
by = "rounds"
each = true                                 # a claim for each case, not one for their mean

[quick]                                     # laid over everything with --quick
rounds = 2
```

The tables of case and method are laid over `[run]` as files are that
[extend one another](run_files.md#files-that-build-on-others). An item with
`explains = "whale/table_1"` is an experiment on another one: on a choice that the document leaves
open, or on why a claim fails. A method of it that has another name there says so with
`stands_for = "STC"`; `smaller = "a network of 1/44 of the parameters"` says why the experiment
cannot decide a claim, whatever its rounds.

`diagnostics = ["norms", "loss", "widths"]` are kept for every round: what parts of the method tell,
`loss` (of training, as devices report it) and `test_loss`, and for each device `widths`,
`utilities` and `fisher`. `groups = { "one class" = [0, 24] }` are first and last devices. A claim
may be `by` a diagnostic, of which less is better, with `groups = ["all classes", "one class"]` of
one group against another. With `within = 0.02` a claim is that two methods are about equal, and
`gain = "direction only"` says that the document's numbers are of other data.
"""


def evidence_page(standings: Sequence[Standing]) -> str:
    """Return the page that collects the verdicts of all items."""
    rule = f"## The rule\n\n{RULE}"
    return "\n".join((_INTRODUCTION, *_collected(standings), *_ran(standings), "", rule, _WRITING))


def _ran(standings: Sequence[Standing]) -> Iterator[str]:
    """Yield a row for each item that was run: at which scale, where, when and by which command."""
    yield from ("", "## What was run", "")
    yield "| item | ours | the document's | machine | date | commit | took | command |"
    yield "|---|---|---|---|---|---|---|---|"
    for standing in standings:
        cells, paper = _distinct(standing), standing.item.paper
        if not cells:
            continue
        rounds = "rounds not given" if paper.rounds is None else _count(paper.rounds, "round")
        theirs = f"{rounds}, {_count(paper.devices, 'device')}, {_count(paper.seeds, 'run')}"
        if standing.item.tuning:  # the comparison of all methods, which no document has
            theirs = _NOTHING
        part = f" ({len(cells)} cells run)" if standing.there.missing else ""
        commands = "; ".join(f"`{each}`" for each in _commands(standing))
        where = " | ".join(_where(cells))
        yield (
            f"| {standing.item.name} | {_ours_scale(cells)}{part} | {theirs} | {where} "
            f"| {minutes_of(standing)} | {commands} |"
        )


def _collected(standings: Sequence[Standing]) -> Iterator[str]:
    yield "## Verdicts"
    words = [verdict.word for each in standings for verdict in each.verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in get_args(Word) if word in words)
    yield from ("", f"{len(words)} claims: {counts}.")
    documents = dict.fromkeys(each.item.document for each in standings)
    for document in documents:
        own = [each for each in standings if each.item.document == document]
        yield from ("", f"### {document}", "")
        yield "| item | claim | against | the document's gain | ours (95 % interval) | verdict |"
        yield "|---|---|---|---|---|---|"
        for each in own:
            yield from _rows(each)


def _rows(standing: Standing) -> Iterator[str]:
    item = standing.item
    page = "comparison.md" if item.tuning else f"evidence/{item.name}.md"
    link = f"[{item.where}]({page})"
    if item.explains:
        link = f"[experiment on {item.explains.partition('/')[2]}](evidence/{item.name}.md)"
    known = standing.there.cells or standing.there.stale
    if not standing.verdicts or not known:
        count = len(standing.verdicts)
        claims = f" ({_count(count, 'claim')})" if count else ""
        yield f"| {link} | {item.title}{claims} | | | | {standing.state} |"
        return
    for verdict in standing.verdicts:
        claim = verdict.claim
        claimed = _claimed(verdict)
        ours = _NOTHING if verdict.gain is None else _interval(verdict.gain)
        against = claim.against(verdict.other)
        yield f"| {link} | {claim.text} | {against} | {claimed} | {ours} | {verdict.word} |"
