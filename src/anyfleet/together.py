"""Runs of equal shape played together: what they train is trained as one stack.

Seeds and hyperparameters of one experiment are runs that differ in numbers only. A stack of a few
devices leaves most of an accelerator idle; the stacks of eight runs in one do not. Everything else
of a run (server, fleet, clock, ledger) is its own, and its results are those of the run played
alone, but for the last bits, which depend on who is stacked.

Runs take turns in the order given, so that nothing depends on chance. Each goes on until it has
something to train; then all that was handed over is trained, and the first run has its turn again.
On an accelerator, eight runs are divided into four meetings with a stream each: while it trains
what one has handed over, the host plays the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyfleet.experiment import Prepared, RoundResult, State
from anyfleet.runtime.simulated.captured_training import CapturedTraining
from anyfleet.runtime.simulated.engines import Stacked
from anyfleet.runtime.simulated.joined_engine import Joined
from anyfleet.runtime.simulated.joined_training import Answer, Call, JoinedTraining
from anyfleet.runtime.simulated.strands import Strand

MEETINGS = 4  # into which runs of one kind are divided on an accelerator
_SHARE = 0.5  # of an accelerator's memory, that graphs of all meetings may keep


class FailedRuns(ExceptionGroup[Exception]):
    """The errors of runs that were played together with others, by their numbers."""

    errors: Mapping[int, Exception]

    @classmethod
    def of(cls, errors: Mapping[int, Exception], count: int) -> "FailedRuns":
        """Return the errors of some of so many runs."""
        listed = ", ".join(map(str, sorted(errors)))
        text = f"{len(errors)} of {count} runs failed (by number from 0: {listed})"
        found = cls(text, [errors[number] for number in sorted(errors)])
        found.errors = dict(errors)
        return found


def play_together(
    prepared: Sequence[Prepared], states: Sequence[State | None], *, meetings: int = MEETINGS
) -> Iterator[tuple[int, RoundResult]]:
    """Play runs at the same time, and yield the number of a run and the result of its round.

    A run with a state goes on after it. Runs that differ in more than numbers are played too, but
    trained one by one. A run that fails ends; the others go on, and FailedRuns is raised after them
    (for a single run, its own error). Close the generator to end all runs.
    """
    if len(states) != len(prepared):
        raise ValueError(
            f"play_together got {len(prepared)} runs and {len(states)} states; give one for each "
            "run, None for a run that begins."
        )
    if meetings < 1:
        raise ValueError(f"play_together: meetings must be at least 1, got {meetings}.")
    return _played(prepared, states, _grouped(prepared, meetings))


def _played(
    prepared: Sequence[Prepared], states: Sequence[State | None], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[int, RoundResult]]:
    """Yield what `play_together` does, for runs whose meetings are known."""
    places = [_place(each) for each in prepared]
    runs: list[_Run] = []
    found = []
    for numbers in groups:
        where = places[numbers[0]]
        beside = sum(places[other[0]] == where for other in groups) if where.type == "cuda" else 1
        found.append(_Meeting([prepared[i] for i in numbers], where, beside))
        runs += found[-1].invite(numbers, [states[i] for i in numbers])
    errors: dict[int, Exception] = {}
    try:
        while any(meeting.going for meeting in found):
            for meeting in found:
                yield from meeting.turn(errors)
    finally:
        for run in runs:
            run.strand.close()
    if errors:
        raise next(iter(errors.values())) if len(runs) == 1 else FailedRuns.of(errors, len(runs))


def _grouped(prepared: Sequence[Prepared], meetings: int) -> list[list[int]]:
    """Return the numbers of the runs of each meeting; those that may be joined are together."""
    kinds: dict[Any, list[int]] = {}
    for number, each in enumerate(prepared):
        engine, where = each.experiment.engine, str(_place(each))
        kind = (engine, where, each.task.blueprint) if _joinable(each) else number
        kinds.setdefault(kind, []).append(number)
    groups = list(kinds.values())
    # Two runs alone are better trained as one; and runs of two kinds are two meetings already.
    parts = min(meetings, len(prepared) // 2)
    if len(groups) > 1 or parts < 2 or _place(prepared[0]).type != "cuda":
        return groups
    return [part.tolist() for part in torch.tensor(groups[0]).tensor_split(parts)]


def _joinable(prepared: Prepared) -> bool:
    """Return whether the stacks of a run can be trained together with those of others."""
    engine = prepared.experiment.engine
    return type(engine) is Stacked and (engine.workers == 1 or _place(prepared).type == "cuda")


def _place(prepared: Prepared) -> torch.device:
    """Return the device of torch that a run is on."""
    return next((value.device for value in prepared.task.params.values()), torch.device("cpu"))


News = RoundResult | list[Call]  # what a run hands over


@dataclass(eq=False)
class _Run:
    """A run at a meeting, and the answers to what it has handed over."""

    number: int
    joined: bool
    strand: Strand[News, list[Answer], None]
    answers: list[Answer] = field(default_factory=list)


class _Meeting:
    """Runs that are played in turns, and trained together where that is possible."""

    def __init__(self, prepared: Sequence[Prepared], where: torch.device, meetings: int) -> None:
        self._prepared, self._where, self._meetings = prepared, where, meetings
        self._stream: torch.cuda.Stream | None = None
        if where.type == "cuda":
            self._stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        engine = prepared[0].experiment.engine
        own = engine if isinstance(engine, Stacked) else Stacked()
        runner = CapturedTraining(own.precision, compile=own.compile, share=_SHARE / meetings)
        self._train = JoinedTraining(runner, [each.task for each in prepared], where)
        self.going: list[_Run] = []

    def invite(self, numbers: Sequence[int], states: Sequence[State | None]) -> list[_Run]:
        """Return the runs, which have not begun, and keep them as those that are going on."""
        with torch.cuda.stream(self._stream):
            self.going = [
                _Run(number, _joinable(each), self._strand(each, state))
                for number, each, state in zip(numbers, self._prepared, states, strict=True)
            ]
        return list(self.going)

    def _strand(self, prepared: Prepared, state: State | None) -> Strand[News, list[Answer], None]:
        def play(hand: Any) -> None:
            own = prepared.experiment.engine
            if _joinable(prepared):
                assert isinstance(own, Stacked)
                engine = Joined(own, hand, self._meetings)
                changed = replace(prepared.experiment, engine=engine)
            else:
                changed = prepared.experiment
            for result in replace(prepared, experiment=changed).play(state):
                hand(result)

        return Strand(play)

    def turn(self, errors: dict[int, Exception]) -> Iterator[tuple[int, RoundResult]]:
        """Yield the rounds that end before each run has something to train; then train it.

        The errors of runs that fail are kept in `errors`.
        """
        handed: list[tuple[_Run, list[Call]]] = []
        self._follow()
        for run in list(self.going):
            news = self._next(run, errors)
            while isinstance(news, RoundResult):
                self._precede()
                yield run.number, news
                self._follow()
                if not run.joined:
                    break
                news = self._next(run, errors)
            if isinstance(news, list):
                handed.append((run, news))
        with torch.cuda.stream(self._stream):
            answers = iter(self._train([call for _, calls in handed for call in calls]))
        for run, calls in handed:
            run.answers = [next(answers) for _ in calls]

    def _next(self, run: _Run, errors: dict[int, Exception]) -> News | None:
        """Return what a run hands over next; None if it has ended, by an error or without one."""
        answers, run.answers = run.answers, []
        try:
            news = run.strand.resume(lambda: answers)
        except Exception as error:  # noqa: BLE001 - the other runs go on
            errors[run.number], news = error, None
        if run.strand.ended:
            self.going.remove(run)
        return news

    def _follow(self) -> None:
        """Let the stream wait for what the caller has launched: it may still read results."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._where))

    def _precede(self) -> None:
        """Let the caller's stream wait for what the runs have launched."""
        if self._stream is not None:
            torch.cuda.current_stream(self._where).wait_stream(self._stream)
