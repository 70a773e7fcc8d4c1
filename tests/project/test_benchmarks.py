"""The benchmarks run, and ask of the fleet what they say; how fast they are is not asserted."""

import importlib.util
import socket
import threading
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import attack, depth, fleet, planner, real_fleet, sizes
from benchmarks import codec as codecs
from benchmarks.measuring import NotRun

from anyfleet.cli import demo
from anyfleet.core.layout import Symbols
from anyfleet.core.slots import Policy, nested
from anyfleet.parts import aggregate, choose, codec, plan, select
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.tasks import Task
from anyfleet.world import World
from anyfleet.world.quantities import When, bounds
from tests.helpers import small


def test_every_selector_and_every_planner_is_measured() -> None:
    selectors = {type(make(1_000)).__name__ for make in fleet.SELECTORS.values()}
    assert selectors == set(select.__all__)
    planners = {type(part).__name__ for pair in fleet.PLANNERS.values() for part in pair}
    assert planners == set(plan.__all__) | set(choose.__all__)


# What a planner costs does not depend on who named the devices: each once, not all pairs.
PAIRS = {("Everyone", planner) for planner in fleet.PLANNERS}
PAIRS |= {(selector, "WidthByLevel") for selector in fleet.SELECTORS}


@cache
def thousand() -> tuple[Task, World, fleet.Built]:
    """Nobody changes it."""
    return fleet.build(1_000)


@pytest.mark.parametrize(("selector", "planner"), sorted(PAIRS))
def test_a_round_of_a_thousand_devices(selector: str, planner: str) -> None:
    task, world, built = thousand()
    measured = fleet.measure(task, world, selector, planner, fleet.Rounds(1, warm=0))
    assert built.devices == task.devices == len(world) == 1_000
    # Few devices report less memory than a narrow slice needs, and are not asked. `InOrder` passes
    # over all that are not there when it is their turn.
    least = 0.3 if selector == "InOrder" else 0.9
    assert least * fleet.COHORT < measured.orders <= fleet.COHORT
    assert measured.clock > 0
    assert measured.ask > 0
    assert measured.rest > 0


def test_everything_that_can_change_does() -> None:
    _, world, _ = fleet.build(1_000)
    everybody, early, late = np.arange(1_000), When(0.0, 0), When(7_200.0, 5)
    before, after = (world.conditions(everybody, when, 100) for when in (early, late))
    for name in ("bit_rate_up", "bit_rate_down", "load", "memory", "speed"):
        assert (getattr(before, name) != getattr(after, name)).mean() > 0.9, name
    assert (world.online(everybody, early) != world.online(everybody, late)).mean() > 0.1
    assert all(bounds(group.battery)[1] < np.inf for group in world.groups)
    assert all(bounds(group.recharge)[0] > 0 for group in world.groups)


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    fleet.main(["--devices", "1000", "--select", "Everyone", "--rounds", "1", "--warm", "0"])
    shown = capsys.readouterr().out
    assert "1,000 devices, Everyone" in shown
    assert all(planner in shown for planner in fleet.PLANNERS)


def test_depths_are_timed_beside_what_they_count(capsys: pytest.CaptureFixture[str]) -> None:
    depth.main(["--nets", "C.2", "--batches", "--repeats", "1", "--steps", "1"])
    shown = capsys.readouterr().out
    assert "C.2, batch 12" in shown
    assert "batch 32" not in shown
    # specification §2: what widths of the CNN count if convolutions are charged for every sample.
    for share in ("0.344", "0.380", "0.777", "1.000"):
        assert f" {share} " in shown
    assert "Of 3 depths that do not train everything" in shown


def test_a_depth_that_takes_too_long_is_marked() -> None:
    rows = [depth.Row(1, 1.0, 0.5, 0.45, 0.4), depth.Row(2, 2.0, 1.0, 1.0, 1.0)]
    _, slow, whole = depth.shown(rows)
    assert slow.count("!") == 1
    assert "!" not in whole
    assert "Of 1 depths" in depth.summary(rows)
    assert "1 meet it by FLOP and 0 by FedPMT's rule" in depth.summary(rows)


def test_every_codec_is_measured() -> None:
    shown = " ".join(str(case) for case in codecs.CASES)
    # One sends nothing, the other is what top-k has inside.
    assert all(
        f"{name}(" in shown for name in set(codec.__all__) - {"Nothing", "Plain", "Quantiser"}
    )


def test_codecs_are_measured_beside_what_they_need_at_least() -> None:
    rows = list(codecs.rows(small.task(devices=1, norm=False), repeats=1))
    assert len(rows) == len(codecs.CASES) + 1
    by_name = {row.codec: row for row in rows}
    assert by_name["Raw(precision='same')"].sent_fraction == 1
    assert by_name["Raw(precision='fp16')"].sent_fraction == 0.5
    assert all(row.encode > 0 < row.decode for row in rows)
    assert sum(row.symbols > 0 for row in rows) == len(codecs.CASES) - 3
    # Headers are the larger part of the shortest messages.
    long = [row for row in rows if row.symbols > 1_000]
    assert len(long) == 3
    assert all(0.9 < row.scaled <= row.bound < 1.3 for row in long)
    table = "\n".join([*codecs.shown(rows), codecs.summary(rows)])
    assert all(str(case) in table for case in codecs.CASES)
    assert f"of {len(rows)} rows" in table


def test_the_bound_of_a_message_counts_levels_signs_and_which_are_kept() -> None:
    around = codecs.around(small.task())
    (name, tensor_layout), *_ = around.tensors.items()
    levels = torch.zeros(1, tensor_layout.entries, dtype=torch.int32)
    kept = torch.zeros(1, tensor_layout.entries // tensor_layout.unit, dtype=torch.bool)
    kept[0, :2] = True
    levels[0, : 2 * tensor_layout.unit : 2] = -3
    symbols = Symbols({}, {name: levels}, {name: kept}, {name: torch.ones(1, 3)})
    found = codecs.bound(SymbolFormat(kernels=True), symbols, around)
    # Two kernels of nine entries out of six: half of the entries are 3, each with a sign.
    assert (tensor_layout.unit, kept.shape[1]) == (9, 6)
    assert found.bits == pytest.approx(np.log2(15) + 18 + 9)
    assert (found.scales, found.symbols) == (96, 18)


def test_what_misses_a_goal_of_codecs_is_marked() -> None:
    good = codecs.Row("quick", 0.1, 0.0, 200_000, 1.01, 1.0, 150.0, 150.0)
    slow = codecs.Row("slow", 0.1, 0.0, 200_000, 1.05, 1.0, 50.0, 150.0)
    _, first, second = codecs.shown([good, slow])
    assert "!" not in first
    assert second.count("!") == 2
    assert "1 are at most 2% over the bound, 2 over the bound with" in codecs.summary([good, slow])


def test_plans_are_timed_and_held_against_brute_force(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--cohorts", "3", "--repeats", "1", "--compared", "12", "--grid", "40", "80"]
    planner.main(given)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[0] == "3"
    assert shown[2].startswith("a row of nine given sizes: ")
    assert shown[3].startswith("the choices of 100 simulated devices: ")
    assert shown[4] == "12 of 12 devices have a plan"
    found = planner.missed(12, (40, 80))
    assert len(found.grid) == len(found.reference) == 12
    assert min(found.grid) > -1e-9
    assert 0 < max(found.grid) < 0.5
    assert max(map(abs, found.reference)) < 1e-8


def test_a_cohort_that_takes_too_long_to_plan_is_marked() -> None:
    _, quick, slow = planner.shown([planner.Row(100, 1.0, 50.0), planner.Row(100, 21.0, 50.0)])
    assert "!" not in quick
    assert "!" in slow


def test_every_aggregate_is_attacked() -> None:
    room: list[type] = [getattr(aggregate, name) for name in aggregate.__all__]
    public: set[type] = {each for each in room if Policy in each.__mro__ and is_dataclass(each)}
    assert public == {type(i) for part in attack.AGGREGATES.values() for i in nested(part)}
    assert replace(demo.TASK, devices=10) == attack.TASK
    assert (demo.SGD, demo.FLEET) == (attack.SGD, attack.FLEET)
    kinds = {(case.attack, case.bad) for case in attack.cases(["Mean"], 1, 1)}
    assert {("none", 0), ("huge", 1), ("NaN", 2), ("flipped", 2)} <= kinds
    assert len(attack.cases(["Mean", "Aio"], 1, 3)) == 2 * 3 * len(kinds)


def test_attacks_are_run_written_down_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attack, "TASK", replace(attack.TASK, limit=150, server=20))
    page, results = tmp_path / "page.md", tmp_path / "attack.json"
    page.write_text(f"before\n{attack.BEGIN}\nold\n{attack.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(attack, "PAGE", page)
    monkeypatch.setattr(attack, "PICTURE", tmp_path / "attack.svg")
    monkeypatch.setattr(attack, "ATTACKS", {"huge": attack.ATTACKS["huge"]})
    given = ["--results", str(results)]
    attack.main(["--only", "Mean", "--rounds", "1", "--seeds", "1", *given])
    shown = capsys.readouterr().out
    assert "| Mean | " in shown
    found = attack.read(results)
    assert [each.refused for each in found] == [0, 1, 2, 0, 0]
    assert all(0 <= each.accuracy[-1] <= 1 for each in found)
    attack.main(["--page", *given])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert shown.strip() in text
    assert "old" not in text
    assert "<svg" in (tmp_path / "attack.svg").read_text(encoding="utf-8")


def test_sizes_of_honest_updates_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", "rounds=1", "task.limit=300", "task.server=20"]
    sizes.main(["fedavg", *few])
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["recipe", "seed", "updates", "ratio", "refused"]
    name, _, updates, ratio, refused = row.split()
    assert (name, refused) == ("fedavg", "0")
    assert int(updates) > 0
    assert 1 <= float(ratio) < 100
    assert last.startswith(f"The largest ratio is {ratio}")


# --- a real fleet -----------------------------------------------------------------------------


def test_a_counter_passes_bytes_on_and_counts_them_both_ways() -> None:
    with socket.create_server((real_fleet.HOST, 0)) as server:

        def echo() -> None:
            near, _ = server.accept()
            with near:
                near.sendall(2 * near.recv(100))

        thread = threading.Thread(target=echo)
        thread.start()
        with real_fleet.Counter(server.getsockname()[1]) as counter:
            with socket.create_connection((real_fleet.HOST, counter.port)) as link:
                link.sendall(b"hello")
                came = b""
                while piece := link.recv(100):
                    came += piece
            assert came == b"hellohello"
            assert (counter.up, counter.down) == (5, 10)
        thread.join()


def test_what_a_round_costs_is_what_is_left_of_its_time() -> None:
    one = real_fleet.Round(3.0, compute=1.0, counted_down=4e6, counted_up=6e6)
    assert real_fleet.beyond(one, rate=1e7) == pytest.approx(1.0)
    ends = [real_fleet.Seen(1.0, 10, 20), real_fleet.Seen(3.0, 110, 70)]
    (seen,) = real_fleet.with_seen([one], ends)
    assert (seen.processor, seen.wire_down, seen.wire_up) == (2.0, 100.0, 50.0)
    with pytest.raises(NotRun, match="1 ends of 2 rounds"):
        real_fleet.with_seen([one], ends[:1])
    row = real_fleet.overhead_row(lambda: [seen, replace(seen, seconds=5.0)], 1e7)
    by_name = dict(zip(real_fleet.OVERHEAD[2:], row, strict=True))
    assert (by_name["wall, ms"], by_name["training, ms"]) == (4000.0, 1000.0)
    assert (by_name["beyond both, ms"], by_name["most"]) == pytest.approx((2000.0, 3000.0))
    wire = dict(zip(real_fleet.WIRE[2:], real_fleet.wire_row(lambda: [seen], 2), strict=True))
    assert (wire["counted up, kB"], wire["wire down, kB"]) == (3000.0, 0.05)


def test_a_file_that_grows_is_seen_line_by_line(tmp_path: Path) -> None:
    seen: list[real_fleet.Seen] = []
    with real_fleet.noted(tmp_path / "rounds", None, seen):
        (tmp_path / "rounds").write_text("1\n2\n")
        real_fleet.awaited(lambda: len(seen) == 2, "not seen", tmp_path, 20.0)
    assert real_fleet.loopback_rate(1 << 20) > 0


def test_stock_flower_trains_the_network_that_every_method_has() -> None:
    found = importlib.util.spec_from_file_location("stock_app", real_fleet.APP / "stock_app.py")
    assert found is not None
    assert found.loader is not None
    app = importlib.util.module_from_spec(found)
    found.loader.exec_module(app)
    theirs = [tuple(each.shape) for each in app.net().parameters()]
    for method in real_fleet.METHODS:
        _, _, prepared = real_fleet.prepared_for(method, real_fleet.BYTE_NODES, 1)
        ours = prepared.task.params.values()
        assert [tuple(each.shape) for each in ours] == theirs
        assert prepared.task.devices == real_fleet.BYTE_NODES
