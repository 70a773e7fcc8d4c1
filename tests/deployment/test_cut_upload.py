"""A device as a process, killed in the middle of an upload: it sends only what is missing."""

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from anyfleet.deployment import practice
from anyfleet.deployment.fleet_folder import Address, make_fleet
from anyfleet.deployment.roster import enrol
from anyfleet.deployment.serving import Service, Work, hosting, linked
from anyfleet.device.bundle import write_bundle
from anyfleet.experiment import Experiment, prepare
from anyfleet.methods import fedrescue
from anyfleet.names import Factory
from anyfleet.runtime import Sequential
from anyfleet.runtime.flower.keys import device_key, public_text
from anyfleet.tasks import Embedded
from anyfleet.tasks.zoo import perceptron
from anyfleet.world import lossy
from tests.helpers.cut_link import CutLink

HIDDEN = 40
SIZE = 4 * 785 * HIDDEN  # bytes of a reply, a little less than all of it
BIT_RATE = 4e5  # of the device that comes back: what is missing takes some seconds


def awaited(true: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, log.read_text() if log.is_file() else "no log"
        time.sleep(0.01)


def quiet(link: CutLink) -> bool:
    before = link.crossed["up"]
    time.sleep(0.3)
    return before == link.crossed["up"]


def test_a_device_killed_in_mid_upload_sends_only_what_is_missing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    ready = prepare(
        Experiment(
            task=Embedded(
                devices=1, limit=140, server=20, model=Factory.of(perceptron, hidden=(HIDDEN,))
            ),
            method=fedrescue(count=1, lr=0.1),
            fleet=lossy(errors=(1e-9,), column_width=0.25),
            engine=Sequential(),
            rounds=1,
        )
    )
    folder = make_fleet(tmp_path / "fleet", Address("127.0.0.1", practice.free_port()))
    write_bundle(ready.task, folder.bundle)
    (tmp_path / "run").mkdir()
    counting = ready.world.declared.counting
    work = Work(ready.task, ready.experiment.limits, counting, tmp_path / "run", 1)
    trial = practice.Practice(Path(), (), (), tmp_path, identical=True)
    log = trial.device(0) / "log.txt"
    file, here = folder.device / "fleet.toml", str(folder.device_file().address)
    link = CutLink(here)
    key = device_key(folder.device / "device.key")  # as the device itself would make it
    enrol(folder.roster, practice.name_of(0), public_text(key.public_key()))
    with linked(folder, work) as opened:
        file.write_text(file.read_text().replace(here, link.address))
        running = [practice.device_process(trial, ready, 0)]

        def restart() -> None:
            """Kill the device when its link is cut, in the middle of its reply."""
            awaited(lambda: link.cut, log)
            running[0].kill()
            running[0].wait()
            link.heal()
            words = [*running[0].args, "--bit-rate", str(BIT_RATE)]  # type: ignore[misc]
            with log.open("ab") as out:
                running.append(subprocess.Popen(words, stdout=out, stderr=out))

        torment = threading.Thread(target=restart)
        try:
            service = Service(fleet=str(folder.path), run="a run", metrics=-1)
            with hosting(folder, service, work, opened) as served:
                for _ in served.gather(1):
                    pass
                awaited(lambda: quiet(link), log)  # the end of its check-in
                link.heal(up=int(0.65 * SIZE))
                torment.start()
                (result,) = ready.play(runtime=served.fleet)
                crossed = link.crossed["up"]
                status = served.status()
        finally:
            torment.join()
            for process in running:
                process.kill()
                process.wait()
            link.close()
    assert len(running) == 2
    ledger = result.round.ledger
    assert (ledger.failure, ledger.delivered_up.tolist()) == (("",), [1.0])
    assert status.sent_again == {}
    assert ledger.bits_up[0] / 8 > SIZE
    assert crossed < 0.7 * SIZE
    assert practice.compare_models(result.round.params, ready, ()).differing == 0
