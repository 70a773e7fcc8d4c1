"""How much of anything a message may bring, and where there may be no limit at all."""

import importlib
import math
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from anyfleet import Experiment, config, load
from anyfleet.errors import ConfigError, Refusal
from anyfleet.methods import fedavg
from anyfleet.names import HOMES
from anyfleet.parts.choose import LargestInTime
from anyfleet.runtime import Limits
from anyfleet.store.run_folder import describe
from anyfleet.tasks import Embedded
from tests.helpers import small

BLUEPRINT = small.task().blueprint


def test_limits_that_nothing_meets_are_refused_all_at_once() -> None:
    with pytest.raises(Refusal) as caught:
        Limits(message=0, job=-1, norm=0.0)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "Limits.job",
        "Limits.message",
        "Limits.norm",
    ]


def test_what_is_not_given_follows_from_the_model() -> None:
    most, half = Limits().for_model(BLUEPRINT), BLUEPRINT.local(BLUEPRINT.prefix(0.5))
    assert Limits().for_model(half).message < most.message
    assert Limits().for_model(half).header < most.header
    assert most.message > most.header + 4 * BLUEPRINT.numel()
    assert most.report > 6 + 8 + 16  # a number for every channel
    given = Limits(message=9, header=8, report=7).for_model(BLUEPRINT)
    assert (given.message, given.header, given.report) == (9, 8, 7)


# --- no limit -----------------------------------------------------------------------------------

# An infinite number is no limit here but a slip, and a run file refuses it. Whoever adds a field
# that takes one from Python decides: `Unbounded`, a check of the class, or this list.
SLIPS = {
    "AdamW.epsilon",
    "AdamW.weight_decay",
    "AngleWeighted.sharpness",
    "Clipped.length",
    "Decaying.start",
    "Dirichlet.alpha",
    "DirichletSizes.alpha",
    "FisherBlocks.epsilon",
    "FisherUtility.penalty",
    "FisherUtility.target",
    "FisherUtility.threshold",
    "FrozenPrefix.clip",
    "FrozenPrefix.proximal",
    "Generator.rho_s",
    "Gradient.clip",
    "Gradient.proximal",
    "Inverse.epsilon",
    "Inverse.mu",
    "Inverse.offset",
    "Learned.alpha",
    "LogNormalSizes.sigma",
    "Mean.discount",
    "MostGain.seconds",
    "ServerAdam.epsilon",
    "ServerAdam.lr",
    "ServerSgd.lr",
    "Sgd.weight_decay",
    "Shift.fill",
    "LocalStepsWithin.seconds",
    "When.now",
}


def exported() -> Iterator[Any]:
    """Yield a value of every class that run files may name and that needs numbers at most."""
    found = {
        each
        for home in set(HOMES.values())
        for each in vars(importlib.import_module(home)).values()
        if isinstance(each, type) and is_dataclass(each)
    }
    for kind in sorted(found, key=lambda kind: kind.__name__):
        due = [f for f in fields(kind) if f.init and f.default is f.default_factory is MISSING]
        hints = typing.get_type_hints(kind)
        try:
            yield kind(**{f.name: 1 if hints[f.name] is int else 0.5 for f in due})
        except (TypeError, ValueError):
            continue  # it needs more than numbers


def unlimited() -> Iterator[tuple[str, Any]]:
    """Yield the values that take infinity from Python, one field at a time."""
    for value in (*exported(), LargestInTime(1.0)):
        hints = typing.get_type_hints(type(value))
        for each in fields(value):
            kind = hints[each.name]
            if each.init and float in (kind, *typing.get_args(kind)):
                try:
                    other = replace(value, **{each.name: math.inf})
                except (TypeError, ValueError):
                    continue
                yield f"{type(value).__name__}.{each.name}", other


def test_what_takes_infinity_from_python_takes_it_from_a_file() -> None:
    refused, known = set(), set()
    for name, value in unlimited():
        known.add(name)
        try:
            assert config.load(config.dump(value, complete=True), type(value)) == value
        except ConfigError:
            refused.add(name)
    assert refused == SLIPS
    assert known > {"Limits.norm", "Limits.growth", "Deadline.seconds", "LargestInTime.seconds"}


@pytest.mark.parametrize("limits", [Limits(growth=math.inf), Limits(norm=math.inf, growth=1e3)])
def test_a_run_without_limits_can_be_described_and_loaded(limits: Limits, tmp_path: Path) -> None:
    experiment = Experiment(Embedded(devices=4), fedavg(lr=0.1), limits=limits)
    file = tmp_path / "config.toml"
    file.write_text(describe(experiment))
    assert load(file) == experiment
    assert load(file, ["limits.growth=inf"]).limits.growth == math.inf
