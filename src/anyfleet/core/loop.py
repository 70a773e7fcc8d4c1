"""The federated loop: issue orders, wait, and end the round if the schedule says so.

One loop serves every schedule. `run` is a generator: evaluation, checkpoints and stopping are the
body of the caller's `for`.
"""

from collections.abc import Iterator

from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.seam import Reply, Round, Runtime, Snapshot
from anyfleet.core.server import Server
from anyfleet.tracebacks import during

__all__ = ["Reply", "Round", "Runtime", "Snapshot", "run"]


def run(
    method: Method, task: Task, runtime: Runtime, seed: int, *, resume: Snapshot | None = None
) -> Iterator[Round]:
    """Yield the state of the run after every round, for as long as the caller asks for more."""
    with during(round_index=0 if resume is None else resume.round_index):
        server = Server(method, task, runtime, seed)
    if resume is not None:
        server.restore(resume)
    while True:
        with during(round_index=server.round_index):
            ended = _turn(server, runtime)
        if ended is not None:
            yield ended


def _turn(server: Server, runtime: Runtime) -> Round | None:
    """Issue orders and wait; return the round if it has ended."""
    before = server.issued
    server.issue()
    view = server.view()
    if not server.ready(view):
        alarm, enough = server.patience(view)
        # Not by the clock, which goes on by itself where devices are real.
        waits = alarm > view.now if alarm is not None else bool(view.under_way)
        events = runtime.wait(alarm, enough)
        server.receive(events)
        view = server.view()
        if not (waits or len(events) or server.issued > before):
            raise RuntimeError(
                f"{server.method.schedule} stands still: nothing to issue, nothing to wait for, "
                "not ready. Let its `alarm` return a time in the future until it is ready."
            )
    return server.finish_round() if server.ready(view) else None
