"""Messages as bytes: the same orders and answers come out, and their size is what was charged."""

import math
import sys
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfleet import rng
from anyfleet.client import work
from anyfleet.codec import ErrorFeedback, Fgc, Hq, Nothing, Plain, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.delivery import cut_order, cut_update
from anyfleet.errors import BadMessage
from anyfleet.frames import FRAME_BYTES, framed
from anyfleet.method import Codec
from anyfleet.methods import fedavg, heterofl
from anyfleet.plan import LargestInTime, Menu
from anyfleet.runtime.limits import Limits
from anyfleet.runtime.wire import (
    HEADER_SLACK,
    decode_order,
    decode_update,
    encode_order,
    encode_update,
    shortened,
)
from anyfleet.train import Tracked
from anyfleet.types import Kind, Memory, Numbers, Orders, Updates
from tests import small
from tests.messages import LEAD, charged, put_together, taken_apart, with_header
from tests.test_local import orders

TASK = small.task()
ORDER = orders(heterofl(shares=(0.5,), lr=0.1), TASK, [3])
UPDATE = work(ORDER, (Memory(),), TASK).updates


def same(one: Orders, two: Orders) -> bool:
    columns = ("id", "device", "visit", "choice", "bits", "heard", "of")
    return (
        all(np.array_equal(getattr(one, c), getattr(two, c)) for c in columns)
        and torch.equal(one.key, two.key)
        and (one.slices, one.menus, one.kind) == (two.slices, two.menus, two.kind)
        and (one.step, one.cohort, one.job) == (two.step, two.cohort, two.job)
        and all(
            np.array_equal(
                getattr(one.numbers, f.name), getattr(two.numbers, f.name), equal_nan=True
            )
            for f in fields(Numbers)
        )
    )


@pytest.mark.parametrize(
    "method",
    [
        fedavg(lr=0.1),
        heterofl(shares=(0.5, 0.25)),
        replace(fedavg(), norm=Tracked()),
        replace(fedavg(), plan=Menu((1.0, 0.5))),
    ],
    ids=["fedavg", "heterofl", "tracked", "menu"],
)
def test_an_order_survives_the_wire(method: object) -> None:
    sent = orders(method, TASK, [5])  # type: ignore[arg-type]
    received = decode_order(encode_order(sent, TASK), TASK)
    assert same(sent, received)
    for tree, values in sent.trees[0].items():
        assert small.identical(values, received.trees[0][tree])


def test_an_update_survives_the_wire() -> None:
    received = decode_update(encode_update(UPDATE, ORDER, TASK), ORDER, TASK)
    assert small.identical(UPDATE.trees[0]["delta"], received.trees[0]["delta"])
    assert small.identical(UPDATE.masks[0], received.masks[0])
    assert received.report == UPDATE.report
    assert received.bits[0] == UPDATE.bits[0]


@pytest.mark.parametrize("column", [1.0, 0.125])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_charged_bits_are_the_bytes_of_trees_index_sets_and_masks(
    share: float, column: float
) -> None:
    method = replace(heterofl(shares=(share,)), norm=Tracked())
    sent = orders(method, TASK, [0], column=column)
    data = encode_order(sent, TASK)
    assert sent.bits[0] == 8 * charged(data)
    assert len(data) - charged(data) < HEADER_SLACK
    answer = work(sent, (Memory(),), TASK).updates
    reply = encode_update(answer, sent, TASK)
    assert answer.bits[0] == 8 * charged(reply)
    assert len(reply) - charged(reply) < HEADER_SLACK


@given(st.data())
def test_damaged_messages_raise_nothing_but_bad_message(data: st.DataObject) -> None:
    for encoded, decode in (
        (encode_order(ORDER, TASK), lambda b: decode_order(b, TASK)),
        (encode_update(UPDATE, ORDER, TASK), lambda b: decode_update(b, ORDER, TASK)),
    ):
        raw = bytearray(encoded[: data.draw(st.integers(0, len(encoded)))])
        if raw:
            raw[data.draw(st.integers(0, min(len(raw), 600) - 1))] ^= data.draw(st.integers(1, 255))
        with suppress(BadMessage):
            assert isinstance(decode(bytes(raw)), Orders | Updates)


def refused(
    data: bytes,
    reason: str,
    match: str | None = None,
    *,
    order: Orders = ORDER,
    limits: Limits | None = None,
) -> None:
    """As the order, or as the answer, that it begins as."""
    down = data[2:3] == b"o"
    with pytest.raises(BadMessage, match=match) as caught:
        (decode_order(data, TASK, (), limits) if down else decode_update(data, order, TASK, limits))
    assert caught.value.reason == reason


# --- cut anywhere -----------------------------------------------------------------------------

COLUMN = 0.125
UPLINKS: list[Codec] = [
    *(Raw(), Raw("fp16"), Nothing(), Plain(), TopK(0.2, Qsgd(4, 32)), Stc(0.2)),
    *(Qsgd(), Uveq(), Hq(), Fgc(), Fgc(((0.1, 0.3, 8), (1.0, 0.9, 64)))),
]
DOWNLINKS: list[Codec] = [Raw(), Raw("bf16"), Qsgd(), Uveq()]
HALVES = heterofl(shares=(0.55,), lr=0.1, batch=8)


def ends(data: bytes) -> list[int]:
    """Where the header and each column end, by adding up."""
    header, columns = taken_apart(data)
    sizes = [len(msgspec.msgpack.encode(header)), *map(len, columns)]
    return list(accumulate((size + FRAME_BYTES for size in sizes), initial=LEAD))[1:]


@cache
def sent_up(codec: Any) -> tuple[Orders, Updates, bytes]:
    method = replace(HALVES, uplink=codec, norm=Tracked())
    order = orders(method, TASK, [3], column=COLUMN)
    update = work(order, (Memory(),), TASK).updates
    return order, update, encode_update(update, order, TASK)


@pytest.mark.parametrize("codec", UPLINKS, ids=repr)
@settings(max_examples=25)
@given(place=st.floats(0, 1), edge=st.sampled_from([None, -1, 0, 1]))
def test_an_answer_cut_anywhere_gives_its_complete_columns_bit_for_bit(
    codec: Any, place: float, edge: int | None
) -> None:
    order, update, data = sent_up(codec)
    assert len(ends(data)) == 1 + 5
    at = int(place * len(data))
    if edge is not None:  # where something ends, or a byte beside it
        at = min(len(data), ends(data)[int(place * 5.99)] + edge)
    if at < ends(data)[0]:
        refused(data[:at], "cut" if at >= LEAD else "version" if at == 3 else "magic", order=order)
        return
    came = sum(end <= at for end in ends(data)[1:])
    received = decode_update(data[:at], order, TASK)
    expected = cut_update(update, order, came * COLUMN if came < 5 else 1.0, TASK.blueprint)
    assert received.delivered[0] == expected.delivered[0]
    assert received.trees[0].keys() == expected.trees[0].keys()
    for tree, values in expected.trees[0].items():
        assert small.identical(values, received.trees[0][tree])
    assert small.identical(expected.masks[0], received.masks[0])
    assert small.identical(expected.kept[0], received.kept[0])
    assert received.bits[0] == expected.bits[0]
    assert received.report == expected.report


@cache
def sent_down(codec: Any) -> tuple[Orders, bytes]:
    method = small.padded(replace(HALVES, downlink=codec, norm=Tracked()))
    order = orders(method, TASK, [3], column=COLUMN)
    return order, encode_order(order, TASK)


@pytest.mark.parametrize("codec", DOWNLINKS, ids=repr)
@settings(max_examples=25)
@given(place=st.floats(0, 1))
def test_an_order_cut_anywhere_gives_its_complete_columns_bit_for_bit(
    codec: Any, place: float
) -> None:
    order, data = sent_down(codec)
    at = int(place * len(data))
    if at < ends(data)[0]:
        refused(data[:at], "cut" if at >= LEAD else "version" if at == 3 else "magic", order=order)
        return
    came = sum(end <= at for end in ends(data)[1:])
    received = decode_order(data[:at], TASK)
    expected = cut_order(order, came * COLUMN if came < 5 else 1.0, TASK.blueprint)
    assert received.delivered[0] == expected.delivered[0]
    assert received.bits[0] == expected.bits[0]
    assert received.trees[0].keys() == expected.trees[0].keys()
    for tree, values in expected.trees[0].items():
        assert small.identical(values, received.trees[0][tree])


def test_who_counts_on_its_message_having_arrived_has_no_use_for_a_part_of_it() -> None:
    """What error feedback sent, it does not send again: half of it would be lost for good."""
    order, _, data = sent_up(ErrorFeedback())
    assert decode_update(data, order, TASK).delivered[0] == 1
    refused(data[:-1], "cut", order=order)


def test_a_link_fails_anywhere_within_the_column_that_it_loses() -> None:
    order, _, data = sent_up(Raw())
    keys = rng.fold(rng.root(0, "links"), torch.arange(400))
    places = {len(shortened(data, 2, key)) for key in keys}
    begin, end = ends(data)[2:4]
    assert begin <= min(places) < begin + 40
    assert end - 40 < max(places) < end
    assert len(places) > 250
    with pytest.raises(ValueError, match="after 5"):
        shortened(data, 5, order.key[0])


# --- what is refused --------------------------------------------------------------------------


def test_text_that_is_not_text_is_refused() -> None:
    header, columns = taken_apart(encode_order(ORDER, TASK))
    raw = bytearray(msgspec.msgpack.encode(header))
    # A key of the header: one of its letters becomes half of a character.
    raw[raw.index(b"share")] = 0xE4
    lead = encode_order(ORDER, TASK)[:LEAD]
    refused(lead + framed([bytes(raw), *columns]), "header")


def test_another_version_is_refused() -> None:
    data = bytearray(encode_order(ORDER, TASK))
    data[3] = 99
    refused(bytes(data), "version", "version 99")


def test_an_order_may_not_name_foreign_code() -> None:
    job = msgspec.msgpack.encode({"use": "os:system", "command": "true"})
    refused(with_header(encode_order(ORDER, TASK), job=job), "job", "allowed packages")


SENT, ANSWER = encode_order(ORDER, TASK), encode_update(UPDATE, ORDER, TASK)
NUMBERS = taken_apart(SENT)[0]["numbers"]


@pytest.mark.parametrize("data", [SENT, ANSWER], ids=["order", "answer"])
def test_what_is_too_large_is_refused_before_it_is_read(data: bytes) -> None:
    refused(data, "too large", limits=Limits(message=len(data) - 1))
    refused(data, "cut", limits=Limits(header=100))
    for decode in (
        lambda: decode_order(SENT, TASK, limits=Limits(message=len(SENT))),
        lambda: decode_update(ANSWER, ORDER, TASK, Limits(message=len(ANSWER))),
    ):
        assert len(decode()) == 1


def test_a_message_may_be_as_large_as_its_model_needs_and_not_much_more() -> None:
    most = Limits().most(TASK.blueprint)
    raw = 4 * TASK.blueprint.numel()
    assert raw < most.message < 10 * raw + (1 << 20)
    refused(SENT + bytes(most.message), "too large")
    refused(SENT + b"x", "trailing")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"share": math.nan}, "numbers"),
        ({"share": 0.0}, "numbers"),
        ({"share": 1.5}, "numbers"),
        ({"column": 0.0}, "numbers"),
        ({"column": 5e-324}, "numbers"),  # as many columns as there are numbers
        ({"column": 1e-3}, "numbers"),
        ({"bits": math.inf}, "numbers"),
        ({"bits": -1.0}, "numbers"),
        ({"utility": math.inf}, "numbers"),
        ({"choice": -2}, "numbers"),
        ({"menu": [b""] * 100}, "numbers"),
        ({"menu": [b""]}, "choice"),  # the whole model, and it is told to train another
        ({"numbers": {**NUMBERS, "lr": math.nan}}, "numbers"),
        ({"numbers": {**NUMBERS, "lr": math.inf}}, "numbers"),
        ({"numbers": {**NUMBERS, "batch": 0}}, "numbers"),
        ({"numbers": {**NUMBERS, "batch": 1 << 40}}, "numbers"),
        ({"numbers": {**NUMBERS, "epochs": 1 << 40}}, "numbers"),
        ({"numbers": {**NUMBERS, "epochs": -1, "steps": -1}}, "numbers"),
        ({"numbers": {**NUMBERS, "steps": -2}}, "numbers"),
        ({"numbers": {**NUMBERS, "rate": -1.0}}, "numbers"),
        ({"numbers": {**NUMBERS, "target": -1.0}}, "numbers"),
        ({"numbers": {**NUMBERS, "more": 1.0}}, "header"),
        ({"numbers": {}}, "header"),
        ({"id": -1}, "header"),
        ({"device": -1}, "header"),
        ({"id": 1 << 63}, "header"),
        ({"kind": "conquer"}, "header"),
        ({"step": 1.5}, "header"),
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
        ({"trees": {"weights": list(UPDATE.trees[0]["delta"])}}, "tensors"),
        ({"trees": {**UPDATE.trees[0], "delta": [*UPDATE.trees[0]["delta"]] * 2}}, "tensors"),
        ({"masks": {"9.weight": ([1], b"\x80")}}, "mask"),
        ({"masks": {"0.weight": ([1 << 40, 1, 1, 1], b"\x80")}}, "mask"),
        ({"masks": {"0.weight": ([1, 1, 1, 1], b"\x80\x80")}}, "mask"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_answer_that_no_device_sends(changes: dict[str, Any], reason: str) -> None:
    refused(with_header(ANSWER, **changes), reason)


def test_an_answer_may_have_only_what_its_order_asked_for() -> None:
    for kind in (Kind.HOLD, Kind.EVALUATE, Kind.REPORT, Kind.STATISTICS):
        refused(ANSWER, "tensors", order=replace(ORDER, kind=kind))


def test_an_answer_must_have_what_its_order_asked_for() -> None:
    bare = put_together(ANSWER, {**taken_apart(ANSWER)[0], "trees": {}, "masks": {}}, ())
    refused(bare, "tensors")
    fetch = replace(ORDER, kind=Kind.FETCH)
    refused(bare, "tensors", order=fetch)
    gone = decode_update(with_header(bare, report={"missing": 1.0}), fetch, TASK)
    assert gone.trees == ({},)
    refused(bare, "tensors", order=replace(ORDER, kind=Kind.STATISTICS))
    for kind in (Kind.HOLD, Kind.EVALUATE, Kind.REPORT):
        assert decode_update(bare, replace(ORDER, kind=kind), TASK).delivered[0] == 1


def test_statistics_alone_have_nothing_behind_them() -> None:
    order = replace(ORDER, kind=Kind.STATISTICS)
    data = encode_update(work(order, (Memory(),), TASK).updates, order, TASK)
    header, (column,) = taken_apart(data)
    assert decode_update(data, order, TASK).trees[0]["buffers"].keys() == {
        "1.running_mean",
        "1.running_var",
    }
    refused(put_together(data, header, (column + b"x",)), "trailing", order=order)
    refused(put_together(data, header, (column[:-1],)), "shape", order=order)
    refused(data[:-1], "cut", order=order)


def test_an_answer_is_not_read_as_an_order() -> None:
    with pytest.raises(BadMessage) as caught:
        decode_order(ANSWER, TASK)
    assert caught.value.reason == "magic"


# --- jobs -------------------------------------------------------------------------------------

JOB = msgspec.msgpack.decode(taken_apart(SENT)[0]["job"])


def with_job(job: Any) -> bytes:
    return with_header(SENT, job=msgspec.msgpack.encode(job))


@pytest.mark.parametrize(
    "part",
    [
        {"use": "os:system", "command": "true"},
        {"use": "anyfleet.study:load", "path": "a file"},  # reads files
        {"use": "anyfleet.tasks:TextFile", "path": "a file"},
        {"use": "anyfleet.cli.app:app"},
        {"use": "anyfleet.codec.raw:distortion", "sent": {}, "received": {}},  # a function
        {"use": "anyfleet.codec:Raw", "precision": "os:system"},
        {"use": "anyfleet.codec:Raw", "precision": "fp99"},
        {"use": "anyfleet.codec:Raw", "more": 1},
        {"use": "anyfleet.train:Sgd"},  # a part, but no codec
        {"use": "anyfleet.codec:Absent"},
        {"use": 7},
        "anyfleet.codec:Raw",
        7,
        None,
        b"bytes",
    ],
    ids=repr,
)
def test_a_job_names_parts_of_devices_only(part: Any) -> None:
    refused(with_job({**JOB, "uplink": part}), "job")
    refused(with_job({**JOB, "downlink": part}), "job")


def test_a_module_that_is_not_allowed_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_parts.py").write_text("class Part:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(with_job({**JOB, "uplink": {"use": "foreign_parts:Part"}}), "job", "allowed packages")
    assert "foreign_parts" not in sys.modules
    with pytest.raises(BadMessage, match="Part"):
        decode_order(
            with_job({**JOB, "uplink": {"use": "foreign_parts:Part"}}), TASK, ["foreign_parts"]
        )
    assert "foreign_parts" in sys.modules
    del sys.modules["foreign_parts"]


def test_a_function_is_not_called_even_if_its_package_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "called_parts.py").write_text("CALLS = []\n\ndef part():\n    CALLS.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadMessage, match="no part"):
        decode_order(
            with_job({**JOB, "uplink": {"use": "called_parts:part"}}), TASK, ["called_parts"]
        )
    assert sys.modules.pop("called_parts").CALLS == []


def test_a_job_is_bounded_in_depth_length_and_numbers() -> None:
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    refused(with_job({**JOB, "report": nested}), "job")
    refused(with_job({**JOB, "report": ["x" * 70_000]}), "too large")
    refused(
        with_job({**JOB, "uplink": {"use": "anyfleet.codec:Qsgd", "bucket": 10**9}}), "too large"
    )
    refused(with_job({**JOB, "report": ["mood"]}), "job")
    refused(with_header(SENT, job=b"\x91" * 5000), "job")
    refused(with_header(SENT, job=b"\xc1"), "job")


def test_infinite_numbers_of_a_job_survive_the_wire() -> None:
    """JSON would have made nothing of them."""
    order = orders(fedavg(), TASK, [0])
    sent = replace(order, job=replace(order.job, choose=LargestInTime(math.inf)))
    assert decode_order(encode_order(sent, TASK), TASK).job == sent.job
