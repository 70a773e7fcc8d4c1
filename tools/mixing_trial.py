"""One mixture of `tools.mixing`: two rounds of a tiny task with unequal devices, and a verdict."""

import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import lru_cache
from itertools import combinations, islice
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from tools.mixing_parts import SLOTS, inside, mixed
from torch import nn

from anyfleet.core.ledger import Ledger
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.errors import CompositionError
from anyfleet.parts.codec import Nothing
from anyfleet.runtime import Sequential, Simulated
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.partition import ClassCounts
from anyfleet.world import Fleet, Group, Steady

RUNS, REFUSED, FAILED = "runs", "refused", "FAILED"
CITED = "(docs/"  # a refusal names the page that explains it
ROUNDS = 2
SECONDS = 60  # after which a mixture hangs
CLASSES, PIXELS = 4, 6
_COSTS = ("bits_down", "bits_up", "flops", "seconds", "joules", "wait_seconds")


class Pair(NamedTuple):
    """Two parts of different slots, by name."""

    slots: tuple[str, str]
    parts: tuple[str, str]

    def __str__(self) -> str:
        return " × ".join(f"{slot} {part}" for slot, part in zip(*self, strict=True))


class Outcome(NamedTuple):
    """What came of a pair."""

    pair: Pair
    result: str
    said: str = ""  # why it was refused, or how it failed
    kind: str = ""  # why it was refused, whichever parts they were


def pairs() -> list[Pair]:
    """Return every pair of parts of different slots."""
    return [
        Pair((one, two), (first, second))
        for one, two in combinations(SLOTS, 2)
        for first in SLOTS[one]
        for second in SLOTS[two]
    ]


def composed(pair: Pair) -> Method:
    """Return the method with both parts, or raise CompositionError."""
    one, two = (SLOTS[slot][part] for slot, part in zip(*pair, strict=True))
    return mixed(one, two)


def trial(pair: Pair) -> Outcome:
    """Compose and run a mixture; return what came of it, whatever it raises."""
    try:
        with _in_time():
            method = composed(pair)
            said = "; ".join(faults(method, rounds(method)))
    except CompositionError as error:
        said = str(error)
        return Outcome(pair, REFUSED if CITED in said else FAILED, said, _kind(said, pair))
    except (Exception, TooSlow):  # noqa: BLE001 - that there is none is what is shown
        return Outcome(pair, FAILED, traceback.format_exc())
    return Outcome(pair, FAILED if said else RUNS, said)


def _kind(said: str, pair: Pair) -> str:
    """Return the complaint without the parts themselves."""
    rows = [SLOTS[slot][part] for slot, part in zip(*pair, strict=True)]
    parts = [part for row in rows for each in row.parts.values() for part in inside(each)]
    for text in sorted({repr(part) for part in parts if is_dataclass(part)}, key=len, reverse=True):
        said = said.replace(text, "…")
    return said


# --- the world --------------------------------------------------------------------------------


def _net() -> nn.Module:
    """Return a net with a convolution, a normalisation and a hidden layer, to cut or freeze."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * (PIXELS // 2) ** 2, 8),
        nn.ReLU(),
        nn.Linear(8, CLASSES),
    )


@lru_cache(maxsize=1)
def task() -> Task:
    """Return a task of noisy copies of four pictures; devices have two classes or all."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        y = torch.arange(120) % CLASSES
        x = torch.randn(CLASSES, 1, PIXELS, PIXELS)[y] + 0.5 * torch.randn(120, 1, PIXELS, PIXELS)
        split = Split(
            devices=6, partition=ClassCounts((2, 4, 2, 4, 2, 4), samples=18), server=20, seed=1
        )
        return Task.of(_net(), Data(x, y), split=split)


# A device of the last group has hardly a joule for an order, and declines wherever one may.
FLEET = Fleet(
    groups=(
        Group(
            "fast",
            count=3,
            level=0,
            speed=1e8,
            link=Steady(bit_rate_up=1e6, bit_rate_down=4e6),
            budget=1.0,
        ),
        Group(
            "slow",
            count=2,
            level=1,
            speed=2e7,
            link=Steady(bit_rate_up=2e5, bit_rate_down=1e6),
            budget=1.0,
        ),
        Group(
            "poor",
            count=1,
            level=1,
            speed=2e7,
            link=Steady(bit_rate_up=2e5, bit_rate_down=1e6),
            budget=1e-9,
        ),
    )
)


def rounds(method: Method, engine: Engine | None = None) -> list[Round]:
    """Return the first rounds of a run."""
    problem = task()
    samples = np.array([problem.size(device) for device in range(problem.devices)])
    runtime = Simulated(problem, FLEET.build(samples, 0), engine=engine or Sequential())
    return list(islice(run(method, problem, runtime, 0), ROUNDS))


# --- the verdict ------------------------------------------------------------------------------


def faults(method: Method, made: Sequence[Round]) -> Iterator[str]:
    """Yield what is wrong with these rounds; nothing if the mixture runs."""
    silent = method.uplink == Nothing()  # it shares nothing, so that the server learns nothing
    before = task().params
    for each in made:
        found = (
            *_of_model({**each.params, **each.buffers}),
            *_of_costs(each.ledger, silent=silent),
        )
        for fault in found:
            yield f"round {each.index}: {fault}"
        if not silent and not _moved(before, each.params):
            yield f"round {each.index}: the model did not move"
        before = each.params


def _of_model(tree: Params) -> Iterator[str]:
    broken = [name for name, value in tree.items() if not value.isfinite().all()]
    if broken:
        yield f"not finite: {', '.join(broken)}"


def _moved(before: Params, after: Params) -> bool:
    return any(not torch.equal(after[name], value) for name, value in before.items())


def _of_costs(ledger: Ledger, *, silent: bool) -> Iterator[str]:
    counted = ledger.counted
    if not counted.any():
        yield f"no reply counted; the failures are {', '.join(sorted(set(ledger.failure)))}"
    for name in _COSTS:
        costs = getattr(ledger, name)
        if not (np.isfinite(costs) & (costs >= 0)).all():
            yield f"{name} are {costs.tolist()}"
    for name in ("bits_down", "seconds", *(() if silent else ("bits_up",))):
        if not (getattr(ledger, name)[counted] > 0).all():
            yield f"{name} of a reply are {getattr(ledger, name).tolist()}"


class TooSlow(BaseException):
    """A mixture that takes longer than any may; not an Exception, so that nobody catches it."""


@contextmanager
def _in_time() -> Iterator[None]:
    previous = signal.signal(signal.SIGALRM, _too_slow)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} s")
