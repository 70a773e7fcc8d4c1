"""`Method`: one part for each slot, checked when it is made; and `Job`, the half on devices."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal, Self

from anyfleet.arguments import OwnSignature, check_names, described
from anyfleet.core.objectives import Task
from anyfleet.core.signals import Menu, ServerChoice, ServerSamples, Signal
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
    Slot,
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
# What parts say of themselves: of each the type of what is in the set, in words, and an example.
_DECLARED: Mapping[str, tuple[type, str, str]] = MappingProxyType(
    {
        "reports": (str, "texts", 'frozenset({"loss"})'),
        "learns_from": (str, "texts", 'frozenset({"loss"})'),
        "requires": (Signal, "signals", "frozenset({Menu()})"),
        "provides": (Signal, "signals", "frozenset({Menu(5)})"),
        "decides": (Signal, "signals", "frozenset({SentFraction()})"),
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

    @cached_property
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
    """A federated method: one part for each slot.

    `dataclasses.replace` makes another method out of one, with other parts. What cannot work
    together is refused when a method is made.
    """

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
        """Return the parts that work on the server and have a state, by slot."""
        return {name: getattr(self, name) for name in _POLICIES}

    @property
    def reported(self) -> frozenset[str]:
        """The numbers that devices measure and report because some part asks."""
        return frozenset().union(*(part.reports for _, part in _asked(self)))

    @property
    def required(self) -> frozenset[Signal]:
        """The signals that parts require of each other and of the task."""
        return frozenset().union(*(part.requires for _, part in _asked(self)))

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
        """Return why a task cannot be learned with this method, by what would have to change."""
        with during("train", self.train):
            found = {"method.train": self._misfit(task)}
        if ServerSamples() in self.required and not len(task.server):
            found["task"] = (
                "the method compares models by their loss on the server, which has no samples; "
                "keep some back for it (server = 200, for example)."
            )
        return {where: why for where, why in found.items() if why}

    def _misfit(self, task: Task) -> str:
        """Return why the trainer cannot train a task, or ""."""
        found: Any = self.trainer.misfit(task)
        if found is None or isinstance(found, str):
            return found or ""
        raise BadReturn(
            f"train={quoted(self.train)} returned {quoted(found)} from `misfit`; due is a text, "
            "empty if it can train the task."
        )

    def job(self) -> Job:
        """Return what a device has to know of this method."""
        return self._job

    @cached_property
    def _job(self) -> Job:
        """What a device has to know, made once: it goes with every order."""
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
    """Yield what stands in a slot without being a part of its kind."""
    for name, slot in SLOTS.items():
        value = getattr(method, name)
        if isinstance(value, slot):
            continue
        article = "an" if slot.__name__[0] in "AE" else "a"
        told = f"{name} must be {article} {slot.__name__}, got {described(value)}"
        others = [other.__name__ for other in SLOTS.values() if isinstance(value, other)]
        if others:
            told += f", which is for the slot {others[0].lower()}."
        elif isinstance(value, str):
            told += "; only run files name parts by texts, from Python pass the part itself."
        elif value is None:
            told += "; every slot needs a part."
        elif not told.endswith("?"):
            told += f"; make {type(value).__name__} a subclass of anyfleet.parts.{slot.__name__}."
        yield told
    cache: Any = method.cache
    if not isinstance(cache, bool):
        yield f"cache must be True or False, got {described(cache)}."


def _misdeclared(method: Method) -> Iterator[str]:
    """Yield what parts say of themselves in another form than their slots do."""
    for slot, part in _asked(method):
        for name, (kind, kinds, example) in _DECLARED.items():
            with during(slot, part):
                value: Any = getattr(part, name, frozenset())
            if isinstance(value, frozenset | set) and all(isinstance(v, kind) for v in value):
                continue
            told = f"{slot}={quoted(part)}: `{name}` must be a frozenset of {kinds}"
            if inspect.ismethod(value):
                yield f"{told}, got a function; put @property above `def {name}`."
            else:
                yield f"{told}, got {quoted(value)}; write for example {name} = {example}."
    for slot, part in _asked(method):
        with during(slot, part):
            brought: Any = part.measures
        if not isinstance(brought, tuple) or not all(isinstance(m, Measure) for m in brought):
            yield (
                f"{slot}={quoted(part)}: `measures` must be a tuple of Measure, got "
                f"{quoted(brought)}; write for example measures = (Fisher(),)."
            )


def _asked(method: Method) -> Iterator[tuple[str, Slot]]:
    """Yield all parts that say something of themselves, and policies inside them, by slot."""
    for name in SLOTS:
        if name not in _POLICIES:
            yield name, getattr(method, name)
    for name, policy in method.policies().items():
        yield from ((name, part) for part in nested(policy))


def _brought(method: Method) -> Iterator[tuple[str, Measure]]:
    """Yield every measure that a part brings along, and the part as an error quotes it."""
    for slot, part in _asked(method):
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


def _unmeasured(method: Method) -> Iterator[str]:
    """Yield which numbers parts want that no device measures."""
    parts = [(name, part.reports) for name, part in _asked(method)]
    parts.append(("choose", method.choose.learns_from))
    known = MEASURES.union(*(measure.names for _, measure in _brought(method)))
    for name, wants in parts:
        if wants - known:
            yield (
                f"{name} wants {sorted(wants - known)}, which no device measures; here devices "
                f"measure {sorted(known)}. More can be measured by the `measures` of a part, for "
                "example Fisher()."
            )


def _unmet(method: Method) -> Iterator[str]:
    """Yield which signals parts require that no other part provides."""
    # Orders ask nothing of the downlink, so what its codec could follow is of no use.
    provided = (part.provides for name, part in _asked(method) if name != "downlink")
    given: frozenset[Signal] = frozenset().union(*provided)
    # A menu from which the server chooses never comes to a device.
    chosen = ServerChoice() in given
    on_device = {signal for signal in given if not (chosen and isinstance(signal, Menu))}
    for name, part in _asked(method):
        there = on_device if name == "choose" else given
        for signal in sorted(part.requires, key=str):
            if not signal.from_task and not any(map(signal.met_by, there)):
                yield (
                    f"{name}={part!r} needs {signal}, which no part of this method provides; "
                    f"use {signal.advice} ({signal.page})."
                )


def _contested(method: Method) -> Iterator[str]:
    """Yield what several parts would decide: only one of them would have its way."""
    # The server decides first, so its parts are named first.
    parts = sorted(_asked(method), key=lambda named: named[0] not in _POLICIES)
    for signal in sorted(set().union(*(part.decides for _, part in parts)), key=str):
        who = [f"{name}={part!r}" for name, part in parts if signal in part.decides]
        if len(who) > 1:
            both = "both" if len(who) == 2 else "all"
            yield f"{' and '.join(who)} {both} set {signal}; keep one ({signal.page})."


def _unsendable(method: Method) -> Iterator[str]:
    """Yield why the codecs cannot carry what the method sends."""
    uplink, downlink = method.uplink, method.downlink
    if method.send == "weights" and (uplink.drops or uplink.state_name):
        yield (
            f"uplink={uplink!r} leaves entries out, and what is left out of weights counts as "
            'zero; use send="delta", or a codec that sends every entry (docs/codecs.md).'
        )
    if downlink.drops or downlink.state_name:
        yield (
            f"downlink={downlink!r} leaves entries of the model out; use a codec that sends every "
            "entry and remembers nothing (docs/codecs.md)."
        )
