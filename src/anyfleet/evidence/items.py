"""Items: one table or figure of a paper as a recipe, with the paper's own numbers and claims.

An item has cases (rows of the table) and methods (its columns). Every case with every method is an
experiment: the table `[run]`, over which that of the case and that of the method are laid, as
files that extend one another are (`anyfleet.config.extending`). docs/evidence.md explains the file.
"""

import hashlib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from anyfleet import config
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import Experiment, from_source

COSTS = ("rounds", "seconds", "joules", "bytes", "flops")  # spent until the target is reached
SCORES = ("score", "best")  # of the last evaluation, and of all; "@0.5" at a width
NOT_REACHED = "not reached"  # in place of a number: the target was not
_WIDTH = re.compile(r"(score|best)(@(0?\.\d+|1(\.0)?))?")
# Keys of a method that are not those of a run file.
_OF_METHODS = ("cases", "quick", "best", "stands_for")

Printed = Mapping[str, float | None]  # by method; None: the paper says that it was not reached


@dataclass(frozen=True)
class Scale:
    """How much a paper ran: rounds (None: it does not say), devices, runs with different seeds."""

    rounds: int | None
    devices: int
    seeds: int = 1


@dataclass(frozen=True)
class Case:
    """A row of the table: what is different in it, its target, and what the paper prints."""

    name: str
    target: float | None = None  # score that costs are measured to
    run: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Printed] = field(default_factory=dict)  # by measure
    calculate: Mapping[str, Any] = field(default_factory=dict)  # parameters of a calculation


@dataclass(frozen=True)
class Column:
    """A method of the table: what is different with it, and in which cases it is compared."""

    name: str
    run: Mapping[str, Any]
    quick: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] | None = None  # None: all
    stands_for: str = ""  # another method, of the item that this one's experiment explains


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: one method is better than others by a measure, over some cases.

    `gain` is what the paper says: a ratio of costs, or a difference of scores. Without it, it is
    computed from the numbers that the paper prints; without these, only a direction is claimed. A
    claim with `more_than` says that the gain by one score is larger than that by another one, and
    one with `within` that a score is as good, or less by so much at most.

    A diagnostic of the item may stand for a measure: its mean of all rounds, or with `last` that of
    the last round, of which less is better. With `groups` it is smaller for the first group of
    devices than for the second.
    """

    text: str
    better: str
    than: tuple[str, ...]
    by: str
    cases: tuple[str, ...]
    # "direction only": what the paper prints is of other data, and says nothing of the size
    gain: float | Literal["direction only"] | None = None
    more_than: str | None = None  # another score
    within: float = 0.0  # of a score
    groups: tuple[str, str] | None = None
    last: bool = False  # of a diagnostic

    def against(self, other: str) -> str:
        """Return what the better method is compared with, as a table has it."""
        return other if self.groups is None else f"{other}, {self.groups[1]}"


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper that is to be reproduced.

    `methods` are those that are run. Of some, several variants are, of which the best one counts,
    as in a paper that reports the best of several settings: `best` has their names.
    """

    name: str  # document/item
    title: str
    where: str  # in the document
    paper: Scale
    seeds: int
    measures: tuple[str, ...]
    cases: Mapping[str, Case]
    methods: Mapping[str, Column]
    claims: tuple[Claim, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None  # the method whose accuracy must match the paper's
    choices: tuple[str, ...] = ()  # what the paper leaves open, and what was chosen
    explains: str | None = None  # another item, of whose result this is an experiment
    diagnostics: tuple[str, ...] = ()  # of rounds, which the result file keeps
    groups: Mapping[str, range] = field(default_factory=dict)  # of devices, in diagnostics
    note: str = ""
    calculate: str = ""  # the calculation that stands in place of runs
    tuning: Mapping[str, Any] = field(default_factory=dict)
    home: Path | None = None  # the folder of its file
    best: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of variants
    smaller: str = ""  # how it is smaller than the paper's beyond rounds, devices and seeds
    about: str = ""  # the comment at the head of its file, in Markdown

    @property
    def document(self) -> str:
        """The document that the item is from."""
        return self.name.partition("/")[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the methods as a table has them, each with its variants once."""
        group = {name: whole for whole, names in self.best.items() for name in names}
        return tuple(dict.fromkeys(group.get(name, name) for name in self.methods))

    def pairs(self) -> Iterator[tuple[Case, Column]]:
        """Yield every case with every method that it has."""
        for case in self.cases.values():
            for column in self.methods.values():
                if column.cases is None or case.name in column.cases:
                    yield case, column

    def source(
        self,
        case: Case,
        column: Column,
        *,
        quick: bool = False,
        over: Mapping[str, Any] | None = None,
    ) -> config.Source:
        """Return the run file of a case with a method; `over` is laid over everything."""
        smaller = (self.quick, case.quick, column.quick) if quick else ()
        data = config.laid_over(self.run, case.run, column.run, *smaller, over or {})
        return config.Source(data, folder=self.home)

    def experiments(self, *, quick: bool = False) -> dict[tuple[str, str], Experiment]:
        """Return the experiment of every case with every method.

        Raise ConfigError with the problems of all of them at once.
        """
        found: dict[tuple[str, str], Experiment] = {}
        problems: list[Problem] = []
        for case, column in self.pairs() if not self.calculate else ():
            try:
                found[case.name, column.name] = from_source(self.source(case, column, quick=quick))
            except ConfigError as error:
                where = f"{self.name}: {case.name}, {column.name}"
                problems += [each.within(where) for each in error.problems]
        if problems:
            raise ConfigError(problems)
        return found


def digest(experiment: Experiment) -> str:
    """Return a short text that is the same for equal experiments, whatever seed and machine."""
    plain = config.dump(replace(experiment, seed=0, engine="auto", device="auto"), complete=True)
    # A setting that experiments did not have once, and that is not used, is none.
    data = {key: value for key, value in plain.items() if value is not None}
    return hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest()[:16]


def is_cost(measure: str) -> bool:
    """Return whether a measure is an amount that is spent until the target is reached."""
    return measure in COSTS


def is_score(measure: str) -> bool:
    """Return whether a measure is a score, of which more is better."""
    return _WIDTH.fullmatch(measure) is not None


def setting(key: str, value: Any) -> dict[str, Any]:
    """Return a setting of a run file, by its dotted key, as the tables that hold it."""
    found: Any = value
    for part in reversed(key.split(".")):
        found = {part: found}
    return dict(found)  # a key has at least one part


def variant(name: str, key: str, value: float) -> str:
    """Return the name of a method with a value of a setting."""
    return f"{name}, {key.rpartition('.')[2]}={value:g}"


# --- reading --------------------------------------------------------------------------------------

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Table = dict[str, Any]


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    devices: _Count
    rounds: _Count | None = None
    seeds: _Count = 1


class _Case(msgspec.Struct, forbid_unknown_fields=True):
    target: float | None = None
    run: _Table = {}
    quick: _Table = {}
    paper: dict[str, dict[str, float | str]] = {}
    calculate: _Table = {}


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    better: str
    than: Annotated[list[str], msgspec.Meta(min_length=1)]
    by: str
    cases: list[str] | None = None
    each: bool = False  # a claim of its own for each of the cases
    gain: float | Literal["direction only"] | None = None
    more_than: str | None = None
    within: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    groups: tuple[str, str] | None = None
    last: bool = False


class _Best(msgspec.Struct, forbid_unknown_fields=True):
    key: str  # of run files
    values: Annotated[list[float], msgspec.Meta(min_length=2)]


class _Column(msgspec.Struct):
    best: _Best | None = None
    cases: list[str] | None = None
    quick: _Table = {}
    stands_for: str = ""


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    where: str
    paper: _Scale
    measures: Annotated[list[str], msgspec.Meta(min_length=1)]
    cases: Annotated[dict[str, _Case], msgspec.Meta(min_length=1)]
    methods: Annotated[dict[str, _Table], msgspec.Meta(min_length=1)]
    seeds: _Count = 1
    claims: list[_Claim] = []
    run: _Table = {}
    quick: _Table = {}
    baseline: str | None = None
    choices: list[str] = []
    explains: str | None = None
    diagnostics: list[str] = []
    groups: dict[str, tuple[int, int]] = {}  # first and last device
    note: str = ""
    calculate: str = ""
    tuning: _Table = {}
    smaller: str = ""


def read_item(file: Path) -> Item:
    """Return the item in a file; raise ConfigError with all that is wrong with it.

    Its experiments are not made yet: see `Item.experiments`.
    """
    try:
        text = file.read_text(encoding="utf-8")
        found = msgspec.convert(tomllib.loads(text), _Item)
    except OSError as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror}.")]) from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError([Problem(str(file), f"is not an item: {error}.")]) from error
    problems = [*_problems(found)]
    if problems:
        raise ConfigError([each.within(file) for each in problems])
    return replace(_item(found, file), about=_about(text))


def _about(text: str) -> str:
    """Return the comment at the head of a file, without its first line, which is the command."""
    head = takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line.removeprefix("#").removeprefix(" ") for line in head]
    return "\n".join(lines[1:]).strip()


def _item(found: _Item, file: Path) -> Item:
    names = tuple(found.cases)
    methods = {name: [*_columns(name, table)] for name, table in found.methods.items()}
    return Item(
        name=f"{file.parent.name}/{file.stem}",
        title=found.title,
        where=found.where,
        paper=Scale(found.paper.rounds, found.paper.devices, found.paper.seeds),
        seeds=found.seeds,
        measures=tuple(found.measures),
        cases={name: _case(name, case) for name, case in found.cases.items()},
        methods={column.name: column for columns in methods.values() for column in columns},
        claims=tuple(each for claim in found.claims for each in _claims(claim, names)),
        run=found.run,
        quick=found.quick,
        baseline=found.baseline,
        choices=tuple(found.choices),
        explains=found.explains,
        diagnostics=tuple(found.diagnostics),
        groups={name: range(first, last + 1) for name, (first, last) in found.groups.items()},
        note=found.note,
        calculate=found.calculate,
        tuning=found.tuning,
        home=file.resolve().parent,
        best={
            name: tuple(column.name for column in columns)
            for name, columns in methods.items()
            if len(columns) > 1
        },
        smaller=found.smaller,
    )


def _case(name: str, case: _Case) -> Case:
    paper = {
        measure: {
            method: value if isinstance(value, float) else None for method, value in row.items()
        }
        for measure, row in case.paper.items()
    }
    return Case(name, case.target, case.run, case.quick, paper, case.calculate)


def _columns(name: str, table: _Table) -> Iterator[Column]:
    """Yield a method of the file, or a method for each value of the setting that is varied."""
    run = {key: value for key, value in table.items() if key not in _OF_METHODS}
    own = msgspec.convert(table, _Column)
    cases = None if own.cases is None else tuple(own.cases)
    if own.best is None:
        yield Column(name, run, own.quick, cases, own.stands_for)
        return
    for value in own.best.values:
        whole = int(value) if value.is_integer() else value  # numbers of things are whole
        laid = config.laid_over(run, setting(own.best.key, whole))
        yield Column(variant(name, own.best.key, value), laid, own.quick, cases, own.stands_for)


def _claims(claim: _Claim, cases: tuple[str, ...]) -> Iterator[Claim]:
    """Yield a claim over its cases, or one for each of them."""
    chosen = cases if claim.cases is None else tuple(claim.cases)
    whole = Claim(
        text=claim.text,
        better=claim.better,
        than=tuple(claim.than),
        by=claim.by,
        cases=chosen,
        gain=claim.gain,
        more_than=claim.more_than,
        within=claim.within,
        groups=claim.groups,
        last=claim.last,
    )
    if not claim.each:
        yield whole
        return
    for case in chosen:
        yield replace(whole, text=f"{claim.text.removesuffix('.')}: {case}.", cases=(case,))


def _problems(item: _Item) -> Iterator[Problem]:
    """Yield all that does not fit together in an item."""
    computed = bool(item.calculate)
    for measure in item.measures:
        yield from _of_measure("measures", measure, computed=computed)
    if item.baseline is not None and item.baseline not in item.methods:
        yield Problem("baseline", f"{item.baseline!r} is none of the methods.")
    for name, table in item.methods.items():
        yield from _of_column(name, table, item)
        if not computed and "method" not in table and "method" not in item.run:
            yield Problem(f"methods.{name}", "has no `method`.")
    for name, (first, last) in item.groups.items():
        if not 0 <= first <= last:
            yield Problem(
                f"groups.{name}", f"must be a first and a last device, got {first, last}."
            )
    costs = [each for each in item.measures if is_cost(each)]
    for name, case in item.cases.items():
        if costs and case.target is None and not computed:
            yield Problem(f"cases.{name}", f"needs a `target`, because {costs[0]} is a measure.")
        for measure, row in case.paper.items():
            where = f"cases.{name}.paper.{measure}"
            yield from _of_measure(where, measure, computed=computed)
            for method, value in row.items():
                if method not in item.methods:
                    yield Problem(where, f"{method!r} is none of the methods.")
                if isinstance(value, str) and value != NOT_REACHED:
                    yield Problem(where, f"must be a number or {NOT_REACHED!r}, got {value!r}.")
                elif isinstance(value, float) and not math.isfinite(value):
                    yield Problem(where, f"must be finite, got {value}.")
    for number, claim in enumerate(item.claims):
        yield from _of_claim(f"claims[{number}]", claim, item)


def _of_column(name: str, table: _Table, item: _Item) -> Iterator[Problem]:
    try:
        own = msgspec.convert(table, _Column)
    except msgspec.ValidationError as error:
        yield Problem(f"methods.{name}", f"{error}.")
        return
    for each in own.cases or ():
        if each not in item.cases:
            yield Problem(f"methods.{name}.cases", f"there is no case {each!r}.")
    if own.stands_for and item.explains is None:
        yield Problem(f"methods.{name}.stands_for", "only an experiment (`explains`) has it.")


def _of_claim(where: str, claim: _Claim, item: _Item) -> Iterator[Problem]:
    if claim.by not in item.diagnostics:
        yield from _of_measure(where, claim.by, computed=bool(item.calculate))
    for method in (claim.better, *claim.than):
        if method not in item.methods:
            yield Problem(where, f"{method!r} is none of the methods.")
    for name in claim.cases or ():
        if name not in item.cases:
            yield Problem(where, f"there is no case {name!r}.")
    if claim.more_than is not None:
        yield from _of_measure(where, claim.more_than, computed=bool(item.calculate))
    if claim.more_than is not None and not (is_score(claim.by) and is_score(claim.more_than)):
        yield Problem(where, "`more_than` compares gains of scores, not of costs.")
    if claim.within and not is_score(claim.by):
        yield Problem(where, "`within` is a difference of scores.")
    if claim.groups is not None and claim.by not in item.diagnostics:
        yield Problem(where, "`groups` have diagnostics, and no other measure.")
    if claim.last and claim.by not in item.diagnostics:
        yield Problem(where, "`last` is of diagnostics; a score is that of the last round anyway.")
    for group in claim.groups or ():
        if group not in item.groups:
            yield Problem(where, f"there is no group {group!r}.")


def _of_measure(where: str, measure: str, *, computed: bool) -> Iterator[Problem]:
    if not computed and not is_cost(measure) and not is_score(measure):
        known = ", ".join((*COSTS, *SCORES))
        yield Problem(where, f"{measure!r} is no measure; there are {known}, and best@0.5.")
