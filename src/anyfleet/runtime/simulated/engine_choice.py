"""The engine of a run that names none: the fastest for its shape on this machine, as measured.

A run on a GPU is stacked. On a CPU no engine is the fastest everywhere, so that the first orders of
a run are carried out by each for a moment, with few local steps. What came of that is kept in the
user's cache directory, for each machine and shape (model, method, data per device): engines differ
in their last bits, and the same run shall have the same engine again. So whether a run is measured
depends on it alone, and on no clock: one that is too short for that has the same engine whether or
not a longer one came before. `anyfleet.cache` says where that directory is.
"""

import importlib.metadata
import platform
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

import anyfleet
from anyfleet import cache, config
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.limits import Limits
from anyfleet.core.local_training import local_steps, sizes_of
from anyfleet.core.loop import run
from anyfleet.core.messages import TRAINING
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.time_and_energy import steps_of
from anyfleet.elastic import WHOLE, Priced
from anyfleet.errors import ConfigError
from anyfleet.runtime.simulated.engines import (
    Assignment,
    Engine,
    Executed,
    Executor,
    Sequential,
    Stacked,
    Workers,
    cores,
)
from anyfleet.runtime.simulated.freed_memory import keep_freed_memory
from anyfleet.runtime.simulated.simulator import Simulated
from anyfleet.world import World

SECONDS = 5.0  # that measuring takes at most
_SHARE = 0.1  # of a run that may be spent on measuring
_LEAST = 0.1  # seconds: in less, nothing can be measured
_EQUAL = 1.05  # a simpler engine may take this much longer than the fastest
SIDE_BY_SIDE = 1.4  # the same for runs side by side: stacks need the cache that these share
_PASSES = 3  # over the largest sample, if there is time
_ORDERS, _STEPS = 8, 4  # orders in the first sample, and their local steps, if there is time
# What a local step takes, roughly, to tell whether a run is worth measuring.
_SECONDS_PER_CALL, _FLOPS = 1e-5, 1e10
# Devices in a stack: few of them stay in the processor's cache, many share what an operator costs.
_FEW, _MANY = 16, 32
_LONG_STEP = "a local step takes too long"


@dataclass(frozen=True, eq=False)
class Prospect:
    """A run that needs an engine."""

    method: Method
    task: Task
    world: World
    limits: Limits
    seed: int
    rounds: int


class Choice(NamedTuple):
    """An engine, and why it was chosen."""

    engine: Engine
    why: str


@dataclass(frozen=True)
class Measurement:
    """The seconds of local training in a run by each engine; without any, why there are none."""

    seconds: Mapping[str, float]
    why_not: str = ""
    unstackable: str = ""  # why there are no stacks among the engines, or ""

    def times(self, rounds: int) -> "Measurement":
        """Return the measurement of so many rounds, made of that of one."""
        return replace(self, seconds={name: rounds * each for name, each in self.seconds.items()})


def candidates() -> dict[str, Engine]:
    """Return the engines to choose from on a CPU, by what is written of them; simple ones first."""
    stacks = (Stacked(chunk=_FEW), Stacked(chunk=_MANY))
    many = cores()
    together = (*stacks, *(replace(each, workers=many) for each in stacks)) if many > 1 else stacks
    engines = (Sequential(), *((Workers(),) if many > 1 else ()), *together)
    return {str(engine): engine for engine in engines}


def without_workers() -> dict[str, Engine]:
    """Return the engines for runs that are played side by side, so that the cores are taken."""
    alone = (Sequential(), Stacked(chunk=_FEW), Stacked(chunk=_MANY))
    return {str(engine): engine for engine in alone}


def choose(
    prospects: Iterable[Prospect],
    seconds: float = SECONDS,
    *,
    engines: Mapping[str, Engine] | None = None,
    equal: float = _EQUAL,
) -> Choice:
    """Return the engine for runs that are compared: one for all, with which all are the fastest.

    Each may be measured for so many `seconds`, however many there are: what is kept of one is then
    what a run of it alone would keep. Without `engines`, it is one of all `candidates`. A simpler
    one is chosen if it takes at most `equal` times as long.
    """
    measurements = []
    for prospect in prospects:
        if _on_gpu(prospect.task):
            return Choice(Stacked(), "for a GPU")
        measurements.append(measure(prospect, seconds))
    return _fastest(measurements, candidates() if engines is None else engines, equal)


def _on_gpu(task: Task) -> bool:
    return any(value.device.type != "cpu" for value in task.params.values())


def _fastest(
    measurements: Sequence[Measurement], engines: Mapping[str, Engine], equal: float
) -> Choice:
    """Return the one of these engines with which all runs together take the least time."""
    without = tuple(dict.fromkeys(each.unstackable for each in measurements if each.unstackable))
    measured = [each.seconds for each in measurements if each.seconds]
    if not measured:
        reasons = tuple(dict.fromkeys(each.why_not for each in measurements))
        # Where a single step takes long, nothing is gained but by doing several at a time.
        slow = _LONG_STEP in reasons and torch.get_num_threads() == 1
        engine = Workers() if slow and str(Workers()) in engines else Sequential()
        return Choice(engine, "not measured: " + "; ".join(reasons + without))
    total = {
        name: sum(each[name] for each in measured)
        for name in engines
        if all(name in each for each in measured)
    }
    shortest = min(total.values())
    name = next(name for name, seconds in total.items() if seconds <= equal * shortest)
    gain = total[str(Sequential())] / total[name]
    found = f"{gain:.2g} times as fast as Sequential"
    if isinstance(engines[name], Sequential):
        found = "no other is faster" if equal == _EQUAL else "no other is much faster"
    return Choice(engines[name], "measured: " + "; ".join((found, *without)))


def expected_seconds(prospect: Prospect) -> float:
    """Return roughly the seconds of a run in which all devices train in every round.

    Nothing is measured for it. 0.0 if the trainer fails, which comes again in the run.
    """
    try:
        return _expected(prospect, range(prospect.task.devices))
    except Exception:  # noqa: BLE001 - a user's trainer may fail in any way
        return 0.0


def measure(prospect: Prospect, seconds: float = SECONDS) -> Measurement:
    """Return how long each engine would take for a run, from the cache or measured now.

    Measuring takes about `seconds`, and at most a tenth of the run. What the parts of a method do
    meanwhile changes nothing: they get the same keys again, torch its random state.
    """
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _kept_or_measured(prospect, seconds)
    except Exception:  # noqa: BLE001 - it comes again in the run, where it is explained
        return Measurement({}, "the first orders cannot be carried out")


def _kept_or_measured(prospect: Prospect, seconds: float) -> Measurement:
    """Return the measurement of a run, which is empty if the run is too short to be measured.

    That depends on the run alone, and not on whether a longer one left a measurement in the cache.
    """
    short = Measurement({}, "the run is short")
    if _SHARE * _expected(prospect, range(prospect.task.devices)) < _LEAST:
        return short
    orders = _first_orders(prospect)
    expected = _expected(prospect, orders.orders.device.tolist())
    most = min(seconds, _SHARE * expected)
    if most < _LEAST:
        return short
    step = expected / (prospect.rounds * _steps(orders, prospect.task))
    # Each engine carries out the first sample twice, and is timed the second time.
    affordable = int(most / (2 * step * len(_unlike(candidates(), 2))))
    count = min(len(orders.orders), _ORDERS, affordable)
    if count < min(len(orders.orders), 2):
        return Measurement({}, _LONG_STEP)
    first = count, min(_STEPS, affordable // count)
    shape = shape_of(prospect)
    file = _file(shape)
    found = _read(file)
    if found is None:
        found = _keep(file, shape, _measured_now(prospect, orders, first, most))
    return found.times(prospect.rounds)


# --- measuring ----------------------------------------------------------------------------------


def _measured_now(
    prospect: Prospect, orders: Assignment, first: tuple[int, int], most: float
) -> Measurement:
    """Return the seconds of one round by each engine, from samples of the orders.

    The first has so many orders with so many local steps. Measuring takes about `most` seconds.
    """
    keep_freed_memory()  # as the run will have it
    clock = _Clock(prospect)
    clock.seconds(Sequential(), _shortened(orders, [0], 1, prospect.task))
    engines, unstackable = candidates(), _unstackable(clock, orders)
    if unstackable:
        engines = {name: e for name, e in engines.items() if not isinstance(e, Stacked)}
    found = _contest(clock, engines, orders, first, time.perf_counter() + most)
    steps = _steps(orders, prospect.task)
    by_round = {name: seconds * steps for name, seconds in found.items()}
    return Measurement(by_round, unstackable=unstackable)


def _expected(prospect: Prospect, devices: Sequence[int]) -> float:
    """Return roughly the seconds of a run in which these devices train in every round."""
    task, train = prospect.task, prospect.method.trainer
    samples = np.array([task.size(device) for device in devices])
    hyperparameters = train.hyperparameters(0, samples)
    steps = sum(local_steps(hyperparameters, samples.tolist()))
    batch = int(hyperparameters.batch_size.max(initial=1))
    processed = steps * min(batch, int(samples.max(initial=1)))
    work = train.work(Priced(task.blueprint, WHOLE, batch), processed, steps)
    seconds = float(work.calls) * _SECONDS_PER_CALL + float(work.flops) / _FLOPS
    return seconds * prospect.rounds


class _FirstOrders(Exception):
    """The first orders to train, on their way out of the loop."""

    def __init__(self, orders: Assignment) -> None:
        super().__init__()
        self.orders = orders


@dataclass(frozen=True)
class _Interceptor(Engine):
    """The engine that hands out the first orders to train instead of carrying them out."""

    def start(self, task: Task, limits: Limits) -> Executor:
        return _Intercepting(Sequential().start(task, limits))


@dataclass(frozen=True)
class _Intercepting:
    """What carries out orders for `_Interceptor`, until some are to train: those it raises."""

    inner: Executor

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        if given.orders.kind in TRAINING:
            raise _FirstOrders(given)
        return self.inner.execute(given, states)


def _first_orders(prospect: Prospect) -> Assignment:
    """Return the first orders to train; raise RuntimeError if the first round has none."""
    task = prospect.task
    runtime = Simulated(task, prospect.world, engine=_Interceptor(), limits=prospect.limits)
    try:
        list(islice(run(prospect.method, task, runtime, prospect.seed), 1))
    except _FirstOrders as found:
        return found.orders
    raise RuntimeError("nobody trains in the first round")


def _unstackable(clock: "_Clock", orders: Assignment) -> str:
    """Return why devices cannot be stacked, or "": a user's trainer may not be made for that."""
    try:
        clock.seconds(Stacked(), _shortened(orders, [0, 0], 1, clock.prospect.task))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other engines do without it
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]
        trainer = type(clock.prospect.method.trainer).__name__
        return f"{trainer} cannot be stacked: {reason.rstrip('.: ')}"
    return ""


def _contest(
    clock: "_Clock",
    engines: Mapping[str, Engine],
    orders: Assignment,
    first: tuple[int, int],
    until: float,
) -> dict[str, float]:
    """Return the seconds of a local step by each engine, from samples of the orders that grow.

    Who falls far behind is not measured again. The others take turns, so that a machine that is
    busy for a moment is so for all.
    """
    task = clock.prospect.task
    own = max(1, *local_steps(orders.orders.hyperparameters, _samples(orders, task)))
    found: dict[str, float] = {}
    left, passes = dict(engines), 0
    behind: dict[str, float] = {}  # how many times as long those took that are not left
    count, steps = first[0], min(own, first[1])
    while True:
        sample = _shortened(orders, list(range(count)), steps, task)
        amount, seen = _steps(sample, task), found if passes else {}
        for alike in _unlike(left, count):
            seconds = clock.seconds(left[alike[0]], sample) / amount
            found |= {name: min(seconds, seen.get(name, seconds)) for name in alike}
        # A small stack shows less than a larger one what it gains, and while orders are cut short
        # what they take besides their steps counts for too much.
        factor = 3.0 if 2 * steps < own else 1.5 if count < _MANY else 1.25
        best = min(found[name] for name in left)
        behind |= {name: found[name] / best for name in left if found[name] > factor * best}
        left = {name: engine for name, engine in left.items() if name not in behind}
        larger = _grown(count, steps, len(orders.orders), own)
        passes = passes + 1 if larger == (count, steps) else 0
        count, steps = larger
        due = count * steps * sum(found[alike[0]] for alike in _unlike(left, count))
        if passes == _PASSES or time.perf_counter() + due > until:
            # Seconds of another sample say nothing beside these; how they compared there does.
            best = min(found[name] for name in left)
            return found | {name: times * best for name, times in behind.items()}


def _unlike(engines: Mapping[str, Engine], count: int) -> list[list[str]]:
    """Return the engines, those together that do the same with so many orders."""
    alike: dict[Engine, list[str]] = {}
    for name, engine in engines.items():
        same = engine
        if isinstance(engine, Stacked):
            same = replace(engine, chunk=min(engine.chunk, max(count, _FEW)))
        alike.setdefault(same, []).append(name)
    return list(alike.values())


def _grown(count: int, steps: int, orders: int, own: int) -> tuple[int, int]:
    """Return a larger sample: how many orders, and how many of their `own` local steps.

    First come enough orders for stacks to show what they gain, then all steps, so that what an
    order takes besides counts for no more than it does, then all orders.
    """
    if count < min(orders, _MANY):
        return min(orders, _MANY, 2 * count), steps
    if steps < own:
        return count, min(own, 2 * steps)
    return min(orders, 2 * count), steps


def _shortened(given: Assignment, rows: Sequence[int], most: int, task: Task) -> Assignment:
    """Return some of the orders, with at most so many local steps each.

    All are shortened in proportion: a stack pads its devices to the longest of them.
    """
    orders, sent = (_limited(each.take(rows), most, task) for each in (given.orders, given.sent))
    return Assignment(orders, sent, given.upload_width[rows])


def _limited(orders: Cohort, most: int, task: Task) -> Cohort:
    own = steps_of(orders.hyperparameters, sizes_of(task)[orders.device])
    longest = max(1, int(own.max()))
    steps = np.maximum(1, -(-own * min(most, longest) // longest))
    return replace(orders, hyperparameters=replace(orders.hyperparameters, local_steps=steps))


def _steps(given: Assignment, task: Task) -> int:
    """Return the local steps of all orders together, at least 1."""
    return max(1, sum(local_steps(given.orders.hyperparameters, _samples(given, task))))


def _samples(given: Assignment, task: Task) -> list[int]:
    """Return the number of samples of each order's device."""
    return [task.size(device) for device in given.orders.device.tolist()]


@dataclass(frozen=True, eq=False)
class _Clock:
    """A stopwatch for engines, which carry out orders of the run that is to come."""

    prospect: Prospect
    started: dict[Engine, Executor] = field(default_factory=dict)

    def seconds(self, engine: Engine, orders: Assignment) -> float:
        """Return the seconds that an engine takes for these orders."""
        task, limits = self.prospect.task, self.prospect.limits
        if engine not in self.started:
            self.started[engine] = engine.start(task, limits)
            # Threads and libraries prepare themselves when they meet their first orders.
            self.started[engine].execute(orders, DeviceStates(task))
        began = time.perf_counter()
        self.started[engine].execute(orders, DeviceStates(task))
        return time.perf_counter() - began


# --- what was measured before -------------------------------------------------------------------


def shape_of(prospect: Prospect) -> dict[str, Any]:
    """Return what the fastest engine depends on, as plain data: machine, model, method, fleet."""
    task = prospect.task
    samples = sum(task.size(device) for device in range(task.devices)) / max(1, task.devices)
    levels = np.bincount(np.maximum(prospect.world.declared.level, 0))
    return {
        "anyfleet": anyfleet.__version__,
        "torch": importlib.metadata.version("torch"),
        "machine": platform.node(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "engines": sorted(candidates()),
        "model": task.blueprint.program.digest.hex(),
        "parameters": {name: [*value.shape] for name, value in task.params.items()},
        "precision": sorted({str(value.dtype) for value in task.params.values()}),
        "samples": float(f"{samples:.2g}"),
        "devices_by_level": levels.tolist(),
        "method": _without_lr(_plain(prospect.method)),
    }


def _plain(method: Method) -> Any:
    try:
        return config.dump(method, complete=True)
    except ConfigError:  # parts that no run file can name
        return str(method)


def _without_lr(value: Any) -> Any:
    """Return plain data without learning rates, which no engine depends on."""
    if isinstance(value, Mapping):
        return {key: _without_lr(item) for key, item in value.items() if key != "lr"}
    return [_without_lr(item) for item in value] if isinstance(value, list) else value


class _Kept(msgspec.Struct, frozen=True):
    """What a file of the cache holds: the measurement of a round, and what it holds for."""

    shape: Any
    seconds: dict[str, float]
    unstackable: str = ""


def _file(shape: Mapping[str, Any]) -> Path | None:
    """Return the file of the cache for a shape; None without a cache."""
    folder = cache.home()
    return None if folder is None else folder / "engines" / f"{cache.key_digest(shape).hex()}.json"


def _read(file: Path | None) -> Measurement | None:
    """Return the measurement of a round that a file of the cache holds; None if it is of no use."""
    if file is None:
        return None
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    known = {name: seconds for name, seconds in kept.seconds.items() if name in candidates()}
    usable = str(Sequential()) in known and all(seconds > 0 for seconds in known.values())
    return Measurement(known, unstackable=kept.unstackable) if usable else None


def _keep(file: Path | None, shape: Mapping[str, Any], found: Measurement) -> Measurement:
    """Write a measurement into the cache, and return it; if one is there by now, return that.

    A file is written as a whole; without a place for it, nothing is kept.
    """
    if file is None:
        return found
    if (meanwhile := _read(file)) is not None:
        return meanwhile
    kept = _Kept(shape, dict(found.seconds), found.unstackable)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = msgspec.json.format(msgspec.json.encode(kept), indent=2)
        cache.replace_file(file, text + b"\n")
    return found
