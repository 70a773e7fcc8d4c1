"""Pages of items: the paper's numbers beside ours, the claims and their verdicts.

Pages follow from recipes and result files alone: nobody types a number into them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from anyfleet.analysis.intervals import estimate
from anyfleet.analysis.units import common_unit, quantity
from anyfleet.evidence import diagnostics, sensitivity
from anyfleet.evidence.calculations import calculated
from anyfleet.evidence.estimates import CORE, core_hours, flops_of
from anyfleet.evidence.items import SCORES, Case, Item, is_cost
from anyfleet.evidence.measured import (
    Amount,
    Cells,
    Found,
    Key,
    amounts,
    best_variant,
    found,
    with_best,
)
from anyfleet.evidence.results import CellResult, Results
from anyfleet.evidence.tuning import chosen, tuned
from anyfleet.evidence.verdicts import MATCHED, Gain, Verdict, exactly, verdicts
from anyfleet.experiment import Experiment

_UNITS: Mapping[str, str] = {"seconds": "s", "joules": "J", "bytes": "B", "flops": "FLOP"}
NOTHING = "–"
ENDED = "ended early"  # runs of an experiment
DOCUMENTS: Mapping[str, str] = {
    "fedpmt": "FedPMT",
    "whale": "WHALE-FL",
    "fedrescue": "FedResCuE",
    "anycost": "AnycostFL",
    "thesis": "Thesis",
    "comparison": "Comparison",
}


@dataclass(frozen=True)
class Standing:
    """An item with what was found of it."""

    item: Item
    results: Results | None
    there: Found
    verdicts: tuple[Verdict, ...]
    distinct: int = 0  # experiments of the item; equal ones are played once
    flops: float | None = None  # of all its runs, about; None: nobody knows

    @property
    def state(self) -> str:
        """Where the item stands, in a few words."""
        if self.item.calculate:
            return _calculated_state(self.item)
        if self.there.stale:
            return f"stale ({len(self.there.stale)} cells)"
        if not self.there.cells.keys() - self.there.shared.keys():
            return "not run"
        words = [verdict.word for verdict in self.verdicts]
        counts = {word: words.count(word) for word in dict.fromkeys(words)}
        told = ", ".join(f"{count} {word}" for word, count in counts.items()) or "run"
        whole = len(self.there.cells) + len(self.there.missing)
        part = f"; {len(self.there.cells)} of {whole} cells" if self.there.missing else ""
        return f"{told}{part}"


def standing_of(
    item: Item,
    results: Results | None,
    experiments: Mapping[Key, Experiment] | None = None,
    elsewhere: Cells | None = None,
) -> Standing:
    """Return where an item stands; of one whose methods are tuned, where the tuned methods do.

    `experiments` are those of the item, which saves making them again; `elsewhere` are the results
    of all items, among which are those of experiments that it shares with others.
    """
    made = item.experiments() if experiments is None else experiments
    own = found(item, results, made, elsewhere)
    there = own
    if item.tuning and results is not None:
        there = found(tuned(item, chosen(item, results)), results)
    distinct = {own.digests[key]: experiment for key, experiment in made.items()}
    flops = flops_of(item, distinct.values()) if distinct else None
    return Standing(item, results, there, verdicts(item, there), len(distinct), flops)


# --- one item -------------------------------------------------------------------------------------


def item_page(standing: Standing, experiments: Sequence[Standing] = ()) -> str:
    """Return the page of an item in Markdown; `experiments` are those that explain it."""
    return "\n".join(_item_lines(standing, experiments)) + "\n"


def minutes_of(standing: Standing) -> str:
    """Return how long the runs of an item took, in words; "–" if none was run."""
    cells = own_cells(standing)
    return f"{math.fsum(cell.minutes for cell in cells):.1f} min" if cells else NOTHING


def distinct_cells(standing: Standing) -> list[CellResult]:
    """Return the cells of an item, each once: several cases may share one."""
    return [*{cell.digest: cell for cell in standing.there.cells.values()}.values()]


def own_cells(standing: Standing) -> list[CellResult]:
    """Return the cells of an item that were played for it, each once."""
    shared = standing.there.shared
    own = {cell.digest: cell for key, cell in standing.there.cells.items() if key not in shared}
    return [*own.values()]


def _item_lines(standing: Standing, experiments: Sequence[Standing]) -> Iterator[str]:
    item = standing.item
    yield f"# {DOCUMENTS.get(item.document, item.document)}, {item.where}: {item.title}"
    yield ""
    if item.explains:
        page = f"{item.explains.partition('/')[2]}.md"
        yield from (f"An experiment of ours on [{item.explains}]({page}).", "")
    if item.about:
        yield from (item.about, "")
    yield from _scale(standing)
    yield ""
    yield from (f"`{command}`" for command in commands_of(standing))
    if item.note:
        yield from ("", item.note)
    yield from _tables(standing)
    yield from diagnostics.table(item, standing.there)
    yield from _claims(standing)
    yield from _by_target(standing)
    yield from _by_reading(standing)
    if item.choices:
        yield from ("", "## What the document leaves open", "")
        yield from (f"- {choice}" for choice in item.choices)
    yield from _failing(standing, experiments)
    for each in experiments:
        yield from ("", f"## Experiment: {each.item.title}", "")
        link = f"[{each.item.name}]({each.item.name.partition('/')[2]}.md)"
        yield f"{link}: {each.state}{hours_of(each)}."
        yield from _claims(each, head=False) if own_cells(each) else ()
    yield from ("", "All items: [evidence](../../evidence.md).")


def _scale(standing: Standing) -> Iterator[str]:
    """Yield the scale of the paper, and the one at which the item was run."""
    item, cells = standing.item, distinct_cells(standing)
    if item.calculate:
        yield "Calculated, not run."
        return
    paper = item.paper
    rounds = "rounds not given" if paper.rounds is None else counted(paper.rounds, "round")
    yield (
        f"The document's scale: {rounds}, {counted(paper.devices, 'device')}, "
        f"{counted(paper.seeds, 'run')}."
    )
    if not cells:
        yield f"Ours: {standing.state}. {_takes(standing)}"
        return
    machines, dates, commits = origins(cells)
    spent = "" if (took := minutes_of(standing)) == NOTHING else f"; {took}utes"
    smaller = f"; {item.smaller}" if item.smaller else ""
    scale = scale_of(cells, chosen=paper.rounds is None)
    yield f"Ours: {scale}{smaller}; {machines}; {dates}; commit {commits}{spent}."
    for owner in dict.fromkeys(standing.there.shared.values()):
        keys = [key for key, each in standing.there.shared.items() if each == owner]
        told = ", ".join(dict.fromkeys(method for _, method in keys))
        document, _, name = owner.partition("/")
        page = f"{name}.md" if document == item.document else f"../{owner}.md"
        link = f"[{owner}]({page})"
        yield f"The runs of {told} are those of {link}."
    if standing.there.stale or standing.there.missing:
        some = f"Not everything was run: {standing.state}."
        told = some if own_cells(standing) else "The rest was not run."
        yield f"{told} {_takes(standing)}"


def _takes(standing: Standing) -> str:
    """Return a sentence on how much computing all runs of an item take."""
    if standing.flops is None:
        return "How much computing it takes is not known."
    return (
        f"All of it takes about {standing.flops:.1e} FLOP: {core_hours(standing.flops)} of one "
        f"core at {CORE / 1e9:g} GFLOP/s, if devices train whole networks."
    )


def hours_of(standing: Standing) -> str:
    """Return how much computing an item takes of which nothing was run, in brackets."""
    known = own_cells(standing) or standing.there.stale or standing.flops is None
    return "" if known else f" (takes {core_hours(standing.flops)})"


def scale_of(cells: Sequence[CellResult], *, chosen: bool = False) -> str:
    """Return rounds, devices and seeds of cells; `chosen`: the document gives no rounds."""
    rounds, devices, seeds = (
        _range(sorted(numbers))
        for numbers in (
            {cell.rounds for cell in cells},
            {cell.devices for cell in cells},
            {len(cell.runs) for cell in cells},
        )
    )
    each = ((rounds, "round"), (devices, "device"), (seeds, "seed"))
    told = [f"{number} {noun}{'' if number == '1' else 's'}" for number, noun in each]
    return ", ".join([told[0] + " (our choice)" * chosen, *told[1:]])


def origins(cells: Sequence[CellResult]) -> tuple[str, str, str]:
    """Return machines, dates and commits of cells, each once."""
    return (
        "; ".join(dict.fromkeys(cell.machine for cell in cells)),
        ", ".join(dict.fromkeys(cell.date for cell in cells)),
        ", ".join(
            dict.fromkeys(c for cell in cells for c in (cell.commit or "unknown").split("; "))
        ),
    )


def commands_of(standing: Standing) -> tuple[str, ...]:
    """Return the commands that the runs of an item come from; without any the one to give."""
    known = dict.fromkeys(cell.command for cell in own_cells(standing) if cell.command)
    return tuple(known) or (f"anyfleet reproduce {standing.item.name}",)


def counted(number: int, noun: str) -> str:
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
    printed = any(case.paper for case in item.cases.values())
    first = "The document's number stands first, ours after it in bold"
    told = first if printed else "The document does not print these numbers; ours are in bold"
    yield from ("", f"{told}, ± half of the 95 % interval.")
    if any(_ended(cell) for cell in standing.there.cells.values()):
        yield f"{ENDED.capitalize()}: some runs ended when they had reached the target."
    yield from _far(standing)


def _far(standing: Standing) -> Iterator[str]:
    """Yield the accuracies of the whole model that are far from what the document prints."""
    found = [
        (case, method, measure, 100 * (ours - printed))
        for case in standing.item.cases.values()
        for measure, row in case.paper.items()
        if measure in SCORES
        for method, printed in row.items()
        if printed is not None
        and (ours := _accuracy(standing, case, method, measure)) is not None
        and abs(ours - printed) > MATCHED
    ]
    if found:
        yield from ("", f"More than {100 * MATCHED:g} points from the document's numbers:", "")
    for case, method, measure, points in found:
        side = "above" if points > 0 else "below"
        by = _headline(measure).lower()
        yield f"- {case.name}, {method}: {by} {abs(points):.1f} points {side}"


def _accuracy(standing: Standing, case: Case, method: str, measure: str) -> float | None:
    """Return the mean of a score over the runs of a method; None if it was not run."""
    cell = with_best(standing.item, standing.there, measure).cells.get((case.name, method))
    values = [] if cell is None else [each.value for each in amounts(case, cell, measure).values()]
    return estimate(values).mean if values else None


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
    row, key = case.paper.get(measure, {}), (case.name, method)
    printed = ""
    if method in row:
        value = row[method]
        printed = f"{'not reached' if value is None else _printed(measure, value)} / "
    if key in there.cells:
        cell = there.cells[key]
        ended = f", {ENDED}" if not is_cost(measure) and _ended(cell) else ""
        return f"{printed}**{_ours(amounts(case, cell, measure), measure)}**{ended}"
    if key in there.stale:
        return f"{printed}stale"
    return f"{printed}not run" if key in there.missing else printed.removesuffix(" / ") or NOTHING


def _ended(cell: CellResult) -> bool:
    """Return whether some runs of an experiment ended before their rounds."""
    return any(run.rounds and not cell.whole(run) for run in cell.runs.values())


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


def _printed(measure: str, value: float) -> str:
    """Return a number of the document with all its digits."""
    if measure not in _UNITS:
        return _told(measure, value)
    unit = common_unit([value], _UNITS[measure])
    return f"{value / unit.size:,.6g} {unit.name}"


def _told(measure: str, value: float) -> str:
    if measure in _UNITS:
        return quantity(value, _UNITS[measure])
    if measure == "rounds":
        return f"{value:.1f}".removesuffix(".0")
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
        claimed = claimed_gain(verdict)
        ours = NOTHING if verdict.gain is None else told_gain(verdict.gain)
        by = _headline(claim.by).lower()
        word = f"**{verdict.word}**: {verdict.why}"
        against = claim.against(verdict.other)
        yield f"| {claim.text} | {against} | {by} | {claimed} | {ours} | {word} |"


def _by_target(standing: Standing) -> Iterator[str]:
    """Yield a table of the gains at other targets, for claims whose target is our choice."""
    item, there = standing.item, standing.there
    rows = [*sensitivity.with_own_targets(item, there, standing.verdicts)]
    if not rows:
        return
    heads = [f"{100 * each:+g} points" if each else "as it is" for each in sensitivity.SHIFTS]
    yield from ("", "## With another target", "")
    yield "The targets are our choice. From the same runs, with the target so much lower or higher"
    yield f"({NOTHING}: runs ended before, or never got there, so that nobody knows):"
    yield ""
    yield f"| claim | against | {' | '.join(heads)} |"
    yield "|---|---|" + "---|" * len(heads)
    for verdict in rows:
        gains = sensitivity.gains(item, there, verdict)
        told = (NOTHING if each is None else told_gain(each) for each in gains)
        against = verdict.claim.against(verdict.other)
        yield f"| {verdict.claim.text} | {against} | {' | '.join(told)} |"


def _by_reading(standing: Standing) -> Iterator[str]:
    """Yield a table of the gains if the mean of some evaluations had to reach the target."""
    item, there = standing.item, standing.there
    found = [
        {(v.claim, v.other): v for v in sensitivity.smoothed(item, there, window)}
        for window in sensitivity.WINDOWS
    ]
    asked = sensitivity.about_costs(there, standing.verdicts)
    every = [(each, [known[each.claim, each.other] for known in found]) for each in asked]
    rows = [(each, smooth) for each, smooth in every if any(own.gain for own in smooth)]
    if not rows:
        return
    heads = [f"mean of {window}" for window in sensitivity.WINDOWS]
    first, last = sensitivity.WINDOWS
    yield from ("", "## With a smoothed curve", "")
    yield "A target counts as reached at the first evaluation that is not below it. From the same"
    yield f"runs, if the mean of the last {first} or {last} evaluations had to reach it (with the"
    yield f"verdict where it is another one; {NOTHING}: runs ended before, so that nobody knows):"
    yield ""
    yield f"| claim | against | as it is | {' | '.join(heads)} |"
    yield "|---|---|---|" + "---|" * len(heads)
    for verdict, smooth in rows:
        told = (_reading(each, verdict) for each in (verdict, *smooth))
        against = verdict.claim.against(verdict.other)
        yield f"| {verdict.claim.text} | {against} | {' | '.join(told)} |"


def _reading(found: Verdict, stated: Verdict) -> str:
    """Return a gain, and its verdict if it is not the stated one."""
    if found.gain is None:
        return NOTHING
    return told_gain(found.gain) + (f": {found.word}" if found.word != stated.word else "")


def _failing(standing: Standing, experiments: Sequence[Standing]) -> Iterator[str]:
    """Yield the claims that fail or fall short, each with the experiments in which it does not."""
    fails = [(each, told) for each in standing.verdicts if (told := _shortfall(each))]
    if fails:
        yield from ("", "## Why claims fail or fall short", "")
    for verdict, told in fails:
        claim = f"{verdict.claim.text.removesuffix('.')} (against {verdict.other})"
        flips = [
            f"{_where(each, other, standing)}: {told_gain(other.gain)}"
            for each in (standing, *experiments)
            for other in each.verdicts
            if other.gain is not None
            and _answers(each.item, other, verdict)
            and _better(other, verdict)
        ]
        flips += [
            f"runs in which the mean of {window} evaluations has to reach the target: "
            f"{told_gain(other.gain)}"
            for window in sensitivity.WINDOWS
            if is_cost(verdict.claim.by)
            for other in sensitivity.smoothed(standing.item, standing.there, window)
            if (other.claim, other.other) == (verdict.claim, verdict.other)
            and other.gain is not None
            and _better(other, verdict)
        ]
        named = f"{told} {'; '.join(flips)}." if flips else "cause not found."
        yield f"- {claim}: {named}"


def _where(experiment: Standing, found: Verdict, page: Standing) -> str:
    """Return what names a verdict on the page of an item: a link, or another claim of the item."""
    if experiment is page:
        return f"the claim “{found.claim.text.removesuffix('.')}”"
    link = f"[{experiment.item.title}]({experiment.item.name.partition('/')[2]}.md)"
    return f"{link}, {found.claim.better} against {found.other}"


def _shortfall(verdict: Verdict) -> str:
    """Return how an experiment is named in which a claim does not fail so; "" if it does not."""
    if verdict.word == "baseline not matched":
        return "the baseline matches in"
    if verdict.word == "direction only":
        return "the gain is larger in"
    return "it holds in" if verdict.below else ""


def _better(other: Verdict, verdict: Verdict) -> bool:
    """Return whether another verdict is what one falls short of."""
    if verdict.word == "baseline not matched":
        return other.word in ("reproduced", "direction only", "not reproduced")
    if verdict.word == "direction only":
        own, theirs = verdict.gain, other.gain
        return own is not None and theirs is not None and theirs.low > own.high
    return other.above


def _answers(item: Item, found: Verdict, asked: Verdict) -> bool:
    """Return whether a verdict of an item is about the same question as another verdict.

    It has the same measure and opponent, or one that stands for it, and the same cases; an
    experiment that has none of these cases may have others.
    """
    same = (opponent(item, found), found.claim.by) == (asked.other, asked.claim.by)
    elsewhere = not any(case in item.cases for case in asked.claim.cases)
    return same and (elsewhere or set(found.claim.cases) <= set(asked.claim.cases))


def opponent(item: Item, verdict: Verdict) -> str:
    """Return the method that a verdict is against, or the one that it stands for."""
    column = item.methods.get(verdict.other)
    return (column.stands_for if column else "") or verdict.other


def claimed_gain(verdict: Verdict) -> str:
    """Return the gain that the document claims, in words."""
    gain, claim = verdict.claimed, verdict.claim
    if claim.within:
        return f"about equal (within {100 * claim.within:g} points)"
    if gain is None:
        return "direction only"
    return f"× {gain:.3g}" if is_cost(claim.by) else f"{100 * gain:+.2f} points"


def told_gain(gain: Gain) -> str:
    scale = 100.0 if gain.kind == "points" else 1.0
    form = {"ratio": ".3g", "points": "+.2f", "plain": "+.3g"}[gain.kind]
    mean, low, high = (format(scale * each, form) for each in (gain.mean, gain.low, gain.high))
    before, unit = "× " if gain.kind == "ratio" else "", " points" if gain.kind == "points" else ""
    bound = {(True, False): "≥ ", (False, True): "≤ "}.get((gain.least, gain.most), "")
    known = not math.isnan(gain.low)
    return f"{bound}{before}{mean}{unit}" + (f" ({low} to {high})" if known else "")


# --- calculated items -----------------------------------------------------------------------------


def _calculated_entry(
    case: Case, method: str, measure: str, ours: Mapping[tuple[str, str], float]
) -> str:
    printed = case.paper.get(measure, {}).get(method)
    value = ours.get((case.name, method))
    if printed is None and value is None:
        return NOTHING
    told = NOTHING if printed is None else _told(measure, printed)
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
