"""Messages that no server and no device sends are refused, each for its reason."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Kind
from anyfleet.errors import BadMessage
from anyfleet.wire import decode_order, decode_reply, encode_order, encode_reply
from anyfleet.wire.frames import framed
from tests.helpers.exchanged import ANSWER, ORDER, SENT, TASK, UPDATE, refused
from tests.helpers.messages import LEAD, put_together, taken_apart, with_header


def test_text_that_is_not_text_is_refused() -> None:
    header, columns = taken_apart(encode_order(ORDER, TASK))
    raw = bytearray(msgspec.msgpack.encode(header))
    # A key of the header: one of its letters becomes half of a character.
    raw[raw.index(b"width")] = 0xE4
    lead = encode_order(ORDER, TASK)[:LEAD]
    refused(lead + framed([bytes(raw), *columns]), "header")


def test_another_version_is_refused() -> None:
    data = bytearray(encode_order(ORDER, TASK))
    data[3] = 99
    refused(bytes(data), "version", "version 99")


def test_an_order_may_not_name_foreign_code() -> None:
    job = msgspec.msgpack.encode({"use": "os:system", "command": "true"})
    refused(with_header(encode_order(ORDER, TASK), job=job), "job", "os belongs to Python itself")


HYPERPARAMETERS = taken_apart(SENT)[0]["hyperparameters"]


@pytest.mark.parametrize("data", [SENT, ANSWER], ids=["order", "answer"])
def test_what_is_too_large_is_refused_before_it_is_read(data: bytes) -> None:
    refused(data, "too large", limits=Limits(message=len(data) - 1))
    refused(data, "cut", limits=Limits(header=100))
    for decode in (
        lambda: decode_order(SENT, TASK, limits=Limits(message=len(SENT))),
        lambda: decode_reply(ANSWER, ORDER, TASK, Limits(message=len(ANSWER))),
    ):
        assert len(decode()) == 1


def test_a_message_may_be_as_large_as_its_model_needs_and_not_much_more() -> None:
    most = Limits().for_model(TASK.blueprint)
    raw = 4 * TASK.blueprint.numel()
    assert raw < most.message < 10 * raw + (1 << 20)
    refused(SENT + bytes(most.message), "too large")
    refused(SENT + b"x", "trailing")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": math.nan}, "numbers"),
        ({"width": 0.0}, "numbers"),
        ({"width": 1.5}, "numbers"),
        ({"column_width": 0.0}, "numbers"),
        ({"column_width": 5e-324}, "numbers"),  # as many columns as there are numbers
        ({"column_width": 1e-3}, "numbers"),
        ({"bits": math.inf}, "numbers"),
        ({"bits": -1.0}, "numbers"),
        ({"utility": math.inf}, "numbers"),
        ({"choice": -2}, "numbers"),
        ({"menu": [b""] * 100}, "numbers"),
        ({"menu": [b""]}, "choice"),  # the whole model, and it is told to train another
        ({"hyperparameters": {**HYPERPARAMETERS, "lr": math.nan}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "lr": math.inf}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "batch_size": 0}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "batch_size": 1 << 40}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "epochs": 1 << 40}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "epochs": -1, "local_steps": -1}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "local_steps": -2}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "sent_fraction": -1.0}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "sent_fraction": 1.5}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "sent_fraction": math.inf}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "target_seconds": -1.0}}, "numbers"),
        ({"hyperparameters": {**HYPERPARAMETERS, "more": 1.0}}, "header"),
        ({"hyperparameters": {}}, "header"),
        ({"id": -1}, "header"),
        ({"device": -1}, "header"),
        ({"id": 1 << 63}, "header"),
        ({"kind": "conquer"}, "header"),
        ({"round_index": 1.5}, "header"),
        ({"slice": b"\xff\xff\xff"}, "slice"),
        ({"trees": {"model": ["9.weight"]}}, "tensors"),
        ({"trees": {"model": ["0.weight", "0.weight"]}}, "tensors"),
        ({"trees": {"delta": ["0.weight"]}}, "tensors"),
        ({"trees": {"model": ["0.weight"]}}, "content"),
        ({"surprise": 1}, "header"),
    ],
    ids=repr,
)
def test_an_order_that_no_server_sends(changes: dict[str, Any], reason: str) -> None:
    refused(with_header(SENT, **changes), reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"order": 77}, "unknown order"),
        ({"device": 4}, "wrong device"),
        ({"key": 4}, "replayed"),
        ({"samples": -1}, "header"),
        ({"bits": math.nan}, "numbers"),
        ({"bits": 1e18}, "numbers"),
        ({"report": {"loss": "low"}}, "header"),
        ({"report": {"channels": [0.0] * 10_000}}, "too large"),
        ({"report": {f"n{i}": 0.0 for i in range(65)}}, "too large"),
        ({"trees": {"delta": ["0.weight"]}}, "tensors"),
        ({"trees": {"weights": list(UPDATE.trees_of(0)["delta"])}}, "tensors"),
        ({"trees": {**UPDATE.trees_of(0), "delta": [*UPDATE.trees_of(0)["delta"]] * 2}}, "tensors"),
        ({"trees": {"delta": list(UPDATE.trees_of(0)["delta"])[::-1]}}, "tensors"),
        ({"report": {**UPDATE.report_of(0), "loss": [1.0]}}, "report"),
        ({"report": {"loss": 1.0}}, "report"),
        ({"masks": {"9.weight": ([1], b"\x80")}}, "mask"),
        ({"masks": {"0.weight": ([1 << 40, 1, 1, 1], b"\x80")}}, "mask"),
        ({"masks": {"0.weight": ([1, 1, 1, 1], b"\x80\x80")}}, "mask"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_reply_that_no_device_sends(changes: dict[str, Any], reason: str) -> None:
    refused(with_header(ANSWER, **changes), reason)


def test_a_reply_may_have_only_what_its_order_asked_for() -> None:
    for kind in (Kind.HOLD, Kind.EVALUATE, Kind.REPORT, Kind.STATISTICS):
        refused(ANSWER, "tensors", order=replace(ORDER, kind=kind))


def test_a_device_cannot_change_statistics_that_never_travel() -> None:
    header, columns = taken_apart(ANSWER)
    names = list(TASK.buffers)
    values = b"".join(bytes(4 * value.numel()) for value in TASK.buffers.values())
    trees = {**header["trees"], "buffers": names}
    refused(put_together(ANSWER, {**header, "trees": trees}, (values + columns[0],)), "tensors")


def test_a_reply_must_have_what_its_order_asked_for() -> None:
    bare = put_together(ANSWER, {**taken_apart(ANSWER)[0], "trees": {}, "masks": {}}, ())
    refused(bare, "tensors")
    fetch = replace(ORDER, kind=Kind.FETCH)
    refused(bare, "tensors", order=fetch)
    gone = decode_reply(with_header(bare, report={"missing": 1.0}, bits=32.0), fetch, TASK)
    assert gone.trees_of(0) == {}
    refused(bare, "tensors", order=replace(ORDER, kind=Kind.STATISTICS))
    told = 32.0 * len(UPDATE.report_of(0))
    for kind, bits in ((Kind.HOLD, 32.0), (Kind.EVALUATE, told), (Kind.REPORT, told)):
        done = decode_reply(with_header(bare, bits=bits), replace(ORDER, kind=kind), TASK)
        assert done.delivered_width[0] == 1


def test_statistics_alone_have_nothing_behind_them() -> None:
    order = replace(ORDER, kind=Kind.STATISTICS)
    data = encode_reply(work(order, (DeviceState(),), TASK).replies, order, TASK)
    header, (column,) = taken_apart(data)
    assert decode_reply(data, order, TASK).trees_of(0)["buffers"].keys() == {
        "1.running_mean",
        "1.running_var",
    }
    refused(put_together(data, header, (column + b"x",)), "trailing", order=order)
    refused(put_together(data, header, (column[:-1],)), "shape", order=order)
    refused(data[:-1], "cut", order=order)


def test_a_reply_is_not_read_as_an_order() -> None:
    with pytest.raises(BadMessage) as caught:
        decode_order(ANSWER, TASK)
    assert caught.value.reason == "magic"
