"""The federated loop: issue orders, wait, and end the round if the schedule says so.

One loop serves every schedule. `run` is a generator: evaluation, checkpoints and stopping are the
body of the caller's `for`.

An accelerator computes what devices reply while the host goes on. Where the model of the next round
follows from replies without looking at a number of them, the host ends the round, issues the next
one and lets its training begin; only then it checks the replies, and hands the round to the caller.
If a reply does not count after all, both rounds are undone, and played again one after the other.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from anyfleet.core.events import Events
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.seam import Reply, Round, Runtime, Snapshot
from anyfleet.core.server import Ending, Server
from anyfleet.tracebacks import during

__all__ = ["Reply", "Round", "Runtime", "Snapshot", "run"]


def run(
    method: Method,
    task: Task,
    runtime: Runtime,
    seed: int,
    *,
    resume: Snapshot | None = None,
    rounds: int | None = None,
) -> Iterator[Round]:
    """Yield the state of the run after every round, for as long as the caller asks for more.

    When the caller gets a round, the training of the next one may have begun on an accelerator, but
    not beyond so many `rounds`; the state of the runtime as the round ended is `Round.fleet`.
    """
    with during(round_index=0 if resume is None else resume.round_index):
        server = Server(method, task, runtime, seed)
    if resume is not None:
        server.restore(resume)
    before = server.snapshot(), runtime.save()
    ending: Ending | None = None  # of a round whose replies have not been checked
    while True:
        waited, failure = None, None
        if ending is None or rounds is None or server.round_index < rounds:
            try:
                with during(round_index=server.round_index):
                    waited = _wait(server, runtime)
            except Exception as error:
                if ending is None:
                    raise
                failure = error  # perhaps of a model that does not count
        if ending is not None:
            done, ending = server.settle(ending), None
            if done is None:
                _undo(server, runtime, *before)
                continue
            before = done.snapshot, done.fleet
            yield done
        if failure is not None:
            raise failure
        if waited is None:
            continue
        try:
            with during(round_index=server.round_index):
                ending = _receive(server, waited)
        except Exception:
            if server.trusted is None:
                raise
            _undo(server, runtime, *before)
            continue
        if ending is not None and ending.unchecked is None:
            done, ending = server.settle(ending), None
            assert done is not None
            before = done.snapshot, done.fleet
            yield done


class _Waited(NamedTuple):
    """What came in while the loop waited."""

    events: Events | None  # None: the round was ready before
    moved: bool  # whether orders were issued, or something was waited for


def _wait(server: Server, runtime: Runtime) -> _Waited:
    """Issue orders, and return what comes in until the schedule looks again."""
    before = server.issued
    server.issue()
    view = server.view()
    if server.ready(view):
        return _Waited(None, True)
    alarm, enough = server.patience(view)
    # Not by the clock, which goes on by itself where devices are real.
    waits = alarm > view.now if alarm is not None else bool(view.under_way)
    return _Waited(runtime.wait(alarm, enough), waits or server.issued > before)


def _receive(server: Server, waited: _Waited) -> Ending | None:
    """Enter what came in; return how the round ended, or None if it goes on."""
    events = waited.events
    if events is not None:
        server.receive(events, trusting=server.may_trust(events))
        if not (waited.moved or len(events)):
            raise RuntimeError(
                f"{server.method.schedule} stands still: nothing to issue, nothing to wait for, "
                "not ready. Let its `alarm` return a time in the future until it is ready."
            )
    if server.ready(server.view()):
        return server.finish_round()
    if server.trusted is not None:
        raise _NotReady  # they have to be checked now
    return None


def _undo(server: Server, runtime: Runtime, before: Snapshot, fleet: Any) -> None:
    """Go back to the state after the last round that was checked."""
    server.undo(before)
    runtime.restore(fleet)


class _NotReady(Exception):
    """Replies that were trusted do not end the round."""
