"""`anyfleet reproduce`: play the runs of an item, and set its numbers beside the document's."""

import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec.structs import replace as replace_struct
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from anyfleet import config
from anyfleet.cli.run import RUNS
from anyfleet.cli.screen import console, errors, put_line, show, silent
from anyfleet.cli.study import Manner, conclude, opened, play
from anyfleet.evidence.calculations import calculated
from anyfleet.evidence.comparison import compare
from anyfleet.evidence.comparison_page import winners
from anyfleet.evidence.estimates import CORE, core_hours
from anyfleet.evidence.items import Item
from anyfleet.evidence.library import Library
from anyfleet.evidence.measured import found
from anyfleet.evidence.pages import Standing, item_page, minutes_of, standing_of
from anyfleet.evidence.reproducing import (
    Extent,
    Reproduction,
    origin,
    reproduction,
    require_known,
    results_of,
)
from anyfleet.evidence.results import Results, write_results
from anyfleet.evidence.tuning import chosen, trials, trials_of, tuned
from anyfleet.evidence.verdicts import verdicts
from anyfleet.study import standing as standing_in
from anyfleet.study.state_file import holds_study, read

_QUICK_SEEDS = 2


@dataclass(frozen=True)
class Asked:
    """What a command asks for: how much of an item, by which means, told how."""

    seeds: int | None = None
    cases: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    quick: bool = False
    missing: bool = False  # only what the result file lacks
    threads: int = 1
    device: str | None = None
    engine: str | None = None
    changes: tuple[str, ...] = ()  # of the engine: `engine.precision=tf32`

    def extent(self, item: Item) -> Extent:
        """Return how much of an item is run."""
        usual = _QUICK_SEEDS if self.quick else item.seeds
        seeds = usual if self.seeds is None else self.seeds
        return Extent(seeds, self.cases, self.methods, self.quick)

    def command(self, item: Item) -> str:
        """Return the command without what no result depends on: folders, processes, output."""
        words = ["anyfleet", "reproduce", item.name]
        words += [] if self.seeds is None else ["--seeds", f"{self.seeds}"]
        words += [word for case in self.cases for word in ("--case", case)]
        words += [word for method in self.methods for word in ("--method", method)]
        words += [] if self.threads == 1 else ["--threads", f"{self.threads}"]
        words += [] if self.device is None else ["--device", self.device]
        words += [] if self.engine is None else ["--engine", self.engine]
        return shlex.join([*words, *self.changes])

    def over(self) -> dict[str, Any]:
        """Return what changes every run file accordingly."""
        found: dict[str, Any] = {}
        if self.device is not None:
            found["device"] = self.device
        if self.engine is not None:
            found["engine"] = {"use": self.engine} if self.engine != "auto" else "auto"
        others = [word for word in self.changes if not word.startswith("engine.")]
        if others:
            told = f"{', '.join(others)}: only keys of the engine; a recipe says the rest."
            raise typer.BadParameter(told, param_hint="KEY=VALUE")
        return config.override(found, self.changes)


def reproduce_item(name: str, asked: Asked, manner: Manner) -> None:
    """Play what is left of an item, write its result file unless it was quick, and tell it."""
    library = Library()
    item = library.item(name)
    if item.calculate:
        require_known(item, asked.extent(item))
        _tell_calculated(item, json=manner.json)
        return
    if item.tuning:
        reproduce_tuned(library, item, asked, manner)
        return
    asked_for, out = _wanted(library, item, asked, manner)
    if asked_for.known:
        every = len(asked_for.known) + len(asked_for.names) + len(asked_for.shared)
        told = f"all results are there of {len(asked_for.known)} of {every} cells."
        show(errors(), f"Not played again: {told}")
    if asked_for.shared:
        owners = ", ".join(dict.fromkeys(asked_for.shared.values()))
        told = f"{len(asked_for.shared)} cells are results of {owners}: they are not played again."
        show(errors(), told)
    if not asked_for.names:
        standing = standing_of(item, library.results(name), elsewhere=library.cells())
        if manner.json:
            put_line(sys.stdout, "result", item=name, results=msgspec.Raw(_encoded(standing)))
        else:
            console().print(Markdown(item_page(standing)))
        return
    came_from = origin(item, asked.command(item))
    if holds_study(out):
        show(errors(), f"Going on in {out}.")
    with opened(asked_for.study, Manner(out, manner.jobs, manner.json, manner.terms)) as study:
        outcome = play(study)
        settled = replace(asked_for, study=study.study)
        results = results_of(settled, outcome.runs, came_from, out)
        standing = _kept(library, asked_for, results, quick=asked.quick)
        if outcome.finished:
            study.screen.print(Markdown(item_page(standing)))
            _say_where(library, item, study.screen, quick=asked.quick)
        conclude(study, outcome, _encoded(standing), _again(item, asked, manner))


def _wanted(
    library: Library, item: Item, asked: Asked, manner: Manner
) -> tuple[Reproduction, Path]:
    """Return what is played of an item, and in which folder.

    The folder is that of all runs that are asked for, so that the same command finds it again when
    some of them have results.
    """
    make = partial(
        reproduction,
        item,
        asked.extent(item),
        threads=asked.threads,
        over=asked.over(),
        elsewhere=None if asked.quick else library.cells(),
    )
    whole = make()
    out = manner.out or _folder(whole, quick=asked.quick, missing=asked.missing)
    if not asked.missing:
        return whole, out
    begun: dict[str, tuple[int, ...]] = {}
    if holds_study(out):
        study = read(out, manner.terms.allow)
        if standing_in(out, study).left:
            begun = {name: cell.seeds for name, cell in study.cells.items()}
    return make(there=library.results(item.name), begun=begun), out


def _again(item: Item, asked: Asked, manner: Manner) -> str:
    """Return the command that goes on with what was stopped."""
    words = [asked.command(item), *(["--missing"] if asked.missing else [])]
    words += ["--quick"] if asked.quick else []
    return " ".join([*words, *(["--out", shlex.quote(str(manner.out))] if manner.out else [])])


def _tell_calculated(item: Item, *, json: bool) -> None:
    """Show an item whose numbers are calculated: all of them, whatever cases are asked for."""
    standing = standing_of(item, None)
    if not json:
        console().print(Markdown(item_page(standing)))
        return
    for (case, method), ours in calculated(item).items():
        printed = item.cases[case].paper.get(item.measures[0], {}).get(method)
        put_line(sys.stdout, "number", case=case, method=method, ours=ours, printed=printed)
    put_line(sys.stdout, "result", item=item.name, stands=standing.state)


def reproduce_tuned(library: Library, item: Item, asked: Asked, manner: Manner) -> None:
    """Play the trials of an item, then its methods with what the trials chose; show who is best.

    Both studies lie in the folder of the command if it names one.
    """
    if asked.missing:
        told = f"cannot be used for {item.name}, whose methods are tuned first; to go on with what "
        told += "was stopped, give the same command and its --out again."
        raise typer.BadParameter(told, param_hint="--missing")
    if asked.methods:
        told = f"the methods of {item.name} have budgets in common: all of them are run."
        raise typer.BadParameter(told, param_hint="--method")
    extent = asked.extent(item)
    tried = trials(item)
    few = replace(extent, seeds=1 if asked.quick else tried.seeds)
    again = _again(item, asked, manner)
    first = _played(library, tried, few, asked, _inside(manner, "trials"), again)
    best = tuned(item, chosen(item, first, quick=asked.quick))
    last = _played(library, best, extent, asked, _inside(manner, "runs"), again)
    results = replace_struct(last, cells={**first.cells, **last.cells})
    screen = silent() if manner.json else console()
    screen.print(Markdown(winners(compare(item, results, quick=asked.quick))))
    _say_where(library, item, screen, quick=asked.quick)
    if not asked.quick:
        show(screen, "Page and rows of the package: python -m tools.comparison")


def _inside(manner: Manner, name: str) -> Manner:
    return manner if manner.out is None else replace(manner, out=manner.out / name)


def _played(
    library: Library, item: Item, extent: Extent, asked: Asked, manner: Manner, again: str
) -> Results:
    """Play what is left of an item, and write what is finished unless it was quick.

    Exit, and say how to go on, if runs are left.
    """
    asked_for = reproduction(item, extent, threads=asked.threads, over=asked.over())
    out = manner.out or _folder(asked_for, quick=asked.quick)
    came_from = origin(item, asked.command(item))
    with opened(asked_for.study, replace(manner, out=out)) as study:
        outcome = play(study)
        settled = replace(asked_for, study=study.study)
        results = results_of(settled, outcome.runs, came_from, out)
        standing = _kept(library, asked_for, results, quick=asked.quick)
        conclude(study, outcome, _encoded(standing), again)
    return results


def _kept(library: Library, asked_for: Reproduction, results: Results, *, quick: bool) -> Standing:
    """Write the result file unless it was a quick look; return where the item stands."""
    item = asked_for.item
    if quick:
        experiments = {
            key: asked_for.study.cells[name].experiment for key, name in asked_for.names.items()
        }
        there = found(item, results, experiments)
        return Standing(item, results, there, verdicts(item, there))
    before = library.results(item.name)
    joined = results if before is None else before.joined(results)
    if results.cells:
        write_results(library.result_file(item.name), joined)
    return standing_of(item, joined, elsewhere=library.cells())


def _say_where(library: Library, item: Item, screen: Console, *, quick: bool) -> None:
    if quick:
        show(screen, "A quick look: small data, few rounds. No result file was written.")
    else:
        show(screen, f"Results: {library.result_file(item.name)}")


def _encoded(standing: Standing) -> bytes:
    """Return the verdicts of an item as JSON."""
    return msgspec.json.encode(
        [
            {
                "claim": each.claim.text,
                "better": each.claim.better,
                "than": each.other,
                "by": each.claim.by,
                "verdict": each.word,
                "why": each.why,
                "gain": each.gain and [each.gain.mean, each.gain.low, each.gain.high],
                "at_least": each.gain is not None and each.gain.least,
                "at_most": each.gain is not None and each.gain.most,
                "claimed": each.claimed,
            }
            for each in standing.verdicts
        ]
    )


def _folder(asked_for: Reproduction, *, quick: bool, missing: bool = False) -> Path:
    """Return the folder of the study, which is the same whenever the same runs are asked for."""
    name = asked_for.item.name.replace("/", "_")
    kind = ("_quick" if quick else "") + ("_missing" if missing else "")
    return RUNS / f"{name}{kind}_{asked_for.identity}"


def list_items(start: str, *, json: bool) -> None:
    """Show the items whose names begin so: what each takes, and where it stands."""
    library = Library()
    if not library.names():
        told = "there are no items here: run this in a copy of the project (recipes/)."
        raise typer.BadParameter(told, param_hint="--list")
    names = [name for name in library.names() if name.startswith(start)]
    if not names:
        library.item(start)  # which says that there is none
    known = library.cells()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("item", "where", "runs", "rounds", "takes", "took", "stands"):
        table.add_column(head, overflow="fold")
    for name in names:
        item = library.item(name)
        made = item.experiments()
        standing = standing_of(item, library.results(name), made, known)
        rounds = sorted({experiment.rounds for experiment in made.values()})
        told = "–" if not rounds else "–".join(dict.fromkeys(map(str, (rounds[0], rounds[-1]))))
        each = item.seeds + trials_of(item)
        count = standing.distinct * each
        runs = str(count) if made else "–"
        if json:
            about = {"where": item.where, "runs": count, "flops": standing.flops}
            put_line(sys.stdout, "item", item=name, **about, stands=standing.state)
            continue
        takes = core_hours(standing.flops)
        table.add_row(name, item.where, runs, told, takes, minutes_of(standing), standing.state)
    if json:
        return
    console().print(table)
    show(console(), f"takes: about so long with one core at {CORE / 1e9:g} GFLOP/s, all runs.")
