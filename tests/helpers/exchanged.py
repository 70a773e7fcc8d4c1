"""An order and its reply as bytes, and a check that changed bytes are refused."""

import pytest

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.limits import Limits
from anyfleet.core.orders import Cohort
from anyfleet.errors import BadMessage
from anyfleet.methods import heterofl
from anyfleet.wire import decode_order, decode_reply, encode_order, encode_reply
from tests.core.test_local_training import orders
from tests.helpers import small

TASK = small.task()
ORDER = orders(heterofl(widths=(0.5,), lr=0.1), TASK, [3])
UPDATE = work(ORDER, (DeviceState(),), TASK).replies
SENT, ANSWER = encode_order(ORDER, TASK), encode_reply(UPDATE, ORDER, TASK)


def refused(
    data: bytes,
    reason: str,
    match: str | None = None,
    *,
    order: Cohort = ORDER,
    limits: Limits | None = None,
) -> None:
    """Check that bytes are refused for a reason, as the order or the reply that they begin as."""
    down = data[2:3] == b"o"
    with pytest.raises(BadMessage, match=match) as caught:
        (decode_order(data, TASK, (), limits) if down else decode_reply(data, order, TASK, limits))
    assert caught.value.reason == reason
