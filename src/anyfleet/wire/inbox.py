"""What a server does with bytes that claim to be answers."""

from collections import Counter

from anyfleet.core.limits import Limits
from anyfleet.core.messages import Replies
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.errors import BadMessage
from anyfleet.wire import ReplyMessage, accepted, read_reply


class Inbox:
    """The orders that wait for an answer; each takes one. `refused` counts by reason.

    Numbers of orders only grow, so that of orders which are closed nothing need be remembered.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        self._task, self._limits = task, limits
        self._open: dict[int, Cohort] = {}
        self._answered: set[int] = set()
        self._highest = -1
        self.refused: Counter[str] = Counter()

    def expect(self, order: Cohort) -> None:
        """An order was sent: its answer may come."""
        number = int(order.id[0])
        self._open[number] = order
        self._highest = max(self._highest, number)

    def close(self, order: int) -> None:
        """No answer to this order will count: its device refused it, or it was given up."""
        self._open.pop(order, None)
        self._answered.discard(order)

    def receive(self, data: bytes, sender: int) -> Replies:
        """The answer in these bytes, which came from this device; `BadMessage` if it is none."""
        try:
            letter = read_reply(data, self._task, self._limits)
            update = accepted(letter, self._order(letter, sender), self._task)
            if not update.delivered_width[0]:
                # Taken for an answer, its device would believe that its update has arrived.
                raise BadMessage("not one whole column", "nothing came through")
        except BadMessage as error:
            self.refused[error.reason] += 1
            raise
        self._answered.add(letter.header.order)
        return update

    def _order(self, letter: ReplyMessage, sender: int) -> Cohort:
        number = letter.header.order
        if number not in self._open:
            known = number <= self._highest
            reason = "stale" if known else "unknown order"
            raise BadMessage(f"an answer to order {number}, which is not open", reason)
        order = self._open[number]
        if order.device[0] != sender:
            told = f"device {sender} answers an order of device {order.device[0]}"
            raise BadMessage(told, "wrong device")
        if number in self._answered:
            raise BadMessage(f"a second answer to order {number}", "duplicate")
        return order
