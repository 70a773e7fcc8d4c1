"""A run that takes a moment, with orders in flight and caches, and the folder it was written to."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from anyfleet import methods, tasks
from anyfleet.experiment import Experiment, RoundResult, play
from anyfleet.names import Factory
from anyfleet.parts.codec import ErrorFeedback, Stc
from anyfleet.parts.schedule import Buffered
from anyfleet.runtime import Sequential
from anyfleet.store import Recording, Reopened, Terms, checkpoint, reopen
from anyfleet.tasks import Generator, zoo

MODEL = Factory.of(zoo.perceptron, features=60, hidden=(16,))
TASK = tasks.Synthetic(MODEL, Generator(devices=6, samples=40), server=20)
METHOD = replace(
    methods.heterofl(widths=(1.0, 0.5), count=3, lr=0.1),
    cache=True,
    uplink=ErrorFeedback(Stc(0.2)),
    schedule=Buffered(concurrency=4, buffer_size=2),
)
EXPERIMENT = Experiment(TASK, METHOD, engine=Sequential(), rounds=5)
RECORD = ("rounds.jsonl", "ledger.jsonl", "model.safetensors")


@lru_cache(maxsize=1)
def results() -> tuple[RoundResult, ...]:
    """Of the run that nobody interrupts."""
    return tuple(play(EXPERIMENT))


def written(folder: Path, steps: Iterable[RoundResult], every: int | None = 1) -> Path:
    """A folder that looks as if the process had been killed after these steps."""
    folder.mkdir(exist_ok=True)
    recording = Recording(folder, EXPERIMENT, every=every)
    for result in steps:
        recording.append(result)
    recording._lock.release()
    return folder


def finished(folder: Path, terms: Terms | None = None) -> Path:
    """Goes on to the end."""
    return go_on(folder, reopen(folder, terms or Terms()))


def go_on(folder: Path, run: Reopened) -> Path:
    """Goes on to the end with a run that was opened."""
    with Recording(folder, run.experiment, past=run.past, every=run.every) as recording:
        for result in play(run.experiment, run.task, resume=run.past.state):
            recording.append(result)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """What must be the same, whatever happened on the way."""
    return {name: (folder / name).read_bytes() for name in RECORD}


def numbers(folder: Path) -> list[int]:
    """Of the checkpoints, the newest first."""
    return [int(path.name) for path in checkpoint.found(folder)]


@lru_cache(maxsize=1)
def _whole() -> list[dict[str, bytes]]:
    return []


def whole(folder: Path) -> dict[str, bytes]:
    """Of the run that nobody interrupts."""
    if not _whole():
        folder.mkdir()
        with Recording(folder, EXPERIMENT) as recording:
            for result in results():
                recording.append(result)
        _whole().append(contents(folder))
    return _whole()[0]
