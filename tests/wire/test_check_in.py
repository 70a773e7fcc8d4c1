"""Check-ins and choices as bytes: what was said comes out again, and nothing else is accepted."""

import math
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tools.fuzz import last_choice

from anyfleet.core.check_in import Choices
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Hyperparameters
from anyfleet.core.orders import Cohort
from anyfleet.errors import BadMessage
from anyfleet.methods import fedavg
from anyfleet.parts.plan import WidthMenu
from anyfleet.wire import (
    CheckInReport,
    decode_check_in,
    decode_choice,
    decode_order,
    encode_check_in,
    encode_choice,
    encode_offer,
)
from anyfleet.wire.check_in import LONGEST_REASON
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.messages import with_header

TASK = small.task()
METHOD = replace(fedavg(lr=0.1), plan=WidthMenu((1.0, 0.5, 0.25)))
ORDER = orders(METHOD, TASK, [3])
PLAIN = orders(fedavg(lr=0.1), TASK, [3])
KNOWN = {
    "speed": 1e9,
    "battery": math.inf,
    "bit_rate_up": 0.0,
    "loss": -1.5,
    "load": 1.0,
    "fixed": 1.0,
}
REPORT = CheckInReport(
    version="0.1.0",
    bundle="ab" * 32,
    samples=30,
    test_samples=7,
    level=2,
    column_width=0.25,
    conditions=KNOWN,
)
CHOICES = last_choice(ORDER)


def refused_check_in(data: bytes, reason: str, match: str | None = None) -> None:
    with pytest.raises(BadMessage, match=match) as caught:
        decode_check_in(data)
    assert caught.value.reason == reason


def refused_choice(
    data: bytes, reason: str, match: str | None = None, order: Cohort = ORDER
) -> None:
    with pytest.raises(BadMessage, match=match) as caught:
        decode_choice(data, order)
    assert caught.value.reason == reason


# --- reports ----------------------------------------------------------------------------------


def test_a_report_comes_out_as_it_went_in() -> None:
    assert decode_check_in(encode_check_in(REPORT)) == REPORT


def test_what_is_not_known_is_left_out() -> None:
    told = {name.name: math.nan for name in fields(Conditions)} | {"speed": 2.0}
    found = decode_check_in(encode_check_in(msgspec.structs.replace(REPORT, conditions=told)))
    assert found.conditions == {"speed": 2.0}


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("colour", 1.0, "is not a condition"),
        ("speed", math.nan, "left out"),
        ("speed", 0.0, "speed of 0"),
        ("speed", -1.0, "below 0"),
        ("bit_rate_up", -1.0, "below 0"),
        ("battery", -math.inf, "below 0"),
        ("load", math.inf, "load of inf"),
        ("loss", math.inf, "loss of inf"),
        ("fixed", 1.5, "share"),
        ("x" * 999, 1.0, "'x{40}' is not"),
    ],
)
def test_conditions_that_no_device_has_are_refused(name: str, value: float, match: str) -> None:
    data = with_header(encode_check_in(REPORT), conditions={**KNOWN, name: value})
    refused_check_in(data, "numbers", match)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"samples": -1}, "header"),
        ({"samples": 2**60}, "header"),
        ({"test_samples": 1.5}, "header"),
        ({"level": 10**9}, "header"),  # a table of so many levels would fill the memory
        ({"level": -1}, "header"),
        ({"bundle": "AB" * 32}, "header"),
        ({"bundle": ""}, "header"),
        ({"version": "1" * 65}, "header"),
        ({"version": ""}, "header"),
        ({"column_width": 0.0}, "numbers"),
        ({"column_width": 1.5}, "numbers"),
        ({"column_width": math.nan}, "numbers"),
        ({"conditions": {"speed": "fast"}}, "header"),
        ({"conditions": []}, "header"),
        ({"further": 1}, "header"),
    ],
)
def test_reports_that_no_device_sends_are_refused(changes: dict[str, Any], reason: str) -> None:
    refused_check_in(with_header(encode_check_in(REPORT), **changes), reason)


def test_bytes_that_are_no_report_are_refused() -> None:
    data = encode_check_in(REPORT)
    for end in range(len(data)):
        with pytest.raises(BadMessage):
            decode_check_in(data[:end])
    refused_check_in(data + b"x", "trailing")
    refused_check_in(data[:-1] + bytes([data[-1] ^ 1]), "checksum")
    refused_check_in(encode_choice(CHOICES, ORDER), "magic")
    refused_check_in(data + bytes(1 << 20), "too large")


# --- choices ----------------------------------------------------------------------------------


def same(one: Hyperparameters, two: Hyperparameters) -> bool:
    names = (f.name for f in fields(Hyperparameters))
    return all(np.array_equal(getattr(one, n), getattr(two, n), equal_nan=True) for n in names)


def test_a_choice_comes_out_as_it_went_in() -> None:
    own = CHOICES.hyperparameters.changed(sent_fraction=0.25, frequency=1e8)
    for choices in (
        replace(CHOICES, hyperparameters=own),
        replace(CHOICES, utility=np.array([math.nan])),
        replace(CHOICES, entry=np.array([-1]), declined=("the battery is low",)),
    ):
        found = decode_choice(encode_choice(choices, ORDER), ORDER)
        assert found.order.tolist() == ORDER.id.tolist()
        assert found.choices.entry.tolist() == choices.entry.tolist()
        assert np.array_equal(found.choices.utility, choices.utility, equal_nan=True)
        assert found.choices.declined == choices.declined
        assert same(found.choices.hyperparameters, choices.hyperparameters)


def test_a_device_chooses_from_an_offer_that_came_as_bytes() -> None:
    offer = decode_order(encode_offer(ORDER, TASK), TASK)
    assert [len(offer.menu_of(0)), offer.id[0]] == [3, ORDER.id[0]]
    assert not offer.trees_of(0)
    found = decode_choice(encode_choice(last_choice(offer), offer), ORDER)
    assert found.choices.entry.tolist() == [2]


def test_a_long_reason_is_cut_where_it_is_sent() -> None:
    choices = replace(CHOICES, declined=("x" * 9999,))
    assert decode_choice(encode_choice(choices, ORDER), ORDER).choices.declined == (
        "x" * LONGEST_REASON,
    )


def test_without_a_menu_there_is_no_entry() -> None:
    nothing = Choices(np.array([-1]), PLAIN.hyperparameters, np.array([math.nan]), ("",))
    assert decode_choice(encode_choice(nothing, PLAIN), PLAIN).choices.entry.tolist() == [-1]
    data = encode_choice(replace(nothing, entry=np.array([0])), PLAIN)
    refused_choice(data, "choice", "entry 0 of a menu of 0", PLAIN)


NUMBERS = {
    "lr": 0.1,
    "epochs": 1,
    "batch_size": 8,
    "local_steps": -1,
    "sent_fraction": math.nan,
    "frequency": math.nan,
    "target_seconds": math.nan,
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"order": 10**6}, "unknown order"),
        ({"order": -1}, "header"),
        ({"device": 4}, "wrong device"),
        ({"key": 1}, "replayed"),
        ({"entry": 3}, "choice"),
        ({"entry": -1}, "choice"),
        ({"entry": -2, "declined": "no"}, "choice"),
        ({"entry": 2**63}, "header"),
        ({"utility": math.inf}, "numbers"),
        ({"declined": "x" * (LONGEST_REASON + 1)}, "header"),
        ({"declined": None}, "header"),
        ({"hyperparameters": {**NUMBERS, "lr": math.nan}}, "numbers"),
        ({"hyperparameters": {**NUMBERS, "lr": -1.0}}, "numbers"),
        ({"hyperparameters": {**NUMBERS, "batch_size": 0}}, "numbers"),
        ({"hyperparameters": {**NUMBERS, "epochs": 10**9}}, "numbers"),
        ({"hyperparameters": {**NUMBERS, "sent_fraction": 1.5}}, "numbers"),
        ({"hyperparameters": {}}, "header"),
    ],
)
def test_choices_that_no_device_makes_are_refused(changes: dict[str, Any], reason: str) -> None:
    refused_choice(with_header(encode_choice(CHOICES, ORDER), **changes), reason)


def test_the_limits_of_the_server_hold_for_choices() -> None:
    data = with_header(encode_choice(CHOICES, ORDER), hyperparameters={**NUMBERS, "epochs": 5})
    assert decode_choice(data, ORDER, Limits(epochs=5))
    with pytest.raises(BadMessage, match="epochs of 5"):
        decode_choice(data, ORDER, Limits(epochs=4))


def test_bytes_that_are_no_choice_are_refused() -> None:
    data = encode_choice(CHOICES, ORDER)
    for end in range(len(data)):
        with pytest.raises(BadMessage):
            decode_choice(data[:end], ORDER)
    refused_choice(data + b"x", "trailing")
    refused_choice(encode_check_in(REPORT), "magic")
