"""Whole rounds on a CUDA device: stacked = sequential, and resuming, whatever the method keeps."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from anyfleet.core.events import Events
from anyfleet.core.loop import run
from anyfleet.core.method import Method
from anyfleet.core.server import Server
from anyfleet.experiment import Experiment, play
from anyfleet.methods import fedavg
from anyfleet.runtime import Sequential, Simulated, Stacked
from anyfleet.tasks import Embedded
from tests.helpers import small
from tests.runtime.simulated.test_stacks import CODECS, FLEET, METHODS, task

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # they run anywhere


@pytest.mark.parametrize("name", METHODS)
def test_stacked_rounds_are_those_of_single_devices(name: str) -> None:
    here, there = task(), task().to(DEVICE)
    alone = small.steps(METHODS[name], here, 1, engine=Sequential(), fleet=FLEET)[-1]
    stacked = small.steps(METHODS[name], there, 1, engine=Stacked(), fleet=FLEET)[-1]
    found = {name: value.cpu() for name, value in stacked.params.items()}
    assert small.distance(alone.params, found) < 1e-10
    for column in ("device", "bits_up", "bits_down", "compute_seconds", "upload_joules"):
        assert getattr(alone.ledger, column).tolist() == getattr(stacked.ledger, column).tolist()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_resumed_run_has_the_same_bits(name: str, precision: str) -> None:
    problem = task().to(torch.float32).to(DEVICE)

    def begun() -> Simulated:
        engine = Stacked(precision=precision)  # type: ignore[arg-type]
        return Simulated(problem, small.world(problem, FLEET), engine=engine)

    method: Method = METHODS[name]
    whole = list(islice(run(method, problem, begun(), 0), 4))
    first, second = begun(), begun()
    half = list(islice(run(method, problem, first, 0), 2))
    second.restore(half[-1].fleet)  # the next round has begun in `first`
    rest = list(islice(run(method, problem, second, 0, resume=half[-1].snapshot), 2))
    assert small.identical(rest[-1].params, whole[-1].params)
    assert repr(rest[-1].ledger.as_dicts()) == repr(whole[-1].ledger.as_dicts())


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_compresses_there_as_on_the_host(name: str) -> None:
    base = replace(METHODS["synchronous"], uplink=CODECS[name])
    here, there = (
        small.steps(base, each, 2, engine=Stacked(), fleet=FLEET)[-1]
        for each in (task(), task().to(DEVICE))
    )
    found = {name: value.cpu() for name, value in there.params.items()}
    assert small.distance(here.params, found) < 1e-9
    assert here.ledger.bits_up.tolist() == there.ledger.bits_up.tolist()


def test_scores_are_those_of_rounds_that_wait_for_them() -> None:
    base = Experiment(Embedded(devices=4, limit=200, server=20), fedavg(count=2, lr=0.1), rounds=3)
    experiment = replace(base, engine=Stacked(), device="auto", evaluate_every=1)
    # A score that no run has: whoever may end after a round waits for its scores.
    waiting = replace(experiment, stop_at=2.0)
    found, expected = (
        [str(result.record) for result in play(each)] for each in (experiment, waiting)
    )
    assert found == expected


@pytest.mark.parametrize("name", ["synchronous", "remembering"])
def test_rounds_that_begin_early_are_those_of_rounds_that_wait(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = task().to(torch.float32).to(DEVICE)
    ahead = small.steps(METHODS[name], problem, 4, engine=Stacked(), fleet=FLEET)
    monkeypatch.setattr(Server, "may_trust", lambda *_: False)
    waiting = small.steps(METHODS[name], problem, 4, engine=Stacked(), fleet=FLEET)
    for one, other in zip(ahead, waiting, strict=True):
        assert small.identical(one.params, other.params)
        assert repr(one.ledger.as_dicts()) == repr(other.ledger.as_dicts())


def test_the_host_goes_on_while_a_round_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted: list[bool] = []
    check = Server.may_trust

    def noted(server: Server, events: Events) -> bool:
        trusted.append(check(server, events))
        return trusted[-1]

    monkeypatch.setattr(Server, "may_trust", noted)
    small.steps(METHODS["synchronous"], task().to(DEVICE), 3, engine=Stacked(), fleet=FLEET)
    assert trusted
    assert all(trusted)
