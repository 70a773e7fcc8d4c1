"""The product beside others on the same work: a plain loop, pfl-research, Flower's simulation.

    python -m benchmarks.peers --works P --precisions tf32 bf16 --vendor DIR       # on a GPU
    python -m benchmarks.peers --works C.1 C.2 C.3 C.4 --engines sequential stacked   # on a CPU

Every row is the median of whole rounds of FedAvg: sampling a cohort, local SGD on every device,
the weighted mean; no evaluation. Data lie on the device that trains before the first round, for all
alike. Each peer has a process of its own, started from here, so that nobody's settings are left to
the next. A peer runs in the precision of the row, in its fastest setting: on a GPU with and without
cuDNN's search for the fastest algorithm (and in the rows of tf32 also without tf32), on a CPU with
one thread and with as many as there are cores. pfl is tried with 1 to 5 processes that share the
device; Flower has a worker for each core, on a GPU also fewer. What is not installed says so;
`--vendor` names a folder of unpacked packages for machines that cannot install any.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import torch
from benchmarks.measuring import (
    ROOT,
    WORKLOADS,
    Cell,
    NotRun,
    Options,
    Precision,
    Table,
    Timing,
    Workload,
    at_least,
    attempted,
    built,
    given_options,
    new_net,
    parser,
    play_rounds,
    report,
    samples,
    tf32,
    timed,
    times_of,
    verdict,
)
from benchmarks.overhead import shares
from torch import Tensor, nn
from torch.nn import functional

PEERS = ("plain", "pfl", "flower")
ENGINES = ("stacked",)
PROCESSES = (1, 2, 3, 4, 5)
RESULT = "RESULT "
# What the product must be worth, by work, peer and precision: on a GPU, then on a CPU.
GPU_TARGETS = {("P", "pfl", "tf32"): 45.0, ("P", "pfl", "bf16"): 60.0}
CPU_TARGETS = {
    **{(work, "plain"): 1.6 for work in ("C.1", "C.2")},
    **{(work, "plain"): 1.05 for work in ("C.3", "C.4")},
    **{(work, "flower"): 3.0 for work in ("C.1", "C.2")},
    **{(work, "flower"): 1.1 for work in ("C.3", "C.4")},
}


# -- a plain loop, and what peers share


def on_device(work: Workload, device: str) -> tuple[Tensor, Tensor]:
    """Return the samples and labels of all users: [users, samples, ...]."""
    x, y = samples(work.shape, work.users * work.samples)
    x, y = x.to(device), y.to(device)
    return x.view(work.users, work.samples, *work.shape), y.view(work.users, work.samples)


def autocast(options: Options) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a forward pass has the precision that is asked for."""
    if options.precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(options.device).type, torch.bfloat16)


def local_sgd(net: nn.Module, x: Tensor, y: Tensor, work: Workload, options: Options) -> None:
    """Train a network on one user's samples for one epoch."""
    optimiser = torch.optim.SGD(net.parameters(), lr=work.lr)
    order = torch.randperm(len(x), device=x.device)
    for start in range(0, len(x), work.batch):
        rows = order[start : start + work.batch]
        optimiser.zero_grad()
        with autocast(options):
            loss = functional.cross_entropy(net(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def plain(work: Workload, options: Options) -> Iterator[None]:
    """Yield after every round of a loop over users, as one would write it in an afternoon."""
    net = new_net(work).to(options.device).train()
    x, y = on_device(work, options.device)
    parameters = list(net.parameters())
    generator = torch.Generator().manual_seed(1)
    while True:
        begin = [each.detach().clone() for each in parameters]
        total = [torch.zeros_like(each) for each in parameters]
        for user in torch.randperm(work.users, generator=generator)[: work.cohort].tolist():
            with torch.no_grad():
                for each, value in zip(parameters, begin, strict=True):
                    each.copy_(value)
            local_sgd(net, x[user], y[user], work, options)
            with torch.no_grad():
                for change, each, value in zip(total, parameters, begin, strict=True):
                    change.add_(each - value)
        with torch.no_grad():
            for each, value, change in zip(parameters, begin, total, strict=True):
                each.copy_(value + change / work.cohort)
        yield


def clocked(rounds: Iterator[Any], options: Options) -> list[float]:
    """Return the seconds of rounds, with those that warm up.

    Nobody waits for the accelerator in between, so that the host may go on with the next round.
    """
    took = []
    for _ in range(options.warm + options.rounds):
        began = time.perf_counter()
        next(rounds)
        took.append(time.perf_counter() - began)
    return took


# -- pfl-research


def pfl(work: Workload, options: Options) -> list[float]:
    """Return the seconds of rounds of pfl's FederatedAveraging on its SimulatedBackend.

    Several processes share the device, and add their sums by gloo: NCCL refuses to.
    """
    os.environ["PFL_PYTORCH_DEVICE"] = options.device
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, backend, **rest: begin("gloo", **rest)
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        """The network with the two methods that pfl asks for."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.train()
            return functional.cross_entropy(self.inner(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            self.eval()
            found = functional.cross_entropy(self.inner(x), y, reduction="sum")
            return {"loss": Weighted(found.item(), len(y))}

    took: list[float] = []

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """Notes when rounds end."""

        def on_train_begin(self, *, model: Any) -> Any:
            self.began = time.perf_counter()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            took.append(time.perf_counter() - self.began)
            self.began = time.perf_counter()
            return False, Metrics()

    x, y = on_device(work, options.device)
    net = Net(new_net(work)).to(options.device)
    amp = torch.bfloat16 if options.precision == "bf16" else None
    central = torch.optim.SGD(net.parameters(), lr=1.0)
    model = PyTorchModel(net, torch.optim.SGD, central, amp_dtype=amp)

    def user(number: int) -> Any:
        return PyTorchTensorDataset((x[number], y[number]), user_id=str(number))

    np.random.seed(0)  # noqa: NPY002 - pfl draws from the global generator
    data = FederatedDataset(user, get_user_sampler("random", list(range(work.users))))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=options.warm + options.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        NNEvalHyperParams(local_batch_size=work.samples),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return took


# -- Flower


def flower(work: Workload, options: Options, workers: int) -> list[float]:
    """Return the seconds of rounds of Flower's simulation with so many workers."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    threads = 1 if options.cuda else max(1, cores() // workers)
    name, device, precision = work.name, options.device, options.precision
    client, server = ClientApp(), ServerApp()
    took: list[float] = []

    @client.train()
    def train(message: Message, context: Context) -> Message:
        from benchmarks import measuring, peers

        torch.set_num_threads(threads)
        own, asked = (
            measuring.WORKLOADS[name],
            measuring.Options(device=device, precision=precision),
        )
        x, y = measuring.samples(own.shape, own.users * own.samples)
        user = int(context.node_config["partition-id"])
        mine = slice(user * own.samples, (user + 1) * own.samples)
        net = measuring.new_net(own).to(device).train()
        arrays: Any = message.content["arrays"]
        net.load_state_dict(arrays.to_torch_state_dict())
        with measuring.tf32(precision == "tf32"):
            peers.local_sgd(net, x[mine].to(device), y[mine].to(device), own, asked)
        content: dict[str, Any] = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": own.samples}),
        }
        return Message(RecordDict(content), reply_to=message)

    class Timed(FedAvg):
        """FedAvg that notes when rounds begin."""

        def configure_train(self, *given: Any, **named: Any) -> Any:
            took.append(time.perf_counter())
            return super().configure_train(*given, **named)

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        strategy = Timed(
            fraction_train=work.cohort / work.users,
            min_train_nodes=work.cohort,
            fraction_evaluate=0.0,
            min_available_nodes=work.users,
        )
        start = ArrayRecord(new_net(work).state_dict())
        # One more: a round ends where the next begins.
        strategy.start(grid, start, num_rounds=options.warm + options.rounds + 1)

    share: Any = {"num_cpus": 1.0, "num_gpus": 1 / workers if options.cuda else 0.0}
    run_simulation(
        server,
        client,
        num_supernodes=work.users,
        backend_config={
            "client_resources": share,
            "init_args": {"num_cpus": cores(), "include_dashboard": False},
        },
    )
    return [end - begin for begin, end in pairwise(took)]


# -- processes of their own


def child(peer: str, work: Workload, options: Options, workers: int) -> None:
    """Run one peer in this process, and print the seconds of its rounds."""
    runs: dict[str, Callable[[], list[float]]] = {
        "plain": lambda: clocked(plain(work, options), options),
        "pfl": lambda: pfl(work, options),
        "flower": lambda: flower(work, options, workers),
    }
    for setting in settings(peer, options, workers):
        torch.set_num_threads(setting.threads)
        torch.backends.cudnn.benchmark = setting.search
        with tf32(setting.tf32):
            took = runs[peer]()
        print(f"\n{RESULT}{json.dumps({'setting': str(setting), 'took': took})}", flush=True)


@dataclass(frozen=True)
class Setting:
    """How a peer is run: what a user would try before saying that it is slow."""

    threads: int
    search: bool = False  # cuDNN's, for the fastest algorithm
    tf32: bool = False
    cuda: bool = False

    def __str__(self) -> str:
        if not self.cuda:
            return f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return ("tf32" if self.tf32 else "torch's defaults") + (", search" if self.search else "")


def settings(peer: str, options: Options, workers: int) -> list[Setting]:
    """Return the settings that a peer is tried in.

    In the rows of tf32 also torch's own defaults: small products may be faster without it.
    """
    if options.cuda:
        own = [options.precision == "tf32"]
        kinds = [True, False] if own[0] and workers == 1 else own
        searches = (False, True) if workers == 1 else (False,)
        count = torch.get_num_threads()
        return [Setting(count, each, kind, cuda=True) for kind in kinds for each in searches]
    alone = peer == "plain" or (peer == "pfl" and workers == 1)
    return [Setting(each) for each in sorted({1, cores() if alone else 1})]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


NEEDS = {"plain": (), "pfl": ("pfl",), "flower": ("flwr", "ray")}
WARM = 3  # rounds after which a peer is as fast as it gets
SECONDS = 20.0  # after which no more rounds of the product are begun, beside the first


def started(
    peer: str, work: Workload, options: Options, vendor: str | None, workers: int = 1
) -> tuple[Timing, str]:
    """Return how long the rounds of a peer take in its fastest setting, and which that is."""
    if any(importlib.util.find_spec(each) is None for each in NEEDS[peer]):
        raise NotRun("not installed")
    if options.late:
        raise NotRun("the time was used up")
    options = replace(options, warm=min(WARM, options.warm))
    command = [sys.executable, "-m", "benchmarks.peers", "--child", peer, "--works", work.name]
    command += ["--device", options.device, "--precision", options.precision]
    command += ["--rounds", str(options.rounds), "--warm", str(options.warm)]
    command += ["--workers", str(workers)]
    command += ["--users", str(work.users), "--cohort", str(work.cohort)]
    command += ["--vendor", vendor] if vendor else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path[1:]])
    }
    ranks = workers if peer == "pfl" else 1
    address = f"127.0.0.1:{_free_port()}"
    shared = {"PFL_WORKER_ADDRESSES": ",".join([address] * ranks)} if ranks > 1 else {}
    # Local ranks differ too: what only the first does on a machine shall not be done twice.
    processes = [
        subprocess.Popen(
            command,
            env=environment | shared | {"PFL_WORKER_RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed, complained = processes[0].communicate(timeout=600)
    finally:
        for each in processes:  # with what they started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
    found = [json.loads(x.removeprefix(RESULT)) for x in printed.splitlines() if RESULT in x]
    if not found:
        lines = complained.strip().splitlines() or ["no message"]
        raise RuntimeError(f"{peer} said: {lines[-1]}")
    tried = [(_timing(each["took"], options), each["setting"]) for each in found]
    return min(tried, key=lambda each: each[0].ms)


def _timing(took: Sequence[float], options: Options) -> Timing:
    milli = [1e3 * each for each in took[options.warm :]]
    middle = statistics.median(milli)
    return Timing(middle, min(milli), max(milli), took[0], len(milli), 0.0)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


# -- the table

TIMES = ("ms a round", "lowest", "highest", "first, s")
HEAD = ("work", "precision", "who", "setting", *TIMES, "× the product", "target")


@dataclass(frozen=True)
class Asked:
    """Which rows to measure."""

    peers: Sequence[str] = PEERS
    engines: Sequence[str] = ENGINES
    processes: Sequence[int] = PROCESSES
    vendor: str | None = None
    cuda: bool = False


def product(work: Workload, options: Options) -> tuple[Timing, str]:
    """Return how long the product's rounds take."""
    from anyfleet.methods import fedavg

    task = built(work, options.device)
    method = fedavg(count=work.cohort, lr=work.lr, batch_size=work.batch, epochs=1)
    return timed(method, task, options, seconds=SECONDS, replies=work.cohort), ""


def rows(work: Workload, options: Options, asked: Asked) -> list[tuple[Cell, ...]]:
    """Measure the product with every engine, then every peer, on one workload."""
    own = [
        _row(work, options, text, lambda: product(work, how))  # noqa: B023 - called at once
        for text, how in _products(options, asked)
    ]
    torch.cuda.empty_cache()
    best = _held([(row, each.ms) for row, each in own if each])
    found = [row for row, _ in own]
    for peer in asked.peers:
        tried = []
        for text, workers in _settings(peer, asked):
            run = lambda: started(peer, work, options, asked.vendor, workers)  # noqa: B023, E731
            tried.append(_row(work, options, text, run, best))
            if tried[0][1] is None:
                break
        found += _judged(tried, work, options, peer)
    return found


def _held(own: Sequence[tuple[tuple[Cell, ...], float]]) -> float | None:
    """Return the milliseconds that peers are held against: of `auto`, else of the fastest row."""
    auto = [ms for row, ms in own if str(row[2]).endswith("auto")]
    return min(auto or [ms for _, ms in own], default=None)


def _products(options: Options, asked: Asked) -> Iterator[tuple[str, Options]]:
    """Yield the rows of the product: every engine, and the stacked one compiled if asked."""
    for engine in asked.engines:
        for how in (False, True) if options.compile and engine == "stacked" else (False,):
            text = f"product, {engine}" + (", compiled" if how else "")
            yield text, replace(options, engine=engine, compile=how)


def _settings(peer: str, asked: Asked) -> Iterator[tuple[str, int]]:
    """Yield the rows of a peer: its name, and how many processes or workers it has."""
    if peer == "plain":
        yield "plain loop", 1
    elif peer == "pfl":
        for count in asked.processes:
            yield f"pfl, {count} process{'es' if count > 1 else ''}", count
    else:
        for count in {cores()} if not asked.cuda else (8, 4, 1):
            yield f"Flower, {count} worker{'s' if count > 1 else ''}", count


def _row(
    work: Workload,
    options: Options,
    who: str,
    measure: Callable[[], tuple[Timing, str]],
    best: float | None = None,
) -> tuple[tuple[Cell, ...], Timing | None]:
    """Return a row without its target, and the times in it."""
    kept: list[Timing] = []

    def cells() -> tuple[Cell, ...]:
        each, setting = measure()
        kept.append(each)
        ratio = each.ms / best if best else None
        return setting, each.ms, each.low, each.high, each.first, ratio, ""

    row = attempted(cells, len(HEAD), work.name, options.precision, who)
    ms = f"{kept[0].ms:9.1f} ms" if kept else "        -   "
    print(f"    {work.name} {options.precision:8} {who:32} {ms}", file=sys.stderr, flush=True)
    return row, kept[0] if kept else None


def _judged(
    tried: Sequence[tuple[tuple[Cell, ...], Timing | None]],
    work: Workload,
    options: Options,
    peer: str,
) -> list[tuple[Cell, ...]]:
    """Return the rows of a peer; the one that a target speaks of says whether it is met."""
    ran = [number for number, (_, each) in enumerate(tried) if each]
    made = [row for row, _ in tried]
    goal = (
        GPU_TARGETS.get((work.name, peer, options.precision))
        if options.cuda
        else CPU_TARGETS.get((work.name, peer))
    )
    if not ran or goal is None:
        return made
    # The target of pfl is that of one process.
    held = 0 if peer == "pfl" else min(ran, key=lambda number: tried[number][1].ms)  # type: ignore[union-attr]
    ratio = made[held][-2]
    if isinstance(ratio, float):
        made[held] = (*made[held][:-1], at_least(ratio, goal))
    return made


def training_share(works: Sequence[Workload], options: Options, engines: Sequence[str]) -> Table:
    """Return what whole rounds take over the training that is in them."""
    from anyfleet.methods import fedavg

    def row(work: Workload, engine: str) -> tuple[Cell, ...]:
        own = replace(options, engine=engine)
        method = fedavg(count=work.cohort, lr=work.lr, batch_size=work.batch)
        rounds = play_rounds(method, built(work, own.device), own)
        found = times_of(rounds, own, seconds=SECONDS)
        split = shares(rounds, 4.0)
        whole = 1 / split["train launch"]
        return found.ms, found.ms / whole, whole, verdict(whole, 1.10)

    head = ("work", "engine", "ms a round", "of it training, ms", "round ÷ training", "target")
    made = [
        attempted(lambda: row(work, engine), len(head), work.name, engine)  # noqa: B023
        for work in works
        for engine in engines
    ]
    return Table("training", "Whole rounds over the training in them", head, tuple(made))


def chosen(made: Sequence[tuple[Cell, ...]], options: Options, engines: Sequence[str]) -> Table:
    """Return what `auto` takes over the fastest engine: on each workload, and in the demo."""
    from benchmarks.precisions import FLEET, SGD, TASK

    from anyfleet.methods import fedavg

    text = "product, "
    known: dict[str, dict[str, float]] = {}
    for work, _, who, _, ms, *_ in made:
        if isinstance(ms, float) and isinstance(who, str) and who.startswith(text):
            known.setdefault(str(work), {})[who.removeprefix(text)] = ms
    task = TASK.build(0)
    for engine in engines:
        own = replace(options, engine=engine)
        with contextlib.suppress(NotRun):
            each = timed(fedavg(**SGD), task, own, FLEET, seconds=20.0)
            known.setdefault("demo", {})[engine] = each.ms
    head = ("work", *engines, "auto ÷ best", "target")
    found: list[tuple[Cell, ...]] = []
    for name, by_engine in known.items():
        auto = by_engine.get("auto")
        ratio = None if auto is None else auto / min(by_engine.values())
        told = "not run: no engine auto" if ratio is None else verdict(ratio, 1.10)
        found.append((name, *(by_engine.get(engine) for engine in engines), ratio, told))
    return Table("engines", "Engines, ms a round, and the one that is chosen", head, tuple(found))


def tables(
    works: Sequence[Workload], options: Options, asked: Asked, precisions: Sequence[Precision]
) -> list[Table]:
    """Measure every workload in every precision."""
    made = [
        row
        for work in works
        for precision in precisions
        for row in rows(work, replace(options, precision=precision), asked)
    ]
    sizes = sorted({(w.users, w.cohort, w.samples, w.batch) for w in works})
    notes = [
        f"{users:,} users with {count} samples each, cohorts of {cohort}, batches of {batch}, one "
        "epoch; whole rounds of FedAvg without evaluation."
        for users, cohort, count, batch in sizes
    ]
    notes.append(
        "The ratio is to the product in the same precision: to `auto` where it is listed, else to "
        "the fastest row."
    )
    notes.append("A peer's row is its fastest setting of those that were tried.")
    found = [Table("peers", "The product and its peers", HEAD, tuple(made), tuple(notes))]
    if not options.cuda:
        found.append(chosen(made, options, asked.engines))
        found.append(training_share(works, options, asked.engines))
    return found


def resized(works: Sequence[str], given: argparse.Namespace) -> list[Workload]:
    """Return workloads, with another number of users or another cohort if these are given."""
    own = [WORKLOADS[name] for name in works]
    return [
        replace(each, users=given.users or each.users, cohort=given.cohort or each.cohort)
        for each in own
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or run one peer."""
    read = parser(__doc__)
    read.add_argument("--works", nargs="+", choices=WORKLOADS, default=["P"])
    read.add_argument("--precisions", nargs="+", choices=get_args(Precision))
    read.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    read.add_argument("--engines", nargs="+", default=ENGINES, help="of the product")
    read.add_argument("--processes", type=int, nargs="+", default=PROCESSES, help="of pfl")
    read.add_argument("--users", type=int, help="instead of the workload's own")
    read.add_argument("--cohort", type=int, help="instead of the workload's own")
    read.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    read.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    given = read.parse_args(arguments)
    options, works = given_options(given), resized(given.works, given)
    if given.child:
        child(given.child, works[0], options, given.workers)
        return
    asked = Asked(given.peers, given.engines, given.processes, given.vendor, options.cuda)
    precisions = given.precisions or [options.precision]
    report("peers", tables(works, options, asked, precisions), options, given.out)


if __name__ == "__main__":
    main()
