"""Messages as bytes: the same orders and answers come out, and their size is what was charged."""

from contextlib import suppress
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Hyperparameters
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.errors import BadMessage
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import WidthMenu
from anyfleet.wire import HEADER_SLACK, decode_order, decode_reply, encode_order, encode_reply
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.exchanged import ORDER, TASK, UPDATE
from tests.helpers.messages import charged


def same(one: Cohort, two: Cohort) -> bool:
    columns = ("id", "device", "visit", "choice", "bits", "acknowledged", "held_order")
    return (
        all(np.array_equal(getattr(one, c), getattr(two, c)) for c in columns)
        and torch.equal(one.key, two.key)
        and (one.slices, one.menus, one.kind) == (two.slices, two.menus, two.kind)
        and (one.round_index, one.cohort_key, one.job) == (two.round_index, two.cohort_key, two.job)
        and all(
            np.array_equal(
                getattr(one.hyperparameters, f.name),
                getattr(two.hyperparameters, f.name),
                equal_nan=True,
            )
            for f in fields(Hyperparameters)
        )
    )


@pytest.mark.parametrize(
    "method",
    [
        fedavg(lr=0.1),
        heterofl(widths=(0.5, 0.25)),
        replace(fedavg(), norm=Tracked()),
        replace(fedavg(), plan=WidthMenu((1.0, 0.5))),
    ],
    ids=["fedavg", "heterofl", "tracked", "menu"],
)
def test_an_order_survives_the_wire(method: object) -> None:
    sent = orders(method, TASK, [5])  # type: ignore[arg-type]
    received = decode_order(encode_order(sent, TASK), TASK)
    assert same(sent, received)
    for tree, values in sent.trees_of(0).items():
        assert small.identical(values, received.trees_of(0)[tree])


def test_an_update_survives_the_wire() -> None:
    received = decode_reply(encode_reply(UPDATE, ORDER, TASK), ORDER, TASK)
    assert small.identical(UPDATE.trees_of(0)["delta"], received.trees_of(0)["delta"])
    assert small.identical(UPDATE.masks_of(0), received.masks_of(0))
    assert received.report_of(0) == UPDATE.report_of(0)
    assert received.bits[0] == UPDATE.bits[0]


@pytest.mark.parametrize("column", [1.0, 0.125])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_charged_bits_are_the_bytes_of_trees_index_sets_and_masks(
    share: float, column: float
) -> None:
    method = replace(heterofl(widths=(share,)), norm=Tracked())
    sent = orders(method, TASK, [0], column=column)
    data = encode_order(sent, TASK)
    assert sent.bits[0] == 8 * charged(data)
    assert len(data) - charged(data) < HEADER_SLACK
    answer = work(sent, (DeviceState(),), TASK).replies
    reply = encode_reply(answer, sent, TASK)
    assert answer.bits[0] == 8 * charged(reply)
    assert len(reply) - charged(reply) < HEADER_SLACK


@given(st.data())
def test_damaged_messages_raise_nothing_but_bad_message(data: st.DataObject) -> None:
    for encoded, decode in (
        (encode_order(ORDER, TASK), lambda b: decode_order(b, TASK)),
        (encode_reply(UPDATE, ORDER, TASK), lambda b: decode_reply(b, ORDER, TASK)),
    ):
        raw = bytearray(encoded[: data.draw(st.integers(0, len(encoded)))])
        if raw:
            raw[data.draw(st.integers(0, min(len(raw), 600) - 1))] ^= data.draw(st.integers(1, 255))
        with suppress(BadMessage):
            assert isinstance(decode(bytes(raw)), Cohort | Replies)
