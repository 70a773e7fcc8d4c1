"""Several runs played together, as one stack where they have the same shape."""

from collections.abc import Iterator, Sequence

from anyfleet.experiment import Prepared, RoundResult, State


def play_together(
    prepared: Sequence[Prepared], states: Sequence[State | None]
) -> Iterator[tuple[int, RoundResult]]:
    """Yield the result of every round of every run, each with the number of its run.

    A run begins, or goes on from its state. Here one is played after the other.
    """
    for number, (each, state) in enumerate(zip(prepared, states, strict=True)):
        for result in each.play(state):
            yield number, result
