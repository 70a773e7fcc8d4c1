"""The engine of a run that is played together with others: it hands over what is to be trained."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyfleet.arrays import Ints
from anyfleet.core.client import Launched, Mapper
from anyfleet.core.limits import Limits
from anyfleet.core.local_training import Extent, Inputs, Lift
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Train, TrainingContext, TrainingResult
from anyfleet.runtime.simulated.engines import Engine, Executor, Stacked, Stacks
from anyfleet.runtime.simulated.joined_training import Answer, Call
from anyfleet.runtime.simulated.stacking import capacities, stacks
from anyfleet.runtime.simulated.strands import Strand


@dataclass(frozen=True, eq=False)
class Joined(Engine):
    """The engine that makes the stacks that `own` makes, and hands all of a round over at once.

    `hand` returns an answer to every call. So many meetings of runs share the memory.
    """

    own: Stacked
    hand: Callable[[list[Call]], list[Answer]]
    meetings: int = 1

    def start(self, task: Task, limits: Limits) -> Executor:
        return _Handing(self, task)


class _Handing(Stacks):
    """An engine that lets somebody else train its stacks."""

    def __init__(self, engine: Joined, task: Task) -> None:
        super().__init__(engine.own, task)
        self._hand, self._meetings = engine.hand, engine.meetings
        self._runner = self._train
        self._one: Callable[[Call], TrainingResult] | None = None

    def _rows(self, orders: Cohort) -> list[Ints]:
        workers = self._engine.workers
        return stacks(orders, self._task, self._chunk, workers, runs=self._meetings)

    def _mapper(self, orders: Cohort, rows: list[Ints]) -> Mapper:
        most = [self._chunk or n // self._meetings for n in capacities(orders, rows, self._task)]
        return partial(self._map, most)

    def _map(
        self, most: list[int], begun: Callable[[int], Launched], numbers: Iterable[int]
    ) -> list[Launched]:
        """Return all stacks after they were trained; each begins up to where it is trained."""
        if len(most) == 1:
            self._one = lambda call: self._hand([call._replace(most=most[0])])[0]()
            return [begun(number) for number in numbers]
        strands: list[Strand[Call, TrainingResult, Launched]] = [
            Strand(partial(self._begin, begun, number)) for number in numbers
        ]
        try:
            calls = [strand.resume(_nothing) for strand in strands]
            known = [call for call in calls if call is not None]
            assert len(known) == len(strands)
            given = [call._replace(most=n) for call, n in zip(known, most, strict=True)]
            for strand, answer in zip(strands, self._hand(given), strict=True):
                strand.resume(answer)
            return [strand.result for strand in strands if strand.result is not None]
        finally:
            for strand in strands:
                strand.close()

    def _begin(
        self,
        begun: Callable[[int], Launched],
        number: int,
        hand: Callable[[Call], TrainingResult],
    ) -> Launched:
        self._one = hand
        return begun(number)

    def _train(
        self,
        trainer: Train,
        context: TrainingContext,
        inputs: Inputs,
        bounds: Extent,
        *,
        lift: Lift,
        cohort_key: int,
    ) -> TrainingResult:
        """Return the result of a training that somebody else does."""
        assert self._one is not None
        return self._one(Call(trainer, context, inputs, bounds, lift, cohort_key))


def _nothing() -> Any:
    """Return no answer: a strand that begins has not asked yet."""
