"""A machine as a row of a fleet file: the fit on seconds that are known, and a real measurement."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anyfleet import config
from anyfleet.cli.fleet import profile_machine
from anyfleet.core.messages import Conditions
from anyfleet.core.time_and_energy import Counts, effort_of
from anyfleet.elastic.cost.memory import Live
from anyfleet.errors import ConfigError
from anyfleet.hardware.probes import STEPS, Peak, Sample, measure, weigh
from anyfleet.hardware.profile import (
    FittedSpeed,
    Profile,
    as_toml,
    conclude,
    fit,
    free_memory,
    profile,
    slices,
)
from anyfleet.world import Fleet, Group
from anyfleet.world.quantities import When
from tests.helpers import small

TRUE = FittedSpeed(speed=3e9, overhead=0.002, latency=1e-4, bandwidth=5e8)
Demands = tuple[float, float, float, float]
# Demands that do not go along with each other: steps, calls, FLOP, bytes.
DEMANDS: list[Demands] = [
    (4, 40, 8e9, 1e8),
    (4, 90, 1e9, 9e7),
    (2, 200, 3e8, 4e8),
    (8, 160, 5e7, 1e6),
    (1, 10, 2e9, 3e7),
    (16, 20, 6e8, 2e8),
]


def sampled(rates: FittedSpeed, demands: Sequence[Demands] = DEMANDS) -> list[Sample]:
    """What a machine with these rates would show."""
    rows = [Sample("net", 1.0, 0, *demand, 1.0) for demand in demands]
    return [replace(row, seconds=rates.seconds(row)) for row in rows]


def close(found: FittedSpeed, wanted: FittedSpeed, tolerance: float = 1e-6) -> bool:
    pairs = zip(vars(found).values(), vars(wanted).values(), strict=True)
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)


def test_the_fit_finds_a_known_machine() -> None:
    assert close(fit(sampled(TRUE)), TRUE)


@pytest.mark.parametrize(
    "rates",
    [
        replace(TRUE, overhead=0.0),
        replace(TRUE, latency=0.0),
        replace(TRUE, bandwidth=math.inf),
        FittedSpeed(2e10, 0.0, 0.0, math.inf),
    ],
)
def test_the_fit_finds_a_machine_without_some_of_the_costs(rates: FittedSpeed) -> None:
    found = fit(sampled(rates))
    assert math.isclose(found.speed, rates.speed, rel_tol=1e-6)
    assert found.overhead == pytest.approx(rates.overhead, abs=1e-9)
    assert found.latency == pytest.approx(rates.latency, abs=1e-10)
    assert 1 / found.bandwidth == pytest.approx(1 / rates.bandwidth, abs=1e-15)


def test_one_disturbed_measurement_does_not_move_the_fit() -> None:
    samples = sampled(TRUE, [*DEMANDS, *((3 * a, b, 2 * c, d) for a, b, c, d in DEMANDS)])
    samples[2] = replace(samples[2], seconds=5 * samples[2].seconds)
    assert close(fit(samples), TRUE, tolerance=0.02)


def test_no_rate_is_negative() -> None:
    samples = [
        replace(sample, seconds=sample.seconds * (1 + 0.5 * math.sin(7 * number)))
        for number, sample in enumerate(sampled(TRUE))
    ]
    found = fit(samples)
    assert found.speed > 0
    assert found.bandwidth > 0
    assert min(found.overhead, found.latency) >= 0


def test_a_single_sample_gives_a_speed_that_explains_it() -> None:
    (only,) = sampled(TRUE, DEMANDS[:1])
    assert fit([only]).error(only) == pytest.approx(0.0, abs=1e-9)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit([])


def test_the_error_is_relative_to_what_was_measured() -> None:
    (sample, *_) = sampled(TRUE)
    assert TRUE.error(replace(sample, seconds=sample.seconds * 2)) == pytest.approx(-0.5)


def machine(rates: FittedSpeed = TRUE) -> Profile:
    return Profile(rates, 2e9, tuple(sampled(rates)), ())


def loaded(row: str) -> Fleet:
    data = tomllib.loads(row)
    fleet: Fleet = config.load(data["fleet"], Fleet, homes={"": "anyfleet.world"})
    return fleet


@pytest.mark.parametrize("rates", [TRUE, FittedSpeed(1e9, 0.0, 0.0, math.inf)])
def test_a_row_is_a_group_of_a_fleet_file(rates: FittedSpeed) -> None:
    (group,) = loaded(as_toml(machine(rates), 'a "small" one')).groups
    assert group == Group(
        name='a "small" one',
        count=1,
        speed=rates.speed,
        overhead=rates.overhead,
        latency=rates.latency,
        bandwidth=rates.bandwidth,
        memory=2e9,
    )


def test_the_simulated_clock_says_what_the_profile_says() -> None:
    world = loaded(as_toml(machine())).build(np.array([10]), seed=0)
    own: Conditions = world.conditions(np.array([0]), When(0.0, 0), 1)
    for sample in sampled(TRUE):
        counts = Counts(sample.flops, sample.flops, sample.flops * 3)
        effort = effort_of(
            counts, 0.5, local_steps=int(sample.local_steps), calls=sample.calls, moved=sample.moved
        )
        (seconds,) = effort.seconds(own, np.array([np.nan]))
        assert seconds == pytest.approx(TRUE.seconds(sample))


def test_memory_is_what_is_free_by_the_account_of_planners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyfleet.hardware.profile.free_memory", lambda: 9e9)
    peaks = [Peak("a", measured=30.0, predicted=10.0), Peak("b", measured=9.0, predicted=10.0)]
    found = conclude(sampled(TRUE), peaks)
    assert found.memory == pytest.approx(3e9)
    assert found.peaks == tuple(peaks)


def test_this_machine_has_memory() -> None:
    assert 0 < free_memory() < math.inf


def test_a_tiny_net_can_be_profiled() -> None:
    task = small.task()
    found = profile({"tiny": task}, batch=8)
    measured = [(s.net, s.first_trained_layer) for s in found.samples]
    assert measured == [("tiny", first) for first in (0, 2) * 3]
    assert all(s.seconds > 0 for s in found.samples)
    assert {s.local_steps for s in found.samples} == {STEPS}
    assert found.fitted.speed > 0
    assert found.memory > 0


def test_a_sample_demands_what_the_clock_would_charge() -> None:
    task = small.task()
    whole, narrow, _ = (slices(task)[i] for i in (0, 2, 4))
    large, little = (measure("tiny", task, s, 8) for s in (whole, narrow))
    assert large.calls == little.calls
    assert large.flops > 2 * little.flops
    assert large.width == 1.0
    assert 0.2 < little.width < 0.4


def test_measuring_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure("tiny", small.task(), slices(small.task())[-1], 4)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_peak_counts_storages_once_and_only_while_they_live() -> None:
    given = torch.zeros(1000)
    with Live() as live:
        one = given + 1
        view = one.view(10, 100)
        two = given + 2
        del one, view
        three = given + 3
        three.add_(two)
        given.mul_(2)
    assert live.peak == 2 * 4000
    assert live.now == 2 * 4000
    del two, three
    assert live.now == 0


def test_the_peak_holds_model_gradient_and_activations() -> None:
    found = weigh("tiny", small.task(), batch=8)
    assert found.measured == pytest.approx(found.predicted, rel=0.25)
    more = weigh("tiny", small.task(), batch=16)
    assert more.measured > found.measured


def test_the_command_adds_a_row_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anyfleet.cli.fleet.standard", lambda batch: {"tiny": small.task()})
    file = tmp_path / "fleet.toml"
    file.write_text('[[fleet.groups]]\nname = "there before"\n')
    profile_machine(file, batch=4, name="new")
    names = [group["name"] for group in tomllib.loads(file.read_text())["fleet"]["groups"]]
    assert names == ["there before", "new"]
    shown = capsys.readouterr().out
    assert "measured ms" in shown
    assert "Median error" in shown
    assert str(file) in shown.replace("\n", "")


def test_a_file_that_cannot_take_a_row_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyfleet.cli.fleet.standard", lambda batch: pytest.fail("measured"))
    file = tmp_path / "fleet.toml"
    file.write_text("[fleet]\ngroups = []\n")
    with pytest.raises(ConfigError, match=r"fleet\.toml"):
        profile_machine(file)
    assert file.read_text() == "[fleet]\ngroups = []\n"
