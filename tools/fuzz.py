"""Spoil real messages and see that only `BadMessage` ever escapes.

    python -m tools.fuzz [COUNT [SEED]]

Orders and replies of several methods, with every codec of the package, and check-ins and choices
are mutated, truncated, spliced, and lie about lengths; then they are read as a device or a server
would, under a limit of memory for all and of time for each. Exits with 1 when anything else
escapes, when a codec fails otherwise than by refusing, or when what was read does not have the
right shapes.
"""

import math
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from inspect import isabstract
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tools.mangling import mangled
from torch import nn

from anyfleet.core.check_in import Choices, OrderChoices
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Kind
from anyfleet.core.method import Method
from anyfleet.core.orders import NOTHING, Cohort, IssuedOrders
from anyfleet.core.planning import PlanningState, load_models, plan_cohort
from anyfleet.core.return_checks import Caller, chosen
from anyfleet.core.screening import Screen
from anyfleet.core.server import Server
from anyfleet.core.slots import Codec
from anyfleet.core.stacks import Replies
from anyfleet.core.view import Request
from anyfleet.elastic import narrowed
from anyfleet.errors import BadMessage, CompositionError
from anyfleet.measure import Fisher
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts import codec as codecs
from anyfleet.parts.aggregate import Diagnosed
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import WidthMenu
from anyfleet.runtime import Limits, Simulated
from anyfleet.tasks import Data, Split, Task
from anyfleet.wire import (
    CheckInReport,
    decode_check_in,
    decode_choice,
    decode_order,
    decode_reply,
    encode_check_in,
    encode_choice,
    encode_order,
    encode_reply,
)
from anyfleet.world import Fleet

MEMORY = 256 << 20  # bytes that reading may take beyond what is there before
SECONDS = 5.0  # that one message may take
ACCEPTED, ESCAPED = "accepted", "ESCAPED"


@dataclass(frozen=True, eq=False)
class Case:
    """A real message, and how its receiver reads it."""

    data: bytes
    order: Cohort
    task: Task
    up: bool

    def read(self, data: bytes) -> Cohort | Replies | CheckInReport | OrderChoices:
        """Return the message as its receiver reads it."""
        if self.data[2:3] == b"i":
            return decode_check_in(data)
        if self.data[2:3] == b"c":
            return decode_choice(data, self.order)
        if self.up:
            return decode_reply(data, self.order, self.task)
        return decode_order(data, self.task)


@dataclass
class Tally:
    """What became of messages."""

    reasons: Counter[str] = field(default_factory=Counter)
    escaped: list[tuple[str, bytes]] = field(default_factory=list)  # how, and by which message
    slowest: float = 0.0
    seconds: float = 0.0
    taken: int = 0  # bytes of memory beyond what was there before

    @property
    def count(self) -> int:
        """The number of messages."""
        return self.reasons.total()


class TooSlow(BaseException):
    """A message that takes longer than any may; not an Exception, so that nobody catches it."""


# --- real messages ----------------------------------------------------------------------------


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )


def _task() -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        data = Data(torch.randn(24, 1, 3, 3), torch.arange(24) % 3)
        split = Split(devices=3, test_share=0.2, server=4)
        return Task.of(_net(), data, data, split=split)


def _codecs() -> Iterator[Codec]:
    """Yield every codec of the package with its defaults, and some with other settings."""
    for name in codecs.__all__:
        part: Any = getattr(codecs, name)
        if not isabstract(part) and not any(map(_required, fields(part))):
            yield part()
    yield from (codecs.Raw("bf16"), codecs.Uveq(dimension=1), codecs.Stc(0.2, scope="model"))
    yield from (codecs.TopK(0.15, codecs.Qsgd()), codecs.TopK(0.15, codecs.Uveq()))
    yield from (
        codecs.ErrorFeedback(codecs.Fgc()),
        codecs.Qsgd(quantisation_levels=100_000, bucket=5),
    )


def _required(each: Any) -> bool:
    return bool(each.default is each.default_factory)


def _methods() -> Iterator[Method]:
    base = fedavg(lr=0.1, batch_size=4)
    yield replace(
        base,
        norm=Tracked(),
        aggregate=Diagnosed(reported=("norm", "channels"), measures=(Fisher(),)),
    )
    yield replace(base, plan=WidthMenu((1.0, 0.5)), norm=Tracked())
    yield replace(heterofl(widths=(0.5,), lr=0.1, batch_size=4), send="weights", cache=True)
    for codec in _codecs():
        yield replace(base, uplink=codec)
        with suppress(CompositionError):  # it leaves entries out, which weights cannot bear
            yield replace(base, uplink=codec, downlink=codec, send="weights", cache=True)


def _order(method: Method, task: Task, column: float, kind: Kind) -> Cohort:
    """Return an order as a server would send it over links with columns of this width."""
    samples = np.array([task.size(device) for device in range(task.devices)])
    server = Server(method, task, Simulated(task, Fleet().build(samples, 0)), 0)
    state = PlanningState(0, 0, server.visits, server.acknowledged, server.states)
    request, devices = Request(kind=kind), np.array([1])
    planned = plan_cohort(request, devices, method=method, view=server.view(), state=state)
    asked = replace(planned.orders, column_width=np.array([column]))
    return load_models(asked, method=method, task=task, params=task.params, buffers=task.buffers)


def _fetching(order: Cohort, method: Method, task: Task) -> Cohort:
    """Return an order that fetches the result of an order to hold it."""
    asked = replace(order, id=order.id + 1, held_order=order.id, kind=Kind.FETCH)
    asked = asked.with_downloads(NOTHING)
    return load_models(asked, method=method, task=task, params={}, buffers={})


def messages() -> list[Case]:
    """Return messages both ways: every method, codec and kind of order, whole and in columns."""
    task, found = _task(), []
    plain = fedavg(lr=0.1, batch_size=4)
    asked = [_order(m, task, c, Kind.TRAIN) for m in _methods() for c in (1.0, 0.25)]
    asked += [_order(plain, task, 0.25, k) for k in Kind if k not in (Kind.TRAIN, Kind.FETCH)]
    for order in asked:
        done = work(order, (DeviceState(),), task)
        found.append(Case(encode_order(order, task), order, task, up=False))
        found.append(Case(encode_reply(done.replies, order, task), order, task, up=True))
        if order.kind == Kind.HOLD:
            fetch = _fetching(order, plain, task)
            held = work(fetch, done.states, task)
            found.append(Case(encode_order(fetch, task), fetch, task, up=False))
            found.append(Case(encode_reply(held.replies, fetch, task), fetch, task, up=True))
    return found + _check_ins(task)


def _check_ins(task: Task) -> list[Case]:
    """Return what a device says before it is given a model: reports, and choices from a menu."""
    method = replace(fedavg(lr=0.1, batch_size=4), plan=WidthMenu((1.0, 0.5)))
    order = _order(method, task, 1.0, Kind.TRAIN)
    known = {"speed": 1e9, "battery": float("inf"), "memory": 4e9, "load": 1.0, "loss": 2.0}
    report = CheckInReport("0.1", "0" * 64, 20, 4, 0, 1.0, known)
    nothing = replace(last_choice(order), declined=("too slow",))
    return [
        Case(data, order, task, up=True)
        for data in (
            encode_check_in(report),
            encode_choice(last_choice(order), order),
            encode_choice(nothing, order),
        )
    ]


def last_choice(order: Cohort) -> Choices:
    """Return the choice of the last entry of an order's menu."""
    entry = np.array([len(order.menu_of(0)) - 1])
    return Choices(entry, order.hyperparameters, np.array([0.5]), ("",))


# --- reading what was spoilt ------------------------------------------------------------------


def fuzz(count: int, seed: int, cases: Sequence[Case]) -> Tally:
    """Spoil and read `count` messages; return what became of them."""
    draw, tally = np.random.default_rng(seed), Tally()
    others = [case.data for case in cases]
    began, before = time.perf_counter(), _resident("VmRSS")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the most starts anew
    previous = signal.signal(signal.SIGALRM, _too_slow)
    try:
        for _ in range(count):
            case = cases[int(draw.integers(len(cases)))]
            _tell(tally, case, mangled(case.data, others, draw))
    finally:
        signal.signal(signal.SIGALRM, previous)
    tally.seconds, tally.taken = time.perf_counter() - began, _resident("VmHWM") - before
    return tally


def _tell(tally: Tally, case: Case, data: bytes) -> None:
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        found = case.read(data)
        tally.reasons[_judged(found, case)] += 1
    except BadMessage as error:
        tally.reasons[error.reason] += 1
        if error.reason == "fault":
            tally.escaped.append((traceback.format_exc(), data))
    except (Exception, TooSlow):  # noqa: BLE001 - that there is none is what is shown
        tally.reasons[ESCAPED] += 1
        tally.escaped.append((traceback.format_exc(), data))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    tally.slowest = max(tally.slowest, time.perf_counter() - start)


def _judged(found: Cohort | Replies | CheckInReport | OrderChoices, case: Case) -> str:
    """Return "accepted", or why the server refuses the values; raise for wrong shapes."""
    if isinstance(found, CheckInReport):
        if any(map(math.isnan, found.conditions.values())) or not 0 < found.column_width <= 1:
            raise AssertionError(f"{found} was accepted")
        return ACCEPTED
    if isinstance(found, OrderChoices):
        caller = Caller("choose", case.order.job.choose, 0)
        chosen(found.choices, caller, [len(case.order.menu_of(0))])
        return ACCEPTED
    order = case.order if isinstance(found, Replies) else found
    width = float(found.delivered_width[0])
    part = narrowed(order.slices[0], width, case.task.blueprint) if width else order.slices[0]
    local = case.task.blueprint.local(part)
    for tree in found.trees_of(0).values():
        for name, value in tree.items():
            if value.shape != local.shape(name):
                raise AssertionError(f"{name} has the shape {value.shape}")
    if isinstance(found, Cohort):
        return ACCEPTED
    samples = np.full(case.task.devices, case.task.size(1))
    screen = Screen.of(case.task, order.job, samples, Limits())
    (refused,) = screen.check(IssuedOrders.of(order), found).reasons
    return refused.partition(":")[0] or ACCEPTED


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def _resident(name: str) -> int:
    """Return the bytes of memory that this process has ("VmRSS"), or had at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def confine() -> None:
    """Limit the memory that this process may still take."""
    told = Path("/proc/self/statm").read_text(encoding="ascii")
    here = int(told.split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, most))


def main(arguments: Sequence[str]) -> int:
    """Spoil messages, show the table, and return the exit code."""
    count, seed = (int(number) for number in (*arguments, "100000", "0")[:2])
    console = Console()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = messages()
    for case in cases:
        case.read(case.data)  # what is not spoilt can be read
    confine()
    tally = fuzz(count, seed, cases)
    table = Table("reason", "messages", title=f"{tally.count:,} spoilt messages")
    for reason, number in tally.reasons.most_common():
        table.add_row(reason, f"{number:,}")
    console.print(table)
    console.print(
        f"{tally.count / tally.seconds:,.0f} messages a second; the slowest took "
        f"{1e3 * tally.slowest:.1f} ms; {tally.taken / 2**20:.1f} MiB more memory at most."
    )
    for how, data in dict(tally.escaped).items():
        console.print(f"{how}{data.hex()}\n", markup=False, soft_wrap=True)
    console.print(f"{len(tally.escaped)} times something else than BadMessage escaped.")
    return 1 if tally.escaped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
