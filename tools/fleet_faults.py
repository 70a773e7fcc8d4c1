"""Torment a real fleet: kill, cut, lie, revoke; see that the run goes on, and how soon.

    python -m tools.fleet_faults [--tries 20] [--kinds KIND ...] [--jobs 2] [--seed 0]
    python -m tools.fleet_faults --soak 200 [--devices 8]

Every kind of fault has a fleet of its own on loopback: a server and devices, each a process that a
public command starts. Faults hit it at random moments, one after the other, in one run. After each,
a round that began later must be completed, and somebody must have said what happened, where anybody
does. In the end the run is resumed and ends by itself. Where no order failed, its model must be
that of the simulator, bit for bit. The exit code is 1 if a round is lost, if something hangs, if a
model differs, or if nobody says what happened.

Results go into build/fleet_faults.json (soak: build/fleet_soak.json), and with --page into
docs/fleet_faults.md: a row there names the commit that its tries began with, and rows of kinds that
are not run again stay. POSIX only.
"""

import argparse
import datetime as dt
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tools.fleet_clock import clock, compiler, set_clock
from tools.fleet_rig import Device, Rig, Setting, Trouble, memory, pause, rigged, tail, wait

from anyfleet.deployment.practice import name_of
from tests.helpers.cut_link import CutLink

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "fleet_faults.md"
MARKS = ("<!-- {} begins -->", "<!-- {} ends -->")
ROUND = 1.5  # seconds: a fault comes at a random moment of so long a time
DAY = 86400


@dataclass(frozen=True)
class Wanted:
    """What must become true after a fault."""

    back: Callable[[], bool]  # the fleet works as it should after such a fault
    told: Callable[[], bool] | None  # somebody has said what happened; None: nobody does
    what: str  # the fault, in words
    at: float  # when it happened


Fault = Callable[[Rig, random.Random], AbstractContextManager[Wanted]]


@dataclass(frozen=True)
class Group:
    """Kinds of faults that hit one fleet, in random order."""

    name: str
    setting: Setting
    faults: Mapping[str, Fault]  # by kind
    adapt: Callable[[Device], None]
    same: bool = True  # no order may fail, and the model must be the simulator's


@dataclass
class Account:
    """What became of one kind of fault."""

    kind: str
    tries: int = 0
    rounds: int = 0
    lost: int = 0
    again: int = 0  # rounds that a killed server played again from the answers of devices
    failed: int = 0  # orders
    seconds: list[float] = field(default_factory=list)
    model: str = "–"
    wrong: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    commit: str = ""  # of which, and when, it was begun

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.wrong or self.model == "differs")


# --- kinds of faults ------------------------------------------------------------------------------


def some(rig: Rig, luck: random.Random) -> Device:
    """Return one of the devices that the fleet began with, as soon as most of them are up."""
    first = rig.devices[: rig.setting.devices]
    wait(lambda: sum(each.up for each in first) > len(first) / 2, "devices do not come back")
    return luck.choice([each for each in first if each.up])


def passed(rig: Rig, begun: int) -> Callable[[], bool]:
    """Return whether a round has been completed that began when more than `begun` were done."""
    return lambda: rig.look() >= begun + 2


def works(rig: Rig, device: Device, begun: int) -> Callable[[], bool]:
    """Return whether a device has replied in such a round."""
    return lambda: rig.look() >= begun + 2 and rig.replied(device.number, begun + 1)


@contextmanager
def killed(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Kill a device, which stays away until the others have gone on."""
    device, begun, now = some(rig, luck), rig.look(), time.monotonic()
    device.kill()

    def told() -> bool:
        return "went offline" in rig.failures(device.number, begun)

    yield Wanted(passed(rig, begun), told, "killed", now)
    device.start()  # the next faults come while it comes back


@contextmanager
def killed_and_back(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Kill a device, and start it again at once."""
    device, begun, now = some(rig, luck), rig.look(), time.monotonic()
    device.kill()
    said = device.told()
    device.start()
    yield Wanted(works(rig, device, begun), lambda: device.said(said, " work "), "killed", now)


@contextmanager
def server_killed(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Kill the server, and resume its run."""
    device, begun, now = some(rig, luck), rig.look(), time.monotonic()
    said, ours = device.told(), rig.server_log.stat().st_size
    rig.kill_server()
    pause(luck, 1.0)
    rig.resume()

    def told() -> bool:
        lines = rig.server_log.read_bytes()[ours:]
        noticed = device.said(said, " retry ") or device.said(said, " note ", "link broke")
        return b"waiting for devices" in lines and noticed

    yield Wanted(works(rig, device, begun), told, "killed", now)


@contextmanager
def superlink_killed(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Kill the SuperLink; its server starts it again."""
    begun, restarts = rig.look(), rig.status().restarts
    wait(lambda: rig.superlink() > 0, "there is no SuperLink")
    with suppress(ProcessLookupError):
        os.kill(rig.superlink(), signal.SIGKILL)
    device, now = some(rig, luck), time.monotonic()
    back = works(rig, device, begun)
    yield Wanted(back, lambda: rig.status().restarts > restarts, "killed", now)


LINKS: dict[Path, CutLink] = {}


def through_a_link(device: Device) -> None:
    """Put a link that can be cut between a device and the gate."""
    file = device.home / "fleet.toml"
    text = file.read_text()
    address = next(line.split('"')[1] for line in text.splitlines() if "address" in line)
    link = LINKS[device.home] = CutLink(address)
    file.write_text(text.replace(address, link.address))


def cut(way: str) -> Fault:
    """Return a fault: a device's link is cut in the middle of an upload or a download."""

    @contextmanager
    def fault(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
        device = some(rig, luck)
        link, room = LINKS[device.home], luck.randrange(20_000, 180_000)
        said = device.told()
        link.heal(**{way: room})
        wait(lambda: link.cut, "nothing crosses the link")
        begun, now = rig.look(), time.monotonic()
        pause(luck, 3.0)
        link.heal()

        def told() -> bool:
            return device.said(said, " retry ") or device.said(said, " note ", "link broke")

        yield Wanted(works(rig, device, begun), told, f"{way} cut", now)

    return fault


LIES = ("shape", "NaN", "1e30", "replay", "oversized", "another's order", "another's name")


def lying(device: Device) -> None:
    """Make a liar of the last device."""
    if device.number == 3:
        device.module = ("-m", "tools.fleet_liar")
        (device.home / "victim").write_text(str(device.home.parent / name_of(0)))


@contextmanager
def lied(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Let the liar tell one of its lies."""
    if not rig.lies:  # all of them, before one comes again
        rig.lies = luck.sample(LIES, len(LIES))
    device, word = rig.devices[3], rig.lies.pop()
    # A device that was killed before first answers what nobody waits for: a lie to nobody.
    wait(works(rig, device, rig.look() - 1), "the liar is away")
    told, said = device.home / "lied", device.told()
    told.unlink(missing_ok=True)
    again, since = sum(rig.status().sent_again.values()), rig.look()
    (device.home / "lie").write_text(word)
    wait(told.is_file, "the liar does not lie")
    begun, now = rig.look(), time.monotonic()

    def is_told() -> bool:
        if word == "another's name":
            return device.said(said, "a lie was refused")
        if word == "oversized":  # it is not even fetched: the order is sent again
            return sum(rig.status().sent_again.values()) > again
        return any("refused" in each for each in rig.failures(3, since))

    if word != "another's order":
        yield Wanted(works(rig, device, begun), is_told, word, now)
        return
    # The SuperLink does not take it, and tells nobody: the other device must not be harmed.
    yield Wanted(works(rig, device, begun), None, word, now)
    if failed := rig.failures(0, since):
        raise Trouble(f"a reply to another's order harmed it: {failed[0]}")


@contextmanager
def stranger(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Start a device with a key that nobody has enrolled."""
    device = rig.new_device()
    device.start()

    def refused() -> bool:
        return device.said(0, " retry ", "unknown or revoked")

    wait(refused, "nobody refuses a stranger")
    pause(luck, ROUND)
    begun, now = rig.look(), time.monotonic()
    yield Wanted(passed(rig, begun), refused, "refused", now)
    device.kill()
    rig.devices.remove(device)
    if device.said(0, " work "):
        raise Trouble("a stranger was given work")
    device.home.rename(device.home.with_name(f"stranger-{begun}"))


@contextmanager
def joined(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Start and enrol a device while the run goes on."""
    for each in rig.guests[1:]:  # so many processes would be slow
        rig.revoke(each)
        each.kill()
    del rig.guests[1:]
    device = rig.new_device()
    device.start()
    wait((device.home / "device.pub").is_file, "a device makes no key")
    pause(luck, ROUND)
    begun, now = rig.look(), time.monotonic()
    rig.enrol(device)
    yield Wanted(works(rig, device, begun), lambda: device.said(0, " work "), "joined", now)
    rig.guests.append(device)


@contextmanager
def revoked(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
    """Revoke a device that has joined."""
    if not rig.guests:
        with joined(rig, luck) as wanted:
            wait(wanted.back, "a new device gets no work")
    device = rig.guests.pop()
    pause(luck, ROUND)
    said = device.told()
    rig.revoke(device)
    begun, now = rig.look(), time.monotonic()

    def told() -> bool:
        row = rig.status().devices[device.number]
        return row.state == "revoked" and device.said(said, " retry ", "revoked")

    yield Wanted(passed(rig, begun), told, "revoked", now)
    wait(lambda: device.said(said, " retry ", "revoked"), "a device is not told of its end")
    device.kill()
    if rig.replied(device.number, begun + 2):
        raise Trouble("a revoked device was given work")


def set_back(whose: str) -> Fault:
    """Return a fault: the clock of a device, or of server and SuperLink, is set back."""

    @contextmanager
    def fault(rig: Rig, luck: random.Random) -> Iterator[Wanted]:
        device = some(rig, luck)
        file = (rig.folder if whose == "server" else device.home) / "clock"
        before, begun = int(file.read_text()), rig.look()
        # By seconds or hours; a certificate is valid since a day before the fleet was made.
        back = before - int(10 ** luck.uniform(0.5, 4.0))
        set_clock(file, back if back > -DAY * 0.9 else before - 3)
        # Nobody says anything: a device then signs by the server's clock without a word.
        yield Wanted(works(rig, device, begun), None, "set back", time.monotonic())

    return fault


def with_clock(device: Device) -> None:
    """Give a device a clock that can be set back."""
    device.environment = clock(device.home / "preload", device.home / "clock")


GROUPS: tuple[Group, ...] = (
    Group(
        "restarts",
        Setting(method="stc", absence=60.0, patience=120.0),
        {
            "node killed and back": killed_and_back,
            "server killed": server_killed,
            "SuperLink killed": superlink_killed,
            "unregistered key": stranger,
            "device's clock set back": set_back("device"),
            "server's clock set back": set_back("server"),
        },
        with_clock,
    ),
    Group(
        "links",
        Setting(
            method="fedavg", hidden=64, absence=60.0, patience=120.0
        ),  # orders and replies of 200 kB
        {"link cut in mid-upload": cut("up"), "link cut in mid-download": cut("down")},
        through_a_link,
    ),
    Group(
        "failures",
        Setting(method="fedavg", count=8),
        {
            "node killed": killed,
            "node lies": lied,
            "node joins": joined,
            "node revoked": revoked,
        },
        lying,
        same=False,
    ),
)
KINDS = tuple(kind for group in GROUPS for kind in group.faults)


# --- tries ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is tried."""

    kinds: tuple[str, ...]
    tries: int
    minutes: float
    seed: int
    commit: str


def torment(group: Group, plan: Plan, folder: Path) -> list[Account]:
    """Inject the faults of a group into one run, in random order; return what became of them."""
    luck = random.Random(f"{plan.seed} {group.name}")  # noqa: S311 - no secret
    chosen = [kind for kind in group.faults if kind in plan.kinds]
    accounts = {kind: Account(kind, commit=plan.commit) for kind in chosen}
    order = [kind for kind in accounts for _ in range(plan.tries)]
    luck.shuffle(order)
    end, kind = time.monotonic() + 60 * plan.minutes, ""
    server = clock(folder / "preload", folder / "clock") if group.adapt is with_clock else {}
    rig = None
    try:
        with rigged(folder, group.setting, environment=server, adapt=group.adapt) as rig:
            for number, kind in enumerate(order):
                if time.monotonic() > end:
                    say(f"{group.name}: the time is up after {number} of {len(order)} tries")
                    break
                attempt(group.faults[kind], rig, luck, accounts[kind])
                took = accounts[kind].seconds[-1]
                say(f"{group.name}: {number + 1} of {len(order)}, {kind}, {took:.1f} s")
            kind = "the end"
            rig.end()
            settle(group, rig, list(accounts.values()))
    except Exception as error:  # noqa: BLE001 - told in the account
        for account in accounts.values():
            if kind in (account.kind, "the end"):
                account.wrong.append(f"{type(error).__name__}: {error}".splitlines()[0])
        say(f"{group.name}: {kind}: {traceback.format_exc()}")
        if rig is not None:
            say(f"{group.name}: the server's log ends:\n{tail(rig.server_log)}")
    return list(accounts.values())


def attempt(fault: Fault, rig: Rig, luck: random.Random, account: Account) -> None:
    """Inject one fault, and wait until the fleet has recovered."""
    before, lost, again = rig.look(), rig.lost, rig.again
    pause(luck, ROUND)
    with fault(rig, luck) as wanted:
        wait(wanted.back, f"after a fault ({wanted.what}) no round is completed")
        account.seconds.append(time.monotonic() - wanted.at)
        account.tries += 1
        account.faults[wanted.what] = account.faults.get(wanted.what, 0) + 1
        if wanted.told is not None:
            with suppress(Trouble):  # a status is written once a second
                wait(wanted.told, "", 15.0)
            if not wanted.told():
                account.wrong.append(f"nobody says what happened: {wanted.what}")
    account.rounds += rig.look() - before
    account.lost, account.again = account.lost + rig.lost - lost, account.again + rig.again - again
    for each in rig.ledger():
        if each.failure and before <= each.round_index < rig.look():
            account.failed += 1
            reason = each.failure.removeprefix("refused: ").partition(":")[0]
            account.reasons[reason] = account.reasons.get(reason, 0) + 1


def settle(group: Group, rig: Rig, accounts: list[Account]) -> None:
    """Enter what the records say in the end: the last lost rounds, and the model."""
    failed = [each.failure for each in rig.ledger() if each.failure]
    for account in accounts:
        if rig.missing():
            account.wrong.append("a round is missing in the end")
        if group.same and not failed:
            account.model = "identical" if rig.identical() else "differs"
        elif group.same:
            account.wrong.append(f"an order failed, so that no model is compared: {failed[0]}")


_SAYING = threading.Lock()


def say(text: str) -> None:
    """Print a line at once."""
    with _SAYING:
        sys.stderr.write(f"{dt.datetime.now(dt.UTC):%H:%M:%S} {text}\n")
        sys.stderr.flush()


# --- the soak -------------------------------------------------------------------------------------

MOMENTS = (20, 50, 100, 200)  # rounds after which memory is read
MOST_GROWTH = 0.2  # from the second of these to the last
DUE: tuple[Fault, ...] = (server_killed, superlink_killed)  # what must come at all
_QUARTER = 0.25  # of the run, in which that must come


@dataclass
class Soak:
    """What became of a long run with random faults."""

    devices: int
    rounds: int = 0
    lost: int = 0
    again: int = 0
    failed: int = 0
    minutes: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    memory: dict[int, dict[str, float]] = field(default_factory=dict)  # MB, by round
    wrong: list[str] = field(default_factory=list)


def soak(rounds: int, devices: int, *, seed: int, folder: Path) -> Soak:
    """Play a long run under random faults; read how much memory everybody has.

    Server and SuperLink are killed once at least, in the first quarter only, and the first device
    never: whoever is started anew has forgotten what it might have piled up.
    """
    found, luck = Soak(devices), random.Random(f"{seed} soak")  # noqa: S311
    early: list[Fault] = [killed_and_back, server_killed, superlink_killed]
    due = luck.sample(DUE, len(DUE))
    later: list[Fault] = [killed, killed_and_back, killed_and_back, cut("up"), cut("down")]
    later += [stranger, joined, revoked, *([set_back("device")] if compiler() else [])]
    moments = sorted({round(each * rounds / 200) for each in MOMENTS})

    def adapt(device: Device) -> None:
        through_a_link(device)
        with_clock(device)

    began, account = time.monotonic(), Account("soak")
    setting = Setting(devices=devices, samples=800, method="fedavg", hidden=64, count=devices + 4)
    try:
        with rigged(folder, setting, adapt=adapt) as rig:
            while rig.look() < rounds:
                quiet = rig.look() + luck.randrange(1, 4)
                while rig.look() < min(quiet, rounds):
                    _weigh(rig, found, moments)
                    time.sleep(0.1)
                fault = next_fault(rig.look() / rounds, luck, due, early, later)
                shielded = _Shielded(luck) if fault in (killed, killed_and_back) else luck
                attempt(fault, rig, shielded, account)
                name = named(fault)
                found.faults[name] = found.faults.get(name, 0) + 1
                say(f"soak: round {rig.look()}, {name}, {account.seconds[-1]:.1f} s")
                _weigh(rig, found, moments)
            found.rounds = rig.look()
            found.failed = sum(bool(each.failure) for each in rig.ledger())
            rig.end()
            found.lost, found.again = rig.lost, rig.again
    except Exception as error:  # noqa: BLE001 - told
        found.wrong.append(f"{type(error).__name__}: {error}")
        say(traceback.format_exc())
    found.wrong += account.wrong
    found.wrong += [f"no {named(each)} in the first quarter" for each in due]
    found.minutes = (time.monotonic() - began) / 60
    found.wrong += grown(found)
    return found


def next_fault(
    past: float, luck: random.Random, due: list[Fault], early: list[Fault], later: list[Fault]
) -> Fault:
    """Return the fault that comes next, when so much of the run is past; those due come soon."""
    if due and past < _QUARTER and (past > _QUARTER / 3 or luck.random() < 0.5):
        return due.pop()
    return luck.choice(early + later if past < _QUARTER - 0.025 else later)


def named(fault: Fault) -> str:
    """Return the name of a fault."""
    return fault.__qualname__.partition(".")[0].replace("_", " ")


class _Shielded(random.Random):
    """Luck that spares the first device."""

    def __init__(self, luck: random.Random) -> None:
        super().__init__(luck.random())

    def choice(self, seq: Any) -> Any:
        """Return anything but the first."""
        return super().choice(list(seq)[1:])


def _weigh(rig: Rig, found: Soak, moments: list[int]) -> None:
    """Enter how much memory everybody has, if a round is done after which that is read."""
    for moment in moments:
        if rig.look() >= moment and moment not in found.memory:
            assert rig.server is not None
            first = rig.devices[0].process
            found.memory[moment] = {
                "server": memory(rig.server.pid),
                "SuperLink": memory(rig.superlink()),
                "first device": memory(first.pid if first else 0),
            }


def grown(found: Soak) -> list[str]:
    """Return who has more memory in the end than the rule allows."""
    if len(found.memory) < 2:
        return ["memory was not read"]
    base, last = list(found.memory.values())[1], list(found.memory.values())[-1]
    return [
        f"{name} grew from {base[name]:.0f} to {last[name]:.0f} MB"
        for name in last
        if last[name] > (1 + MOST_GROWTH) * base[name]
    ]


# --- what is printed and written ------------------------------------------------------------------


HEAD = (
    "| fault | tries | rounds completed | rounds lost | recovered after (median, worst) "
    "| orders that failed | model | commit |\n|---|---|---|---|---|---|---|---|"
)


def table(rows: Mapping[str, str]) -> str:
    """Return rows by kind as a table of Markdown, in the order of the kinds."""
    return "\n".join([HEAD, *(rows[kind] for kind in KINDS if kind in rows)])


def rows_of(page: str) -> dict[str, str]:
    """Return the rows of the table on a page, by kind."""
    begin, end = (mark.format("faults") for mark in MARKS)
    lines = page.partition(begin)[2].partition(end)[0].splitlines()
    found = {line.strip("| ").partition(" |")[0].partition(" (")[0]: line for line in lines}
    return {kind: line for kind, line in found.items() if kind in KINDS}


def row(account: dict[str, Any]) -> str:
    """Return one account as a row of the table."""
    took = account["seconds"]
    seconds = f"{statistics.median(took):.1f} s, {max(took):.1f} s" if took else "–"
    reasons = ", ".join(f"{n} {each}" for each, n in sorted(account["reasons"].items()))
    model = account["model"] if not account["wrong"] else "WRONG: " + "; ".join(account["wrong"])
    sorts = ", ".join(f"{n} {each}" for each, n in sorted(account["faults"].items()))
    name = account["kind"] + (f" ({sorts})" if len(account["faults"]) > 1 else "")
    cells = (name, account["tries"], account["rounds"], account["lost"], seconds)
    rest = (reasons or "none", model, account["commit"])
    return "| " + " | ".join(map(str, (*cells, *rest))) + " |"


def soak_text(found: dict[str, Any]) -> str:
    """Return a soak as Markdown."""
    faults = ", ".join(f"{n} {each}" for each, n in sorted(found["faults"].items()))
    names = list(next(iter(found["memory"].values()), {}))
    head = "| after round | " + " | ".join(f"{each}, MB" for each in names) + " |\n|---|"
    lines = [head + "---|" * len(names)]
    for moment, each in found["memory"].items():
        lines.append(f"| {moment} | " + " | ".join(f"{each[name]:.0f}" for name in names) + " |")
    verdict = "; ".join(found["wrong"]) or "bounded by the rule"
    return (
        f"{found['rounds']} rounds on {found['devices']} devices "
        f"in {found['minutes']:.0f} minutes, {found['lost']} rounds lost, "
        f"{found['failed']} orders failed. Faults: {faults}. "
        f"Resident memory: {verdict}.\n\n" + "\n".join(lines)
    )


def put(name: str, text: str) -> None:
    """Replace a generated part of the page."""
    begin, end = (mark.format(name) for mark in MARKS)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def commit_now() -> str:
    """Return the commit of this moment, and the day; the code may change while it runs."""

    def git(*words: str) -> str:
        asked = ["git", "-C", str(ROOT), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603

    changed = " with changes" if git("status", "--porcelain", "--", "src", "tools") else ""
    day = dt.datetime.now(dt.UTC).date()
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}, {day}"


def provenance(words: str, commit: str) -> str:
    """Return what was run, on what, of which commit and when."""
    return f"`{words}`, {os.cpu_count()} cores, commit {commit}."


def keep(file: Path, value: object) -> None:
    """Write results as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1))


def main(given: argparse.Namespace) -> int:
    """Run what is asked for, show it, and return the exit code."""
    # In the background of a shell it is ignored, and would be by the servers that end with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    out, commit = Path(given.out), commit_now()
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-faults-"))
        home = Path(given.folder or made)
        if given.soak:
            found = asdict(soak(given.soak, given.devices, seed=given.seed, folder=home / "soak"))
            words = f"python -m tools.fleet_faults --soak {given.soak} --devices {given.devices}"
            text = f"{provenance(words, commit)}\n\n{soak_text(found)}"
            keep(out / "fleet_soak.json", {"told": provenance(words, commit), **found})
            sys.stdout.write(f"{text}\n")
            if given.page:
                put("soak", text)
            return 1 if found["wrong"] or found["lost"] else 0
        kinds = [each for each in given.kinds or KINDS if "clock" not in each or compiler()]
        plan = Plan(tuple(kinds), given.tries, given.minutes, given.seed, commit)
        if len(kinds) < len(given.kinds or KINDS):
            say("no clock is set back: that needs a C compiler (cc)")
        chosen = [each for each in GROUPS if set(plan.kinds) & set(each.faults)]
        with ThreadPoolExecutor(given.jobs) as pool:
            work = [pool.submit(torment, each, plan, home / each.name) for each in chosen]
            accounts = [account for each in work for account in each.result()]
    words = f"python -m tools.fleet_faults --tries {given.tries} --jobs {given.jobs}"
    fresh = [{**asdict(each), "good": each.good} for each in accounts]
    keep(out / "fleet_faults.json", {"told": provenance(words, commit), "kinds": fresh})
    rows = {each["kind"]: row(each) for each in fresh}
    sys.stdout.write(f"{provenance(words, commit)}\n\n{table(rows)}\n")
    if given.page:
        kept = rows_of(PAGE.read_text(encoding="utf-8"))
        text = (
            f"`{words}`, {os.cpu_count()} cores; each row has the commit and the day of its start."
        )
        put("faults", f"{text}\n\n{table({**kept, **rows})}")
    return 0 if all(each.good for each in accounts) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Torment a real fleet on loopback.")
    parser.add_argument("--tries", type=int, default=20, help="of every kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--jobs", type=int, default=2, help="fleets at the same time")
    parser.add_argument("--minutes", type=float, default=60.0, help="for every fleet, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=int, metavar="ROUNDS", help="a long run instead")
    parser.add_argument("--devices", type=int, default=8, help="of the soak")
    parser.add_argument("--page", action="store_true", help="write docs/fleet_faults.md")
    parser.add_argument("--out", default="build", help="folder for the results as JSON")
    parser.add_argument("--folder", help="keep everything in this folder")
    sys.exit(main(parser.parse_args()))
