"""Fleets in run files: what is wrong with them is told at once, each with its place in the file."""

from pathlib import Path

import numpy as np
import pytest

from anyfleet.errors import ConfigError
from anyfleet.experiment import build, load, populate
from anyfleet.store import describe
from anyfleet.world import Replayed, Table, Wandering, When
from tests.helpers.sets import NAMES

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
link = { use = "Steady", bit_rate_up = 1e6, bit_rate_down = 1e6, bit_rate_dwn = 2e6 }

[[fleet.groups]]
speed = -1.0
count = 0
column_loss = { error = 1.5 }

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
    "fleet.groups.3.link.bit_rate_dwn": 'did you mean "bit_rate_down" or',
    "fleet.groups.4.speed": "above 0, got -1.0",
    "fleet.groups.4.count": "at least 1, got 0",
    "fleet.groups.4.column_loss.error": "must be a probability",
    "fleet.groups.5.overhead": "Uniform.low, 2.0, is above Uniform.high, 1.0",
    "fleet.groups.5.energy": "at least 0",
    "fleet.groups.5.frequency": "slowest and the fastest",
    "fleet.groups.5.distance": "got 'far'",
    "fleet.groups.5.battery.mean": "not negative",
    "fleet.groups.5.availability.mean": "[0, 1]",
}


# Several faults in one part, also in what it cannot do without, and in the arguments of a preset.
BAD_PARTS = """
[[fleet.groups]]
link = { use = "Steady", bit_rate_up = -1.0, bit_rate_down = -3.0, send_power = -0.1 }
speed = { use = "Redrawn", of = { use = "Uniform", low = 3.0, high = 1.0 }, every = -1.0 }
load = { use = "LogNormal", median = -1.0, sigma = -2.0 }
memory = { use = "Categorical", values = [], weights = [-1.0] }
column_loss = { column_width = 2.0, error = -1.0, minimum_bit_rate = -5.0 }

[[fleet.groups]]
link = { use = "Steady", bit_rate_up = "fast", bit_rate_down = 0.0 }
battery = { use = "Wandering", mean = -1.0, persistence = 3.0, floor = 2.0 }
distance = { use = "Disc", radius = -5.0, floor = -1.0 }
recharge = { use = "Normal", mean = "high", deviation = -1.0 }
availability = { use = "Intermittent", share = 2.0, every = 0.0 }

[[fleet.groups]]
link = { use = "Shannon", band = 0.0, receive_power = -1.0, ref_loss_db = 1e4 }
availability = { use = "Intermittent", every = 0.0 }

[fleet.reports]
rounds = -1
noise = -1.0
"""

TOLD_OF_PARTS = {
    "fleet.groups.0.link.bit_rate_up": "Steady.bit_rate_up must be finite bits per second above 0",
    "fleet.groups.0.link.bit_rate_down": "Steady.bit_rate_down",
    "fleet.groups.0.link.send_power": "watts",
    "fleet.groups.0.speed.of": "Uniform.low, 3.0, is above Uniform.high, 1.0",
    "fleet.groups.0.speed.every": "Redrawn.every must be a positive number of seconds",
    "fleet.groups.0.load.median": "positive",
    "fleet.groups.0.load.sigma": "positive",
    "fleet.groups.0.memory.values": "one or more",
    "fleet.groups.0.memory.weights": "not be negative",
    "fleet.groups.0.column_loss.column_width": "(0, 1]",
    "fleet.groups.0.column_loss.error": "probability",
    "fleet.groups.0.column_loss.minimum_bit_rate": "above 0",
    "fleet.groups.1.link.bit_rate_up": "got 'fast'",
    "fleet.groups.1.link.bit_rate_down": "above 0",
    "fleet.groups.1.battery.mean": "not negative",
    "fleet.groups.1.battery.persistence": "[0, 0.99]",
    "fleet.groups.1.battery.floor": "[0, 1]",
    "fleet.groups.1.distance.radius": "positive",
    "fleet.groups.1.distance.floor": "not be negative",
    "fleet.groups.1.recharge.mean": "got 'high'",
    "fleet.groups.1.recharge.deviation": "not be negative",
    "fleet.groups.1.availability.share": "(0, 1]",
    "fleet.groups.1.availability.every": "positive number of seconds",
    "fleet.groups.2.link.band": "above 0",
    "fleet.groups.2.link.receive_power": "watts",
    "fleet.groups.2.link.ref_loss_db": "decibels",
    "fleet.groups.2.availability.share": "is missing",
    "fleet.groups.2.availability.every": "positive number of seconds",
    "fleet.reports.rounds": "not negative",
    "fleet.reports.noise": "not negative",
}

BAD_PRESETS = {
    'use = "levels"\nspeeds = [-1, 2, -3]\nbit_rate_up = 0.0\n'
    "bit_rate_down = [-1.0, 2.0, 3.0]\nmemory = -4.0\nmortality = 2.0\n": {
        "speeds": "levels.speeds must be above 0, got -1",
        "bit_rate_up": "levels.bit_rate_up must be finite bits per second above 0",
        "bit_rate_down": "levels.bit_rate_down must be finite",
        "memory": "levels.memory must be above 0, got -4.0",
        "mortality": "levels.mortality must be at least 0 and at most 1, got 2.0",
    },
    'use = "cell"\ndevices = 0\ndistance = -1.0\ncoefficient = -1.0\nbudget = -1.0\n'
    "flops_per_cycle = 0.0\nlink = { band = -1.0, receive_power = -1.0 }\n": {
        "devices": "cell.devices must be at least 1",
        "distance": "cell.distance must be at least 0",
        "coefficient": "cell.coefficient must be at least 0",
        "budget": "cell.budget must be above 0",
        "flops_per_cycle": "cell.flops_per_cycle must be above 0",
        "link.band": "Shannon.band",
        "link.receive_power": "Shannon.receive_power",
    },
    'use = "lossy"\nerrors = [0.1, 1.5]\nlevels = 0\ncolumn_width = 0.0\nspeed = -1.0\n': {
        "errors": "lossy.errors must be a probability",
        "levels": "lossy.levels must be at least 1",
        "column_width": "lossy.column_width must lie in (0, 1]",
        "speed": "lossy.speed must be above 0",
    },
    'use = "testbed"\nspeed = 0.0\n': {"speed": "testbed.speed must be above 0"},
    'use = "steep"\nspeed = 0.0\n': {"speed": "steep.speed must be above 0"},
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


def test_everything_wrong_within_a_part_is_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, BAD_PARTS)
    assert found.keys() == TOLD_OF_PARTS.keys()
    for path, text in TOLD_OF_PARTS.items():
        assert text in found[path], path


@pytest.mark.parametrize(("fleet", "told"), BAD_PRESETS.items())
def test_a_preset_names_its_own_arguments(tmp_path: Path, fleet: str, told: dict[str, str]) -> None:
    found = problems(tmp_path, f"[fleet]\n{fleet}")
    assert found.keys() == {f"fleet.{key}" for key in told}
    for key, text in told.items():
        assert text in found[f"fleet.{key}"], key


def test_a_part_made_in_python_tells_all_its_faults_on_lines_of_their_own() -> None:
    with pytest.raises(ValueError, match="Wandering") as caught:
        Wandering(-1.0, persistence=3.0)
    first, second = str(caught.value).splitlines()
    assert first.startswith("Wandering.mean must")
    assert second.startswith("Wandering.persistence must")


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
        ('[fleet]\nuse = "levels"\nspeeds = [1e9]\nbit_rate_up = [1e6, 2e6]\n', "fleet"),
        ('[fleet]\nuse = "lossy"\nlevels = 0\n', "fleet.levels"),
        ('[fleet]\nuse = "levls"\n', "fleet.use"),
        (
            '[[fleet.groups]]\nrecharge = { use = "Wandering", mean = 5.0 }\n',
            "fleet.groups.0.recharge",
        ),
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
memory = { use = "Categorical", values = [1e9, 2e9], weights = [3.0, 1.0] }
distance = { use = "Disc", radius = 550.0 }
link = { use = "Shannon" }
availability = { use = "Diurnal", mean = 0.5 }

[[fleet.groups]]
link = { use = "wifi" }
battery = 4e4
recharge = { use = "Uniform", low = 1.0, high = 5.0 }
mortality = { use = "Wandering", mean = 0.001 }
"""
    )
    fleet = load(file).fleet
    assert fleet.size is None
    assert [group.name for group in fleet.groups] == ["phones", ""]
    assert load(file, ["fleet.groups.1.speed=3e9"]).fleet.groups[1].speed == 3e9


# --- files beside a run file ----------------------------------------------------------------------

TABLE = '[fleet]\nuse = "Table"\nfile = "data/fleet.csv"\n'
GROUPS = """
[[fleet.groups]]
devices = ["ada", "bob"]
speed = 5e8
[[fleet.groups]]
devices = [1]
speed = 7e8
"""
OWNED = """
rounds = 2
[task]
use = "Own"
model = { use = "perceptron", features = 6, classes = 3, hidden = [4] }
data = { use = "tests.helpers.sets:Owned" }
devices = 3
partition = { use = "ByOwner" }
[method]
use = "fedavg"
count = 3
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and files beside it; the working directory is another one."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/fleet.csv").write_text("owner,speed\nada,1e9\nbob,2e9\nalf,3e9\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def test_a_relative_path_lies_beside_the_run_file(home: Path) -> None:
    (home / "data/rates.csv").write_text("rate\n1e6\n")
    numbers = '{ use = "Replayed", file = "data/rates.csv", field = "rate" }'
    table, group = home / "table.toml", home / "group.toml"
    table.write_text(REST + TABLE)
    group.write_text(f"{REST}[[fleet.groups]]\nspeed = {numbers}\n")
    fleet = load(table).fleet
    assert isinstance(fleet, Table)
    assert fleet.file == home / "data/fleet.csv"
    (speed,) = (group.speed for group in load(group).fleet.groups)
    assert isinstance(speed, Replayed)
    assert speed.file == home / "data/rates.csv"
    # What a run writes down is found from anywhere.
    (home / "elsewhere/config.toml").write_text(describe(load(table)))
    assert load(home / "elsewhere/config.toml") == load(table)
    with pytest.raises(ConfigError, match=r"fleet\.file: Table\.file .*other\.csv cannot be read"):
        load(table, ["fleet.file=other.csv"])


def test_a_table_of_a_run_that_has_changed_since_is_refused(home: Path) -> None:
    (home / "run.toml").write_text(REST + TABLE)
    (home / "config.toml").write_text(describe(load(home / "run.toml")))
    (home / "data/fleet.csv").write_text("speed\n1e9\n")
    with pytest.raises(ConfigError, match=r"^fleet\.sha256: Table\.sha256 .* has changed since"):
        load(home / "config.toml")


def test_all_faults_of_a_table_have_the_place_of_its_file(home: Path) -> None:
    (home / "run.toml").write_text(REST + TABLE + 'counting = "guess"\n')
    (home / "data/fleet.csv").write_text("speed,memmory\n-1,1\nx,1\n")
    with pytest.raises(ConfigError) as told:
        load(home / "run.toml")
    found = sorted((each.path, each.message[-30:]) for each in told.value.problems)
    assert [path for path, _ in found] == ["fleet.counting", *["fleet.file"] * 3]


@pytest.mark.parametrize(
    ("fleet", "speeds"),
    [
        (TABLE, [3e9, 1e9, 2e9]),
        (
            GROUPS,
            [7e8, 5e8, 5e8],
        ),
    ],
)
def test_hardware_is_bound_to_data_by_their_owner(
    home: Path, fleet: str, speeds: list[float]
) -> None:
    (home / "run.toml").write_text(OWNED + fleet)
    for seed in (0, 1):
        experiment = load(home / "run.toml", [f"seed={seed}"], allow=["tests.helpers.sets"])
        task = build(experiment)
        # Devices follow the order of owners; whose rows they have is told by their inputs.
        owner = [NAMES[int(task.data(device).x[0, 0])] for device in range(3)]
        world = populate(experiment, task)
        speed = world.values("speed", np.arange(3), When(0.0, 0)).tolist()
        by_owner = dict(zip(owner, speed, strict=True))
        assert by_owner == dict(zip(("alf", "ada", "bob"), speeds, strict=True))
