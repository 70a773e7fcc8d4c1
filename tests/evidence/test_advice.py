from pathlib import Path

import msgspec
import pytest

from anyfleet import config
from anyfleet.errors import ConfigError
from anyfleet.evidence.advice import advise, nearest
from anyfleet.evidence.comparison import CaseFacts, Comparison, Interval, Row
from anyfleet.evidence.fleet_facts import FleetFacts, facts_of
from anyfleet.evidence.tuning import Tuning

STABLE = FleetFacts(20, 8.0, 0.0, 0.0, limited_energy=False, upload=1.0, skewed=True, too_small=0.0)
LOSING = msgspec.structs.replace(STABLE, lost_columns=0.1)
ALIKE = msgspec.structs.replace(STABLE, skewed=False)
TUNING = Tuning("method.lr", (0.01, 0.1), 0.5, 100, 0.4)


def row(case: str, method: str, **gains: float) -> Row:
    told = {name: Interval(gain, gain - 0.01, gain + 0.01) for name, gain in gains.items()}
    return Row(case, method, trials=2, value=0.1, scores=told, gains=told)


def comparison() -> Comparison:
    cases = {"stable": STABLE, "losing": LOSING, "alike": ALIKE}
    gains = {  # time, bytes, energy
        "fedavg": (0.0, 0.0, 0.0),
        "heterofl": (0.05, 0.01, 0.0),
        "stc": (0.02, 0.08, 0.0),
        "fedprox": (0.01, 0.01, 0.2),
    }
    rows = [
        row(case, method, seconds=one, bytes=two, joules=three)
        for case in cases
        for method, (one, two, three) in gains.items()
        if (case, method) != ("losing", "stc")
    ]
    rows.append(Row("losing", "stc", refused="links lose columns"))
    budgets = {"seconds": 1.0, "joules": 1.0, "bytes": 1.0}
    facts = {name: CaseFacts(each, budgets) for name, each in cases.items()}
    return Comparison("fedavg", 3, 40, TUNING, ("heterofl",), facts, tuple(rows))


def names(facts: FleetFacts, rows: Comparison) -> list[str]:
    return [candidate.method for candidate in advise(facts, rows).candidates]


def test_the_best_methods_of_the_nearest_case_are_named_with_their_rows() -> None:
    found = advise(STABLE, comparison())
    assert found.cases == ("stable",)
    assert [each.method for each in found.candidates] == ["stc", "heterofl", "fedprox"]
    assert found.candidates[0].gain == pytest.approx(0.05)
    assert found.candidates[0].rows == (comparison().of("stable")["stc"],)
    assert found.away == 0.0


def test_another_row_gives_another_answer() -> None:
    known = comparison()
    better = row("stable", "heterofl", seconds=0.3, bytes=0.1, joules=0.0)
    rows = tuple(
        better if (each.case, each.method) == ("stable", "heterofl") else each
        for each in known.rows
    )
    assert names(STABLE, known)[0] == "stc"
    assert names(STABLE, msgspec.structs.replace(known, rows=rows))[0] == "heterofl"


def test_energy_counts_where_it_is_limited() -> None:
    limited = msgspec.structs.replace(STABLE, limited_energy=True)
    assert names(limited, comparison())[0] == "fedprox"


def test_what_the_fleet_cannot_run_is_no_candidate() -> None:
    assert names(LOSING, comparison()) == ["heterofl", "fedprox", "fedavg"]
    small = msgspec.structs.replace(STABLE, too_small=0.25)
    assert names(small, comparison()) == ["heterofl"]


def test_what_is_not_known_of_a_fleet_does_not_count() -> None:
    unknown = msgspec.structs.replace(STABLE, upload=None, skewed=None)
    assert nearest(unknown, comparison()) == ("stable", "alike")
    far = msgspec.structs.replace(STABLE, drop_outs=0.5)
    assert advise(far, comparison()).away == pytest.approx(2.5)


# --- facts ----------------------------------------------------------------------------------------


def facts(text: str, folder: Path) -> FleetFacts:
    file = folder / "fleet.toml"
    file.write_text(text)
    return facts_of(config.read(file, (), ()), "fleet.toml")


RUN = """
[task]
use = "Embedded"
devices = 8
model = { use = "logistic" }
partition = { use = "Dirichlet", alpha = 0.3 }

[fleet]
use = "levels"
speeds = [4e9, 1e9]
bit_rate_up = 1e6
mortality = 0.25
error = 0.1
"""


def test_facts_are_those_of_the_file(tmp_path: Path) -> None:
    found = facts(RUN, tmp_path)
    assert (found.devices, found.spread, found.drop_outs, found.lost_columns) == (8, 4, 0.25, 0.1)
    assert found.upload == pytest.approx(7850 * 32 / 1e6, rel=1e-3)
    assert found.skewed is True
    assert found.too_small == 0
    assert not found.limited_energy
    told = " ".join(found.told())
    assert "25 % of the orders fail" in told
    assert "data differ between devices" in told


@pytest.mark.parametrize(
    ("old", "new", "name", "value"),
    [
        ("alpha = 0.3", "alpha = 100.0", "skewed", False),
        ('{ use = "Dirichlet", alpha = 0.3 }', '{ use = "Iid" }', "skewed", False),
        ("error = 0.1", "memory = 90e3", "too_small", 1.0),
        ("error = 0.1", "budget = 2.0", "limited_energy", True),
        ("mortality = 0.25", "", "drop_outs", 0.0),
    ],
)
def test_facts_change_with_the_file(
    tmp_path: Path, old: str, new: str, name: str, value: object
) -> None:
    assert getattr(facts(RUN, tmp_path), name) != value
    assert getattr(facts(RUN.replace(old, new), tmp_path), name) == value


def test_a_fleet_alone_is_enough(tmp_path: Path) -> None:
    found = facts("[[fleet.groups]]\ncount = 3\nbattery = 10.0\n", tmp_path)
    assert (found.devices, found.spread, found.upload, found.skewed) == (3, 1.0, None, None)
    assert found.limited_energy
    assert "no task" in " ".join(found.told())


def test_all_problems_of_fleet_and_task_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no table") as none:
        facts('[task]\nuse = "Embeded"\n', tmp_path)
    assert len(none.value.problems) == 2
    with pytest.raises(ConfigError, match="speeds"):
        facts('[fleet]\nuse = "levels"\nspeed = 3\n', tmp_path)
