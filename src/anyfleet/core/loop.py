"""The federated loop: fill idle devices, wait, maybe step. One loop for every schedule.

`run` is a generator: evaluation, checkpoints and stopping are the caller's `for` body.
"""

from collections.abc import Iterator

from anyfleet.core.incoming import Reply
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.seam import Round, Runtime, Snapshot
from anyfleet.core.server import Server
from anyfleet.tracebacks import during

__all__ = ["Reply", "Round", "Runtime", "Snapshot", "run"]


def run(
    method: Method, task: Task, runtime: Runtime, seed: int, *, resume: Snapshot | None = None
) -> Iterator[Round]:
    """Yields after every server step, for as long as the caller goes on asking."""
    with during(round_index=0 if resume is None else resume.round_index):
        server = Server(method, task, runtime, seed)
    if resume is not None:
        server.restore(resume)
    while True:
        with during(round_index=server.round_index):
            step = _turn(server, runtime)
        if step is not None:
            yield step


def _turn(server: Server, runtime: Runtime) -> Round | None:
    """Fill idle devices, wait, and step if the schedule is ready."""
    before = server.issued, runtime.now()
    server.fill()
    view = server.view()
    if not server.ready(view):
        events = runtime.wait(*server.patience(view))
        server.receive(events)
        view = server.view()
        if not len(events) and before == (server.issued, runtime.now()):
            raise RuntimeError(
                f"{server.method.schedule} stands still: nothing to issue, nothing to wait for, "
                "not ready. Its alarm must lie in the future until it is ready."
            )
    return server.finish_round() if server.ready(view) else None
