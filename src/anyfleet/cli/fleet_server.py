"""`anyfleet fleet init`, `bundle`, `add`, `remove`, `list`, `renew`, `preflight`: the server."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import typer

from anyfleet.cli.screen import PlainTable, console, show
from anyfleet.core.objectives import Task
from anyfleet.deployment.fleet_folder import (
    Address,
    FleetFolder,
    make_fleet,
    open_fleet,
    renew_certificate,
    write_device_file,
)
from anyfleet.deployment.preflight import inspect, verdict
from anyfleet.deployment.roster import Member, enrol, read_roster, revoke
from anyfleet.device.bundle import bundle_of, write_bundle
from anyfleet.errors import AnyfleetError, ConfigError, Problem
from anyfleet.experiment import Experiment, build, for_real_devices, load
from anyfleet.wire import misfits

EXIT_CODES = {"ok": 0, "failed": 1, "warning": 3}
_MOST_KEY = 1 << 16  # bytes of a key that are read


def init_fleet(
    path: Path,
    file: Path,
    overrides: Sequence[str] = (),
    *,
    address: str,
    days: int,
    allow: Sequence[str],
) -> None:
    """Make the folder of a fleet for the task of a run file, and say what to do next."""
    where, experiment = Address.read(address), load(file, overrides, allow)
    with for_real_devices():
        task = build(experiment)
    asked = _asked_of_devices(experiment, task, tuple(allow))
    folder = make_fleet(path, where, days=days, allow=asked)
    try:
        write_bundle(task, folder.bundle, asked)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # half a fleet is none
        raise
    screen = console()
    show(screen, f"{path} is the folder of the fleet. It holds secrets: keep it to yourself.")
    show(screen, f"1. Copy {folder.device} to every device. It holds no secret.")
    show(screen, "2. There: anyfleet device join DIR --data MODULE:FACTORY")
    show(screen, f"3. Here, with its device.pub: anyfleet fleet add {path} NAME --key device.pub")
    show(screen, f"4. Let devices reach {where}, and run: anyfleet fleet preflight {path}")


def _asked_of_devices(
    experiment: Experiment, task: Task, allow: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the packages whose code devices run too; that of the model and the data stays here."""
    job, limits = experiment.method.job(), experiment.limits

    def suffices(packages: tuple[str, ...]) -> bool:
        try:
            bundle_of(task, packages)
        except AnyfleetError:
            return False
        return misfits(job, packages, limits) == misfits(job, allow, limits)

    asked = allow
    for name in allow:
        fewer = tuple(each for each in asked if each != name)
        asked = fewer if suffices(fewer) else asked
    return asked


def renew_bundle(path: Path, file: Path, overrides: Sequence[str], allow: Sequence[str]) -> None:
    """Write what every device gets anew: for the task of another run file, or another version."""
    folder, experiment = open_fleet(path), load(file, overrides, allow)
    with for_real_devices():
        task = build(experiment)
    asked = _asked_of_devices(experiment, task, tuple(allow))
    write_device_file(folder, folder.device_file().address, asked)
    bundle = write_bundle(task, folder.bundle, asked)
    show(console(), f"{folder.bundle} has the model of {file} ({bundle.digest[:12]}).")
    show(console(), f"Copy {folder.device} over the folder of every device, and start these again.")


def add_device(path: Path, name: str, key: Path | None) -> None:
    """Add a device by the public key in a file or, without one, on the standard input."""
    folder = open_fleet(path)
    member = enrol(folder.roster, name, _key_text(key))
    show(console(), f"{name} is device {member.number}. Its key: {member.fingerprint}")


def _key_text(key: Path | None) -> str:
    if key is None or str(key) == "-":
        if sys.stdin.isatty():
            show(console(), "Paste the line of device.pub, then press Ctrl-D:")
        return sys.stdin.read(_MOST_KEY)
    try:
        with key.open(encoding="utf-8") as content:
            return content.read(_MOST_KEY)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(key), f"cannot be read: {error}.")]) from error


def remove_device(path: Path, name: str) -> None:
    """Revoke a device for ever."""
    member = revoke(open_fleet(path).roster, name)
    show(console(), f"{name}, device {member.number}, is revoked; its key is refused from now on.")


def list_devices(path: Path, *, as_json: bool) -> None:
    """Print the devices that were ever enrolled, as a table or as JSON."""
    members = read_roster(open_fleet(path).roster).members
    if as_json:
        typer.echo(msgspec.json.encode([_row(each) for each in members]).decode())
        return
    screen = console()
    if not members:
        show(screen, f"No device is enrolled. Use: anyfleet fleet add {path} NAME")
        return
    table = PlainTable()
    table.add_column("number", justify="right")
    for head in ("name", "fingerprint", "enrolled at", "state"):
        table.add_column(head, overflow="fold")
    for each in members:
        table.add_row(str(each.number), each.name, each.fingerprint, each.enrolled, each.state)
    screen.print(table)


def _row(member: Member) -> dict[str, object]:
    return {
        "number": member.number,
        "name": member.name,
        "fingerprint": member.fingerprint,
        "enrolled": member.enrolled,
        "revoked": member.revoked or None,
        "state": member.state,
        "node": member.node,
    }


def renew_server(path: Path, *, days: int) -> None:
    """Replace the server's certificate."""
    renew_certificate(open_fleet(path), days=days)
    show(console(), "The certificate is renewed. A server that runs uses it when it starts again.")


def check_server(path: Path, *, as_json: bool) -> int:
    """Print what a check of the server finds, one line each, and return the exit code."""
    found = inspect(FleetFolder(path))
    result = verdict(found)
    if as_json:
        lines = [asdict(each) for each in found]
        typer.echo(msgspec.json.encode({"result": result, "findings": lines}).decode())
    else:
        screen = console()
        for each in found:
            show(screen, f"{each.state:<8} {each.subject}: {each.told}")
    return EXIT_CODES[result]
