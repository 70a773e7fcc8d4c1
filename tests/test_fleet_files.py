"""Fleets in run files: what is wrong with them is told at once, each with its place in the file."""

from pathlib import Path

import pytest

from anyfleet.errors import ConfigError
from anyfleet.study import load

REST = '[task]\nuse = "Embedded"\n[method]\nuse = "fedavg"\n'

BAD = """
[[fleet.groups]]
name = "nobody"
count = 0

[[fleet.groups]]
speed = -1e9
memmory = 4e9

[[fleet.groups]]
speed = { use = "Normal", mean = 1e9, deviation = 1e8 }
memory = { use = "LogNormal", median = 1e9, sigma = 1.0 }

[[fleet.groups]]
speed = { use = "Unifrm", low = 1e9, high = 2e9 }
link = { use = "Steady", up = 1e6, down = 1e6, dwn = 2e6 }

[[fleet.groups]]
speed = -1.0
count = 0
loss = { error = 1.5 }

[[fleet.groups]]
overhead = { use = "Uniform", low = 2.0, high = 1.0 }
energy = { use = "Uniform", low = -1.0, high = 1.0 }
frequency = [3e9, 1e8]
distance = "far"
battery = { use = "Wandering", mean = -1.0 }
availability = { use = "Diurnal", mean = 2.0 }
"""

# Where, and a part of what is said there.
TOLD = {
    "fleet.groups.0.count": "at least 1, got 0",
    "fleet.groups.1.memmory": 'did you mean "memory"?',
    "fleet.groups.1.speed": "above 0, got -1000000000.0",
    "fleet.groups.2.speed": "must be bounded",
    "fleet.groups.2.memory": "must be bounded",
    "fleet.groups.3.speed.use": 'did you mean "Uniform"?',
    "fleet.groups.3.link.dwn": 'did you mean "down"?',
    "fleet.groups.4.speed": "above 0, got -1.0",
    "fleet.groups.4.count": "at least 1, got 0",
    "fleet.groups.4.loss.error": "must be a probability",
    "fleet.groups.5.overhead": "Uniform.low, 2.0, is above Uniform.high, 1.0",
    "fleet.groups.5.energy": "at least 0",
    "fleet.groups.5.frequency": "slowest and the fastest",
    "fleet.groups.5.distance": "got 'far'",
    "fleet.groups.5.battery.mean": "not negative",
    "fleet.groups.5.availability.mean": "[0, 1]",
}


def problems(tmp_path: Path, fleet: str) -> dict[str, str]:
    file = tmp_path / "run.toml"
    file.write_text(REST + fleet)
    with pytest.raises(ConfigError) as caught:
        load(file)
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "a place was told twice"
    return found


def test_everything_wrong_with_a_fleet_is_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, BAD)
    assert found.keys() == TOLD.keys()
    for path, text in TOLD.items():
        assert text in found[path], path


def test_problems_of_the_fleet_do_not_hide_those_of_the_rest(tmp_path: Path) -> None:
    found = problems(tmp_path, 'lr = "fast"\n[[fleet.groups]]\nspeed = 0.0\n')
    assert found.keys() == {"method.lr", "fleet.groups.0.speed"}


@pytest.mark.parametrize(
    ("fleet", "path"),
    [
        ("[fleet]\ngroups = []\n", "fleet.groups"),
        ('[fleet]\ncounting = "guess"\n', "fleet.counting"),
        ("[fleet.reports]\nnoise = -1.0\n", "fleet.reports.noise"),
        # Two keys that disagree: the place of both.
        ('[fleet]\nuse = "levels"\nspeeds = [1e9]\nup = [1e6, 2e6]\n', "fleet"),
        ('[fleet]\nuse = "lossy"\nlevels = 0\n', "fleet.levels"),
        ('[fleet]\nuse = "levls"\n', "fleet.use"),
    ],
)
def test_a_problem_has_its_place(tmp_path: Path, fleet: str, path: str) -> None:
    assert problems(tmp_path, fleet).keys() == {path}


def test_a_good_fleet_of_every_kind_of_number_loads(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        REST
        + """
[[fleet.groups]]
name = "phones"
count = 8
speed = { use = "LogNormal", median = 1e9, sigma = 0.5, low = 1e8, high = 1e10 }
load = { use = "Redrawn", of = { use = "Uniform", low = 1.0, high = 3.0 } }
memory = { use = "Choice", values = [1e9, 2e9], weights = [3.0, 1.0] }
distance = { use = "Disc", radius = 550.0 }
link = { use = "Shannon" }
availability = { use = "Diurnal", mean = 0.5 }

[[fleet.groups]]
link = { use = "wifi" }
battery = 4e4
recharge = { use = "Wandering", mean = 5.0 }
"""
    )
    fleet = load(file).fleet
    assert fleet.size is None
    assert [group.name for group in fleet.groups] == ["phones", ""]
    assert load(file, ["fleet.groups.1.speed=3e9"]).fleet.groups[1].speed == 3e9
