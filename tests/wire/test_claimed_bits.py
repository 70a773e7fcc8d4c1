"""What a message says of its size must be there in bytes: ledger and clock follow it."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.message_size import FETCH_BITS, index_bits
from anyfleet.core.messages import Kind
from anyfleet.core.orders import NOTHING, Cohort
from anyfleet.measure import Fisher
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.aggregate import Diagnosed
from anyfleet.parts.codec import ErrorFeedback, Fgc, Nothing, Plain, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.codec.bitstream import SLACK
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import WidthMenu
from anyfleet.wire import decode_order, decode_reply, encode_order, encode_reply
from tests.core.test_local_training import orders
from tests.helpers.exchanged import ANSWER, ORDER, SENT, TASK, UPDATE, refused
from tests.helpers.messages import put_together, taken_apart, with_header

CODECS: list[Any] = [
    *(Raw(), Raw("bf16"), Nothing(), Plain(), TopK(0.2, Uveq()), Stc(0.2, scope="model")),
    *(Qsgd(), Uveq(), ErrorFeedback(), Fgc(((0.1, 0.3, 8), (1.0, 0.9, 64)))),
]
HALVES = replace(
    heterofl(widths=(0.55,), lr=0.1, batch_size=8),
    norm=Tracked(),
    aggregate=Diagnosed(reported=("norm", "channels"), measures=(Fisher(),)),
)


@cache
def exchange(codec: Any, column: float) -> tuple[Cohort, bytes]:
    order = orders(replace(HALVES, uplink=codec), TASK, [3], column=column)
    return order, encode_reply(work(order, (DeviceState(),), TASK).replies, order, TASK)


def more_than_slack(codec: Any, data: bytes) -> float:
    bits = taken_apart(data)[0]["bits"]
    slack = codec.slack
    return float(slack.column + slack.share * 2 * bits + slack.entry * 10_000 + 8)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_reply_in_one_piece_takes_the_bits_that_it_says(codec: Any) -> None:
    order, data = exchange(codec, 1.0)
    bits = taken_apart(data)[0]["bits"]
    assert decode_reply(data, order, TASK).bits[0] == bits
    refused(with_header(data, bits=0.0), "numbers", order=order)
    refused(with_header(data, bits=bits + more_than_slack(codec, data)), "numbers", order=order)
    # What is beside the model is known to the bit, and bits are never fewer than bytes.
    refused(with_header(data, bits=bits - SLACK.column - 8), "numbers", order=order)
    if codec.slack.column == 0:
        refused(with_header(data, bits=bits + 1), "numbers", order=order)
        refused(with_header(data, bits=bits - 1), "numbers", order=order)


@pytest.mark.parametrize("codec", [Raw(), Nothing(), Qsgd(), TopK(0.2, Uveq())], ids=repr)
def test_every_column_takes_the_bits_that_are_said_of_it(codec: Any) -> None:
    order, data = exchange(codec, 0.125)
    header, columns = taken_apart(data)
    sizes, bits, more = header["sizes"], header["bits"], more_than_slack(codec, data)
    assert decode_reply(data, order, TASK).bits[0] == bits
    for at in (0, 3):
        less = 8 * len(columns[at]) if sizes[at] else -8.0
        for change in (more, -less):
            told = [size + change * (column == at) for column, size in enumerate(sizes)]
            lie = with_header(data, sizes=told, bits=bits + change)
            refused(lie, "numbers", order=order)
            # Also if only the leading columns come, and only they are charged.
            came = put_together(lie, taken_apart(lie)[0], columns[:4])
            refused(came, "numbers", order=order)
    # One column's bits are not another's, and all together are the whole.
    moved = [sizes[0] + more, sizes[1] - more, *sizes[2:]]
    refused(with_header(data, sizes=moved), "numbers", order=order)
    refused(with_header(data, bits=bits + 1), "numbers", "in columns of", order=order)
    refused(with_header(data, sizes=sizes[:-1]), "numbers", "sizes of 4", order=order)


def test_an_order_takes_the_bits_that_it_says() -> None:
    for column in (1.0, 0.125):
        sent = orders(replace(HALVES, downlink=Qsgd()), TASK, [3], column=column)
        data = encode_order(sent, TASK)
        assert decode_order(data, TASK).bits[0] == sent.bits[0]
        bits = float(sent.bits[0])
        for told in (0.0, bits / 2, 2 * bits):
            refused(with_header(data, bits=told), "numbers")
    refused(with_header(SENT, bits=float(ORDER.bits[0]) + 1), "numbers")


@pytest.mark.parametrize("kind", [k for k in Kind if k != Kind.FETCH])
def test_replies_of_every_kind_are_charged_for_what_they_have(kind: Kind) -> None:
    method = replace(HALVES, plan=WidthMenu((1.0, 0.5)))
    for asked in (orders(method, TASK, [3]), orders(fedavg(lr=0.1, batch_size=8), TASK, [2])):
        order = replace(asked, kind=kind)
        update = work(order, (DeviceState(),), TASK).replies
        data = encode_reply(update, order, TASK)
        bits = float(update.bits[0])
        assert decode_reply(data, order, TASK).bits[0] == bits > 0
        refused(with_header(data, bits=0.0), "numbers", order=order)
        refused(with_header(data, bits=bits + 32), "numbers", order=order)


def test_what_is_fetched_is_charged_when_it_is_sent() -> None:
    held = replace(orders(HALVES, TASK, [3]), kind=Kind.HOLD)
    (memory,) = work(held, (DeviceState(),), TASK).states
    bits = float(FETCH_BITS + index_bits(held.slice_of(0), TASK.blueprint))
    asked = replace(held.with_downloads(NOTHING), bits=np.array([bits]))
    fetch = replace(asked, id=held.id + 1, held_order=held.id, kind=Kind.FETCH)
    assert decode_order(encode_order(fetch, TASK), TASK).bits[0] == bits
    refused(with_header(encode_order(fetch, TASK), bits=bits + 1), "numbers")
    for memories in ((memory,), (DeviceState(),)):  # it is there, or gone
        update = work(fetch, memories, TASK).replies
        data = encode_reply(update, fetch, TASK)
        assert decode_reply(data, fetch, TASK).bits[0] == update.bits[0]
        refused(with_header(data, bits=float(update.bits[0]) + 32), "numbers", order=fetch)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("column", [1.0, 0.125])
def test_only_a_codec_that_sends_nothing_names_no_tensors(codec: Any, column: float) -> None:
    order, data = exchange(codec, column)
    if codec == Nothing():
        assert decode_reply(data, order, TASK).trees_of(0)["delta"] == {}
        names = list(UPDATE.trees_of(0)["delta"])
        trees = {**taken_apart(data)[0]["trees"], "delta": names}
        refused(with_header(data, trees=trees), "tensors", order=order)
        return
    header, columns = taken_apart(data)
    told = sum(8 * 4 * value.numel() for value in TASK.buffers.values())
    bare = {**header, "trees": {"delta": []}, "sizes": [0.0] * len(header["sizes"])}
    for bits in (header["bits"] - sum(header["sizes"]), 0.0, float(told)):
        claim = put_together(data, {**bare, "bits": bits}, (b"",) * len(columns))
        refused(claim, "content", order=order)


def test_a_reply_that_is_not_there_does_not_count_as_acknowledged() -> None:
    header, (_,) = taken_apart(ANSWER)
    empty = {**header, "trees": {"delta": []}, "masks": {}, "bits": 0.0}
    refused(put_together(ANSWER, empty, (b"",)), "content")
