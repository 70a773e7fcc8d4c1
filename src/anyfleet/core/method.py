"""`Method`: one part per slot, checked when it is made; and `Job`, the half that devices know."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal, Self

from anyfleet.arguments import OwnSignature, check_names, described
from anyfleet.core.objectives import Task
from anyfleet.core.slots import (
    MEASURES,
    Aggregate,
    Choose,
    Codec,
    Extract,
    Measure,
    Norm,
    Plan,
    Policy,
    Schedule,
    Select,
    Train,
    nested,
)
from anyfleet.errors import BadReturn, CompositionError
from anyfleet.tracebacks import during, quoted

__all__ = ["SLOTS", "Job", "Method"]

# The slots of a method, each with the class that its parts derive from.
SLOTS: Mapping[str, type] = MappingProxyType(
    {
        "select": Select,
        "schedule": Schedule,
        "plan": Plan,
        "choose": Choose,
        "extract": Extract,
        "train": Train,
        "norm": Norm,
        "uplink": Codec,
        "downlink": Codec,
        "aggregate": Aggregate,
    }
)
_POLICIES = ("select", "plan", "extract", "aggregate")
# What parts say of themselves: of each an example.
_DECLARED: Mapping[str, Any] = MappingProxyType(
    {
        "reports": frozenset({"loss"}),
        "provides": frozenset({"menu"}),
        "learns_from": frozenset({"loss"}),
        "decides": frozenset({"sent_fraction"}),
        "requires": {"menu": "plan.WidthMenu"},
    }
)


@dataclass(frozen=True)
class Job:
    """The device's half of a method: it travels with every order."""

    train: Train
    choose: Choose
    uplink: Codec
    downlink: Codec
    norm: Norm
    send: Literal["delta", "weights"] = "delta"
    cache: bool = False
    report: tuple[str, ...] = ()  # names of measured numbers that devices send back
    measures: tuple[Measure, ...] = ()

    @property
    def trainer(self) -> Train:
        """The trainer, with the measures around it that devices report or learn from."""
        asked = self.choose.learns_from.union(self.report)
        trainer = self.train
        for measure in self.measures:
            if asked & measure.names:
                with during("measures", measure):
                    trainer = measure.observed(trainer, asked)
        return trainer


@dataclass(frozen=True)
class Method:
    """A federated method: one part per slot. Any mixture is `dataclasses.replace` of these."""

    select: Select
    schedule: Schedule
    plan: Plan
    choose: Choose
    extract: Extract
    train: Train
    norm: Norm
    uplink: Codec
    downlink: Codec
    aggregate: Aggregate
    send: Literal["delta", "weights"] = "delta"
    cache: bool = False  # the device keeps its model and fills gaps of a download from it

    __signature__ = OwnSignature()

    def __new__(cls, /, *_: Any, **options: Any) -> Self:
        check_names(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if misplaced := tuple(_misplaced(self)):
            raise CompositionError(*misplaced)
        if misdeclared := tuple(_misdeclared(self)):
            raise CompositionError(*misdeclared)
        problems = [*_unmet(self), *_unmeasured(self), *_clashing(self), *_contested(self)]
        if self.send not in ("delta", "weights"):
            problems.append(f'send must be "delta" or "weights", got {self.send!r}.')
        problems += _unsendable(self)
        if problems:
            raise CompositionError(*problems)

    def policies(self) -> dict[str, Policy]:
        """The server-side parts that carry state, by field name."""
        return {name: getattr(self, name) for name in _POLICIES}

    @property
    def reported(self) -> frozenset[str]:
        """What devices shall measure and report."""
        parts = (inner for part in self.policies().values() for inner in nested(part))
        return self.schedule.reports.union(*(part.reports for part in parts))

    @property
    def judges(self) -> bool:
        """Whether some part asks for losses on the server split."""
        return any(
            inner.needs_server_loss for part in self.policies().values() for inner in nested(part)
        )

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What devices measure beside training, for all parts together."""
        found: list[Measure] = []
        for _, measure in _brought(self):
            same = [each for each in found if each.names & measure.names]
            one = measure
            for each in same:
                # None would be a clash, which was refused when the method was made.
                one = each.joined(one) or one
                found.remove(each)
            found.append(one)
        return tuple(found)

    @property
    def trainer(self) -> Train:
        """The trainer, with what devices measure around it."""
        return self.job().trainer

    def misfits(self, task: Task) -> dict[str, str]:
        """Why a task cannot be learned with this method, by what would have to change."""
        with during("train", self.train):
            found = {"method.train": self._misfit(task)}
        if self.judges and not len(task.server):
            found["task"] = (
                "the method compares models by their loss on the server, which has no samples; "
                "keep some back for it (server = 200, for example)."
            )
        return {where: why for where, why in found.items() if why}

    def _misfit(self, task: Task) -> str:
        found: Any = self.trainer.misfit(task)
        if found is None or isinstance(found, str):
            return found or ""
        raise BadReturn(
            f"train={quoted(self.train)} returned {quoted(found)} from `misfit`; due is a text, "
            "empty if it can train the task."
        )

    def job(self) -> Job:
        """What a device has to know of this method."""
        return Job(
            train=self.train,
            choose=self.choose,
            uplink=self.uplink,
            downlink=self.downlink,
            norm=self.norm,
            send=self.send,
            cache=self.cache,
            report=tuple(sorted(self.reported)),
            measures=self.measures,
        )

    def __str__(self) -> str:
        rows = (f"  {f.name:<10}{getattr(self, f.name)}" for f in fields(self))
        return "Method\n" + "\n".join(rows)


def _misplaced(method: Method) -> Iterator[str]:
    """Yield what is no part of the kind that its slot takes."""
    for name, slot in SLOTS.items():
        value = getattr(method, name)
        if slot in type(value).__mro__:
            continue
        article = "an" if slot.__name__[0] in "AE" else "a"
        told = f"{name} must be {article} {slot.__name__}, got {described(value)}"
        others = [other.__name__ for other in SLOTS.values() if other in type(value).__mro__]
        if others:
            told += f", which is for the slot {others[0].lower()}."
        elif isinstance(value, str):
            told += "; only run files name parts by texts, from Python pass the part itself."
        elif value is None:
            told += "; every slot needs a part."
        elif not told.endswith("?"):
            told += f"; derive {type(value).__name__} from anyfleet.core.method.{slot.__name__}."
        yield told
    cache: Any = method.cache
    if not isinstance(cache, bool):
        yield f"cache must be True or False, got {described(cache)}."


def _misdeclared(method: Method) -> Iterator[str]:
    """Yield what parts say of themselves in another way than their slots do."""
    parts: list[tuple[str, Any]] = [("schedule", method.schedule), ("choose", method.choose)]
    parts += [(name, p) for name, part in method.policies().items() for p in nested(part)]
    for slot, part in parts:
        for name, due in _DECLARED.items():
            with during(slot, part):
                value = getattr(part, name, due)
            mapped = isinstance(due, Mapping)
            fits = isinstance(value, Mapping if mapped else frozenset | set)
            if fits and all(isinstance(each, str) for each in value):
                continue
            asked = "a mapping of texts to texts" if mapped else "a frozenset of texts"
            told = f"{slot}={quoted(part)}: `{name}` must be {asked}"
            if inspect.ismethod(value):
                yield f"{told}, got a function; put @property above `def {name}`."
            else:
                yield f"{told}, got {quoted(value)}; write for example {name} = {_example(due)}."
    for slot, part in _measuring(method):
        with during(slot, part):
            brought: Any = part.measures
        if not isinstance(brought, tuple) or not all(Measure in type(m).__mro__ for m in brought):
            yield (
                f"{slot}={quoted(part)}: `measures` must be a tuple of Measure, got "
                f"{quoted(brought)}; write for example measures = (Fisher(),)."
            )


def _measuring(method: Method) -> list[tuple[str, Policy | Choose]]:
    """Return all parts that can bring measures along, each with its slot."""
    parts: list[tuple[str, Policy | Choose]] = [("choose", method.choose)]
    return parts + [(name, p) for name, part in method.policies().items() for p in nested(part)]


def _brought(method: Method) -> Iterator[tuple[str, Measure]]:
    """Yield every measure that a part brings along, and the part as an error quotes it."""
    for slot, part in _measuring(method):
        yield from ((f"{slot}={quoted(part)}", measure) for measure in part.measures)


def _clashing(method: Method) -> Iterator[str]:
    """Yield which measures cannot be in one method."""
    brought = list(_brought(method))
    for (one, mine), (other, theirs) in combinations(brought, 2):
        if mine.names & theirs.names and mine.joined(theirs) is None:
            yield (
                f"{one} and {other} measure {sorted(mine.names & theirs.names)} in different ways: "
                f"{quoted(mine)} and {quoted(theirs)}; give both the same settings."
            )


def _example(due: Any) -> str:
    return repr(due) if isinstance(due, Mapping) else f"frozenset({{{', '.join(map(repr, due))}}})"


def _unmeasured(method: Method) -> Iterator[str]:
    parts = [("schedule", method.schedule.reports), ("choose", method.choose.learns_from)]
    parts += [(n, p.reports) for n, part in method.policies().items() for p in nested(part)]
    known = MEASURES.union(*(measure.names for _, measure in _brought(method)))
    for name, wants in parts:
        if wants - known:
            yield (
                f"{name} wants {sorted(wants - known)}, which no device measures; here devices "
                f"measure {sorted(known)}. More can be measured by the `measures` of a part, for "
                "example Fisher()."
            )


def _unmet(method: Method) -> Iterator[str]:
    parts = [(name, p) for name, part in method.policies().items() for p in nested(part)]
    given = method.schedule.provides.union(*(part.provides for _, part in parts))
    # A menu from which the server chooses never comes to a device.
    left = {what for what in given if not what.startswith("menu") or "chosen menu" not in given}
    needs: list[tuple[str, Any, Mapping[str, str]]] = [(n, p, p.requires) for n, p in parts]
    for name, part, needed in [*needs, ("choose", method.choose, method.choose.requires)]:
        for what, who in needed.items():
            if what not in (left if name == "choose" else given):
                yield (
                    f"{name}={part!r} needs {what!r}, which no part of this method gives; "
                    f"use {who} (specification §E)."
                )


def _contested(method: Method) -> Iterator[str]:
    choose = method.choose
    for number in ("sent_fraction", "frequency"):
        given = {number, f"chosen {number}"}
        plans = [f"plan={part!r}" for part in nested(method.plan) if given & part.provides]
        both = [*plans, *([f"choose={choose!r}"] if number in choose.decides else [])]
        if len(both) > 1:
            yield (
                f"{' and '.join(both)} all decide the {number} of an order, and only one of them "
                "would have its way; use one alone (specification §E)."
            )


def _unsendable(method: Method) -> Iterator[str]:
    uplink, downlink = method.uplink, method.downlink
    planned = [part for part in nested(method.plan) if "sent_fraction" in part.provides]
    if planned and not uplink.follows_sent_fraction:
        yield (
            f"plan={planned[0]!r} gives every upload its rate, and uplink={uplink!r} has its own; "
            "use one that adapts: Fgc, Hq, Uveq, or one of them inside TopK or ErrorFeedback "
            "(specification §E)."
        )
    if method.send == "weights" and (uplink.drops or uplink.state_name):
        yield (
            f"uplink={uplink!r} leaves entries out, and what is left out of weights counts as "
            'zero; use send="delta", or a codec that sends every entry (specification §E).'
        )
    if downlink.drops or downlink.state_name:
        yield (
            f"downlink={downlink!r} leaves entries of the model out; use a codec that sends every "
            "entry and remembers nothing (specification §E)."
        )
