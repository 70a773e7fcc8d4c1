"""Each method learns the small task."""

import pytest

from anyfleet.evaluate import evaluate
from anyfleet.method import Method
from anyfleet.methods import fedavg, fedprox, heterofl
from anyfleet.methods.fedavg import Training
from tests import small


def score(method: Method) -> tuple[float, float, float]:
    task = small.task(dropout=0.0)
    steps = small.steps(method, task, 15)
    final = evaluate(task, steps[-1].params, steps[-1].buffers, norm=method.norm)
    start = evaluate(task, task.params, task.buffers, norm=method.norm)
    return final["accuracy"], final["loss"], start["loss"]


SETTINGS: Training = {"lr": 0.1, "batch": 8, "epochs": 2, "momentum": 0.5}


def test_fedavg_reaches_its_floor() -> None:
    accuracy, loss, initial = score(fedavg(count=8, **SETTINGS))
    assert accuracy > 0.8
    assert loss < 0.5 * initial


@pytest.mark.parametrize(
    "method",
    [fedprox(mu=0.01, count=8, **SETTINGS), heterofl(shares=(1.0, 0.5), count=8, **SETTINGS)],
    ids=["fedprox", "heterofl"],
)
def test_the_others_come_close(method: Method) -> None:
    floor, _, _ = score(fedavg(count=8, **SETTINGS))
    accuracy, loss, initial = score(method)
    assert accuracy >= 0.8 * floor
    assert loss <= 0.6 * initial
