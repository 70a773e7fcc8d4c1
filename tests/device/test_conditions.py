"""Conditions: what the system tells is read rightly, and what nobody knows is left out."""

import json
import math
import stat
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from anyfleet.core.messages import Conditions
from anyfleet.core.time_and_energy import Counts, effort_of
from anyfleet.device import conditions as module
from anyfleet.device.bundle import bundle_of
from anyfleet.device.conditions import (
    BitRates,
    GivenConditions,
    Meter,
    Reporter,
    SpeedProfile,
    as_conditions,
    assumed,
    read_given,
    speed_profile,
)
from anyfleet.device.device_task import DeviceTask
from anyfleet.device.limits import Loan
from anyfleet.device.sensors import Sensors, load_factor, read_sensors
from anyfleet.errors import ConfigError
from anyfleet.wire.check_in import condition_faults
from tests.helpers import small

PROFILE = SpeedProfile("0", "", 1, 2e9, 0.01, 1e-5, None, 2.0, None)


def files(root: Path, **content: str) -> None:
    root.mkdir(parents=True)
    for name, text in content.items():
        (root / name).write_text(f"{text}\n")


# --- the system -------------------------------------------------------------------------------


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert read_sensors(tmp_path, "no-such-program") == Sensors()


def test_batteries_are_read_in_both_forms(tmp_path: Path) -> None:
    supplies = tmp_path / "class/power_supply"
    files(supplies / "AC", type="Mains", online="1")
    assert read_sensors(tmp_path, "none").battery is None
    files(supplies / "BAT0", type="Battery", energy_now="50000000", status="Charging")
    assert read_sensors(tmp_path, "none").battery == pytest.approx(180_000)  # 50 Wh
    files(supplies / "BAT1", type="Battery", charge_now="2000000", voltage_now="5000000")
    assert read_sensors(tmp_path, "none").battery == pytest.approx(180_000 + 36_000)  # 10 Wh
    files(supplies / "mouse", type="Battery", scope="Device", energy_now="9000000")
    files(supplies / "BAT2", type="Battery", energy_now="unknown")
    assert read_sensors(tmp_path, "none").battery == pytest.approx(216_000)


def test_temperature_power_and_frequencies_are_read(tmp_path: Path) -> None:
    files(tmp_path / "class/thermal/thermal_zone0", temp="41500", type="cpu")
    files(tmp_path / "class/thermal/thermal_zone1", temp="nonsense")
    files(tmp_path / "class/hwmon/hwmon0", temp1_input="55250", power1_input="7500000")
    files(tmp_path / "class/hwmon/hwmon1", power1_average="2500000", power1_cap="99000000")
    for number, most in enumerate((1_500_000, 2_400_000)):
        folder = tmp_path / f"devices/system/cpu/cpu{number}/cpufreq"
        files(folder, cpuinfo_min_freq="600000", cpuinfo_max_freq=str(most))
    found = read_sensors(tmp_path, "none")
    assert (found.temperature, found.power) == (55.25, 7.5)
    assert (found.slowest, found.fastest) == (6e8, 2.4e9)


def test_a_battery_tells_what_the_machine_draws_while_it_discharges(tmp_path: Path) -> None:
    supply = tmp_path / "class/power_supply/BAT0"
    files(supply, type="Battery", energy_now="1000000", power_now="6000000", status="Discharging")
    assert read_sensors(tmp_path, "none").power == 6.0
    (supply / "status").write_text("Charging\n")
    assert read_sensors(tmp_path, "none").power is None


def test_a_jetson_is_asked(tmp_path: Path) -> None:
    program = tmp_path / "tegrastats"
    line = (
        "RAM 2448/7772MB (lfb 4x4MB) CPU [5%@1190,2%@1190] GR3D_FREQ 0% cpu@48.5C soc2@47C "
        "gpu@49.062C tj@50.25C VDD_IN 4812mW/4790mW VDD_CPU_GPU_CV 800mW/790mW"
    )
    program.write_text(f"#!/bin/sh\necho '{line}'\nexec sleep 60\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    found = read_sensors(tmp_path, str(program))
    assert (found.temperature, found.power) == (50.25, 4.812)


def test_load_is_a_factor() -> None:
    assert 1.0 <= load_factor() < math.inf


# --- the machine ------------------------------------------------------------------------------


@cache
def device_task() -> DeviceTask:
    task = small.task()
    return DeviceTask(bundle_of(task), 3, task.data(3), task.own_test(3))


def test_a_profile_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SLICE_SECONDS", 0.0)
    file = tmp_path / "profile.json"
    found = speed_profile(device_task(), 1, file)
    assert found.speed > 0
    assert min(found.overhead, found.latency) >= 0
    assert found.excess >= 1
    forged = json.loads(file.read_text()) | {"speed": 1.25}
    file.write_text(json.dumps(forged))
    assert speed_profile(device_task(), 1, file).speed == 1.25  # read, not measured
    assert speed_profile(device_task(), 2, file).threads == 2
    assert json.loads(file.read_text())["speed"] != 1.25
    file.write_text("{}")
    assert speed_profile(device_task(), 1, file).speed > 0


def test_bit_rates_are_those_of_letters_that_crossed_the_link() -> None:
    rates = BitRates()
    rates.sent(100, 1.0)  # too short to tell
    rates.received(10**6, 0.0)
    assert (rates.up, rates.down) == (None, None)
    rates.sent(10**6, 2.0)
    assert rates.up == 4e6
    rates.sent(10**6, 1.0)
    assert rates.up == 6e6
    rates.sent(10**4, 1.0)  # better ones are known
    assert rates.up == 6e6
    rates.received(10**4, 1.0)  # a small one is better than nothing
    assert rates.down == 8e4
    rates.received(10**6, 1.0)
    assert rates.down == 8e6


def test_what_a_machine_does_not_know_keeps_it_from_no_order() -> None:
    known = Meter(PROFILE, Loan(), BitRates()).conditions(Sensors())
    chosen = assumed(known)
    assert {**chosen, **known} == chosen
    assert (chosen["bit_rate_up"], chosen["send_power"]) == (math.inf, 0.0)
    drained = assumed({**known, "battery": 7.0, "bit_rate_up": 5.0})
    assert drained["bit_rate_up"] == 5.0
    assert "send_power" not in drained  # its battery would pay


def test_a_meter_reports_what_it_knows_and_nothing_else() -> None:
    rates = BitRates(up=5.0)
    known = Meter(PROFILE, Loan(memory=1000), rates).conditions(Sensors(fastest=2e9, battery=7.0))
    assert not list(condition_faults(known))
    assert known["memory"] == 500.0
    assert known["battery"] == 7.0
    assert known["bit_rate_up"] == 5.0
    assert known["speed"] * known["load"] == pytest.approx(2e9)
    assert known["slowest"] == known["fastest"] == 2e9
    assert not {"bit_rate_down", "coefficient", "send_power", "exponent", "loss"} & known.keys()
    mains = Meter(PROFILE, Loan(), rates).conditions(Sensors())
    assert mains["battery"] == math.inf


def test_a_machine_with_other_work_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = effort_of(Counts(4e9, 4e9, 8e9), 0.5, local_steps=10, calls=100.0, moved=1e6)
    full, took = np.full(1, np.nan), []
    for load in (1.0, 4.0):
        monkeypatch.setattr(module, "load_factor", lambda load=load: load)
        known = Meter(PROFILE, Loan(), BitRates()).conditions(Sensors(fastest=2e9))
        assert known["speed"] == pytest.approx(2e9 / load)
        complete = {"exponent": math.nan, "coefficient": 0.0, **known}
        took.append(float(effort.seconds(as_conditions(complete), full)[0]))
    assert took[1] == pytest.approx(4 * took[0])
    assert took[0] > 1.9  # 4e9 FLOP, and what they need beside


def test_joules_are_estimated_where_the_system_tells_what_it_draws() -> None:
    drawing = SpeedProfile("0", "", 1, 2e9, 0.01, 1e-5, 1e9, 1.0, 8.0)
    known = Meter(drawing, Loan(), BitRates()).conditions(Sensors(fastest=2e9))
    assert known["coefficient"] == pytest.approx(8.0 / 2e9**3)
    assert known["bandwidth"] == 1e9


# --- given ones -------------------------------------------------------------------------------


def test_given_conditions_are_those_of_the_round(tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_text('{"speed": [1e9, 2e9], "battery": Infinity, "exponent": NaN, "load": 1}')
    given = read_given(file)
    reporter = Reporter(given, None)
    told = [reporter.conditions(index, 0.5, Sensors()) for index in range(4)]
    assert [each["speed"] for each in told] == [1e9, 2e9, 2e9, 2e9]
    assert all(each.keys() == {"speed", "battery", "load", "loss"} for each in told)
    assert reporter.conditions(0, None, Sensors()).keys() == {"speed", "battery", "load"}
    assert not given.measured


def test_a_file_may_ask_for_some_measured_ones() -> None:
    given = GivenConditions({"speed": "measured", "send_power": 0.5, "load": 1.0})
    known = Reporter(given, Meter(PROFILE, Loan(), BitRates())).conditions(0, None, Sensors())
    assert known.keys() == {"speed", "send_power", "load"}
    assert known["load"] == 1.0


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_text('{"sped": 1, "speed": -1, "load": "much", "battery": [], "fixed": [0, 2]}')
    with pytest.raises(ConfigError) as caught:
        read_given(file)
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 5
    assert 'did you mean "speed"' in told[0]
    for text in ("[", "[1]"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_given(file)
    with pytest.raises(ConfigError, match="no such file"):
        read_given(tmp_path / "none.json")


def test_what_is_not_known_is_nan_for_planners() -> None:
    own = as_conditions({"speed": 3.0})
    assert own.speed.tolist() == [3.0]
    others = [getattr(own, f.name) for f in fields(Conditions) if f.name != "speed"]
    assert all(np.isnan(values).tolist() == [True] for values in others)
