"""What a server does with bytes that claim to be replies."""

from collections import Counter

from anyfleet.core.limits import Limits
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.errors import BadMessage
from anyfleet.wire import ReplyMessage, accepted, read_reply


class Inbox:
    """The orders that wait for a reply; each takes one. `refused` counts refusals by reason.

    Ids of orders only grow, so nothing need be remembered of orders that are closed.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        self._task, self._limits = task, limits
        self._open: dict[int, Cohort] = {}
        self._replied: set[int] = set()
        self._highest = -1
        self.refused: Counter[str] = Counter()

    def expect(self, order: Cohort) -> None:
        """Note that an order was sent: its reply may come."""
        number = int(order.id[0])
        self._open[number] = order
        self._highest = max(self._highest, number)

    def close(self, order: int) -> None:
        """Note that no reply to this order counts: its device refused it, or it was given up."""
        self._open.pop(order, None)
        self._replied.discard(order)

    def receive(self, data: bytes, sender: int) -> Replies:
        """Return the reply in bytes that came from device `sender`.

        Raise BadMessage if they are not a reply to an open order of that device.
        """
        try:
            message = read_reply(data, self._task, self._limits)
            reply = accepted(message, self._order(message, sender), self._task)
            if not reply.delivered_width[0]:
                # If it were accepted, its device would believe that its update has arrived.
                raise BadMessage("not one whole column", "nothing came through")
        except BadMessage as error:
            self.refused[error.reason] += 1
            raise
        self._replied.add(message.header.order)
        return reply

    def _order(self, message: ReplyMessage, sender: int) -> Cohort:
        """Return the open order that a message replies to."""
        number = message.header.order
        if number not in self._open:
            known = number <= self._highest
            reason = "stale" if known else "unknown order"
            raise BadMessage(f"a reply to order {number}, which is not open", reason)
        order = self._open[number]
        if order.device[0] != sender:
            what = f"device {sender} replies to an order of device {order.device[0]}"
            raise BadMessage(what, "wrong device")
        if number in self._replied:
            raise BadMessage(f"a second reply to order {number}", "duplicate")
        return order
