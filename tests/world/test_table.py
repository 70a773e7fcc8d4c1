"""Fleets from a table: every number where it belongs, and every fault with its place."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyfleet.arrays import Ints
from anyfleet.errors import Refusal
from anyfleet.runtime.simulated.batteries import Batteries
from anyfleet.world import (
    ColumnLoss,
    Diurnal,
    Group,
    Redrawn,
    Steady,
    Table,
    Uniform,
    When,
    World,
    lte,
)
from anyfleet.world import table as tables
from anyfleet.world.group import FIELDS
from anyfleet.world.links import Way
from anyfleet.world.world import DEVICE_FIELDS

START = When(0.0, 0)
# A number for every field, other than a group has.
NUMBERS = {
    "speed": 3e8,
    "overhead": 0.25,
    "latency": 1e-6,
    "bandwidth": 5e9,
    "fixed": 0.125,
    "load": 2.0,
    "memory": 1e6,
    "energy": 1e-27,
    "distance": 7.0,
    "battery": 11.0,
    "charge": 0.5,
    "reserve": 0.25,
    "recharge": 0.5,
    "budget": 3.0,
    "mortality": 0.75,
    "exponent": 1.5,
    "slowest": 2e8,
    "fastest": 5e8,
    "bit_rate_up": 1e5,
    "bit_rate_down": 2e5,
    "send_power": 0.7,
    "receive_power": 0.3,
}
# Where else the fields of a group show, if not under their own name.
SEEN_AS = {"energy": "coefficient"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(text: str, **fields: Any) -> Table:
    Path("fleet.csv").write_text(text, encoding="utf-8")
    return Table(file="fleet.csv", **fields)


def built(text: str, devices: int, owners: Sequence[str] = (), **fields: Any) -> World:
    return table(text, **fields).build(np.full(devices, 9), 3, owners)


def everybody(world: World) -> Ints:
    return np.arange(len(world))


# --- what a cell means ------------------------------------------------------------------------


def test_every_number_of_a_device_can_stand_in_a_table() -> None:
    assert set(NUMBERS) == set(DEVICE_FIELDS)
    assert set(FIELDS) <= set(DEVICE_FIELDS)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_that_of_its_device_and_no_other(name: str) -> None:
    plain = built("group\nall\nall\nall\n", 3)
    world = built(f"group,{name}\nall,-\nall,{NUMBERS[name]!r}\nall,-\n", 3)
    devices = everybody(world)
    if name in FIELDS:
        was, is_ = (each.values(name, devices, START) for each in (plain, world))
    else:
        was, is_ = (getattr(each.conditions(devices, START, 1), name) for each in (plain, world))
    assert is_[1] == NUMBERS[name]
    np.testing.assert_array_equal(is_[[0, 2]], was[[0, 2]])
    assert was[1] != NUMBERS[name]
    seen = SEEN_AS.get(name, name)
    conditions = world.conditions(devices[1:2], START, 1)
    if name not in ("load", "charge", "reserve", "recharge", "distance", "mortality"):
        assert getattr(conditions, seen)[0] == NUMBERS[name]
    if name == "load":
        assert conditions.speed[0] == 1e9 / 2.0


@pytest.mark.usefixtures("folder")
def test_rows_are_devices_in_their_order_and_nothing_is_drawn() -> None:
    text = "speed,level\n3e9,2\n1e9,0\n2e9,1\n"
    for seed in (0, 1):
        world = table(text).build(np.array([5, 6, 7]), seed)
        speed = world.values("speed", everybody(world), START)
        assert speed.tolist() == [3e9, 1e9, 2e9]
        assert world.declared.level.tolist() == [2, 0, 1]
        assert world.declared.samples.tolist() == [5, 6, 7]
    assert world.assignment == "Devices are the rows of fleet.csv, in their order; no row is drawn."
    assert table(text).size == 3


@pytest.mark.usefixtures("folder")
def test_a_device_has_the_row_of_the_owner_whose_data_it_has() -> None:
    text = "owner,speed\nada,1e9\nbob,2e9\neve,3e9\n"
    world = built(text, 3, ("eve", "ada", "eve"))
    assert world.values("speed", everybody(world), START).tolist() == [3e9, 1e9, 3e9]
    assert "the row of its data's owner in fleet.csv" in world.assignment
    assert "1 of 3 rows have no device." in world.assignment
    assert 'All are of level 0: there is no field "level".' in world.assignment
    assert table(text).owners == ("ada", "bob", "eve")


@pytest.mark.usefixtures("folder")
def test_groups_say_what_a_cell_cannot() -> None:
    busy = Redrawn(Uniform(1.0, 2.0), every=5.0)
    phones = Group("phones", level=3, load=busy, availability=Diurnal(mean=0.3))
    groups = (Group("boards", memory=1e6), phones)
    text = "group,speed,load\nphones,1e9,-\nboards,2e9,-\nphones,3e9,4.0\n"
    world = built(text, 3, groups=groups)
    assert [world.groups[number].name for number in world.group] == ["phones", "boards", "phones"]
    assert world.declared.level.tolist() == [3, 0, 3]
    assert world.values("memory", everybody(world), START)[1] == 1e6
    load = world.values("load", everybody(world), START)
    assert 1.0 <= load[0] <= 2.0
    assert load[1:].tolist() == [1.0, 4.0]
    # The load of the third device is its own, and does not change.
    assert world.compute_until(np.array([0, 2]), START).tolist() == [5.0, math.inf]
    hours = [world.online(everybody(world), When(600.0 * slot, slot)) for slot in range(50)]
    assert np.mean(hours, axis=0)[1] == 1.0
    assert np.mean(hours, axis=0)[0] < 0.8


@pytest.mark.usefixtures("folder")
def test_without_groups_those_of_the_column_are_made_in_its_order() -> None:
    world = built("group\nphones\nboards\nphones\n", 3)
    assert [group.name for group in world.groups] == ["phones", "boards"]
    assert world.group.tolist() == [0, 1, 0]
    assert world.declared.level.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("folder")
def test_links_have_names_or_numbers() -> None:
    world = built("link,bit_rate_up,bit_rate_down\nlte,-,-\n-,-,-\nlte,5e5,6e5\nlte,5e5,-\n", 4)
    seen = world.conditions(everybody(world), When(0.0, 7), 1)
    assert seen.send_power.tolist() == [lte().send_power, 0.1, lte().send_power, lte().send_power]
    assert (seen.bit_rate_up[1], seen.bit_rate_down[1]) == (1e7, 4e7)
    assert (seen.bit_rate_up[2], seen.bit_rate_down[2], seen.bit_rate_up[3]) == (5e5, 6e5, 5e5)
    assert 1e6 <= seen.bit_rate_up[0] <= 2e8
    assert seen.bit_rate_up[0] not in (2e7, seen.bit_rate_down[0])  # it wanders
    slow = Group(link=Steady(Redrawn(Uniform(1e6, 2e6), every=9.0), 1e6))
    world = built("bit_rate_up,bit_rate_down\n5e5,6e5\n5e5,-\n-,-\n", 3, groups=(slow,))
    assert world.bit_rates_until(np.arange(3), START).tolist() == [math.inf, 9.0, 9.0]


@pytest.mark.usefixtures("folder")
def test_a_rate_of_ones_own_decides_whether_columns_get_lost() -> None:
    lossy = Group(column_loss=ColumnLoss(minimum_bit_rate=1e6))
    world = built("bit_rate_up,bit_rate_down\n2e6,5e5\n5e5,2e6\n-,-\n", 3, groups=(lossy,))
    keys = world._keys("test", everybody(world))
    ways: dict[Way, list[int]] = {"up": [8, 0, 8], "down": [0, 8, 8]}
    for way, expected in ways.items():
        came = world.delivered_columns(
            np.full(3, 8), everybody(world), keys, START, active=1, way=way
        )
        assert came.tolist() == expected


@pytest.mark.usefixtures("folder")
def test_a_battery_of_ones_own_runs_down() -> None:
    world = built("battery,charge\n10,0.5\ninf,1\n-,1\n", 3)
    assert not world.on_mains
    left = Batteries(world).charge(everybody(world), 0.0)
    assert left.tolist() == [5.0, math.inf, math.inf]
    assert built("battery\ninf\n-\n", 2).on_mains


@pytest.mark.usefixtures("folder")
def test_files_of_spreadsheets_are_read() -> None:
    Path("fleet.csv").write_bytes('\ufeff\r\n"speed",level\r\n"1e9",1 \r\n\r\n 2e9,0\r\n'.encode())
    fleet = Table(file=Path("fleet.csv"))
    assert fleet == Table(file="fleet.csv")
    assert fleet.size == 2
    assert fleet.build(np.ones(2, dtype=np.int64), 0).declared.level.tolist() == [1, 0]


@pytest.mark.usefixtures("folder")
def test_a_table_longer_than_a_block_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BLOCK", 7)
    speeds = [1e9 + row for row in range(20)]
    text = "owner,speed\n" + "".join(f"o{row},{speed}\n" for row, speed in enumerate(speeds))
    world = built(text, 20, [f"o{19 - row}" for row in range(20)])
    assert world.values("speed", everybody(world), START).tolist() == speeds[::-1]
    with pytest.raises(ValueError, match=r"line 16, field speed: 'x' is not a number"):
        table(text.replace("1000000014.0", "x"))


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_all_faults_are_told_at_once_with_line_and_field() -> None:
    text = (
        "owner,group,speed,bit_rate_up,link,level,slowest,name,spede,column_loss\n"
        "ada,phones,1e9,2e6,lte,0,-,1,1,1\n"
        "ada,board,-2e8,,wify,1.5,2e8,1,1,1\n"
        "bob,\n"
        ",phones,nan,inf,wifi,-1,fast,1,1,1\n"
        "eve,phones,1e9,0,wifi,1000,-,1,1,1\n"
    )
    expected = {
        "line 1: unknown field 'name': write the group of a device in the field \"group\".",
        "line 1: unknown field 'spede', did you mean \"speed\"?",
        (
            "line 1: unknown field 'column_loss': write it in [[fleet.groups]], and name the group "
            'in the field "group".'
        ),
        "line 4: expected 10 cells, as in the header, got 2.",
        "line 5, field owner: there is no owner.",
        "line 5, field speed: 'nan' is not a number.",
        "line 5, field slowest: 'fast' is not a number.",
        "line 3, field bit_rate_up: the number is missing. Write it, or - for that of its group.",
        "line 3, field level: must be a whole number in 0 … 999, got 1.5.",
        "line 5, field level: must be a whole number in 0 … 999, got -1.",
        "line 6, field level: must be a whole number in 0 … 999, got 1000.",
        "line 3, field speed: must be above 0, got -200000000.0.",
        "line 5, field bit_rate_up: must be finite and above 0, got inf.",
        "line 6, field bit_rate_up: must be finite and above 0, got 0.",
        "line 3, field owner: 'ada' already has a row, in line 2.",
        "line 3, field group: there is no group 'board', did you mean \"boards\"?",
        "line 3, field link: there is no link 'wify', did you mean \"wifi\"?",
    }
    with pytest.raises(Refusal) as told:
        table(text, groups=(Group("boards"), Group("phones")))
    assert {each.removeprefix("Table.file fleet.csv, ") for each in told.value.problems} == expected


@pytest.mark.usefixtures("folder")
def test_rows_of_another_length_are_rows() -> None:
    with pytest.raises(Refusal) as told:
        table("speed,memory\n1e9\n")
    (only,) = told.value.problems
    assert only == "Table.file fleet.csv, line 2: expected 2 cells, as in the header, got 1."
    with pytest.raises(Refusal) as told:
        table("spede\n\n")
    assert [each.count("no rows below") for each in told.value.problems] == [0, 1]


@pytest.mark.usefixtures("folder")
def test_of_many_faults_the_first_are_told_and_the_others_counted() -> None:
    with pytest.raises(Refusal) as told:
        table("speed\n" + "x\n" * 500)
    assert len(told.value.problems) == 21
    assert told.value.problems[-1] == "Table.file fleet.csv: 480 more faults like these."


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", NUMBERS)
def test_what_a_group_refuses_a_cell_may_not_be_either(name: str) -> None:
    for number in (-1.0, math.inf, -math.inf):
        infinite = name in ("bandwidth", "battery", "budget")
        if number == math.inf and infinite:
            table(f"{name}\n{NUMBERS[name]}\n{number}\n")
            continue
        with pytest.raises(ValueError, match=rf"fleet\.csv, line 3, field {name}: must be"):
            table(f"{name}\n{NUMBERS[name]}\n{number}\n")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "fields", "told"),
    [
        ("slowest,fastest\n2e9,1e9\n", {}, "line 2, field slowest: the slowest frequency is abo"),
        ("slowest\n2e9\n", {}, "line 2, field slowest: the slowest frequency is above the fast"),
        ("fastest\n1e9\n5e7\n", {}, "line 3, field slowest: the slowest frequency is above"),
        ("speed;level\n1e9;0\n", {}, "line 1: fields must be separated by commas"),
        ("speed,speed\n1,1\n", {}, "line 1: the field 'speed' occurs 2 times"),
        ("availability\nx\n", {}, r"line 1: unknown field 'availability': write it in"),
        ("frequency\n1\n", {}, '"slowest" and "fastest"'),
        ("speed\n", {}, "has no rows below its header"),
        ('group,owner\na,"ada\nb,bob\n', {}, "is not a CSV file: unexpected end of data"),
        ("\n\nspede\n1e9\n", {}, "line 3: unknown field 'spede', did you mean"),
        ("", {}, "is empty: its first line must name the fields"),
        (" \n\n", {}, "is empty"),
        ("speed\n1e9\n", {"links": (lte(),)}, r"Table\.links would be dealt at random"),
        ("group\na\n", {"groups": (Group("a", count=1),)}, r"Table\.groups\.0 has a count or dev"),
        ("group\na\n", {"groups": (Group("a", devices=(0,)),)}, r"Table\.groups\.0 has a count or"),
        ("group\na\n", {"groups": (Group("a"), Group("a"))}, r"Table\.groups must have names"),
        ("speed\n1e9\n", {"groups": (Group("a"), Group("b"))}, 'needs a field "group"'),
        (
            "bit_rate_up\n1e6\n",
            {"groups": (Group(link=Steady(1e6, 1e6, shared=True)),)},
            "field bit_rate_up: a device cannot have a bit rate of its own",
        ),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(
    text: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        table(text, **fields)


def test_files_that_are_no_tables_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"Table\.file none\.csv cannot be read: No such file"):
        Table(file="none.csv")
    with pytest.raises(ValueError, match=r"is not a file"):
        Table(file=folder)
    for content, line in (("speed\n1e9\né\n".encode("latin-1"), 3), ("speed".encode("utf-16"), 1)):
        Path("fleet.csv").write_bytes(content)
        with pytest.raises(ValueError, match=rf"fleet\.csv, line {line}: not UTF-8 text"):
            Table(file="fleet.csv")
    monkeypatch.setattr(tables, "_LARGEST", 5)
    with pytest.raises(ValueError, match=r"is too large: 10 bytes, and at most 5 are read"):
        table("speed\n1e9\n")


@pytest.mark.usefixtures("folder")
def test_another_file_than_that_of_the_run_is_refused() -> None:
    first = table("speed\n1e9\n")
    assert Table(file="fleet.csv", sha256=first.sha256) == first
    with pytest.raises(ValueError, match=r"Table\.sha256 .* fleet\.csv has changed since"):
        table("speed\n2e9\n", sha256=first.sha256)


@pytest.mark.usefixtures("folder")
def test_rows_and_devices_must_be_as_many() -> None:
    for devices in (1, 3):
        with pytest.raises(ValueError, match=rf"has 2 rows, but the task has {devices} devices"):
            built("speed\n1e9\n2e9\n", devices)


@pytest.mark.usefixtures("folder")
def test_owners_without_a_row_and_devices_without_an_owner_are_listed() -> None:
    text = "owner\nada\nbob\nzoe\n"
    with pytest.raises(Refusal) as told:
        built(text, 4, ("ada", "", "kim", "eve"))
    nobody, missing = told.value.problems
    assert "these devices do not have the data of one owner: 1. Use data" in nobody
    assert "no row for the owners of these data: eve, kim." in missing
    assert "Rows whose owner has no device: bob, zoe." in missing
    with pytest.raises(ValueError, match=r"one owner: 0, 1\. Use data with owners and the parti"):
        built(text, 2)
    with pytest.raises(ValueError, match=r"one owner: 0, .*, 9 and 2 more\."):
        built(text, 12, ("",) * 12)
