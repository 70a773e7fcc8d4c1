"""Messages that a link has cut: their complete columns come out, bit for bit."""

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfleet import rng
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.limits import FRAME_BYTES
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Codec
from anyfleet.core.stacks import Replies
from anyfleet.methods import heterofl
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Nothing, Plain, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.norm import Tracked
from anyfleet.wire import cut_message, decode_order, decode_reply, encode_order, encode_reply
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.engines import cut_order, cut_reply
from tests.helpers.exchanged import TASK, refused
from tests.helpers.messages import LEAD, taken_apart

COLUMN = 0.125
UPLINKS: list[Codec] = [
    *(Raw(), Raw("fp16"), Nothing(), Plain(), TopK(0.2, Qsgd(4, 32)), Stc(0.2)),
    *(Qsgd(), Uveq(), Hq(), Fgc(), Fgc(((0.1, 0.3, 8), (1.0, 0.9, 64)))),
]
DOWNLINKS: list[Codec] = [Raw(), Raw("bf16"), Qsgd(), Uveq()]
HALVES = heterofl(widths=(0.55,), lr=0.1, batch_size=8)


def ends(data: bytes) -> list[int]:
    """Where the header and each column end, by adding up."""
    header, columns = taken_apart(data)
    sizes = [len(msgspec.msgpack.encode(header)), *map(len, columns)]
    return list(accumulate((size + FRAME_BYTES for size in sizes), initial=LEAD))[1:]


@cache
def sent_up(codec: Any) -> tuple[Cohort, Replies, bytes]:
    method = replace(HALVES, uplink=codec, norm=Tracked())
    order = orders(method, TASK, [3], column=COLUMN)
    update = work(order, (DeviceState(),), TASK).replies
    return order, update, encode_reply(update, order, TASK)


@pytest.mark.parametrize("codec", UPLINKS, ids=repr)
@settings(max_examples=15)
@given(place=st.floats(0, 1), edge=st.sampled_from([None, -1, 0, 1]))
def test_a_reply_cut_anywhere_gives_its_complete_columns_bit_for_bit(
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
    received = decode_reply(data[:at], order, TASK)
    expected = cut_reply(update, order, came * COLUMN if came < 5 else 1.0, TASK.blueprint)
    assert received.delivered_width[0] == expected.delivered_width[0]
    assert received.trees_of(0).keys() == expected.trees_of(0).keys()
    for tree, values in expected.trees_of(0).items():
        assert small.identical(values, received.trees_of(0)[tree])
    assert small.identical(expected.masks_of(0), received.masks_of(0))
    assert small.identical(expected.kept_of(0), received.kept_of(0))
    assert received.bits[0] == expected.bits[0]
    assert received.report_of(0) == expected.report_of(0)


@cache
def sent_down(codec: Any) -> tuple[Cohort, bytes]:
    method = small.padded(replace(HALVES, downlink=codec, norm=Tracked()))
    order = orders(method, TASK, [3], column=COLUMN)
    return order, encode_order(order, TASK)


@pytest.mark.parametrize("codec", DOWNLINKS, ids=repr)
@settings(max_examples=15)
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
    assert received.delivered_width[0] == expected.delivered_width[0]
    assert received.bits[0] == expected.bits[0]
    assert received.trees_of(0).keys() == expected.trees_of(0).keys()
    for tree, values in expected.trees_of(0).items():
        assert small.identical(values, received.trees_of(0)[tree])


def test_who_counts_on_its_message_having_arrived_has_no_use_for_a_part_of_it() -> None:
    """What error feedback sent, it does not send again: half of it would be lost for good."""
    order, _, data = sent_up(ErrorFeedback())
    assert decode_reply(data, order, TASK).delivered_width[0] == 1
    refused(data[:-1], "cut", order=order)


def test_a_link_fails_anywhere_within_the_column_that_it_loses() -> None:
    order, _, data = sent_up(Raw())
    keys = rng.fold(rng.root(0, "links"), torch.arange(400))
    places = {len(cut_message(data, 2, key)) for key in keys}
    begin, end = ends(data)[2:4]
    assert begin <= min(places) < begin + 40
    assert end - 40 < max(places) < end
    assert len(places) > 250
    with pytest.raises(ValueError, match="after 5"):
        cut_message(data, 5, order.key[0])
