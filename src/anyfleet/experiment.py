"""A run as a value (`Experiment`), read from a run file (`load`) and run round by round (`play`).

`play` yields a `RoundResult` after every round: its `record` has the numbers that tables and plots
are made of, its `round` the model, the ledger and the replies.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, get_args

import numpy as np
import torch
from annotated_types import Ge

from anyfleet import config
from anyfleet.analysis.breakdown import (
    Breakdown,
    Detail,
    Examinations,
    Groups,
    complaints,
    examine_all,
    named,
    take_apart,
)
from anyfleet.analysis.diagnosis import plain_diagnostics
from anyfleet.analysis.metric import Metric, main_metric
from anyfleet.arguments import checked
from anyfleet.core.delivery import unpadded
from anyfleet.core.evaluation import to_test_each
from anyfleet.core.ledger import known
from anyfleet.core.loop import Reply, Round, run
from anyfleet.core.messages import Kind, SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.seam import Runtime, Snapshot
from anyfleet.elastic import cost
from anyfleet.errors import (
    AnyfleetError,
    ConfigError,
    ExcessWarning,
    Problem,
    Refusal,
    StoreError,
)
from anyfleet.methods.fedavg import Training
from anyfleet.names import how_to_allow, lies_within
from anyfleet.runtime import Limits, Simulated
from anyfleet.runtime.simulated.engine_choice import Prospect, choose
from anyfleet.runtime.simulated.engines import Engine, cores
from anyfleet.runtime.simulated.execution import (
    Auto,
    Execution,
    Settings,
    absent,
    execution_of,
    misnamed,
    placed,
)
from anyfleet.runtime.simulated.freed_memory import keep_freed_memory
from anyfleet.tracebacks import during, in_known_code, raised_inside, remedied
from anyfleet.world import Fleet, World

_BEFORE = "before the first round"
_EVALUATIONS = 20  # of a run, about, where nobody says how many
_TRAINING_SHARE = 5  # times the FLOP of an evaluation are trained for each of them
_CHEAP = 1e10  # FLOP of an evaluation that nobody waits for: about a second of one core
_MOST_WORKERS = 8  # threads that evaluate; each holds a batch
_SHORTEST = 1e-9  # simulated seconds between evaluations; a quotient by far less is no number
_SECONDS = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d+)?) *s")  # of simulated time
# The bound stands in the type too: a file with other problems shall report this one as well.
Counter = Annotated[int, Ge(1)]


class TaskSpec(Protocol):
    """A description of a task, which `build` turns into the same task for the same seed."""

    def build(self, seed: int) -> Task:
        """Return the task."""


@checked
@dataclass(frozen=True)
class Experiment:
    """Everything that a run depends on; a run file is this, written down.

    The model is evaluated after the first round and after the last, at each of the `widths`; in
    between every `evaluate_every` rounds, or with a text such as "60 s" after the first round that
    ends at or after each multiple of so many simulated seconds. "auto" is every round of a run of
    at most 20 rounds; in a longer one it spreads about 20 evaluations over the run. Where that
    would be much work beside the training, it is evaluated less often: devices compute five times
    the FLOP of an evaluation for each of them, that of the last round included. `details` breaks
    the scores down at every evaluation: by class of the test set, or by device and by group of the
    fleet, these on the devices' own test data. With `stop_at` the run ends after the first
    evaluation whose score is at least as good, or after its last round. `limits` say which messages
    are refused. All randomness comes from `seed`.

    Engines and devices of torch differ in the last bits of a result. With "auto" they are chosen
    when the run begins: a GPU and stacks where there is one, else the engine that a short
    measurement finds the fastest. Every result says which they are.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = {
        name: f"the method; use methods.fedavg({name}=...) or another one"
        for name in ("count", *Training.__annotations__)
    }

    task: TaskSpec  # what is learned, and from whose data
    method: Method  # one part for each slot
    fleet: Fleet = field(default_factory=Fleet)  # who the devices are
    engine: Engine | Auto = "auto"  # how orders are carried out; auto: as is fastest here
    device: str = "auto"  # of torch: auto, cpu, cuda, cuda:1 …
    limits: Limits = field(default_factory=Limits)  # what is refused of messages
    rounds: Counter = 20  # updates of the global model
    evaluate_every: Counter | str = "auto"  # rounds, or simulated seconds: "60 s"
    widths: tuple[float, ...] = (1.0,)  # at which the model is evaluated, 0 to 1
    details: tuple[Detail, ...] = ()  # scores by class, device or group as well
    stop_at: float | None = None  # score that ends the run, of its metric; None: all rounds
    seed: int = 0  # of all randomness

    def __post_init__(self) -> None:
        if wrong := misnamed(self.device):
            raise ValueError(wrong)
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}.")
        every = self.evaluate_every
        known = every >= 1 if isinstance(every, int) else every == "auto" or _seconds(every) > 0
        if not known:
            raise ValueError(
                "evaluate_every must be a number of rounds from 1 on, simulated seconds above 0 "
                f'such as "60 s", or "auto"; got {every!r}.'
            )
        if not self.widths or not all(0 < width <= 1 for width in self.widths):
            raise ValueError(f"widths must lie in (0, 1], got {self.widths}.")
        unknown = set(self.details) - set(get_args(Detail))
        if unknown:
            raise ValueError(
                f"details may be {', '.join(get_args(Detail))}; got {', '.join(sorted(unknown))}."
            )
        if self.stop_at is not None and not math.isfinite(self.stop_at):
            raise ValueError(f"stop_at must be a finite score, got {self.stop_at}.")

    def ends_after(self, record: "RoundRecord") -> bool:
        """Return whether a round is the last of the run."""
        early = self.stop_at is not None and record.reaches(self.stop_at)
        return early or record.round_index + 1 >= self.rounds


def load(
    path: str | Path, overrides: Sequence[str] = (), allow: Collection[str] = ()
) -> Experiment:
    """Return the experiment in a run file, with `key=value` overrides.

    `allow` names the packages outside of Anyfleet whose code the file may use. Raise ConfigError
    with all problems of the file at once.
    """
    return from_source(config.read(path, overrides, allow))


def from_source(source: config.Source) -> Experiment:
    """Return the experiment that a run file describes.

    An engine that looks names up again (`Threads`) may use the code that the file may use, and no
    other: a file grants itself nothing.
    """
    experiment: Experiment = source.load(Experiment)
    experiment = replace(experiment, engine=_admitting(experiment.engine, source.allow))
    _refuse([*_links(experiment), *_unsendable(experiment)])
    return experiment


def _admitting(engine: Any, allow: tuple[str, ...]) -> Any:
    """Return the engine with the allowed packages, if it has a field for them that is empty."""
    if not is_dataclass(engine) or isinstance(engine, type):
        return engine
    given = {each.name: getattr(engine, each.name) for each in fields(engine)}.get("allow")
    if not isinstance(given, tuple):
        return engine
    beyond = [name for name in given if not lies_within(name, allow)]
    _refuse([Problem("engine.allow", f"asks for {name}. {how_to_allow(name)}") for name in beyond])
    return engine if given else replace(engine, allow=allow)


def build(experiment: Experiment) -> Task:
    """Return the task of an experiment, after checking that its fleet fits it.

    Its tensors are on the device of the experiment. Raise ConfigError where that device is not
    here, or where the data, or the sizes that they are asked for, are a problem of the run file.
    Warn when the selection asks for more devices than there are.
    """
    return assemble(experiment)[0]


def assemble(experiment: Experiment, task: Task | None = None) -> tuple[Task, World]:
    """Return the task of an experiment, on its device, and its fleet; `build` says what is raised.

    `task` saves building it again.
    """
    missing = absent(experiment.device)
    _refuse([Problem("device", missing)] if missing else [])
    if task is not None:
        return placed(task, experiment), populate(experiment, task)
    try:
        task = experiment.task.build(experiment.seed)
    except ValueError as error:
        if raised_inside(error):
            raise  # a user's own code failed: its traceback says more than a problem of the file
        raise ConfigError([Problem("task", str(error))]) from error
    except (RuntimeError, MemoryError, OverflowError) as error:
        if not _too_large(error):
            raise
        reason = str(error).partition("\n")[0] or "out of memory"
        remedy = "Are its sizes too large for this machine?"
        message = f"cannot be built: {reason}. {remedy}"
        raise ConfigError([Problem("task", message)]) from error
    world = populate(experiment, task)
    warn_of_excess(experiment, world)
    return placed(task, experiment), world


def warn_of_excess(experiment: Experiment, world: World) -> None:
    """Say in a warning if the selection asks for more devices than there are."""
    with during("select", experiment.method.select, when=_BEFORE):
        excess = experiment.method.select.excess(world.declared)
    if excess:
        warnings.warn(f"method.select: {excess}", ExcessWarning, stacklevel=4)


@contextmanager
def for_real_devices() -> Iterator[None]:
    """Let the block warn of no excess: how many simulated devices there are does not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExcessWarning)
        yield


def _too_large(error: Exception) -> bool:
    """Return whether our own code failed to make what the sizes of a task ask for."""
    others = isinstance(error, NotImplementedError | RecursionError)
    return not others and not raised_inside(error) and in_known_code(error)


def populate(experiment: Experiment, task: Task) -> World:
    """Return the simulated fleet of an experiment, one row for each device of its task.

    Raise ConfigError with all that does not fit together.
    """
    samples = np.array([task.size(device) for device in range(task.devices)])
    problems = [Problem("details", text) for text in complaints(experiment.details, task)]
    problems += [*_links(experiment), *_unsendable(experiment)]
    with during(when=_BEFORE):
        problems += [Problem(*misfit) for misfit in experiment.method.misfits(task).items()]
    try:
        world = experiment.fleet.build(samples, experiment.seed, task.owners)
    except ValueError as error:
        texts = error.problems if isinstance(error, Refusal) else (str(error),)
        misfits = [Problem("fleet", text) for text in texts]
        raise ConfigError([*misfits, *problems]) from error
    _refuse(problems)
    return world


def _links(experiment: Experiment) -> list[Problem]:
    """Return why the method cannot use links that lose columns, if the fleet has some."""
    if not any(group.column_loss.lossy for group in experiment.fleet.groups):
        return []
    message = unpadded(experiment.method.job())
    return [Problem("method.send", message)] if message else []


def _unsendable(experiment: Experiment) -> list[Problem]:
    """Return why devices would refuse every order of this method."""
    if experiment.engine == "auto":  # it is one that does without bytes
        return []
    found = experiment.engine.misfits(experiment.method.job(), experiment.limits)
    return [Problem(f"method.{path}".removesuffix("."), why) for path, why in found.items()]


def _refuse(problems: Collection[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class RoundRecord:
    """The numbers of a run after a round. Time, bytes, FLOP and joules count from its start.

    What nobody measured is left out of the sums; `unmeasured` says of how many orders.
    """

    round_index: int
    time: float  # simulated seconds
    down: float  # bytes that devices received
    up: float  # bytes that devices sent
    flops: float
    joules: float
    replies: int  # orders of this round whose replies count
    failures: int  # orders of this round that brought nothing
    loss: float  # mean training loss that devices reported in this round, or NaN
    on_devices: float  # `metric` of the devices' own models on their own test data, or NaN
    scores: dict[str, float] = field(default_factory=dict)  # on the test set; empty: not evaluated
    diagnostics: dict[str, Any] = field(default_factory=dict)  # what parts tell of the round
    details: tuple[Breakdown, ...] = ()  # for each width, where the experiment asks for them
    metric: str = "accuracy"  # what the run is measured by (`anyfleet.analysis.metric`)
    unmeasured: int = 0  # orders since the start whose joules are not known, or not all of them

    @property
    def score(self) -> float:
        """The `metric` of the global model, or of the devices' own models where a run asks them.

        NaN when it was not evaluated.
        """
        return self.on_devices if self._surveyed else self.scores.get(self.metric, float("nan"))

    @property
    def accuracy(self) -> float:
        """The score of a run that is measured by its accuracy; NaN for every other run."""
        return self.score if self.metric == "accuracy" else float("nan")

    def at(self, width: float | None) -> float:
        """Return the score at a width, NaN unless it was evaluated; None: `score`."""
        if width is None:
            return self.score
        return self.scores.get(f"{self.metric}@{width:g}", float("nan"))

    def evaluated(self, width: float | None = None) -> bool:
        """Return whether the run, or the model at a width, was evaluated after this round."""
        if width is None:
            return self._surveyed or self.metric in self.scores
        return f"{self.metric}@{width:g}" in self.scores

    def reaches(self, target: float) -> bool:
        """Return whether the run was evaluated after this round with at least such a score."""
        return self.evaluated() and Metric(self.metric).reaches(self.score, target)

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths that were evaluated after this round, as the experiment names them."""
        name = f"{self.metric}@"
        at_widths = (each for each in self.scores if each.startswith(name))
        return tuple(float(each.removeprefix(name)) for each in at_widths)

    @property
    def _surveyed(self) -> bool:
        return self.on_devices == self.on_devices


_START = RoundRecord(-1, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, float("nan"), float("nan"))


@dataclass(frozen=True, eq=False)
class State:
    """All that a run needs to go on after a round; `play(..., resume=state)` does."""

    record: RoundRecord
    snapshot: Snapshot  # of the server
    fleet: Any  # as its runtime saves it
    execution: Execution | None = None  # how the run was carried out; None: it may change now


@dataclass(frozen=True, eq=False)
class RoundResult:
    """What `play` yields after a round: its numbers, the round itself, and how to go on from it.

    `aliases` are the other names that the module's state_dict has for some tensors of the model.
    """

    record: RoundRecord
    round: Round
    execution: Execution  # the device, the engine and the precision of the run
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """All that the run needs to go on from here, also in another process."""
        return State(self.record, self.round.snapshot, self.round.fleet, self.execution)


@dataclass(frozen=True, eq=False)
class Prepared:
    """An experiment that can begin at once: what it was to choose is chosen, all is built."""

    experiment: Experiment  # its engine and device are named
    task: Task  # on that device
    world: World
    execution: Execution

    def play(
        self, resume: State | None = None, runtime: Runtime | None = None
    ) -> Iterator[RoundResult]:
        """Yield the result of every round, from the beginning or after the round of a state.

        The fleet is `runtime`; None: the simulated one. On an accelerator a simulated round that is
        evaluated is yielded after the next one was played, unless its score may end the run.
        """
        ahead = (
            runtime is None
            and self.execution.device.startswith("cuda")
            and self.experiment.stop_at is None
        )
        played = self._played(resume, runtime)
        waiting: _Played | None = None
        while True:
            try:
                done = next(played, None)
            except Exception:
                late = None
                if waiting is not None:  # that round has ended: its result is not lost
                    with suppress(Exception):  # what failed first is told
                        late = self._result(waiting, resume)
                if late is not None:
                    yield late
                raise
            if waiting is not None:
                yield self._result(waiting, resume)
            if done is None:
                return
            waiting = done if ahead and done.scores is not None else None
            if waiting is None:
                yield self._result(done, resume)

    def _played(self, resume: State | None, runtime: Runtime | None) -> Iterator["_Played"]:
        """Yield every round as it was played, with the scores that are being computed."""
        experiment, task, world = self.experiment, self.task, self.world
        if runtime is None:
            engine, limits = _named(experiment.engine), experiment.limits
            runtime = Simulated(task, world, engine=engine, limits=limits)
        record, snapshot = replace(_START, metric=main_metric(task.metrics)), None
        if resume is not None:
            runtime.restore(resume.fleet)
            record, snapshot = resume.record, resume.snapshot
        if experiment.ends_after(record):
            return
        rounds = run(
            experiment.method,
            task,
            runtime,
            experiment.seed,
            resume=snapshot,
            rounds=experiment.rounds,
        )
        while not experiment.ends_after(record):
            with _explained(record, resume):
                done = next(rounds)
                with during(round_index=done.index):
                    # An accelerator computes the scores while the round is entered and saved.
                    evaluated = due(experiment, task, record, done)
                    scores = _begun(experiment, task, done) if evaluated else None
                    entered = _advance(record, done)
            each = _Played(record, entered, done, scores)
            yield each
            record = each.record  # with its scores, if they are there

    def _result(self, played: "_Played", resume: State | None) -> RoundResult:
        """Return the result of a round, with its scores."""
        experiment, task, done = self.experiment, self.task, played.round
        if played.scores is not None:
            groups = named([group.name for group in self.world.groups], self.world.group)
            with _explained(played.before, resume), during(round_index=done.index):
                scores, details = _read(experiment, task, played.scores, groups)
            played.record = replace(played.record, scores=scores, details=details)
        aliases = task.blueprint.aliases
        return RoundResult(played.record, done, self.execution, aliases)


@contextmanager
def _explained(before: RoundRecord, resume: State | None) -> Iterator[None]:
    """Say of an error in here what to do; `before` is the record of the round before it."""
    try:
        yield
    except Exception as error:
        remedied(error, _RESUME if before.round_index >= 0 else _RESTART)
        if resume is not None and before is resume.record and _unfit(error):
            raise StoreError(f"{_UNFIT_STATE}: {error!r}. {_UNFIT_REMEDY}") from error
        raise


@dataclass(eq=False)
class _Played:
    """A round that was played; an accelerator may still compute its scores."""

    before: RoundRecord  # of the round before it
    record: RoundRecord
    round: Round
    scores: Examinations | None  # None: it is not evaluated


@checked
def play(
    experiment: Experiment, task: Task | None = None, *, resume: State | None = None
) -> Iterator[RoundResult]:
    """Run an experiment and yield the result of every round.

    The run is as long as the loop that asks for results; on an accelerator one round more may be
    played, as `Prepared.play` says. `task` saves building it again.
    `resume=result.state` goes on after that round, with the same numbers as if the run had never
    stopped; `experiment.rounds` counts from the beginning of the run. Raise StoreError if the
    experiment names another engine or device than the run had so far.
    """
    yield from prepare(experiment, task, resume=resume).play(resume)


def prepare(
    experiment: Experiment,
    task: Task | None = None,
    *,
    world: World | None = None,
    resume: State | None = None,
) -> Prepared:
    """Return an experiment with its task and fleet, and with the engine and device it runs on.

    An engine that is "auto" becomes the one of the run that is resumed, or else the fastest. `task`
    saves building it again, and with `world` the fleet. Raise ConfigError and StoreError as `build`
    and `play` do.
    """
    keep_freed_memory()
    past = resume.execution if resume else None
    if past is not None:
        experiment = _as_before(experiment, past)
    if task is not None and world is not None:
        task = placed(task, experiment)
    else:
        task, world = assemble(experiment, task)
    why = ""
    if experiment.engine == "auto":
        engine, why = choose([prospect(experiment, task, world)])
        experiment = replace(experiment, engine=engine)
    found = execution_of(task, _named(experiment.engine), why)
    if past is not None and (differing := past.differences(found)):
        raise StoreError(
            f"the state is of a run with another execution: {'; '.join(differing)}. Name the "
            "device and the engine that it had, or go on with other numbers from here on: "
            "resume=dataclasses.replace(state, execution=None)."
        )
    kind = found.device.partition(":")[0]
    named_device = kind if experiment.device == "auto" else experiment.device
    return Prepared(replace(experiment, device=named_device), task, world, found)


def _as_before(experiment: Experiment, past: Execution) -> Experiment:
    """Return the experiment with the engine and device that it had, where it leaves them open."""
    if experiment.engine == "auto":
        with suppress(ConfigError):  # one of the user's own must be named again
            engine = config.load({"engine": past.engine}, Settings).engine
            experiment = replace(experiment, engine=engine)
    return replace(experiment, device=past.device) if experiment.device == "auto" else experiment


def prospect(experiment: Experiment, task: Task, world: World) -> Prospect:
    """Return what the choice of an engine depends on."""
    method, limits = experiment.method, experiment.limits
    return Prospect(method, task, world, limits, experiment.seed, experiment.rounds)


def _named(engine: Engine | Auto) -> Engine:
    """Return the engine of a prepared experiment."""
    assert engine != "auto"
    return engine


_RESUME = (
    "The run so far is safe in the last result that play() gave: mend this, then go on with "
    "play(experiment, task, resume=result.state)."
)
_UNFIT_STATE = "the checkpoint does not fit its run, whose first round from there failed"
_UNFIT_REMEDY = (
    "Remove the newest folder in checkpoints and resume from the one before it, or run it again."
)


def _unfit(error: Exception) -> bool:
    """Return whether an error right after resuming means that the state is of another run.

    Errors of a user's own code stay as they are, and so do those of a machine that is too small.
    """
    explained = isinstance(error, AnyfleetError | MemoryError | torch.cuda.OutOfMemoryError)
    return not explained and in_known_code(error)


_RESTART = "No round was finished before it: mend this, then play it again."


def due(experiment: Experiment, task: Task, before: RoundRecord, done: Round) -> bool:
    """Return whether the model is evaluated after a round; `before` is the record before it.

    It follows from these alone, so that a resumed run evaluates when it would have.
    """
    every, index = experiment.evaluate_every, done.index
    if index + 1 == experiment.rounds:
        return True
    if every == "auto":
        return _affordable(experiment, task, before, done)
    if index == 0:
        return True
    if isinstance(every, int):
        return index % every == 0
    seconds = _seconds(every)
    return float(done.time) // seconds > before.time // seconds  # exact, other than a quotient


def _affordable(experiment: Experiment, task: Task, before: RoundRecord, done: Round) -> bool:
    """Return whether "auto" evaluates after a round that is not the last."""
    spread = done.index % -(-experiment.rounds // _EVALUATIONS) == 0
    work = evaluation_flops(experiment, task)
    trained = done.ledger.flops
    if work <= _CHEAP or (len(trained) and np.isnan(trained).all()):
        return spread
    now, quota = before.flops + float(known(trained).sum()), _TRAINING_SHARE * work
    if now * experiment.rounds >= quota * _EVALUATIONS * (done.index + 1):
        return spread  # if rounds stay as they were so far, so many are no more than their share
    # As many as the training pays for that is expected of the whole run, the last round's among
    # them: evenly spread, so that the one before it is not a moment before.
    expected = now * experiment.rounds / (done.index + 1)
    each = expected / max(1.0, expected // quota)
    return expected >= quota and now // each > before.flops // each


def evaluation_flops(experiment: Experiment, task: Task) -> float:
    """Return the FLOP of one evaluation of the global model at all widths, about."""
    samples = len(task.test)
    if experiment.method.norm.calibrated and task.blueprint.norms:  # by all training data
        samples += sum(task.size(device) for device in range(task.devices))
    slices = [task.blueprint.prefix(width) for width in experiment.widths]
    return float(samples * sum(cost(task.blueprint, each).forward_flops for each in slices))


def _seconds(text: str) -> float:
    """Return the number in "60 s"; 0 if the text is no such thing."""
    found = _SECONDS.fullmatch(text)
    seconds = float(found[1]) if found else 0.0
    return seconds if _SHORTEST <= seconds < float("inf") else 0.0


def _begun(experiment: Experiment, task: Task, done: Round) -> Examinations:
    """Begin to measure the global model at every width."""
    # Where torch has one thread, batches are shared out among the cores, with the same results.
    workers = min(cores(), _MOST_WORKERS) if torch.get_num_threads() == 1 else 1
    models = to_test_each(
        task,
        done.params,
        done.buffers,
        norm=experiment.method.norm,
        slices=[done.sub_model(SubModelSize(width)) for width in experiment.widths],
        workers=workers,
    )
    return examine_all(task, models, experiment.details, workers)


def _read(
    experiment: Experiment, task: Task, begun: Examinations, groups: Groups
) -> tuple[dict[str, float], tuple[Breakdown, ...]]:
    """Return the metrics of the global model at every width; plain names are the first width's."""
    scores: dict[str, float] = {}
    for width, found in zip(experiment.widths, begun.common.means(), strict=True):
        scores |= {f"{name}@{width:g}": value for name, value in found.items()}
        scores = {**found, **scores}
    return scores, take_apart(task, begun, experiment.details, groups, experiment.widths)


def _advance(before: RoundRecord, done: Round) -> RoundRecord:
    """Return the record after one more round."""
    ledger, counted = done.ledger, done.ledger.counted
    losses = ledger.loss[counted & ~np.isnan(ledger.loss)]
    return RoundRecord(
        round_index=done.index,
        time=float(done.time),
        down=before.down + float(known(ledger.bits_down).sum()) / 8,
        up=before.up + float(known(ledger.bits_up).sum()) / 8,
        flops=before.flops + float(known(ledger.flops).sum()),
        joules=before.joules + float(ledger.known_joules.sum()),
        replies=int(counted.sum()),
        failures=int((~counted).sum()),
        loss=float(losses.mean()) if len(losses) else float("nan"),
        on_devices=_surveyed(done.replies, before.metric),
        diagnostics=plain_diagnostics(done.diagnostics),
        metric=before.metric,
        unmeasured=before.unmeasured + int(np.isnan(ledger.joules).sum()),
    )


def _surveyed(replies: Sequence[Reply], metric: str) -> float:
    """Return the mean metric of the devices' own models, by their test samples, or NaN."""
    found = [r for r in replies if r.kind == Kind.EVALUATE and r.samples and metric in r.report]
    if not found:
        return float("nan")
    weights = [reply.samples for reply in found]
    return float(np.average([reply.report[metric] for reply in found], weights=weights))
