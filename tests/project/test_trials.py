"""Four parts written from the documents alone: short, right, and the same from Python and TOML."""

import ast
import doctest
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.experiment import Experiment, load, play
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts import (
    Decaying,
    ErrorFeedback,
    Gradient,
    Method,
    Sgd,
    try_aggregate,
    try_codec,
    try_train,
)
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.store import describe
from anyfleet.tasks import Embedded
from anyfleet.world import Fleet, Group, Uniform, levels

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRIALS = ("geometric_median", "sam", "battery_aware", "one_bit")
ENGINES: dict[str, Callable[[str], Engine]] = {
    "Sequential": lambda name: Sequential(),
    "Threads": lambda name: Threads(allow=(name,)),
    "Stacked": lambda name: Stacked(),
}
MOST_LINES = 20
SMALL = ("rounds=2", "task.devices=4", "task.limit=40", "task.server=0")


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module", autouse=True)
def examples_forgotten() -> Iterator[None]:
    yield
    for name in TRIALS:
        sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def part(name: str, **options: Any) -> Any:
    classes = {
        "geometric_median": "GeometricMedian",
        "sam": "Sam",
        "battery_aware": "BatteryAware",
        "one_bit": "OneBit",
    }
    return getattr(module(name), classes[name])(**options)


# --- the files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_has_at_most_twenty_lines_of_code(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    head = ast.parse(text).body[0]
    assert isinstance(head, ast.Expr), "the file opens with a docstring"
    lines = [line for line in text.splitlines()[head.end_lineno :] if line.strip()]
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_imports_parts_and_nothing_else_of_the_package(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    }
    ours = {each for each in imported if each and each.startswith("anyfleet")}
    assert ours == {"anyfleet.parts"}


@pytest.mark.parametrize("name", ["geometric_median", "sam", "one_bit"])
def test_the_try_in_the_docstring_of_a_trial_works(name: str) -> None:
    failed, tried = doctest.testmod(module(name))
    assert tried
    assert not failed


# --- runs ---------------------------------------------------------------------------------------


def in_python(name: str, engine: Engine) -> Experiment:
    """Return the run of a trial's TOML file, shortened, written in Python."""
    plain: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    method: Method
    fleet = Fleet()
    if name == "geometric_median":
        method = heterofl(widths=(1.0, 0.5), **plain)
        method = replace(method, aggregate=part(name, iterations=20))
        fleet = levels(speeds=(1e9, 2.5e8))
    elif name == "sam":
        trainer = part(name, rho=0.05, lr=Decaying(0.05), optimiser=Sgd(momentum=0.9))
        method = replace(fedavg(), train=trainer)
    elif name == "battery_aware":
        method = replace(fedavg(**plain), select=part(name, count=5))
        charge = Uniform(low=0.3, high=1.0)
        watches = Group("watches", speed=2e8, battery=200.0, charge=charge)
        fleet = Fleet((watches, Group("phones", speed=1e9, battery=500.0, charge=charge)))
    else:
        method = replace(fedavg(**plain), uplink=ErrorFeedback(part(name)))
    task = Embedded(devices=4, limit=40, server=0)
    return Experiment(task, method, fleet, rounds=2, engine=engine)


@lru_cache
def params(name: str, engine: str, source: str) -> dict[str, Tensor]:
    """Return the final model of a run of two rounds, from Python or from TOML."""
    if source == "python":
        experiment = in_python(name, ENGINES[engine](name))
    else:
        changes = [*SMALL, f"engine.use={engine}"]
        experiment = load(EXAMPLES / f"{name}.toml", changes, allow=[name])
    results = list(play(experiment))
    assert len(results) == 2
    assert all(result.record.replies > 0 for result in results)
    return dict(results[-1].round.params)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_runs_from_python_and_from_toml_alike(name: str, engine: str) -> None:
    python, toml = (params(name, engine, source) for source in ("python", "toml"))
    assert all(torch.equal(python[each], toml[each]) for each in python)
    assert all(value.isfinite().all() for value in toml.values())


@pytest.mark.parametrize("name", TRIALS)
def test_engines_agree_on_a_trial(name: str) -> None:
    alone, threads, stacked = (params(name, engine, "toml") for engine in ENGINES)
    assert all(torch.equal(alone[each], threads[each]) for each in alone)
    for each, value in alone.items():
        torch.testing.assert_close(stacked[each], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRIALS)
def test_a_run_file_of_a_trial_says_its_command_and_is_what_python_says(name: str) -> None:
    file = EXAMPLES / f"{name}.toml"
    command = f"# anyfleet run examples/{name}.toml --allow {name}"
    assert file.read_text(encoding="utf-8").splitlines()[0] == command
    read = load(file, [*SMALL, "engine.use=Sequential"], allow=[name])
    assert describe(read) == describe(in_python(name, Sequential()))


# --- each does what it says ---------------------------------------------------------------------


def middle(points: list[list[float]], weights: list[float] | None = None) -> list[float]:
    """Return what the geometric-median aggregator makes of points, from the origin."""
    deltas = [{"w": torch.tensor(point)} for point in points]
    aggregate = part("geometric_median", iterations=200)
    done = try_aggregate(aggregate, {"w": torch.zeros(len(points[0]))}, deltas, samples=weights)
    return [float(value) for value in done.model["w"]]


def test_the_geometric_median_is_where_the_sum_of_distances_is_least() -> None:
    points = [[0.0, 0.0], [4.0, 0.0], [1.0, 3.0], [5.0, 7.0], [-2.0, 1.0]]
    weights = [1.0, 2.0, 1.0, 3.0, 1.0]

    def total(where: np.ndarray) -> float:
        return float(np.dot(weights, np.linalg.norm(np.array(points) - where, axis=1)))

    found = np.array(middle(points, weights))
    directions = [np.array([np.cos(a), np.sin(a)]) for a in np.linspace(0, 6.28, 16)]
    assert all(total(found) < total(found + 0.05 * each) for each in directions)
    assert total(found) < total(np.average(points, axis=0, weights=weights)) - 0.1


def test_the_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    # Of an isosceles right triangle with legs of 1 it is at (3 - sqrt 3) / 6 on both axes.
    place = (3 - 3**0.5) / 6
    assert middle([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]) == pytest.approx([place, place], abs=1e-4)


def test_the_geometric_median_counts_a_device_only_where_it_trained() -> None:
    deltas = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 0.0])}]
    covered = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 0.0])}]
    model = {"w": torch.zeros(2), "other": torch.ones(1)}
    new = try_aggregate(part("geometric_median"), model, deltas, covered=covered).model
    assert new["w"].tolist() == pytest.approx([1.0, 2.0])
    assert new["other"].tolist() == [1.0], "nobody trained it"


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    net = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.randn(2, 3, generator=generator))
    return net, torch.randn(8, 3, generator=generator), torch.arange(8) % 2


def test_sam_without_a_radius_is_gradient_descent() -> None:
    options: dict[str, Any] = {"optimiser": Sgd(momentum=0.9), "local_steps": 3, "batch_size": 4}
    plain = try_train(Gradient(Decaying(0.5), **options), *regression())
    same = try_train(part("sam", lr=Decaying(0.5), rho=0.0, **options), *regression())
    other = try_train(part("sam", lr=Decaying(0.5), rho=0.5, **options), *regression())
    assert torch.equal(plain.params["weight"], same.params["weight"])
    assert not torch.allclose(plain.params["weight"], other.params["weight"], atol=1e-3)


def test_sam_descends_along_the_gradient_uphill() -> None:
    net, x, y = regression()
    lr, rho = 0.5, 0.3

    def slope(weight: Tensor) -> Tensor:
        leaf = weight.detach().requires_grad_()
        loss = nn.functional.cross_entropy(x @ leaf.T, y)
        return torch.autograd.grad(loss, leaf)[0]

    weight = next(net.parameters()).detach()
    first = slope(weight)
    due = weight - lr * slope(weight + rho * first / first.norm())
    trainer = part("sam", lr=Decaying(lr), rho=rho, local_steps=1, batch_size=8)
    torch.testing.assert_close(try_train(trainer, net, x, y).params["weight"], due)


def test_sam_is_charged_twice_the_work() -> None:
    flops = []
    for method in (replace(fedavg(), train=Gradient()), replace(fedavg(), train=part("sam"))):
        task = Embedded(devices=4, limit=40, server=0)
        (result,) = play(Experiment(task, method, rounds=1))
        flops.append(result.record.flops)
    assert flops[1] == 2 * flops[0] > 0


def test_the_selection_asks_those_with_the_most_battery_left() -> None:
    groups = tuple(
        Group(f"{joules}", devices=(device,), battery=joules)
        for device, joules in enumerate((300.0, 900.0, 100.0, 600.0))
    )
    method = replace(fedavg(lr=0.05), select=part("battery_aware", count=2))
    task = Embedded(devices=4, limit=40, server=0)
    first, *_ = play(Experiment(task, method, Fleet(groups), rounds=1))
    assert sorted(first.round.ledger.device.tolist()) == [1, 3]


def test_the_selection_draws_among_equal_devices() -> None:
    method = replace(fedavg(lr=0.05), select=part("battery_aware", count=2))  # all on mains
    task = Embedded(devices=6, limit=60, server=0)
    asked = [
        tuple(sorted(result.round.ledger.device.tolist()))
        for result in play(Experiment(task, method, rounds=4))
    ]
    assert all(len(set(pair)) == 2 for pair in asked)
    assert len(set(asked)) > 1, "always the same devices"


def test_the_codec_sends_signs_and_the_mean_magnitude() -> None:
    tensors = {
        "w": torch.randn(40, 50, generator=torch.Generator().manual_seed(2)),
        "b": torch.tensor([0.5, -1.5, 0.0]),
    }
    tried = try_codec(part("one_bit"), tensors)
    for name, value in tensors.items():
        due = torch.where(value < 0, -1.0, 1.0) * value.abs().mean()
        torch.testing.assert_close(tried.restored[name], due)
    entries = sum(value.numel() for value in tensors.values())
    packed = 8 * sum(map(len, tried.packed))
    assert entries * 0.95 < packed < entries + 400, "one bit for each entry, and a header"
    assert packed <= tried.bits
