"""Engines of tests: another one whose orders or results are changed on the way."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.delivery import cut_orders, cut_replies
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.limits import Limits
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Blueprint
from anyfleet.runtime import Sequential
from anyfleet.runtime.simulated.engines import Assignment, Engine, Executed, Executor


@dataclass(frozen=True)
class Changed(Engine):
    """An engine between which and the runtime something happens; subclasses say what."""

    inner: Engine = field(default_factory=Sequential)

    def start(self, task: Task, limits: Limits) -> Executor:
        return Between(self.inner.start(task, limits), self)

    def given(self, given: Assignment) -> Assignment:
        """Return the orders that reach the engine."""
        return given

    def done(self, given: Assignment, states: DeviceStates, executed: Executed) -> Executed:
        """Return what reaches the runtime."""
        return executed


class Between:
    """An executor of such an engine."""

    def __init__(self, inner: Executor, engine: Changed) -> None:
        self._inner, self._engine = inner, engine

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        given = self._engine.given(given)
        return self._engine.done(given, states, self._inner.execute(given, states))


def spoilt(executed: Executed, spoil: Callable[[Replies], Replies | None]) -> Executed:
    """Return the results with other replies, one by one; None: it never comes."""
    given = executed.replies.rows()
    found = [spoil(reply) for reply in given]
    replies = [old if new is None else new for old, new in zip(given, found, strict=True)]
    gone = {row: "gone" for row, new in enumerate(found) if new is None}
    refused = {**executed.refused_by_server, **gone}
    return replace(executed, replies=join(replies), refused_by_server=refused)


def cut_order(order: Cohort, width: float, blueprint: Blueprint) -> Cohort:
    """Return a single order as it reaches its device through a link that lets `width` through."""
    return cut_orders(order, np.array([width]), blueprint)


def cut_reply(reply: Replies, order: Cohort, width: float, blueprint: Blueprint) -> Replies:
    """Return a single reply as it reaches the server through a link that lets `width` through."""
    return cut_replies(reply, order, np.array([width]), blueprint)
