"""What follows from a task, computed once and kept for as long as the task lives.

Runs that take turns each have a task of their own, so that a cache of a few tasks would forget each
before it is asked for again; and one of many would hold data sets that nobody uses any more.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from anyfleet.core.objectives import Task

Found = TypeVar("Found")


class OncePerTask(Generic[Found]):
    """A function of a task that is called once for each; its value must not hold the task."""

    def __init__(self, function: Callable[[Task], Found]) -> None:
        self.__doc__, self._function = function.__doc__, function
        self._kept: WeakKeyDictionary[Task, Found] = WeakKeyDictionary()

    def __call__(self, task: Task) -> Found:
        """Return the value of a task; one that no weak reference can name is asked every time."""
        with suppress(KeyError, TypeError):
            return self._kept[task]
        found = self._function(task)
        with suppress(TypeError):
            self._kept[task] = found
        return found

    def keep(self, task: Task, found: Found) -> None:
        """Keep a value that is known already."""
        self._kept[task] = found
