"""A real fleet on one machine beside stock Flower: seconds of a round, and bytes on the wire.

    python -m benchmarks.real_fleet                          # 4 and 16 nodes: about 20 minutes
    python -m benchmarks.real_fleet --nodes 4 --rounds 6 --methods fedavg stc

Ours is a practice fleet: the public commands as processes, with TLS, keys and SQLite. Stock Flower
is `flower-superlink` with a `flower-supernode` for each node, as its manual has it, with the same
certificates and keys. It keeps its state in memory, which is its default: with SQLite and 16 nodes
on two cores it ended after the first round ("database is locked"). Its app
(benchmarks/stock_flower) trains the same network on the same data, and both use one thread a
device. Nothing is evaluated in the rounds that count.

A round lasts from the end of the last to its own end. What it costs beyond training and transfer
is that time, less the seconds that the slowest device trained (ours: the ledger's
`compute_seconds`), less the time in which its messages cross a plain socket on loopback, whose
rate is measured first. The first round, in which devices check in and import, does not count.

Bytes are counted by a proxy before the gate or the SuperLink, so that they are those of TCP: with
TLS, HTTP, polls and heartbeats. Rounds of stock Flower last longer, and its nodes poll all the
while; this counts.
"""

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.measuring import ROOT, Cell, NotRun, Options, Table, attempted, report

from anyfleet import config
from anyfleet.deployment.practice import Practice, practise
from anyfleet.experiment import Prepared, from_source, prepare
from anyfleet.runtime import Sequential

HOST = "127.0.0.1"
APP = ROOT / "benchmarks" / "stock_flower"
SAMPLES = 150  # of a device; a tenth of them is for its tests
SERVER = 500  # images that the server keeps
BYTE_NODES = 5  # one for each width
_PATIENCE = 120.0  # seconds for something to start
_ROUND = 180.0  # seconds for a round of stock Flower, at most
_LOOK = 0.02  # seconds between two looks at a file that grows
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

# What changes of a recipe for each method: all train the same network on the same data.
SAME = ("method.lr=0.05", "method.momentum=0.9", "method.epochs=1", "method.batch_size=32")
METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fedavg": ("fedavg", SAME),
    "heterofl": (
        "heterofl",
        (
            "method.widths=[1.0,0.5,0.25,0.125,0.0625]",
            "widths=[1.0]",
            "fleet.speeds=[2e9,1e9,5e8,2.5e8,1.25e8]",
            "method.epochs=1",
            "method.batch_size=32",
        ),
    ),
    "stc": ("stc", ("method.epochs=1", "method.batch_size=32")),
    "anycost": (
        "anycost",
        (
            "task.model={use='cnn_mnist'}",
            "widths=[1.0]",
            "method.batch_size=32",
            f"fleet.devices={BYTE_NODES}",
        ),
    ),
}


@dataclass(frozen=True)
class Round:
    """A round as it was measured."""

    seconds: float
    compute: float  # seconds that the slowest device trained
    counted_down: float  # bytes of all devices that the ledger counts
    counted_up: float
    processor: float = 0.0  # seconds of all processes
    wire_down: float = 0.0  # bytes of all devices that crossed the port
    wire_up: float = 0.0


class Seen(NamedTuple):
    """What was counted up to the end of a round."""

    processor: float
    down: int
    up: int


# -- bytes that cross a port


class Counter:
    """A port on loopback that passes bytes on to another, and counts them both ways."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.up = self.down = 0
        self._server = socket.create_server((HOST, 0), backlog=256)
        self.port = int(self._server.getsockname()[1])
        self._ends = selectors.DefaultSelector()
        self._ends.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._pass, daemon=True)
        self._stop = False

    def __enter__(self) -> "Counter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        for key in list(self._ends.get_map().values()):
            with suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._ends.close()

    def _pass(self) -> None:
        while not self._stop:
            for key, _ in self._ends.select(0.2):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._forward(key.fileobj, *key.data)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        try:
            far = socket.create_connection((HOST, self._target))
        except OSError:
            near.close()
            return
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends.register(near, selectors.EVENT_READ, (far, True))
        self._ends.register(far, selectors.EVENT_READ, (near, False))

    def _forward(self, source: Any, sink: socket.socket, upwards: bool) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(1 << 16)
            sink.sendall(data)
        if upwards:
            self.up += len(data)
        else:
            self.down += len(data)
        if not data:
            for each in (source, sink):
                with suppress(KeyError, ValueError):
                    self._ends.unregister(each)
                each.close()


@contextmanager
def noted(file: Path, counter: Counter | None, seen: list[Seen]) -> Iterator[None]:
    """Add to a list, for each line that a file gets, what was counted up to then."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(_LOOK):
            lines = file.read_bytes().count(b"\n") if file.exists() else 0
            if len(seen) < lines:
                crossed = (counter.down, counter.up) if counter is not None else (0, 0)
                seen.extend([Seen(processor_seconds(), *crossed)] * (lines - len(seen)))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def processor_seconds() -> float:
    """Return the processor time of all processes that were started from here, so far."""
    import psutil

    total = 0.0
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            spent = each.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def with_seen(rounds: Sequence[Round], seen: Sequence[Seen]) -> list[Round]:
    """Return the rounds with what was counted in each of them; `seen` has one entry more."""
    if len(seen) != len(rounds) + 1:
        raise NotRun(f"{len(seen)} ends of {len(rounds) + 1} rounds were seen")
    return [
        replace(
            each,
            processor=after.processor - before.processor,
            wire_down=float(after.down - before.down),
            wire_up=float(after.up - before.up),
        )
        for each, (before, after) in zip(rounds, pairwise(seen), strict=True)
    ]


def loopback_rate(count: int = 1 << 28) -> float:
    """Return how many bytes a second cross a plain socket on loopback."""
    with socket.create_server((HOST, 0)) as server:
        port, chunk = server.getsockname()[1], bytes(1 << 20)

        def send() -> None:
            with socket.create_connection((HOST, port)) as out:
                for _ in range(count // len(chunk)):
                    out.sendall(chunk)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        near, _ = server.accept()
        began = time.perf_counter()
        with near:
            while near.recv(1 << 20):
                pass
        took = time.perf_counter() - began
        thread.join()
    return count / took


# -- our fleet


def prepared_for(method: str, nodes: int, rounds: int) -> tuple[Path, tuple[str, ...], Prepared]:
    """Return a recipe, what changes of it, and the task that is made of both."""
    name, changes = METHODS[method]
    file = ROOT / "recipes" / f"{name}.toml"
    common = (
        f"rounds={rounds}",
        "evaluate_every=1000000",
        f"task.devices={nodes}",
        f"task.limit={SERVER + SAMPLES * nodes}",
        f"task.server={SERVER}",
        "task.partition={use='Iid'}",
        f"method.count={nodes}",
    )
    overrides = (*common, *changes)
    source = config.read(file, overrides, ())
    experiment = replace(from_source(source), engine=Sequential(), device="cpu")
    return file, overrides, prepare(experiment)


def ours(folder: Path, method: str, nodes: int, rounds: int, *, counted: bool) -> list[Round]:
    """Return the rounds of a practice fleet after the first; bytes that cross if `counted`."""
    file, overrides, prepared = prepared_for(method, nodes, rounds)
    practice = Practice(file, overrides, (), folder, identical=True)
    seen: list[Seen] = []
    said: list[str] = []
    with ExitStack() as stack:
        told = practise(practice, prepared)
        said.append(next(told))  # there is a folder for devices
        counter = None
        if counted:
            # Devices reach the gate through the counter: their folders name its port.
            about = practice.fleet / "device" / "fleet.toml"
            text = about.read_text(encoding="utf-8")
            port = re.search(r'address = ".*:(\d+)"', text)
            assert port is not None
            counter = stack.enter_context(Counter(int(port.group(1))))
            about.write_text(text.replace(port.group(1), str(counter.port)), encoding="utf-8")
            said.append(next(told))  # all devices have their folders
            about.write_text(text, encoding="utf-8")
        stack.enter_context(noted(practice.run / "rounds.jsonl", counter, seen))
        for line in told:
            said.append(line)
            print(f"      {line}", file=sys.stderr, flush=True)
    return with_seen(_ledger_rounds(practice.run), seen)


def _ledger_rounds(run: Path) -> list[Round]:
    """Return the rounds of a run after the first, as its files tell them."""
    ended = [each["time"] for each in _lines(run / "rounds.jsonl")]
    orders = _lines(run / "ledger.jsonl")
    found = []
    for number, (before, after) in enumerate(pairwise(ended), start=1):
        mine = [each for each in orders if each["round_index"] == number]
        found.append(
            Round(
                seconds=after - before,
                compute=max((each["compute_seconds"] or 0.0 for each in mine), default=0.0),
                counted_down=sum(each["bits_down"] for each in mine) / 8,
                counted_up=sum(each["bits_up"] for each in mine) / 8,
            )
        )
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- stock Flower


def stock(folder: Path, from_ours: Path, nodes: int, rounds: int, *, counted: bool) -> list[Round]:
    """Return the rounds of stock Flower after the first, on the data and keys of a practice fleet.

    The bytes of the ledger are those of the network, once down and once up for each node.
    """
    folder.mkdir(parents=True)
    fleet, port, notes = from_ours / "fleet", free_port(), folder / "rounds.jsonl"
    seen: list[Seen] = []
    with ExitStack() as stack:
        files = {
            "--ssl-ca-certfile": fleet / "ca.crt",
            "--ssl-certfile": fleet / "server.crt",
            "--ssl-keyfile": fleet / "server.key",
        }
        words = [word for name, file in files.items() for word in (name, str(file))]
        words += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        words += ["--host", HOST, "--port", str(port)]
        started(stack, folder / "superlink", "flower-superlink", *words)
        awaited(lambda: answers(port), "flower-superlink does not answer", folder / "superlink")
        home = _connection(folder, fleet / "ca.crt", port)
        counter = stack.enter_context(Counter(port)) if counted else None
        reached = counter.port if counter is not None else port
        stack.enter_context(noted(notes, counter, seen))
        for number in range(nodes):
            own = from_ours / f"device-{number}"
            flwr(home, "supernode", "register", str(own / "device.pub"), "bench")
            started(
                stack,
                folder / f"node-{number}",
                "flower-supernode",
                *("--root-certificates", str(fleet / "ca.crt")),
                *("--superlink", f"{HOST}:{reached}"),
                *("--auth-supernode-private-key", str(own / "device.key")),
                *("--node-config", f'data="{own / "data.npz"}"'),
                *("--host", HOST, "--port", str(free_port())),
            )
        changed = f'nodes={nodes} rounds={rounds} notes="{notes}"'
        flwr(home, "run", str(APP), "bench", "--run-config", changed)
        awaited(
            lambda: notes.exists() and len(_lines(notes)) >= rounds,
            "stock Flower has not played its rounds",
            folder / "superlink",
            rounds * _ROUND,
        )
        awaited(lambda: len(seen) >= rounds, "the last round was not seen", folder / "superlink")
    played = _lines(notes)
    if any(each["replies"] != nodes for each in played[1:]):
        raise NotRun("some nodes of stock Flower did not reply; see their logs")
    size = 4.0 * nodes * sum(each.numel() for each in _net().parameters())
    found = [
        Round(after["time"] - before["time"], after["compute"], size, size)
        for before, after in pairwise(played)
    ]
    return with_seen(found, seen)


def _net() -> torch.nn.Module:
    from anyfleet.tasks.zoo import cnn_mnist

    return cnn_mnist()


def _connection(folder: Path, authority: Path, port: int) -> Path:
    """Write where Flower's own command finds the SuperLink; return its home."""
    home = folder / "flower"
    home.mkdir()
    text = f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "{HOST}:{port}"\n'
    text += f'root-certificates = "{authority}"\n'
    (home / "config.toml").write_text(text, encoding="utf-8")
    return home


def flwr(home: Path, *words: str) -> None:
    """Run Flower's own command; raise NotRun with what it printed if it fails."""
    done = subprocess.run(
        [program("flwr"), *words],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode:
        raise NotRun(f"`flwr {words[0]}` failed: {(done.stdout + done.stderr)[-500:]}")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, with a home of their own."""
    beside = str(Path(sys.executable).parent)
    path = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"  # it starts others by their names
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def program(name: str) -> str:
    """Return a program that is installed beside Python; raise NotRun if it is not."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        raise NotRun(f"{name} is not installed: pip install 'anyfleet[fleet]'")
    return str(found)


def started(stack: ExitStack, home: Path, name: str, *words: str) -> None:
    """Start a program with its own home and log; it and all it starts end with the stack."""
    home.mkdir(parents=True)
    with (home / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [program(name), *words],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stack.callback(ended, process)


def ended(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it started."""
    import psutil

    with suppress(psutil.Error):
        family = [*psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        for each in family:
            with suppress(psutil.Error):
                each.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def answers(port: int) -> bool:
    """Return whether something listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def awaited(there: Callable[[], bool], what: str, home: Path, seconds: float = _PATIENCE) -> None:
    """Wait until something is there; raise NotRun with the end of a log if it is not."""
    until = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            raise NotRun(f"{what}: {(home / 'log.txt').read_text(errors='replace')[-300:]}")
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# -- tables

OVERHEAD = (
    *("who", "nodes", "rounds", "wall, ms", "training, ms", "transfer, ms"),
    *("beyond both, ms", "least", "most", "processor, ms", "stock / ours", "load", "remark"),
)
WIRE = (
    *("who", "method", "nodes", "rounds", "counted down, kB", "counted up, kB"),
    *("wire down, kB", "wire up, kB", "of stock's", "s a round", "remark"),
)


def beyond(each: Round, rate: float) -> float:
    """Return the seconds of a round beyond training and transfer."""
    return each.seconds - each.compute - transfer(each, rate)


def transfer(each: Round, rate: float) -> float:
    """Return the seconds in which a round's messages cross a socket of so many bytes a second."""
    return (each.counted_down + each.counted_up) / rate


def overhead_row(measure: Callable[[], list[Round]], rate: float) -> tuple[Cell, ...]:
    """Return the columns of a table about the seconds of rounds: medians, and the range."""
    rounds = measure()
    over = [1e3 * beyond(each, rate) for each in rounds]
    wall, trained, moved, processor = (
        1e3 * statistics.median(values)
        for values in (
            [each.seconds for each in rounds],
            [each.compute for each in rounds],
            [transfer(each, rate) for each in rounds],
            [each.processor for each in rounds],
        )
    )
    times = (wall, trained, moved, statistics.median(over), min(over), max(over), processor)
    return (len(rounds), *times, None, os.getloadavg()[0], "")


def wire_row(measure: Callable[[], list[Round]], nodes: int) -> tuple[Cell, ...]:
    """Return the columns of a table about bytes: medians of a round, for each device."""
    rounds = measure()
    counted_down, counted_up, down, up = (
        statistics.median(values) / nodes / 1e3
        for values in (
            [each.counted_down for each in rounds],
            [each.counted_up for each in rounds],
            [each.wire_down for each in rounds],
            [each.wire_up for each in rounds],
        )
    )
    seconds = statistics.median(each.seconds for each in rounds)
    return (nodes, len(rounds), counted_down, counted_up, down, up, None, seconds, "")


def overhead_rows(folder: Path, nodes: int, rounds: int, rate: float) -> list[tuple[Cell, ...]]:
    """Measure the seconds of rounds of ours and of stock Flower, one after the other."""
    mine, theirs = folder / f"ours-{nodes}", folder / f"stock-{nodes}"
    measures: dict[str, Callable[[], list[Round]]] = {
        "Anyfleet": partial(ours, mine, "fedavg", nodes, rounds, counted=False),
        "stock Flower": partial(stock, theirs, mine, nodes, rounds, counted=False),
    }
    both = []
    for who, measure in measures.items():
        say(f"{who}, {nodes} nodes")
        found = partial(overhead_row, measure, rate)
        both.append(attempted(found, len(OVERHEAD), who, nodes))
        say(str(both[-1]))
    first, second = both[0][6], both[1][6]
    if isinstance(first, float) and isinstance(second, float):
        both[0] = (*both[0][:-3], second / first, *both[0][-2:])
    return both


def overhead_table(rows: Sequence[tuple[Cell, ...]], rate: float) -> Table:
    """Return the table of the seconds of rounds."""
    notes = (
        "Medians over the rounds after the first; least and most of the time beyond both.",
        f"Transfer: the bytes of the messages at {rate / 1e9:.1f} GB/s, a socket on loopback.",
        "Beyond both: wall time less training of the slowest device, less transfer.",
        "Processor: the time of all processes in a round, training included.",
        "Load: processes that wanted to run at the end, of this benchmark and of others.",
    )
    title = "Milliseconds of a FedAvg round on real nodes"
    return Table("real_overhead", title, OVERHEAD, tuple(rows), notes)


def wire_table(folder: Path, methods: Sequence[str], rounds: int, nodes: int = BYTE_NODES) -> Table:
    """Count the bytes of rounds of our methods, and of stock Flower's FedAvg."""
    first = folder / f"wire-{methods[0]}"
    measures: dict[tuple[str, str], Callable[[], list[Round]]] = {
        ("Anyfleet", method): partial(
            ours, folder / f"wire-{method}", method, nodes, rounds, counted=True
        )
        for method in methods
    }
    into = folder / "wire-stock"
    measures["stock Flower", "fedavg"] = partial(stock, into, first, nodes, rounds, counted=True)
    rows = []
    for (who, method), measure in measures.items():
        say(f"bytes of {who}, {method}")
        rows.append(attempted(partial(wire_row, measure, nodes), len(WIRE), who, method))
        say(str(rows[-1]))
    whole = rows[-1]
    for number, each in enumerate(rows):
        if isinstance(whole[6], float) and isinstance(each[6], float):
            ratio = (each[6] + each[7]) / (whole[6] + whole[7])  # type: ignore[operator]
            rows[number] = (*each[:8], ratio, *each[9:])
    notes = (
        "Medians of a round, for each device; of stock's: both ways together, of the last row.",
        "Counted: what the ledger charges for messages; of stock Flower, the parameters.",
        "Wire: all bytes that TCP carried, with TLS, HTTP, polls and heartbeats.",
        "HeteroFL has one device for each width from 1 to 1/16.",
        "Devices of AnycostFL have the conditions of the cell in recipes/anycost.toml.",
    )
    return Table("real_bytes", "Bytes of a round on the wire", WIRE, tuple(rows), notes)


def say(text: str) -> None:
    """Print what is measured now."""
    print(f"    {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, and print the tables."""
    reader = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    reader.add_argument("--nodes", type=int, nargs="*", default=(4, 16))
    reader.add_argument("--rounds", type=int, default=6, help="that count, after one that does not")
    reader.add_argument("--methods", nargs="*", choices=METHODS, default=tuple(METHODS))
    reader.add_argument("--out", type=Path, help="a folder for the tables, as JSON and Markdown")
    given = reader.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="anyfleet-real-fleet-") as made:
        folder, rate = Path(made), loopback_rate()
        rows, tables = list[tuple[Cell, ...]](), list[Table]()
        if given.methods:
            tables.append(wire_table(folder, given.methods, given.rounds + 1))
        for nodes in given.nodes:
            rows += overhead_rows(folder, nodes, given.rounds + 1, rate)
            # What is there is written at once: the next takes some minutes.
            found = [overhead_table(rows, rate), *tables]
            report("real_fleet", found, Options(engine="real devices"), given.out)
        if not given.nodes:
            report("real_fleet", tables, Options(engine="real devices"), given.out)


if __name__ == "__main__":
    main()
