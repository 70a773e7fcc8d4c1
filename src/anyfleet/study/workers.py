"""Playing the runs of a study in several processes, one run at a time in each.

A process is new (spawned), so that it shares nothing with this one but the folder of the study. It
reports what happens through a pipe. One that dies takes only its run with it, which can be resumed.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from anyfleet.errors import AnyfleetWarning
from anyfleet.stopping import Stop
from anyfleet.store import Terms
from anyfleet.study import state_file
from anyfleet.study.events import Ended, Event, Noted
from anyfleet.study.plan import PlannedRun
from anyfleet.study.playing import Events, Player, stop

READY = Noted("ready")  # said by a process that has imported everything
_PATIENCE = 60.0  # seconds in which a process that is told to stop closes its run


@dataclass(eq=False)
class _Worker:
    """A process, the pipe to it, what it plays, and the task that it has built."""

    process: SpawnProcess
    pipe: Connection
    run: PlannedRun | None = None
    task: str = ""
    since: float = 0.0  # when it got its run, on the clock of this process

    def brief(self, folder: Path, terms: Terms, cores: Sequence[int]) -> None:
        """Send what belongs to all runs, and the cores that are this process's own."""
        with suppress(OSError):  # it is dead, which is noticed when nothing comes of it
            self.pipe.send((str(folder), terms, cores))


Crew = list[_Worker]  # processes that have no run yet


@contextmanager
def hired(count: int) -> Iterator[Crew]:
    """Start processes that import what they need while this one still prepares their runs."""
    crew: Crew = []
    try:
        for _ in range(count):
            crew.append(_start())
        yield crew
    finally:
        _stop(crew)


def await_imports(crew: Crew) -> None:
    """Wait until hired processes have imported everything: what is measured now is undisturbed."""
    for worker in crew:
        wait([worker.pipe, worker.process.sentinel])


def play_parallel(
    folder: Path,
    runs: Sequence[PlannedRun],
    *,
    jobs: int,
    terms: Terms,
    crew: Crew | None = None,
) -> Events:
    """Play runs of the study in a folder in so many processes; yield what happens.

    Those of the crew are taken first. However this ends, none of them is left behind, and every run
    is closed or can be resumed.
    """
    left, workers, spare = list(runs), list[_Worker](), [] if crew is None else crew
    took: dict[str, float] = {}  # seconds of the last finished run of each experiment
    shares = cycle(_shares(jobs))
    try:
        while left or any(worker.run for worker in workers):
            while left and len(workers) < jobs:
                workers.append(spare.pop() if spare else _start())
                workers[-1].brief(folder, terms, next(shares))
                _hand(workers[-1], left, took)
            for worker in _ready(workers):
                event = _received(worker)
                if event == READY:
                    continue
                if event is None:
                    assert worker.run is not None
                    yield Ended(worker.run, "died", _death(worker.process))
                    workers.remove(worker)
                    continue
                yield event
                if isinstance(event, Ended):
                    if event.how == "finished":
                        took[event.run.name] = time.monotonic() - worker.since
                    worker.run = None
                    if left and event.how != "stopped":
                        _hand(worker, left, took)
                    else:
                        workers.remove(worker)
                        _dismiss(worker)
    finally:
        _stop(workers)


def _shares(jobs: int) -> list[list[int]]:
    """Return the cores of each of so many processes; none where there are too few, or unknown."""
    known = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [known[place::jobs] for place in range(jobs)]


def _start() -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there,))
    with _ignored_interrupts():
        process.start()
    there.close()  # so that the pipe ends with the process
    return _Worker(process, here)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C: this one hears it, and tells them when to stop."""
    if threading.current_thread() is not threading.main_thread():  # which cannot set signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _hand(worker: _Worker, left: list[PlannedRun], took: Mapping[str, float]) -> None:
    """Give a process its next run."""
    run = next_run(left, worker.task, took)
    left.remove(run)
    worker.run, worker.task, worker.since = run, run.task, time.monotonic()
    with suppress(OSError):  # it is dead, which is noticed when nothing comes of it
        worker.pipe.send(run)


def next_run(left: Sequence[PlannedRun], built: str, took: Mapping[str, float]) -> PlannedRun:
    """Return the run that a process plays next, if it has built the task `built`.

    It is a run of that task, or else of the task with the most runs left. Of these the longest is
    returned, so that no process is left alone with a long run at the end: by the seconds that
    another run of its experiment took, or else by those that are expected.
    """
    counts = Counter(each.task for each in left)
    task = built if built in counts else max(counts, key=lambda each: counts[each])
    some = [each for each in left if each.task == task]
    return max(some, key=lambda each: took.get(each.name, each.seconds))


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait until processes have something to tell, and return them."""
    # A process may have left its end of the pipe to processes of its own.
    ready = wait([each for worker in workers for each in (worker.pipe, worker.process.sentinel)])
    return [each for each in workers if each.pipe in ready or each.process.sentinel in ready]


def _received(worker: _Worker) -> Event | None:
    """Return what a process tells; None if it is dead."""
    try:
        event: Event | None = worker.pipe.recv() if worker.pipe.poll() else None
    except (EOFError, OSError):
        return None
    return event


def _death(process: SpawnProcess) -> str:
    """Return how a process ended."""
    process.join(_PATIENCE)
    code = process.exitcode
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    memory = "; was the memory full?" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{memory}"


def _dismiss(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.join(_PATIENCE)


def _stop(workers: Sequence[_Worker]) -> None:
    """Let processes end, each after it has closed its run."""
    for worker in workers:
        worker.process.terminate()
        worker.pipe.close()
    for worker in workers:
        worker.process.join(_PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


# --- in the other process -------------------------------------------------------------------------


def _work(pipe: Connection) -> None:
    """Play runs as they come, until no more come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What closes a run is not interrupted again.
    signal.signal(signal.SIGTERM, Stop(KeyboardInterrupt, once=True))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a user's part prints does not belong to the tables
    with suppress(KeyboardInterrupt, EOFError, OSError), warnings.catch_warnings():
        warnings.showwarning = _forwarded(pipe)
        pipe.send(READY)
        folder, terms, own = pipe.recv()
        if own:  # so that the threads of an evaluation do not take another run's core
            os.sched_setaffinity(0, own)
        study = state_file.read(Path(folder), terms.allow)
        torch.set_num_threads(study.threads)
        player = Player(Path(folder), study, terms)
        while True:
            run: PlannedRun = pipe.recv()
            _play(player, run, pipe)
    # All runs are closed: taking apart what was imported would take as long as importing it.
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """Wait until the process that started this one is dead, and end: others need its run.

    Nothing is closed: a run survives that, as it survives SIGKILL.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # this one is spawned
    wait([parent.sentinel])
    os._exit(1)


def _play(player: Player, run: PlannedRun, pipe: Connection) -> None:
    events = player.play([run])
    try:
        try:
            for event in events:
                pipe.send(event)
        except OSError as why:  # nobody listens any more
            # The signal of whoever closed the pipe may be on its way: it shall not disturb stop().
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise KeyboardInterrupt from why
    except KeyboardInterrupt as why:
        stop(events, why)
        pipe.send(Ended(run, "stopped", "its process was told to stop"))
        raise


def _forwarded(pipe: Connection) -> Any:
    """Return what sends warnings of Anyfleet to the process that shows them; others are printed."""
    otherwise = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, AnyfleetWarning):
            pipe.send(Noted(str(message)))
        else:
            otherwise(message, category, *rest, **more)

    return show
