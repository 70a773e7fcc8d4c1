"""`anyfleet fleet init`, `add`, `remove`, `list`, `renew` and `preflight`, as people use them."""

import builtins
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyfleet.cli.app import app
from anyfleet.deployment import preflight
from anyfleet.deployment.fleet_folder import FleetFolder, open_fleet
from anyfleet.runtime.flower.keys import device_key

RUN_FILE = """
rounds = 2

[task]
use = "Embedded"
devices = 4
limit = 200
server = 20
model = { use = "perceptron", hidden = [8] }

[method]
use = "fedavg"
lr = 0.1
"""


def call(*words: str | Path, stdin: str = "") -> Any:
    return CliRunner().invoke(app, ["fleet", *map(str, words)], input=stdin)


def succeeds(*words: str | Path, stdin: str = "") -> str:
    done = call(*words, stdin=stdin)
    assert done.exit_code == 0, done.output
    return str(done.output)


def refused(*words: str | Path, code: int = 1, stdin: str = "") -> str:
    done = call(*words, stdin=stdin)
    assert done.exit_code == code, done.output
    return str(done.output)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A fleet made by the command, and what it printed."""
    home = tmp_path_factory.mktemp("fleets")
    (home / "run.toml").write_text(RUN_FILE)
    path = home / "fleet"
    return path, succeeds("init", path, home / "run.toml", "--address", "localhost:9443")


def test_init_makes_a_whole_fleet_and_says_how_to_go_on(made: tuple[Path, str]) -> None:
    path, printed = made
    open_fleet(path).check()
    assert any((path / "device" / "bundle").iterdir())
    assert "anyfleet device join" in printed
    assert "anyfleet fleet add" in printed
    secret = (path / "executor.secret").read_text()
    assert secret not in printed


def test_init_refuses_before_it_writes(made: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = made
    file = path.parent / "run.toml"
    assert "not empty" in refused("init", path, file, "--address", "localhost:9443", code=2)
    new = tmp_path / "new"
    assert "HOST:PORT" in refused("init", new, file, "--address", "localhost")
    bad = tmp_path / "bad.toml"
    # The first is found as the file is read, the second as its data are divided.
    for before, after in (("lr = 0.1", "lr = -1"), ("devices = 4", "devices = 4000")):
        bad.write_text(RUN_FILE.replace(before, after))
        assert "problem" in refused("init", new, bad, "--address", "localhost:9443")
        assert not new.exists()


OWN = """
import torch
from torch import nn

def network():
    return nn.Linear(2, 4)

def samples():
    x = torch.randn(40, 2)
    return torch.utils.data.TensorDataset(x, x.norm(dim=1).long().clamp(max=3))

def own_loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")
"""
OWN_FILE = """
task = { use = "Own", model = "own_rings:network", data = "own_rings:samples", devices = 2 }
method = { use = "fedavg", lr = 0.1 }
"""


def test_devices_are_asked_to_allow_only_what_they_run(tmp_path: Path) -> None:
    (tmp_path / "own_rings.py").write_text(OWN)
    (tmp_path / "run.toml").write_text(OWN_FILE)
    words = tmp_path / "run.toml", "--address", "localhost:9443", "--allow", "own_rings"
    succeeds("init", tmp_path / "fleet", *words)
    assert open_fleet(tmp_path / "fleet").device_file().allow == ()
    succeeds("init", tmp_path / "other", *words, "task.loss=own_rings:own_loss")
    assert open_fleet(tmp_path / "other").device_file().allow == ("own_rings",)


def test_what_devices_get_is_written_anew_for_another_version(
    made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = made
    with monkeypatch.context() as later:
        later.setattr("anyfleet.__version__", "9.9")
        assert "anyfleet fleet bundle" in refused("preflight", path)
        printed = succeeds("bundle", path, path.parent / "run.toml", "seed=7")
        assert str(path / "device") in printed
        assert "anyfleet 9.9" in call("preflight", path).output
        assert open_fleet(path).device_file().version == "9.9"
    succeeds("bundle", path, path.parent / "run.toml")


def test_devices_come_and_go(made: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = made
    assert "No device is enrolled" in succeeds("list", path)
    device_key(tmp_path / "device.key")
    public = tmp_path / "device.pub"
    printed = succeeds("add", path, "ada", "--key", public)
    assert re.search(r"ada is device 0.*SHA256:\S{43}", printed)
    assert "is that of device 0" in refused("add", path, "zoe", stdin=public.read_text())
    assert "stays on its device" in refused("add", path, "zoe", "--key", tmp_path / "device.key")
    assert "cannot be read" in refused("add", path, "zoe", "--key", tmp_path / "none")
    (tmp_path / "second").mkdir()
    device_key(tmp_path / "second" / "device.key")
    other = (tmp_path / "second" / "device.pub").read_text()
    assert "zoe is device 1" in succeeds("add", path, "zoe", "--key", "-", stdin=other)
    assert "device 0, is revoked" in succeeds("remove", path, "ada")
    assert "not enrolled" in refused("remove", path, "ada")
    head, *rows = succeeds("list", path).splitlines()
    assert head.split() == ["number", "name", "fingerprint", "enrolled", "at", "state"]
    assert [row.split()[:2] for row in rows] == [["0", "ada"], ["1", "zoe"]]
    assert "revoked" in rows[0]
    found = json.loads(succeeds("list", path, "--json"))
    assert [(each["number"], each["state"]) for each in found] == [(0, "revoked"), (1, "enrolled")]
    assert found[1]["fingerprint"] in rows[1]


def test_preflight_and_its_exit_codes(
    made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = made
    monkeypatch.setattr(preflight, "_is_synchronised", lambda: True)
    lines = succeeds("preflight", path).splitlines()
    assert all(line.startswith("ok ") for line in lines)
    monkeypatch.setattr(preflight, "_is_synchronised", lambda: False)
    assert "\nwarning  clock: " in refused("preflight", path, code=3)
    FleetFolder(path).key.chmod(0o644)
    assert "\nfailed   permissions: " in refused("preflight", path, code=1)
    found = json.loads(refused("preflight", path, "--json", code=1))
    assert found["result"] == "failed"
    assert {"subject", "state", "told"} == found["findings"][0].keys()
    FleetFolder(path).key.chmod(0o600)
    assert "Make one with" in refused("preflight", path / "device")


def test_renew(made: tuple[Path, str]) -> None:
    path, _ = made
    before = FleetFolder(path).certificate.read_bytes()
    assert "renewed" in succeeds("renew", path, "--days", "100")
    assert FleetFolder(path).certificate.read_bytes() != before


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the package cryptography were not installed."""
    plain = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "cryptography":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain(name, *rest, **more)

    ours = [
        name
        for name in sys.modules
        if name.startswith(("anyfleet.deployment", "anyfleet.cli.fleet_server"))
    ]
    for name in ("deployment", "cli"):  # the packages get theirs back, too
        monkeypatch.setattr(f"anyfleet.{name}", sys.modules[f"anyfleet.{name}"])
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", importing)
    assert "pip install 'anyfleet[fleet]'" in refused("list", tmp_path)
