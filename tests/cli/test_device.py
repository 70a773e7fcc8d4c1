"""`anyfleet device`: a process that joins a fleet on loopback, and the unit that starts it."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anyfleet
from anyfleet.cli.app import app
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.deployment.fleet_folder import Address, FleetFolder, make_fleet
from anyfleet.deployment.superlink import SuperLink
from anyfleet.device.bundle import write_bundle
from anyfleet.methods import fedavg
from anyfleet.runtime.flower.envelopes import Letter
from anyfleet.runtime.flower.hosting import Arrival, HostedRun, register_node
from anyfleet.runtime.flower.keys import load_public, public_pem
from anyfleet.wire import decode_check_in, encode_order, encode_reply
from tests.core.test_local_training import orders
from tests.helpers import small

TASK = small.task()
DEVICE = 0  # its number
PATIENCE = 60.0  # seconds after which a test gives up


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["device", *map(str, words)])


def own_file(folder: Path) -> Path:
    """Write the samples of a device of the task into a file, and return it."""
    data, test = TASK.data(DEVICE), TASK.own_test(DEVICE)
    own, tested = (data.x.numpy(), data.y.numpy()), (test.x.numpy(), test.y.numpy())
    np.savez(folder / "own.npz", x=own[0], y=own[1], test_x=tested[0], test_y=tested[1])
    return folder / "own.npz"


# --- a real one -------------------------------------------------------------------------------


@dataclass
class Running:
    """A device as a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def lines(self, word: str) -> list[str]:
        """The reasons that its log gives for a word."""
        said = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line["reason"] for line in said if line["word"] == word]


def start(folder: Path, *options: str) -> Running:
    log = folder.parent / "log"
    (folder.parent / "given.json").write_text('{"speed": 1e9, "memory": 1e9}')
    given = ["--given-conditions", str(folder.parent / "given.json"), "--json"]
    words = ["device", "join", str(folder), "--data", str(own_file(folder.parent)), *given]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "anyfleet.cli", *words, *options], stderr=out
        )
    return Running(process, log)


def until(found: Callable[[], Any], running: Running) -> Any:
    """Wait until a value is true, and return it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := found():
            return value
        assert running.process.poll() is None, running.log.read_text()
        time.sleep(0.05)
    raise AssertionError(running.log.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(folder: FleetFolder) -> Iterator[HostedRun]:
    with SuperLink(folder, folder.device_file().address.port) as link:
        ca, secret = folder.authority.read_bytes(), folder.secret.read_bytes()
        with HostedRun(link.address, ca=ca, secret=secret) as run:
            yield run


def asked(run: HostedRun, node: int, letter: Letter, running: Running) -> Arrival:
    """Send a letter and return the reply."""
    (message,) = run.send([(node, letter)])
    found: list[Arrival] = until(lambda: run.receive([message]), running)
    assert found[0].whole
    assert not found[0].error
    return found[0]


def test_a_device_joins_works_survives_a_kill_and_leaves(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", Address("127.0.0.1", free_port()))
    write_bundle(TASK, folder.bundle)
    own = tmp_path / "device"
    folder.device.rename(own)
    (folder.path / "device").symlink_to(own)  # the server still has it
    order = orders(fedavg(lr=0.1), TASK, [DEVICE])
    reply = encode_reply(work(order, (DeviceState(),), TASK).replies, order, TASK)
    with served(folder) as run:
        running = start(own)
        # It is not enrolled yet: it says so, and stays.
        assert "fleet add" in until(lambda: running.lines("retry"), running)[0]
        assert (own / "device.key").stat().st_mode & 0o777 == 0o600
        public = public_pem(load_public((own / "device.pub").read_text()))
        address = folder.device_file().address
        node = register_node(
            str(address), ca=folder.authority.read_bytes(), public_key=public, name="one"
        )
        until(lambda: any(each.id == node and each.online for each in run.nodes()), running)
        said = asked(run, node, Letter("check-in", b"", {"device": DEVICE}), running)
        report = decode_check_in(said.letter.data)
        assert report.version == anyfleet.__version__
        assert report.samples == TASK.size(DEVICE)
        assert report.conditions == {"speed": 1e9, "memory": 1e9}

        running.process.kill()
        running.process.wait()
        (message,) = run.send([(node, Letter("order", encode_order(order, TASK), {"run": "r"}))])
        running = start(own)
        (found,) = until(lambda: run.receive([message]), running)
        assert found.letter.data == reply

        again = Letter("order", encode_order(order, TASK), {"run": "r"})
        assert asked(run, node, again, running).letter.data == reply
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0
        text = running.log.read_text()
    assert "PRIVATE KEY" not in text
    assert "Traceback" not in text


# --- what is wrong ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a device whose server is nowhere."""
    home = tmp_path_factory.mktemp("home")
    folder = make_fleet(home / "fleet", Address("127.0.0.1", 9), allow=("json",))
    write_bundle(TASK, folder.bundle)
    return folder.device


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    done = invoke("join", tmp_path, "--data", "x.npz")
    assert done.exit_code == 1
    assert "fleet.toml: cannot be read" in done.output
    assert "Copy the folder device/" in done.output


def test_packages_that_the_fleet_names_must_be_allowed(device: Path) -> None:
    done = invoke("join", device, "--data", "x.npz")
    assert done.exit_code == 1
    assert "use --allow json" in done.output
    assert not (device / "device.key").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--data", "none.npz"), "there is no such file"),
        (("--data", "own.npz", "--given-conditions", "none.json"), "there is no such file"),
        (("--data", "json:loads"), "loads"),
    ],
)
def test_mistakes_are_said_before_it_joins(
    device: Path, options: tuple[str, ...], told: str
) -> None:
    done = invoke("join", device, "--allow", "json", *options)
    assert done.exit_code == 1
    assert told in done.output + repr(done.exception)


def test_without_the_extra_it_is_said_what_to_install(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anyfleet.runtime.flower.connection", None)
    done = invoke("join", device, "--data", "x.npz")
    assert done.exit_code == 1
    assert "install anyfleet[fleet]" in done.output


# --- the unit ---------------------------------------------------------------------------------


def test_the_unit_runs_exactly_this_command(device: Path, tmp_path: Path) -> None:
    odd = tmp_path / "100% $own"
    odd.symlink_to(device)
    options = (
        "--allow",
        "json",
        "--threads",
        "2",
        "--memory",
        "1000",
        "--nice",
        "7",
        "--level",
        "1",
    )
    done = invoke("unit", odd, "--data", "mine:data", *options, "--column-width", "0.25")
    assert done.exit_code == 0, done.output
    lines = dict(line.split("=", 1) for line in done.output.splitlines() if "=" in line)
    assert lines["Restart"] == "always"
    assert lines["WorkingDirectory"] == str(Path.cwd())
    assert lines["ExecStart"] == (
        f"{sys.executable} -m anyfleet.cli device join {device.resolve()} --data mine:data "
        "--allow json --threads 2 --memory 1000 --nice 7 --level 1 --column-width 0.25"
    )


def test_odd_letters_in_a_unit_mean_themselves(tmp_path: Path) -> None:
    odd = tmp_path / '100% $own "x"'
    odd.mkdir()
    done = invoke("unit", odd, "--data", "samples of mine.npz")
    line = next(each for each in done.output.splitlines() if each.startswith("ExecStart="))
    assert f'"{tmp_path}/100%% $$own \\"x\\""' in line
    assert f'"{Path.cwd()}/samples of mine.npz"' in line
    assert invoke("unit", tmp_path / "none", "--data", "x.npz").exit_code == 1
