"""What a server does with bytes that claim to be answers."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.limits import Limits
from anyfleet.core.orders import Cohort
from anyfleet.errors import BadMessage
from anyfleet.methods import fedavg
from anyfleet.wire import encode_reply
from anyfleet.wire.inbox import Inbox
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.messages import with_header

TASK = small.task()
ASKED = orders(fedavg(lr=0.1, batch_size=8), TASK, [2, 3, 5]).rows()


def answer(order: Cohort) -> bytes:
    return encode_reply(work(order, (DeviceState(),), TASK).replies, order, TASK)


ANSWERS = [answer(order) for order in ASKED]


@pytest.fixture
def inbox() -> Inbox:
    found = Inbox(TASK, Limits())
    for order in ASKED:
        found.expect(order)
    return found


def refused(inbox: Inbox, data: bytes, sender: int, reason: str) -> None:
    before = inbox.refused[reason]
    with pytest.raises(BadMessage) as caught:
        inbox.receive(data, sender)
    assert caught.value.reason == reason
    assert inbox.refused[reason] == before + 1


def test_every_order_takes_one_reply_in_any_order(inbox: Inbox) -> None:
    for row in (2, 0, 1):
        update = inbox.receive(ANSWERS[row], int(ASKED[row].device[0]))
        assert update.order[0] == ASKED[row].id[0]
    assert not inbox.refused


def test_a_second_reply_is_a_duplicate_also_when_it_is_another(inbox: Inbox) -> None:
    inbox.receive(ANSWERS[0], 2)
    refused(inbox, ANSWERS[0], 2, "duplicate")
    refused(inbox, with_header(ANSWERS[0], samples=1), 2, "duplicate")


def test_what_was_refused_may_still_be_answered(inbox: Inbox) -> None:
    refused(inbox, ANSWERS[0][:-1] + b"x", 2, "nothing came through")
    refused(inbox, ANSWERS[0][:100], 2, "cut")
    assert inbox.receive(ANSWERS[0], 2).device[0] == 2


def test_a_closed_order_takes_none_whether_answered_before_or_not(inbox: Inbox) -> None:
    inbox.receive(ANSWERS[0], 2)
    inbox.close(int(ASKED[0].id[0]))
    inbox.close(int(ASKED[1].id[0]))
    refused(inbox, ANSWERS[0], 2, "stale")
    refused(inbox, ANSWERS[1], 3, "stale")


def test_an_order_that_was_never_sent_is_unknown(inbox: Inbox) -> None:
    refused(inbox, with_header(ANSWERS[0], order=99), 2, "unknown order")


def test_nobody_replies_for_another(inbox: Inbox) -> None:
    refused(inbox, ANSWERS[1], 2, "wrong device")
    # Nor by saying that it is the other.
    refused(inbox, with_header(ANSWERS[0], order=int(ASKED[1].id[0]), device=3), 2, "wrong device")
    refused(inbox, with_header(ANSWERS[0], device=3), 2, "wrong device")


def test_an_old_reply_under_a_new_number_is_replayed(inbox: Inbox) -> None:
    again = replace(ASKED[0], id=ASKED[0].id + 7, key=ASKED[0].key + 1, visit=np.array([1]))
    inbox.receive(ANSWERS[0], 2)
    inbox.expect(again)
    refused(inbox, ANSWERS[0], 2, "duplicate")
    refused(inbox, with_header(ANSWERS[0], order=int(again.id[0])), 2, "replayed")
    assert inbox.receive(answer(again), 2).order[0] == again.id[0]
