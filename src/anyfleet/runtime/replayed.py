"""A fleet in this process whose replies come in as they did in an earlier run on real devices.

Which devices are faster than others decides what an asynchronous run computes. A real run writes
down what came in (`Arrived`); replayed in the same order, the same seed gives the same model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from anyfleet.arrays import Flags, Floats, Ints, join
from anyfleet.core.check_in import OrderChoices
from anyfleet.core.choosing import decide
from anyfleet.core.client import carry_out
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.events import Events, Failures
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Conditions, Devices, no_charges
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies


class Arrived(msgspec.Struct, frozen=True):
    """What came in at one call of `wait`, in that order."""

    now: float  # seconds since the start of the run
    replies: tuple[int, ...] = ()  # numbers of orders
    failures: tuple[tuple[int, str], ...] = ()  # numbers of orders, and why they failed
    choices: tuple[int, ...] = ()  # numbers of orders
    free: int = 0  # devices that were free while nothing was under way

    @classmethod
    def of(cls, events: Events, now: float) -> "Arrived":
        """Return what came in, without what it was."""
        replies, failures, choices = events.replies, events.failures, events.choices
        failed = (
            () if failures is None else zip(failures.order.tolist(), failures.reason, strict=True)
        )
        return cls(
            now,
            () if replies is None else tuple(replies.order.tolist()),
            tuple((order, reason) for order, reason in failed),
            () if choices is None else tuple(choices.order.tolist()),
            events.free,
        )


class Differs(Exception):
    """The loop asks for something else than in the run that is replayed."""


class Replayed:
    """A fleet whose devices are always there and know the same of themselves (`Runtime`).

    Devices choose and train as real ones do, one after the other, when they are asked. What they
    reply is kept until it is its turn.
    """

    def __init__(
        self,
        task: Task,
        declared: Devices,
        conditions: Conditions,
        arrivals: Sequence[Arrived],
        limits: Limits | None = None,
    ) -> None:
        self._task, self._declared, self._conditions = task, declared, conditions
        self._arrivals: Iterator[Arrived] = iter(arrivals)
        self.limits = limits or Limits()
        self._now = 0.0
        self._states = DeviceStates(task)
        self._replies: dict[int, Replies] = {}  # made and not yet told
        self._choices: dict[int, OrderChoices] = {}
        self._device: dict[int, int] = {}  # of each order that is under way or offered
        self._losses = np.full(len(declared), np.nan)

    def now(self) -> float:
        """Return the second at which the last event came in."""
        return self._now

    def begin_round(self, round_index: int) -> None:
        """Do nothing: nothing changes from round to round."""

    def devices(self) -> Devices:
        """Return what the devices declared."""
        return self._declared

    def free(self, devices: Ints) -> Flags:
        """Return which devices have no order."""
        return ~np.isin(devices, [*self._device.values()])

    def free_memory(self, devices: Ints) -> Floats:
        """Return the memory of `conditions`."""
        return self.conditions(devices).memory

    def conditions(self, devices: Ints) -> Conditions:
        """Return the conditions that the devices always have, and the loss that they had last."""
        return replace(self._conditions.take(devices), loss=self._losses[devices])

    def offer(self, orders: Cohort) -> None:
        """Let devices choose; each choice is kept until it is its turn."""
        made = decide(
            orders,
            self.conditions(orders.device),
            self._states.choosers(orders.device),
            self._task,
            self._declared.counting,
        )
        for row, each in enumerate(OrderChoices(orders.id, made).rows()):
            self._choices[int(orders.id[row])] = each
            self._device[int(orders.id[row])] = int(orders.device[row])

    def submit(self, orders: Cohort) -> None:
        """Let devices train, one after the other; each reply is kept until it is its turn."""
        for order in orders.rows():
            number = int(order.id[0])
            done = carry_out(order, self._states, self._task)
            self._states.commit(done.remembered)
            self._replies[number], self._device[number] = done.replies, int(order.device[0])

    def wait(self, until: float | None, enough: int) -> Events:
        """Return what came in next in the run that is replayed."""
        came = next(self._arrivals, None)
        if came is None:
            raise Differs("the run that is replayed had ended here")
        self._now = came.now
        if came.choices:
            chosen = [self._taken(self._choices, number) for number in came.choices]
            return Events(choices=join(chosen))
        replies = [self._taken(self._replies, number) for number in came.replies]
        for each in replies:
            loss = each.reported("loss")
            self._losses[each.device] = np.where(np.isnan(loss), self._losses[each.device], loss)
        spent = [no_charges(each.order, came.now) for each in replies]
        numbers = np.array([number for number, _ in came.failures], dtype=np.int64)
        for number in numbers.tolist():
            self._taken(self._replies, number)
        reasons = tuple(reason for _, reason in came.failures)
        failures = Failures(numbers, reasons, no_charges(numbers, came.now))
        return Events(
            replies=join(replies) if replies else None,
            charges=join(spent) if spent else None,
            failures=failures if len(numbers) else None,
            free=came.free,
        )

    def _taken(self, kept: dict[int, Any], number: int) -> Any:
        if number not in kept:
            raise Differs(f"order {number} came in, which is not under way here")
        del self._device[number]
        return kept.pop(number)

    def cancel(self, orders: Ints, reason: str) -> Failures:
        """Cancel orders; nothing is charged."""
        for number in orders.tolist():
            self._replies.pop(number, None)
            self._choices.pop(number, None)
            self._device.pop(number, None)
        return Failures(orders, (reason,) * len(orders), no_charges(orders, self._now))

    def save(self) -> Any:
        """Return nothing: a replay is not resumed."""

    def restore(self, saved: Any) -> None:
        """Raise RuntimeError: a replay is not resumed."""
        raise RuntimeError("a replay cannot be resumed; play it again")
