"""Kill runs at random moments, resume them, and see whether anything differs.

    python -m tools.kill [N] [--seed S]

N processes (by default 100) are killed: some after a random time, some at a random file operation,
some at a random byte of a file that grows too long. A run is killed several times, also while it
is being resumed, and then left to end. The records of its rounds, its ledger, its model and its
last checkpoint must have the same bytes as in a run that was not disturbed. The exit code is 1 if
one of them has not.

Every process is a fork of this one, which has imported everything already. POSIX only.
"""

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from tools.dying import WAYS, Process, Scale, watch

from anyfleet import methods, tasks
from anyfleet.core.method import Method
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, build, play
from anyfleet.names import Factory
from anyfleet.parts.codec import ErrorFeedback, Stc
from anyfleet.parts.schedule import Buffered, Deadline
from anyfleet.runtime import Sequential, Stacked
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.store import Recording, Terms, checkpoint, reopen
from anyfleet.store.tensor_blocks import content, read, view
from anyfleet.tasks import Generator, zoo
from anyfleet.world import levels

KILLS_PER_RUN = 4
NOT_SEEN = ("id", "block", "offset")
COMPARED = ("rounds.jsonl", "ledger.jsonl", "model.safetensors", "config.toml", "papers.bib")

MODEL = Factory.of(zoo.perceptron, features=60, hidden=(16,))
TASK = tasks.Synthetic(MODEL, Generator(devices=8, samples=50), server=20)
FLEET = levels(speeds=(2e9, 1e9, 5e8), mortality=0.1)
BASE = replace(
    methods.heterofl(widths=(1.0, 0.5), count=4, lr=0.1), cache=True, uplink=ErrorFeedback(Stc(0.2))
)
LATE = replace(BASE, schedule=Deadline(0.003, late="counted", staleness=2))
ASYNCHRONOUS = replace(BASE, schedule=Buffered(concurrency=5, buffer_size=2))


def experiment(method: Method, engine: Engine = Sequential()) -> Experiment:  # noqa: B008 - frozen
    """Return a short run with this method and engine."""
    return Experiment(TASK, method, FLEET, engine, rounds=6, widths=(1.0, 0.5))


# One row for each kind of run. All have caches and error feedback; all but the first have orders
# in flight between two rounds.
RUNS: Mapping[str, Experiment] = {
    "synchronous": experiment(BASE),
    "deadline": experiment(LATE),
    "asynchronous": experiment(ASYNCHRONOUS),
    "stacked": experiment(ASYNCHRONOUS, Stacked(chunk=2)),
}


# --- a process that can be killed -------------------------------------------------------------


def advance(folder: Path, planned: Experiment, reached: Callable[[], None]) -> None:
    """Begin a run, or go on with it, to its end; call `reached` once the folder is open."""
    if (folder / "environment.json").exists():
        run = reopen(folder, Terms())
        reached()
        recording = Recording(folder, run.experiment, past=run.past, every=1)
        results = play(run.experiment, run.task, resume=run.past.state)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        recording = Recording(folder, planned, every=1)
        reached()
        results = play(planned, build(planned))
    with recording:
        for result in results:
            recording.append(result)


# --- what is left -----------------------------------------------------------------------------


def where(folder: Path, rounds: int, *, reached: bool) -> str:
    """Return what a process was doing when it died, as its folder tells."""
    home = folder / "checkpoints"
    if not (folder / "environment.json").exists():
        return "before the start"
    if not reached:
        return "opening the folder"
    if home.is_dir() and list(home.glob(".*.part")):
        return "writing a checkpoint"
    logged_rounds, torn = logged(folder)
    if torn:
        return "appending to a log"
    whole = [path for path in checkpoint.found(folder) if good(path)]
    if len(whole) < len(checkpoint.found(folder)) or len(whole) > checkpoint.KEPT:
        return "removing a checkpoint"
    done = int(whole[0].name) if whole else 0
    if logged_rounds > done:
        return "between log and checkpoint"
    if done == rounds:
        return "closing the run"
    return "computing" if done else "before a checkpoint"


def good(path: Path) -> bool:
    """Return whether a checkpoint is whole."""
    try:
        checkpoint.examine(path)
    except StoreError:
        return False
    return True


def logged(folder: Path) -> tuple[int, bool]:
    """Return how many rounds are in the log, and whether something is half written."""
    parts = [folder / name for name in ("rounds.jsonl", "ledger.jsonl")]
    records, ledger = (part.read_bytes() if part.exists() else b"" for part in parts)
    rows = [msgspec.json.decode(line)["round_index"] for line in ledger.split(b"\n")[:-1]]
    rounds = records.count(b"\n")
    torn = any(text and not text.endswith(b"\n") for text in (records, ledger))
    return rounds, torn or max(rows, default=-1) >= rounds


def differences(one: Path, two: Path) -> list[str]:
    """Return the names of the files whose bytes differ."""
    wrong = [name for name in COMPARED if (one / name).read_bytes() != (two / name).read_bytes()]
    states = [spelt_out(checkpoint.found(folder)[0]) for folder in (one, two)]
    return wrong if states[0] == states[1] else [*wrong, "last checkpoint"]


def spelt_out(path: Path) -> object:
    """Return all values of a checkpoint, but not which were shared: nobody can see that."""
    blocks = read(path / checkpoint.TENSORS)
    shared: dict[int, object] = {}

    def inside(item: object) -> object:
        """Return the content of a table of fields or keys, which is no node itself."""
        if isinstance(item, dict):
            return {key: full(each) for key, each in item.items()}
        return full(item)

    def full(node: object) -> object:
        if isinstance(node, list):
            return [full(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "ref" in node:
            return shared[node["ref"]]
        made = {key: inside(item) for key, item in node.items() if key not in NOT_SEEN}
        if "block" in node:
            made["content"] = bytes(content(view(blocks[node["block"]], node)))
        if "id" in node:
            shared[node["id"]] = made
        return made

    return full(msgspec.json.decode((path / checkpoint.STATE).read_bytes()))


# --- all of it --------------------------------------------------------------------------------


def undisturbed(folder: Path, planned: Experiment) -> Scale:
    """Run an experiment once without disturbing it; return what that takes."""
    note = folder.with_suffix(".operations")

    def work(reached: Callable[[], None]) -> None:
        seen = watch(-1, lambda: None)
        advance(folder, planned, reached)
        note.write_text(str(seen[0]))

    began = time.monotonic()
    Process.start(work).end()
    seconds = time.monotonic() - began
    longest = max(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Scale(seconds, int(note.read_text()), longest)


def torment(folder: Path, planned: Experiment, scale: Scale, luck: random.Random) -> Counter[str]:
    """Kill a run some times and then let it end; return where it was hit."""
    hits: Counter[str] = Counter()

    def work(reached: Callable[[], None]) -> None:
        advance(folder, planned, reached)

    for _ in range(KILLS_PER_RUN):
        ended, reached = luck.choice(WAYS)(work, luck.random(), scale).end()
        if not ended:  # it ended before that
            return hits
        hits[where(folder, planned.rounds, reached=reached)] += 1
    Process.start(work).end()
    return hits


@dataclass
class Account:
    """What became of one kind of run: where its runs were killed, and what differed at the end."""

    hits: Counter[str]
    runs: int
    wrong: list[str]


def kill(name: str, planned: Experiment, *, kills: int, seed: int, home: Path) -> Account:
    """Kill runs of one kind at least so many times; compare each with the undisturbed one."""
    luck = random.Random(f"{seed} {name}")  # noqa: S311 - no secret
    whole, folder = home / "undisturbed", home / "killed"
    scale, account = undisturbed(whole, planned), Account(Counter(), 0, [])
    while account.hits.total() < kills:
        shutil.rmtree(folder, ignore_errors=True)
        account.hits += torment(folder, planned, scale, luck)
        account.runs += 1
        account.wrong += differences(whole, folder)
    return account


def table(accounts: Mapping[str, Account]) -> Table:
    """Return a table with one column for every kind of run."""
    places = sorted({place for account in accounts.values() for place in account.hits})
    shown = Table("killed while", *accounts, box=None, pad_edge=False)
    for place in places:
        shown.add_row(place, *(str(account.hits[place]) for account in accounts.values()))
    rows: Mapping[str, Callable[[Account], object]] = {
        "kills": lambda account: account.hits.total(),
        "runs": lambda account: account.runs,
        "differs": lambda account: ", ".join(sorted(set(account.wrong))) or "nothing",
    }
    for name, told in rows.items():
        shown.add_row(name, *(str(told(account)) for account in accounts.values()))
    return shown


def main(kills: int, seed: int) -> int:
    """Kill, show the table, and return the exit code."""
    torch.set_num_threads(1)  # a fork has only the thread that made it
    for planned in RUNS.values():
        list(play(planned))  # so that all is done that Python and torch do only once
    console = Console(width=None if sys.stdout.isatty() else 160)
    accounts: dict[str, Account] = {}
    with TemporaryDirectory() as folder:
        for number, (name, planned) in enumerate(RUNS.items()):
            home = Path(folder) / name
            home.mkdir()
            share = (kills + number) // len(RUNS)
            accounts[name] = kill(name, planned, kills=share, seed=seed, home=home)
    console.print(table(accounts))
    count = sum(account.hits.total() for account in accounts.values())
    wrong = sum(len(account.wrong) for account in accounts.values())
    verdict = f"{wrong} files DIFFER" if wrong else "every file has the same bytes"
    console.print(f"{count} kills: {verdict} as without.")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill runs and resume them.")
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(main(given.kills, given.seed))
