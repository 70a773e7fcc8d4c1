"""What the benchmarks of speed share: workloads, rounds under a stopwatch, tables, who measured.

They are modules and run from the root of the repository: `python -m benchmarks.speed`. Data are
random and made here. Rounds are whole ones of `anyfleet.play`, with checks, charges and ledger but
without evaluation. Times are medians over rounds after some that warm up; the first round, with
tracing, compiling and capturing, is given apart.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
Precision = Literal["float32", "tf32", "bf16"]
Cell = str | float | int | None


class NotRun(Exception):
    """A row that cannot be measured here; the message says why, and stands in the table."""


@dataclass(frozen=True)
class Options:
    """What every benchmark of speed is told."""

    device: str = "cpu"
    engine: str = "stacked"  # stacked, sequential, workers, threads or auto
    precision: Precision = "float32"
    compile: bool = False  # torch.compile, of the product
    chunk: int | None = None  # devices in a stack at most; None: as the engine decides
    rounds: int = 7  # that count
    warm: int = 3  # before, that do not
    minutes: float = math.inf  # after which nothing more is started
    began: float = field(default_factory=time.monotonic)

    @property
    def cuda(self) -> bool:
        """Whether a CUDA device trains."""
        return self.device.startswith("cuda")

    @property
    def late(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() - self.began > 60 * self.minutes


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks of speed have."""
    made = argparse.ArgumentParser(description=(text or "").partition("\n")[0], allow_abbrev=False)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", default=usual, help=f"cpu, cuda or cuda:1; here {usual}")
    made.add_argument("--engine", default="stacked", help="of the product; auto: it decides")
    made.add_argument("--precision", choices=get_args(Precision), default="float32")
    made.add_argument("--compile", action="store_true", help="let the product use torch.compile")
    made.add_argument("--chunk", type=int, help="devices in a stack at most")
    made.add_argument("--rounds", type=int, default=7, help="that count, of each row")
    made.add_argument("--warm", type=int, default=3, help="rounds before, that do not count")
    made.add_argument("--minutes", type=float, default=math.inf, help="start nothing after these")
    made.add_argument("--threads", type=int, default=0, help="of torch; 0: as it decides")
    made.add_argument("--vendor", help="a folder of unpacked packages, for machines offline")
    made.add_argument("--out", type=Path, help="a folder for the tables, as JSON and Markdown")
    return made


def given_options(given: argparse.Namespace) -> Options:
    """Return the options of a command line, after setting up torch and the vendored packages."""
    if given.vendor and given.vendor not in sys.path:
        sys.path.append(given.vendor)  # at the end: what is installed comes first
    if given.threads:
        torch.set_num_threads(given.threads)
    names = {each.name for each in fields(Options)} - {"began"}
    return Options(**{name: getattr(given, name) for name in names})


# -- workloads


def net_p() -> nn.Module:
    """Return the network of workload P, which has 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def net_tiny(width: int = 16) -> nn.Module:
    """Return a network with 778 parameters, whose training costs next to nothing."""
    return nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def _zoo(name: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from anyfleet.tasks import zoo

        return getattr(zoo, name)()  # type: ignore[no-any-return]

    return made


@dataclass(frozen=True)
class Workload:
    """A network and how many random samples each of how many devices trains it on."""

    name: str
    net: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a sample
    users: int = 1000
    cohort: int = 50
    samples: int = 50  # of each device
    batch: int = 10
    lr: float = 0.01

    @property
    def local_steps(self) -> int:
        """The local steps of a device in a round."""
        return -(-self.samples // self.batch)


SMALL = (1, 28, 28)
COLOUR = (3, 32, 32)
WORKLOADS = {
    each.name: each
    for each in (
        Workload("P", net_p, COLOUR),
        Workload("C.1", _zoo("perceptron"), SMALL),
        Workload("C.2", _zoo("cnn_mnist"), SMALL),
        Workload("C.3", _zoo("cnn_cifar"), COLOUR),
        Workload("C.4", _zoo("mcmahan_cnn"), SMALL),
        Workload("tiny", net_tiny, (20,), users=2000, samples=4, batch=32),
    )
}
_SERVER = 20  # samples of the server, which some methods ask for
_BLOCKS = 1000  # more devices than these share their samples: memory is not what is measured


def new_net(work: Workload) -> nn.Module:
    """Return the network with the same initial weights every time."""
    torch.manual_seed(0)
    return work.net()


@lru_cache(maxsize=2)
def samples(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Return random samples of ten classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *shape, generator=generator)
    return x, torch.randint(0, 10, (count,), generator=generator)


@lru_cache(maxsize=2)
def built(work: Workload, device: str) -> Any:
    """Return the task of a workload on a device."""
    from anyfleet.tasks import Data, Split, Task
    from anyfleet.tasks.partition import Iid

    blocks = min(work.users, _BLOCKS)
    x, y = samples(work.shape, blocks * work.samples + _SERVER)
    split = Split(devices=blocks, partition=Iid(), test_share=0.0, server=_SERVER)
    # A few samples for tests: nothing is evaluated but the first round, which does not count.
    task = Task.of(new_net(work), Data(x, y), Data(x[:20], y[:20]), split=split)
    if work.users > blocks:
        times = -(-work.users // blocks)
        rows, tests = (task.train_rows * times)[: work.users], (task.test_rows * times)
        task = replace(task, train_rows=rows, test_rows=tests[: work.users])
    return task.to(torch.device(device))


# -- the product


def engine(options: Options) -> Any:
    """Return the engine that the options ask for; raise NotRun where this version has none."""
    from anyfleet import runtime

    if options.engine == "auto":
        return "auto"
    kind = getattr(runtime, options.engine.capitalize(), None)
    if kind is None:
        raise NotRun(f"this version has no engine {options.engine}")
    names = {each.name for each in fields(kind)}
    asked: dict[str, Any] = {}
    if options.chunk and "chunk" in names:
        asked["chunk"] = options.chunk
    if "precision" in names:
        asked["precision"] = options.precision
    elif options.precision == "bf16":
        raise NotRun(f"this version's {kind.__name__} has no bf16")
    if options.compile:
        if "compile" not in names:
            raise NotRun(f"this version's {kind.__name__} does not compile")
        asked["compile"] = True
    return kind(**asked)


def experiment(method: Any, task: Any, options: Options, fleet: Any = None) -> Any:
    """Return an experiment that goes on for ever and evaluates nothing after its first round."""
    from anyfleet import Experiment

    asked: dict[str, Any] = {"engine": engine(options), "rounds": 10**6, "evaluate_every": 10**6}
    if fleet is not None:
        asked["fleet"] = fleet
    if "device" in {each.name for each in fields(Experiment)}:
        asked["device"] = options.device
    return Experiment(task=task, method=method, **asked)


@dataclass(frozen=True)
class Timing:
    """Times of rounds, in milliseconds; `first` is the first round, in seconds."""

    ms: float
    low: float
    high: float
    first: float
    rounds: int
    replies: float  # that counted, in the median round


def play_rounds(method: Any, task: Any, options: Options, fleet: Any = None) -> "Rounds":
    """Yield the seconds between two results, and the second one.

    Nobody waits for an accelerator but the run itself: while a round is computed, the host may be
    at work for the next one. A result comes when its numbers have come to the host.
    """
    from anyfleet import play

    results = play(experiment(method, task, options, fleet), task)
    wait_for(options)
    with tf32_for(options):
        while True:
            began = time.perf_counter()
            result = next(results)
            yield time.perf_counter() - began, result


Rounds = Iterator[tuple[float, Any]]


def timed(
    method: Any,
    task: Any,
    options: Options,
    fleet: Any = None,
    *,
    seconds: float = math.inf,
    replies: int | None = None,
) -> Timing:
    """Return how long rounds of a method take; see `times_of`."""
    rounds = play_rounds(method, task, options, fleet)
    return times_of(rounds, options, seconds=seconds, replies=replies)


def times_of(
    rounds: Rounds, options: Options, *, seconds: float = math.inf, replies: int | None = None
) -> Timing:
    """Return how long rounds take, from the first one on; raise NotRun if the time is used up.

    `seconds` after the first round no more are begun, but one counts. A round with fewer `replies`
    than given is an error: it would be too fast.
    """
    if options.late:
        raise NotRun("the time was used up")
    took: list[float] = []
    counted: list[int] = []
    began = time.monotonic()
    warm = options.warm
    for each, result in rounds:
        took.append(each)
        counted.append(result.record.replies)
        if len(took) == 1 and options.warm:
            began = time.monotonic()
        elif time.monotonic() - began > seconds:
            warm = min(warm, max(1, len(took) // 2), len(took) - 1)
            break
        if len(took) == warm + options.rounds:
            break
    got = statistics.median(counted[warm:])
    if replies is not None and got < replies:
        raise NotRun(f"only {got:g} of {replies} orders brought a reply")
    milli = [1e3 * each for each in took[warm:]]
    return Timing(statistics.median(milli), min(milli), max(milli), took[0], len(milli), got)


@contextmanager
def counted_starts(trainer: Any, calls: list[int]) -> Iterator[None]:
    """Count how often local training starts: once for a device alone, and once for a stack.

    A stack whose training is replayed (a CUDA graph) does not start anew.
    """
    kind = type(trainer)
    start = kind.start

    def counted(self: Any, *given: Any) -> Any:
        calls[0] += 1
        return start(self, *given)

    kind.start = counted
    try:
        yield
    finally:
        kind.start = start


def wait_for(options: Options) -> None:
    """Wait until the accelerator has done what it was asked to do."""
    if options.cuda:
        torch.cuda.synchronize()


@contextmanager
def tf32_for(options: Options) -> Iterator[None]:
    """Allow tf32 while a version runs whose engine does not know precisions."""
    from anyfleet.runtime import Stacked

    own = "precision" in {each.name for each in fields(Stacked)}
    with tf32(options.precision == "tf32" and not own):
        yield


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow tf32 in matrix products and convolutions, or leave all as it is."""
    if not allowed:
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


# -- tables


@dataclass(frozen=True)
class Table:
    """A table of results: raw values, so that plots can be drawn of them."""

    name: str  # by which the page of performance finds it
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    command: str = ""

    def markdown(self) -> str:
        """Return the table in Markdown, with its title and notes."""
        numeric = [
            any(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.head))
        ]
        marks = ("---:" if right else "---" for right in numeric)
        lines = [self.head, tuple(marks), *(tuple(map(shown, row)) for row in self.rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"* {note}" for note in self.notes)
        return f"**{self.title}**\n\n{table}\n" + (f"\n{notes}\n" if notes else "")


def shown(cell: Cell) -> str:
    """Return a value as it stands in a table: three digits, or whole numbers from 100 on."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"


def verdict(value: float, target: float, unit: str = "") -> str:
    """Return whether a value is at most its target, and else by how much it is missed."""
    if value <= target:
        return f"met (≤ {shown(target)}{unit})"
    return f"missed by {100 * (value / target - 1):.0f} % (≤ {shown(target)}{unit})"


def at_least(value: float, target: float) -> str:
    """Return whether a ratio is at least its target, and else what is lacking."""
    if value >= target:
        return f"met (≥ {shown(target)}×)"
    return f"missed by {100 * (1 - value / target):.0f} % (≥ {shown(target)}×)"


def about(options: Options) -> dict[str, str]:
    """Return who measured what: command, machine, date, commit, device and precision."""
    return {
        "command": command(),
        "machine": machine(options),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": options.device,
        "engine": options.engine + (", compiled" if options.compile else ""),
        "precision": options.precision,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def command() -> str:
    """Return the command that runs, as one would type it; places on this machine are left out."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"-m {spec.name}" if spec else Path(sys.argv[0]).name
    kept: list[str] = []
    arguments = iter(sys.argv[1:])
    for each in arguments:
        if each in {"--out", "--vendor"}:
            next(arguments, None)
        elif not each.startswith(("--out=", "--vendor=")):
            kept.append(each)
    return f"python {name} {shlex.join(kept)}".rstrip()


def machine(options: Options) -> str:
    """Return the accelerator, and the processor with the number of cores that may be used."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} cores of {model or platform.processor() or 'an unknown processor'}"
    return f"{torch.cuda.get_device_name(options.device)}, {text}" if options.cuda else text


def commit() -> str:
    """Return the commit of the package that is measured, as it is told, or as git knows it.

    A copy of a working tree on another machine may lie on a commit that is not its own.
    """
    import anyfleet

    if told := os.environ.get("ANYFLEET_COMMIT"):
        return told
    where = str(Path(anyfleet.__file__).parent)
    asked = ["git", "-C", where, "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def heading(facts: Mapping[str, str]) -> str:
    """Return the lines above tables that say who measured what."""
    return (
        f"```console\n{facts['command']}\n```\n\n"
        f"Measured {facts['date']} on {facts['machine']}; Python {facts['python']}, torch "
        f"{facts['torch']}, {facts['threads']} torch threads; commit {facts['commit']}; device "
        f"{facts['device']}, engine {facts['engine']}, precision {facts['precision']}."
    )


def report(name: str, tables: Sequence[Table], options: Options, out: Path | None) -> None:
    """Print tables; write them as JSON and Markdown into a folder if one is given."""
    facts = about(options)
    text = "\n".join([heading(facts), "", *(table.markdown() for table in tables)])
    print(text, flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": name, "about": facts, "tables": [asdict(each) for each in tables]}
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(text, encoding="utf-8")


def read_tables(file: Path) -> tuple[dict[str, str], dict[str, Table]]:
    """Return what `report` wrote: who measured, and the tables by name."""
    content = json.loads(file.read_text(encoding="utf-8"))
    tables = [
        Table(
            each["name"],
            each["title"],
            tuple(each["head"]),
            tuple(tuple(row) for row in each["rows"]),
            tuple(each["notes"]),
            each.get("command", ""),
        )
        for each in content["tables"]
    ]
    return content["about"], {table.name: table for table in tables}


def attempted(
    measure: Callable[[], tuple[Cell, ...]], width: int, *first: Cell
) -> tuple[Cell, ...]:
    """Return a row of a table; where it cannot be measured, a row that says why at its end."""
    try:
        return (*first, *measure())
    except NotRun as error:
        why = f"not run: {error}"
    except Exception as error:  # noqa: BLE001 - one row must not cost the others
        why = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    print("   ", *map(shown, first), why, file=sys.stderr, flush=True)
    return (*first, *(None,) * (width - len(first) - 1), why)
