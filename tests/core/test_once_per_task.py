"""What follows from a task: computed once while it lives, and forgotten with it."""

import gc
import weakref
from typing import NamedTuple, cast

from anyfleet.core.objectives import Task
from anyfleet.core.once_per_task import OncePerTask


class Small:
    """All that is needed of a task here."""


class Light(NamedTuple):
    """A task that no weak reference can name."""

    devices: int


def counted(calls: list[object]) -> OncePerTask[int]:
    @OncePerTask
    def number(task: Task) -> int:
        """Return how many were asked so far."""
        calls.append(type(task))
        return len(calls)

    return number


def test_tasks_that_take_turns_are_asked_once_each() -> None:
    calls: list[object] = []
    number, tasks = counted(calls), [cast(Task, Small()) for _ in range(50)]
    assert [number(task) for _ in range(3) for task in tasks] == 3 * list(range(1, 51))
    assert len(calls) == 50
    assert number.__doc__ == "Return how many were asked so far."


def test_a_task_is_not_kept_alive() -> None:
    number, task = counted([]), Small()
    number(cast(Task, task))
    found = weakref.ref(task)
    del task
    gc.collect()
    assert found() is None


def test_what_is_known_is_not_asked() -> None:
    calls: list[object] = []
    number, task = counted(calls), cast(Task, Small())
    number.keep(task, 7)
    assert (number(task), calls) == (7, [])


def test_a_task_that_no_weak_reference_can_name_is_asked_every_time() -> None:
    number, task = counted([]), cast(Task, Light(3))
    assert [number(task), number(task)] == [1, 2]
