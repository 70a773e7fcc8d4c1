import pytest

from anyfleet import config
from anyfleet.elastic import WHOLE, cost
from anyfleet.evidence.estimates import core_hours, forward_flops, run_flops
from anyfleet.experiment import Experiment, from_source
from anyfleet.names import Factory
from anyfleet.tasks import zoo
from anyfleet.tasks.specs import Embedded


def experiment(**changes: object) -> Experiment:
    source: dict[str, object] = {
        "rounds": 10,
        "evaluate_every": 5,
        "task": {
            "use": "Mnist",
            "model": {"use": "logistic"},
            "devices": 4,
            "server": 0,
            "test_share": 0.0,
            "partition": {"use": "Iid", "samples": 100},
        },
        "method": {"use": "fedavg", "count": 2, "epochs": 3},
    }
    return from_source(config.Source({**source, **changes}))


def test_networks_are_counted_as_the_simulator_counts_them() -> None:
    for network in (zoo.cnn_mnist, zoo.mcmahan_cnn):
        blueprint = Embedded(model=Factory.of(network), limit=60, devices=2, server=0).build(0)
        exact = cost(blueprint.blueprint, WHOLE).forward_flops
        assert forward_flops(Factory.of(network), (1, 28, 28)) == pytest.approx(exact, rel=0.02)


def test_a_run_is_training_and_tests() -> None:
    forward = 2 * 784 * 10
    trained = 10 * 2 * 300 * 3  # rounds, devices, samples of three epochs, passes
    assert run_flops(experiment()) == forward * (trained + 2 * 10_000)
    nested = experiment(method={"use": "fjord", "samples": 2, "count": 2, "epochs": 3})
    assert run_flops(nested) == forward * (3 * trained + 2 * 10_000)


def test_what_has_no_known_size_has_no_estimate() -> None:
    task = {"use": "Embedded", "devices": 4, "server": 0}
    assert run_flops(experiment(task=task)) is None
    assert core_hours(None) == "–"


def test_hours_are_told_in_two_digits() -> None:
    hour = 20e9 * 3600
    assert core_hours(5061 * hour) == "5,100 h"
    assert core_hours(1.44 * hour) == "1.4 h"
    assert core_hours(hour / 2) == "30 min"
