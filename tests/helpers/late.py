"""An engine whose numbers arrive when somebody reads them, as those of an accelerator do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anyfleet.core.arriving import LateArray, LateArrays, Transfer
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.limits import Limits
from anyfleet.core.objectives import Task
from anyfleet.core.stacks import Replies, Stack
from anyfleet.runtime import Sequential
from anyfleet.runtime.simulated.engines import Assignment, Engine, Executed, Executor

Spoil = Callable[[int, Replies], Replies]


def _as_they_are(_: int, replies: Replies) -> Replies:
    return replies


@dataclass(frozen=True)
class Late(Engine):
    """An engine that notes in `log` what it trains, and when numbers of it are read first."""

    log: list[str] = field(default_factory=list)
    inner: Engine = field(default_factory=Sequential)
    spoil: Spoil = _as_they_are  # changes the replies of a round

    def start(self, task: Task, limits: Limits) -> Executor:
        return _Running(self, self.inner.start(task, limits))


@dataclass(frozen=True)
class _Running:
    engine: Late
    inner: Executor

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        number = int(given.orders.round_index)
        self.engine.log.append(f"train {number}")
        done = self.inner.execute(given, states)
        replies = self.engine.spoil(number, done.replies)
        stacks = tuple(self._late(number, stack) for stack in replies.stacks)
        return replace(done, replies=replies.having(stacks=stacks))

    def _late(self, number: int, stack: Stack) -> Stack:
        def coming(arrays: Mapping[str, NDArray[Any]]) -> LateArrays:
            return LateArrays(
                {
                    name: LateArray(_Unread(each, f"read {number}", self.engine.log), 0, each.shape)
                    for name, each in arrays.items()
                }
            )

        measured = {name: value.numpy() for name, value in stack.lengths.items()}
        lengths = {**stack.known_lengths, **measured}
        return replace(stack, report=coming(stack.report), known_lengths=coming(lengths))


class _Unread(Transfer):
    """Numbers that nobody has read."""

    def __init__(self, array: NDArray[Any], note: str, log: list[str]) -> None:
        super().__init__(torch.as_tensor(array).reshape(-1))
        self._note, self._log, self._read = note, log, False

    @property
    def awaited(self) -> bool:
        return self._read

    def values(self) -> NDArray[np.float64]:
        if not self._read and self._log[-1:] != [self._note]:
            self._log.append(self._note)
        self._read = True
        return super().values()
