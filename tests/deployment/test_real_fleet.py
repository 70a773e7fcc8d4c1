"""Three devices as processes of their own, over TLS with keys: models are those of the simulator.

One fleet serves all methods, one run after the other, as `anyfleet fleet serve` does. The devices
are started by the public command, and stay for all runs.
"""

import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from anyfleet.core.method import Method
from anyfleet.deployment import practice
from anyfleet.deployment.fleet_folder import Address, FleetFolder, make_fleet
from anyfleet.deployment.roster import enrol
from anyfleet.deployment.serving import Linked, Service, Work, hosting, linked, read_arrivals
from anyfleet.deployment.status import read_status
from anyfleet.device.bundle import write_bundle
from anyfleet.experiment import Experiment, Prepared, prepare
from anyfleet.methods import anycost, fedavg, fedpmt, fedpns, fedrescue, heterofl, stc, whale
from anyfleet.names import Factory
from anyfleet.parts.schedule import Buffered
from anyfleet.runtime import Sequential
from anyfleet.tasks import Embedded
from anyfleet.tasks.zoo import perceptron
from anyfleet.world import levels

# Both levels of the fleet, and one more device than a buffered round waits for.
DEVICES, ROUNDS = 3, 2
PLAIN = fedavg(count=DEVICES, lr=0.1)
METHODS = {
    "FedAvg": PLAIN,
    "HeteroFL": heterofl(widths=(1.0, 0.5), count=DEVICES, lr=0.1),
    "FedPMT": fedpmt(lr=0.1),
    "WHALE-FL": whale(lr=0.1),
    "AnycostFL": anycost(lr=0.1),
    "FedResCuE": fedrescue(lr=0.1),
    "FedPNS": fedpns(lr=0.1),
    "STC with error feedback": stc(lr=0.1),
    "buffered asynchrony": replace(PLAIN, schedule=Buffered(DEVICES, 2)),
}


def prepared(method: Method) -> Prepared:
    return prepare(
        Experiment(
            task=Embedded(devices=DEVICES, limit=740, model=Factory.of(perceptron, hidden=(24,))),
            method=method,
            fleet=levels(speeds=(2e9, 5e8)),
            engine=Sequential(),
            rounds=ROUNDS,
            evaluate_every=ROUNDS,
            seed=3,
        )
    )


@dataclass(frozen=True)
class Started:
    """A fleet whose devices are running."""

    folder: FleetFolder
    home: Path
    link: Linked


def work_of(ready: Prepared, run: Path) -> Work:
    counting = ready.world.declared.counting
    return Work(ready.task, ready.experiment.limits, counting, run, ROUNDS)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    torch.set_num_threads(1)
    home, first = tmp_path_factory.mktemp("real"), prepared(PLAIN)
    folder = make_fleet(home / "fleet", Address("127.0.0.1", practice.free_port()))
    write_bundle(first.task, folder.bundle)
    trial = practice.Practice(Path(), (), (), home, identical=True)
    running = [practice.device_process(trial, first, number) for number in range(DEVICES)]
    try:
        for number in range(DEVICES):
            key = trial.device(number) / "device.pub"
            until = time.monotonic() + 120
            while not key.is_file():
                assert time.monotonic() < until, (trial.device(number) / "log.txt").read_text()
                time.sleep(0.05)
            enrol(folder.roster, practice.name_of(number), key.read_text())
        with linked(folder, work_of(first, home)) as link:
            yield Started(folder, home, link)
    finally:
        for process in running:
            process.terminate()
        codes = [process.wait(30) for process in running]
    assert codes == [0] * DEVICES


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_that_of_the_simulator(started: Started, name: str) -> None:
    ready = prepared(METHODS[name])
    run = started.home / f"run-{[*METHODS].index(name)}"
    run.mkdir()
    service = Service(fleet=str(started.folder.path), run=f"run of {name}")
    work = work_of(ready, run)
    with hosting(started.folder, service, work, started.link) as served:
        for _ in served.gather(DEVICES):
            pass
        for result in ready.play(runtime=served.fleet):
            served.keep_arrivals(result.record.round_index)
        url = f"http://127.0.0.1:{served.metrics}/metrics"
        told = urllib.request.urlopen(url, timeout=10).read().decode()
        status = served.status()
    assert not status.failures
    assert f"anyfleet_rounds {ROUNDS}.0" in told
    assert f'anyfleet_devices{{state="free"}} {DEVICES}.0' in told or status.under_way
    assert f"anyfleet_replies_total {status.replies}.0" in told
    assert read_status(started.folder.path).doing == "done"
    assert result.record.round_index == ROUNDS - 1
    found = practice.compare_models(result.round.params, ready, read_arrivals(run))
    assert found.differing == 0
    assert found.parameters > 1000
    assert found.replayed == (name == "buffered asynchrony")


def test_nothing_secret_is_in_a_log_or_in_the_folder_of_a_run(started: Started) -> None:
    secrets = [started.folder.secret.read_text(), started.folder.key.read_text()[40:80]]
    keys = [started.home / f"device-{number}" / "device.key" for number in range(DEVICES)]
    secrets += [key.read_text()[60:120] for key in keys]
    files = [
        *started.home.glob("run-*/*"),
        *started.home.glob("device-*/log.txt"),
        started.folder.log,
        started.folder.path / "status.json",
    ]
    assert len(files) > DEVICES
    for file in files:
        text = file.read_text(errors="replace")
        assert not [each for each in secrets if each in text]


def test_a_stranger_is_refused(started: Started) -> None:
    """A device whose key nobody has enrolled says so, and tries again."""
    trial = practice.Practice(Path(), (), (), started.home / "stranger", identical=True)
    ready = prepared(PLAIN)
    fleet = started.home / "stranger" / "fleet"
    fleet.mkdir(parents=True)
    (fleet / "device").symlink_to(started.folder.device)
    process = practice.device_process(trial, ready, 0)
    log, until = trial.device(0) / "log.txt", time.monotonic() + 60
    while "retry" not in log.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 0
    assert "anyfleet fleet add" in log.read_text()
    assert "Traceback" not in log.read_text()
