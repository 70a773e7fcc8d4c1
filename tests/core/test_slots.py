"""Slots have one convention: the order of arguments, and what parts say of themselves."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import anyfleet.measure
import anyfleet.parts
from anyfleet.core.method import SLOTS, Method
from anyfleet.core.signals import FollowsSentFraction, HeldResults, Menu, SentFraction, Signal
from anyfleet.core.slots import Measure, Policy, Slot
from anyfleet.errors import CompositionError
from anyfleet.methods import fedavg
from anyfleet.parts.codec import Hq, Raw, Uveq
from anyfleet.parts.norm import Static
from anyfleet.parts.plan import SentFractionByLevel
from anyfleet.parts.train import Gradient

DECLARED = ("reports", "measures", "requires", "provides", "decides")
# Of every kind the arguments come after what a part works on, in this order.
RANKS = {"view": 1, "layout": 1, "state": 2, "key": 3, "device": 4}
ABSTRACT = (*dict.fromkeys(SLOTS.values()), Policy, Measure)


def functions(kind: type) -> dict[str, list[str]]:
    """The public functions that a class has itself, and the names of their arguments."""
    return {
        name: list(inspect.signature(value).parameters)[1:]
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and (name == "__call__" or not name.startswith("_"))
    }


@pytest.mark.parametrize(
    ("slot", "name", "arguments"),
    [(slot, name, args) for slot in ABSTRACT for name, args in functions(slot).items()],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_slots_take_what_they_work_on_then_view_state_and_key(
    slot: type, name: str, arguments: list[str]
) -> None:
    if "context" in arguments:  # training maps over what follows it
        assert arguments[0] == "context"
        return
    ranks = [RANKS.get(each, 0) for each in arguments]
    assert ranks == sorted(ranks), f"{slot.__name__}.{name}({', '.join(arguments)})"


def parts() -> Iterator[type]:
    """Every class of the library that derives from a slot."""
    for package in (anyfleet.parts, anyfleet.measure):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(found.name)).values():
                is_part = isinstance(value, type) and issubclass(value, Slot | Measure)
                if is_part and value.__module__ == found.name:
                    yield value


PARTS = tuple(dict.fromkeys(parts()))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_parts_name_and_order_their_arguments_as_their_slots_do(part: type) -> None:
    own = functions(part)
    for slot in ABSTRACT:
        if issubclass(part, slot):
            for name, arguments in functions(slot).items():
                assert own.get(name, arguments) == arguments, f"{part.__name__}.{name}"


def test_the_parts_of_all_slots_are_looked_at() -> None:
    for slot in (*SLOTS.values(), Measure):
        assert any(issubclass(part, slot) for part in PARTS), slot


@pytest.mark.parametrize("slot", dict.fromkeys(SLOTS.values()), ids=lambda slot: slot.__name__)
def test_what_parts_say_of_themselves_has_one_home(slot: type) -> None:
    assert issubclass(slot, Slot)
    for name in DECLARED:
        homes = [each for each in slot.__mro__ if name in vars(each)]
        assert homes == [Slot], name


@dataclass(frozen=True)
class Asking(Raw):
    """A codec that can say anything of itself."""

    requires: Any = frozenset()
    provides: Any = frozenset()
    decides: Any = frozenset()
    reports: Any = frozenset()


def asking(slot: str, **said: Any) -> Method:
    part: Any = Asking(**said)
    return replace(fedavg(), **{slot: part})


def test_a_method_asks_the_parts_of_all_slots() -> None:
    for slot in ("uplink", "downlink"):
        with pytest.raises(CompositionError, match=rf"{slot}=Asking.* needs a menu"):
            asking(slot, requires=frozenset({Menu()}))
        with pytest.raises(CompositionError, match=rf"{slot} wants \['colour'\]"):
            asking(slot, reports=frozenset({"colour"}))
        with pytest.raises(CompositionError, match=rf"{slot}=Asking.*`provides` must be a froz"):
            asking(slot, provides="a menu")
    assert asking("uplink", reports=frozenset({"loss"})).reported == {"loss"}
    sets = frozenset[Signal]({SentFraction()})
    with pytest.raises(CompositionError, match=r"plan=Sent.* and uplink=Asking.*both set the comp"):
        replace(
            asking("uplink", decides=sets, provides=frozenset({FollowsSentFraction()})),
            plan=SentFractionByLevel((0.5,)),
        )
    kinds: list[tuple[str, Any]] = [("train", Gradient), ("norm", Static)]
    for slot, kind in kinds:
        part: Any = type("Mine", (kind,), {"requires": frozenset({HeldResults()})})()
        with pytest.raises(CompositionError, match=rf"{slot}=.* needs results that wait"):
            replace(fedavg(), **{slot: part})


def test_only_the_uplink_follows_what_orders_ask() -> None:
    plan = SentFractionByLevel((0.5,))
    assert replace(fedavg(), plan=plan, uplink=Hq()).plan == plan
    with pytest.raises(CompositionError, match=r"needs an uplink codec that follows"):
        replace(fedavg(), plan=plan, downlink=Uveq())
