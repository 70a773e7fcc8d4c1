"""`anyfleet fleet practise`, `serve` and `status`: the public commands as processes, together."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

from anyfleet.deployment.serving import kept
from anyfleet.experiment import load
from anyfleet.store import read_ledger, read_rounds
from tests.cli.test_commands import anyfleet_command

RUN_FILE = """
rounds = 2
widths = [1.0]

[task]
use = "Embedded"
devices = 2
limit = 700
model = { use = "perceptron", hidden = [16] }

[method]
use = "fedavg"
count = 2
lr = 0.1
"""


@pytest.fixture(scope="module")
def practised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was practised, and what the command printed."""
    home = tmp_path_factory.mktemp("practice")
    (home / "run.toml").write_text(RUN_FILE)
    words = ("fleet", "practise", str(home / "run.toml"), "--identical", "--out", str(home / "p"))
    done = anyfleet_command(*words)
    assert done.exit_code == 0, done.output
    return home / "p", done.output


def test_a_practice_fleet_computes_what_the_simulator_does(practised: tuple[Path, str]) -> None:
    folder, output = practised
    assert "Bit-identical with the simulator" in output
    assert "real s" in output
    assert "simulated" not in output.replace("simulator", "")
    assert [each.replies for each in read_rounds(folder / "run")] == [2, 2]
    assert set(read_ledger(folder / "run").failure) == {""}
    log = (folder / "device-1" / "log.txt").read_text()
    words = [line.split()[1] for line in log.splitlines()]
    assert [word for word in words if word in ("work", "done")] == ["work", "work", "done"]


def test_a_run_keeps_how_its_fleet_is_served(practised: tuple[Path, str]) -> None:
    folder, _ = practised
    service = kept(folder / "run")
    assert service is not None
    assert Path(service.fleet) == (folder / "fleet").resolve()
    assert load(folder / "run" / "config.toml").rounds == 2


def test_the_status_is_old_when_nobody_serves(practised: tuple[Path, str]) -> None:
    folder, _ = practised
    told = anyfleet_command("fleet", "status", str(folder / "fleet"), "--json")
    status = json.loads(told.output)
    assert status["doing"] == "done"
    assert [each["name"] for each in status["devices"]] == ["device-0", "device-1"]
    assert status["replies"] == 4
    shown = anyfleet_command("fleet", "status", str(folder / "fleet"))
    assert "2 of 2 rounds are done" in shown.output
    assert "device-1" in shown.output


def test_a_run_that_is_finished_is_not_served_again(practised: tuple[Path, str]) -> None:
    folder, _ = practised
    done = anyfleet_command("resume", str(folder / "run"))
    assert done.exit_code == 0, done.output
    assert "has all of its rounds" in done.output


def test_another_model_than_the_devices_have_is_refused(
    practised: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = practised
    other = tmp_path / "other.toml"
    other.write_text(RUN_FILE.replace("[16]", "[8]"))
    words = ("fleet", "serve", str(folder / "fleet"), str(other), "--out", str(tmp_path / "r"))
    refused = anyfleet_command(*words)
    assert refused.exit_code == 1
    assert "another model" in refused.output
    assert "anyfleet fleet bundle" in refused.output


def warned(*words: str) -> bool:
    """Whether a command warns that the fleet has fewer devices than are asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = anyfleet_command(*words)
    assert done.exit_code == 0, done.output
    return "but the fleet has 2 devices" in done.output


def test_nothing_is_said_of_how_many_simulated_devices_there_are(
    practised: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = practised
    file, more, played = str(folder.parent / "run.toml"), "method.count=9", list[object]()
    monkeypatch.setattr("anyfleet.cli.fleet_serve._play", lambda *given: played.append(given))
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    config = (run / "config.toml").read_text()
    assert "count = 2" in config
    (run / "config.toml").write_text(config.replace("count = 2", "count = 9"))
    assert warned("validate", file, more)
    assert not warned(
        "fleet", "serve", str(folder / "fleet"), file, more, "--out", str(tmp_path / "r")
    )
    assert not warned("resume", str(run), "--rounds", "3", "--not-identical")
    assert len(played) == 2
    assert not warned(
        "fleet", "init", str(tmp_path / "f"), file, more, "--address", "localhost:9443"
    )


def test_details_that_need_the_data_of_devices_are_refused(
    practised: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = practised
    own = tmp_path / "own.toml"
    own.write_text('details = ["devices"]\n' + RUN_FILE)
    words = ("fleet", "serve", str(folder / "fleet"), str(own), "--out", str(tmp_path / "r"))
    refused = anyfleet_command(*words)
    assert refused.exit_code == 1
    assert "which stay on them" in refused.output
