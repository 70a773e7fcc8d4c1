"""The page that collects the verdicts of all items, the main claims of the documents first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from anyfleet.evidence.items import Item
from anyfleet.evidence.pages import (
    NOTHING,
    Standing,
    claimed_gain,
    commands_of,
    counted,
    hours_of,
    minutes_of,
    opponent,
    origins,
    own_cells,
    scale_of,
    told_gain,
)
from anyfleet.evidence.verdicts import RULE, Verdict, Word

_INTRODUCTION = """\
# Evidence

What the documents claim, and what came of it in our runs. This page and those that it leads to are
written by `python -m tools.pages` from the recipes (`recipes/DOCUMENT/ITEM.toml`) and from the
result files that `anyfleet reproduce` writes (`evidence/`): nobody types a number into them.

    anyfleet reproduce --list                   # all items, what each takes, and where it stands
    anyfleet reproduce thesis/table_3_1         # play it, and write the result file
    anyfleet reproduce thesis/table_3_1 --quick # a look in seconds; nothing is written
    anyfleet reproduce thesis/table_3_1 --missing # only runs that the result file lacks

An item that was not run says how much computing it takes: hours of one core at 20 GFLOP/s, which
cores of servers reach with networks of some size; small networks take several times as long. What
takes hundreds of hours needs an accelerator. An experiment is a recipe of ours on an item: with
another reading of what the document leaves open, another handicap, or a network so small that a
processor can run it.
"""


@dataclass(frozen=True)
class _Main:
    """A main claim of a document: the items that tell, and which of their claims; empty: all."""

    text: str
    items: tuple[str, ...]
    than: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # cases that are about something else
    apart: tuple[tuple[str, str], ...] = ()  # pairs of methods that are about something else

    def verdicts(self, standing: Standing) -> list[Verdict]:
        """Return the verdicts of an item that are about this claim."""
        return [each for each in standing.verdicts if self._asks(standing.item, each)]

    def _asks(self, item: Item, found: Verdict) -> bool:
        claim = found.claim
        return (
            (not self.than or opponent(item, found) in self.than)
            and (not self.by or claim.by in self.by)
            and (not self.cases or set(claim.cases) <= set(self.cases))
            and (not self.better or claim.better in self.better)
            and set(claim.cases).isdisjoint(self.without)
            and (claim.better, found.other) not in self.apart
        )


_DOCUMENTS: Mapping[str, str] = {
    "fedpmt": "FedPMT (and chapter 5 of the thesis)",
    "whale": "WHALE-FL",
    "fedrescue": "FedResCuE",
    "anycost": "AnycostFL",
    "thesis": "The thesis: FedAdp (chapter 3), Optimal Aggregation and FedPNS (chapter 4)",
    "comparison": "Our own comparison",
}
_MAIN: Sequence[_Main] = (
    _Main("FedPMT reaches a target in less time than FedAvg.", ("fedpmt/table_3",)),
    _Main(
        "FedPMT beats FedDrop on devices with two classes.",
        ("fedpmt/figure_2_fcnn", "fedpmt/figure_2_cnn", "fedpmt/figure_2_cifar"),
        than=("FedDrop, 2 levels", "FedDrop, 4 levels", "FedDrop, 5 levels"),
        cases=("two classes",),
    ),
    _Main(
        "WHALE-FL reaches a target sooner than HeteroFL, FedRolex and FedDrop.",
        ("whale/table_1", "whale/table_1_cifar10", "whale/table_1_shakespeare", "whale/table_3"),
        than=("HeteroFL", "FedRolex", "FedDropout"),
        by=("seconds",),
    ),
    _Main(
        "FedResCuE beats FjORD, FedSlim and FedAvg over links that lose columns, most at × 0.25.",
        ("fedrescue/table_4", "fedrescue/table_5"),
        than=("FjORD", "FedSlim", "FedAvg"),
        without=("no loss",),
    ),
    _Main(
        "FedSeq and FedRush, without distillation or freezing, are worse.",
        ("fedrescue/table_14", "fedrescue/figure_7", "fedrescue/table_4_small"),
        than=("FedSeq", "FedRush"),
    ),
    _Main(
        "AnycostFL takes less energy and time than STC, QSGD, UVeQFed, HeteroFL and FedHQ.",
        ("anycost/table_1_fashion_mnist", "anycost/table_1_cifar10"),
        by=("joules", "seconds"),
    ),
    _Main(
        "EMS, FGC and AIO each contribute.",
        ("anycost/figure_5a",),
        apart=(("AnycostFL", "without EMS, FGC, AIO"),),  # all three together
    ),
    _Main(
        "FedAdp needs fewer rounds than FedAvg.",
        ("thesis/table_3_1", "thesis/table_3_1_fashion_mnist", "thesis/figure_3_2"),
        by=("rounds",),
    ),
    _Main(
        "FedPNS converges faster than FedAvg and BN2 on skewed data.",
        ("thesis/figure_4_2", "thesis/figure_4_3", "thesis/figure_4_4", "thesis/figure_4_6"),
        than=("FedAvg", "BN2"),
        better=("FedPNS",),
    ),
)
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
may be `by` a diagnostic, of which less is better: by its mean of all rounds, or with `last = true`
by that of the last round; and with `groups = ["all classes", "one class"]` of one group against
another. With `within = 0.02` a claim is that two methods are about equal, and
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
        cells, paper = own_cells(standing), standing.item.paper
        if not cells:
            continue
        rounds = "rounds not given" if paper.rounds is None else counted(paper.rounds, "round")
        theirs = f"{rounds}, {counted(paper.devices, 'device')}, {counted(paper.seeds, 'run')}"
        if standing.item.tuning:  # the comparison of all methods, which no document has
            theirs = NOTHING
        part = f" ({len(cells)} cells run)" if standing.there.missing else ""
        commands = "; ".join(f"`{each}`" for each in commands_of(standing))
        where = " | ".join(origins(cells))
        yield (
            f"| {standing.item.name} | {scale_of(cells)}{part} | {theirs} | {where} "
            f"| {minutes_of(standing)} | {commands} |"
        )


def _collected(standings: Sequence[Standing]) -> Iterator[str]:
    yield "## Verdicts"
    own = [each for each in standings if not each.item.explains]
    yield from ("", f"{_counts(own)} of the documents.")
    experiments = [each for each in standings if each.item.explains]
    if experiments:
        yield f"{_counts(experiments)} of our experiments on them."
    yield from _main_claims(standings)
    documents = dict.fromkeys(each.item.document for each in standings)
    for document in documents:
        own = [each for each in standings if each.item.document == document]
        yield from ("", f"### {_DOCUMENTS.get(document, document)}", "")
        yield "| item | claim | against | the document's gain | ours (95 % interval) | verdict |"
        yield "|---|---|---|---|---|---|"
        for each in own:
            yield from _rows(each)


def _main_claims(standings: Sequence[Standing]) -> Iterator[str]:
    """Yield the main claims of the documents, each with its items and the experiments on them."""
    rows = [row for main in _MAIN for row in _main_row(main, standings)]
    if not rows:
        return
    yield from ("", "### The main claims", "")
    yield "| claim | as the document has it | our experiments |"
    yield "|---|---|---|"
    yield from rows
    yield ""
    yield "Ahead are claims whose whole interval lies above no gain, behind those of which no part"
    yield "does, though the runs do not decide them."


def _main_row(main: _Main, standings: Sequence[Standing]) -> Iterator[str]:
    """Yield a main claim as a row of a table, if one of its items is there."""
    own = [each for each in standings if each.item.name in main.items and not each.item.explains]
    known = {each.item.name: each.item for each in standings}
    tried = [
        each
        for each in standings
        if each.item.explains
        and any(found.gain is not None for found in main.verdicts(each))
        and not {each.item.name, *_explained(each.item, known)}.isdisjoint(main.items)
    ]
    if own:
        columns = (" <br> ".join(_short(main, e) for e in each) for each in (own, tried))
        yield f"| {main.text} | {' | '.join(text or NOTHING for text in columns)} |"


def _explained(item: Item, known: Mapping[str, Item]) -> Iterator[str]:
    """Yield the item that an experiment explains, and what that one explains if it is one too."""
    while item.explains is not None:
        yield item.explains
        if item.explains not in known:
            return
        item = known[item.explains]


def _short(main: _Main, standing: Standing) -> str:
    """Return an item as a link, with the verdicts on those of its claims that are about this."""
    item, found = standing.item, main.verdicts(standing)
    link = f"[{item.title if item.explains else item.where}](evidence/{item.name}.md)"
    if all(each.gain is None for each in found):
        return f"{link}: {standing.state}{hours_of(standing)}"
    told = (_told(word, [each for each in found if each.word == word]) for word in get_args(Word))
    return f"{link}: {', '.join(filter(None, told))}"


def _told(word: Word, found: Sequence[Verdict]) -> str:
    """Return how many claims have a verdict; of one that decides nothing, how they stand."""
    if not found:
        return ""
    sides = {"ahead": sum(v.above for v in found), "behind": sum(v.below for v in found)}
    some = " and ".join(f"{count} {side}" for side, count in sides.items() if count)
    decides = word not in ("undecided (scale)", "baseline not matched")
    return f"{len(found)} {word}" + (f" ({some})" if some and not decides else "")


def _counts(standings: Sequence[Standing]) -> str:
    """Return how many claims of items have which verdict, in words."""
    words = [verdict.word for each in standings for verdict in each.verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in get_args(Word) if word in words)
    return f"{counted(len(words), 'claim')} ({counts})"


def _rows(standing: Standing) -> Iterator[str]:
    item = standing.item
    page = "comparison.md" if item.tuning else f"evidence/{item.name}.md"
    link = f"[{item.where}]({page})"
    if item.explains:
        link = f"[experiment on {item.explains.partition('/')[2]}](evidence/{item.name}.md)"
    known = own_cells(standing) or standing.there.stale
    if not standing.verdicts or not known:
        count = len(standing.verdicts)
        claims = f" ({counted(count, 'claim')})" if count else ""
        yield f"| {link} | {item.title}{claims} | | | | {standing.state}{hours_of(standing)} |"
        return
    for verdict in standing.verdicts:
        claim = verdict.claim
        claimed = claimed_gain(verdict)
        ours = NOTHING if verdict.gain is None else told_gain(verdict.gain)
        against = claim.against(verdict.other)
        yield f"| {link} | {claim.text} | {against} | {claimed} | {ours} | {verdict.word} |"
