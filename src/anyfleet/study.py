"""A run as a value: task, method, fleet and engine; and what came out of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from anyfleet.evaluate import evaluate
from anyfleet.ledger import Row
from anyfleet.loop import Answer, Step, run
from anyfleet.method import Method
from anyfleet.runtime import Reference, Simulated
from anyfleet.runtime.engines import Engine
from anyfleet.types import Kind, Task
from anyfleet.world import Fleet


class TaskSpec(Protocol):
    """Something that makes a task, the same one for the same seed."""

    def build(self, seed: int) -> Task: ...


@dataclass(frozen=True)
class Experiment:
    """Everything a run depends on; a run file is this, written down."""

    task: TaskSpec
    method: Method
    fleet: Fleet = field(default_factory=Fleet)
    engine: Engine = field(default_factory=Reference)
    rounds: int = 20
    evaluate_every: int = 1
    widths: tuple[float, ...] = (1.0,)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("rounds", self.rounds), ("evaluate_every", self.evaluate_every)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not self.widths or not all(0 < width <= 1 for width in self.widths):
            raise ValueError(f"widths must lie in (0, 1], got {self.widths}.")


@dataclass(frozen=True)
class Point:
    """Where a run stands after a server step. All totals count from the start."""

    step: int
    time: float  # simulated seconds
    down: float  # bytes
    up: float  # bytes
    flops: float
    arrived: int  # answers of this step that count
    lost: int
    loss: float  # mean training loss the devices reported in this step
    on_devices: float  # accuracy of the devices' own models on their own test data, or NaN
    scores: dict[str, float] = field(default_factory=dict)  # on the test set; empty: not evaluated

    @property
    def accuracy(self) -> float:
        """What the run is judged by: the shared model, or the devices' own where surveyed."""
        if self.on_devices == self.on_devices:
            return self.on_devices
        return self.scores.get("accuracy", float("nan"))


@dataclass(frozen=True, eq=False)
class Moment:
    """A point of a run with the step it describes."""

    point: Point
    step: Step


def play(experiment: Experiment, task: Task | None = None) -> Iterator[Moment]:
    """Runs an experiment; yields after every server step."""
    task = task or experiment.task.build(experiment.seed)
    samples = np.array([len(task.data(device)) for device in range(task.devices)])
    world = experiment.fleet.build(samples, experiment.seed)
    runtime = Simulated(task, world, experiment.seed, engine=experiment.engine)
    point = Point(-1, 0.0, 0.0, 0.0, 0.0, 0, 0, float("nan"), float("nan"))
    for step in run(experiment.method, task, runtime, experiment.seed):
        last = step.index + 1 == experiment.rounds
        due = last or step.index % experiment.evaluate_every == 0
        scores = _scores(experiment, task, step) if due else {}
        point = _advance(point, step, scores)
        yield Moment(point, step)
        if last:
            return


def _scores(experiment: Experiment, task: Task, step: Step) -> dict[str, float]:
    """Metrics of the shared model, at every width; plain names are the first width's."""
    scores: dict[str, float] = {}
    for width in experiment.widths:
        found = evaluate(
            task,
            step.params,
            step.buffers,
            norm=experiment.method.norm,
            slice_=task.blueprint.prefix(width),
        )
        scores |= {f"{name}@{width:g}": value for name, value in found.items()}
        scores = {**found, **scores}
    return scores


def _advance(before: Point, step: Step, scores: dict[str, float]) -> Point:
    counted = [row for row in step.rows if not row.lost]
    losses = [row.loss for row in counted if row.loss == row.loss]
    return Point(
        step=step.index,
        time=step.time,
        down=before.down + _total(step.rows, "bits_down") / 8,
        up=before.up + _total(step.rows, "bits_up") / 8,
        flops=before.flops + _total(step.rows, "flops"),
        arrived=len(counted),
        lost=len(step.rows) - len(counted),
        loss=float(np.mean(losses)) if losses else float("nan"),
        on_devices=_surveyed(step.answers),
        scores=scores,
    )


def _total(rows: Sequence[Row], column: str) -> float:
    return float(sum(getattr(row, column) for row in rows))


def _surveyed(answers: Sequence[Answer]) -> float:
    told = [a for a in answers if a.kind == Kind.EVALUATE and a.samples and "accuracy" in a.report]
    if not told:
        return float("nan")
    weights = [answer.samples for answer in told]
    return float(np.average([answer.report["accuracy"] for answer in told], weights=weights))
