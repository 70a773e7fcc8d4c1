"""The federated loop: fill idle devices, wait, maybe step. One loop for every schedule.

`run` is a generator: evaluation, checkpoints and stopping are the caller's `for` body.
"""

from collections.abc import Iterator

from anyfleet.method import Method
from anyfleet.seam import Answer, Runtime, Snapshot, Step
from anyfleet.server import Server
from anyfleet.types import Task

__all__ = ["Answer", "Runtime", "Snapshot", "Step", "run"]


def run(
    method: Method, task: Task, runtime: Runtime, seed: int, *, resume: Snapshot | None = None
) -> Iterator[Step]:
    """Yields after every server step, for as long as the caller goes on asking."""
    server = Server(method, task, runtime, seed)
    if resume is not None:
        server.restore(resume)
    schedule = method.schedule
    while True:
        server.fill()
        view = server.view()
        if not schedule.ready(view):
            server.hear(runtime.wait(schedule.alarm(view), schedule.enough(view)))
            view = server.view()
        if schedule.ready(view):
            yield server.step()
