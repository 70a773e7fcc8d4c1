"""The benchmarks of speed measure what they say; how fast anything is is not asserted."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import (
    hetero,
    measuring,
    overhead,
    page,
    peers,
    precisions,
    roofline,
    scale,
    speed,
    together,
    way,
)
from benchmarks.measuring import NotRun, Options, Table, Timing, attempted, built
from tools import gpu

import anyfleet
from anyfleet import methods
from anyfleet.cli import demo
from anyfleet.methods import fedavg

TINY = replace(measuring.WORKLOADS["tiny"], users=6, cohort=3)
QUICK = Options(rounds=1, warm=0)


# -- what all share


def test_workload_p_is_the_one_of_the_issue() -> None:
    assert roofline.parameters(measuring.WORKLOADS["P"]) == 1_626_442
    assert roofline.parameters(measuring.WORKLOADS["tiny"]) == 778
    assert measuring.WORKLOADS["P"].local_steps == 5


def test_every_device_has_its_samples_and_more_devices_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_BLOCKS", 4)
    work = replace(TINY, users=10)
    task = built(work, "cpu")
    assert task.devices == 10
    assert {task.size(device) for device in range(10)} == {work.samples}
    assert torch.equal(task.train_rows[9], task.train_rows[1])
    assert len(task.server) > 0


def test_rounds_are_timed_after_those_that_warm_up() -> None:
    def rounds() -> Iterator[tuple[float, Any]]:
        for seconds in (9.0, 0.003, 0.001, 0.002):
            yield seconds, _Result(3)

    found = measuring.times_of(rounds(), Options(rounds=3, warm=1), replies=3)
    assert (found.ms, found.low, found.high, found.first) == (2, 1, 3, 9)
    with pytest.raises(NotRun, match="only 3 of 4 orders"):
        measuring.times_of(rounds(), Options(rounds=3, warm=1), replies=4)
    with pytest.raises(NotRun, match="used up"):
        measuring.times_of(rounds(), Options(minutes=-1.0))


class _Result:
    def __init__(self, replies: int) -> None:
        self.record = type("Record", (), {"replies": replies})()


def test_a_round_without_all_of_its_replies_is_not_timed() -> None:
    assert measuring.timed(fedavg(count=3), built(TINY, "cpu"), QUICK, replies=3).replies == 3


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), ("x", "x"), (3, "3"), (1234.5, "1,234"), (0.123, "0.12")]
)
def test_cells_have_three_digits(value: measuring.Cell, text: str) -> None:
    assert measuring.shown(value) == text


def test_what_misses_a_target_says_by_how_much() -> None:
    assert measuring.verdict(5.0, 4.0, " ms") == "missed by 25 % (≤ 4.00 ms)"
    assert measuring.verdict(4.0, 4.0) == "met (≤ 4.00)"
    assert measuring.at_least(40.0, 45.0) == "missed by 11 % (≥ 45.0×)"
    assert measuring.at_least(46.0, 45.0) == "met (≥ 45.0×)"


def test_one_row_that_fails_does_not_cost_the_others() -> None:
    def wrong() -> tuple[measuring.Cell, ...]:
        raise RuntimeError("out of order\nmore")

    assert attempted(wrong, 4, "a") == ("a", None, None, "failed: RuntimeError: out of order")
    assert attempted(lambda: (1.0, 2.0, ""), 4, "a") == ("a", 1.0, 2.0, "")


def test_tables_are_written_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("name", "A title", ("who", "ms"), (("a", 1.5), ("b", None)), ("a note",))
    measuring.report("file", [table], QUICK, tmp_path)
    facts, found = measuring.read_tables(tmp_path / "file.json")
    assert found == {"name": table}
    shown = capsys.readouterr().out
    assert "| a | 1.50 |" in shown
    assert "* a note" in shown
    assert all(str(facts[name]) in shown for name in ("machine", "date", "commit", "precision"))


def test_the_command_leaves_out_places_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", "--out", "/a/b", "--rounds", "3", "--vendor=/c"])
    assert measuring.command().endswith("--rounds 3")
    assert "/a/b" not in measuring.command()


# -- seeds together


def test_seeds_are_measured_alone_and_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(together, "CASES", {"tiny": together.Case(TINY, 1)})
    table = together.table(["tiny"], [3], [1], QUICK)
    alone, three = (dict(zip(table.head, row, strict=True)) for row in table.rows)
    assert (alone["runs"], alone["meetings"], three["runs"], three["meetings"]) == (1, 0, 3, 1)
    assert three["× one run"] == float(three["ms a round"] or 0) / float(alone["ms a round"] or 0)
    assert "tiny 3 1" in capsys.readouterr().err


# -- overhead and the way


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("parts/select/uniform.py", "select"),
        ("parts/plan/menus.py", "plan"),
        ("core/ledger.py", "ledger"),
        ("core/screening.py", "screen"),
        ("core/local_training.py", "train launch"),
        ("runtime/simulated/engines.py", "train launch"),
        ("runtime/simulated/recorded_steps.py", "train launch"),
        ("runtime/simulated/simulator.py", "clock"),
        ("world/world.py", "clock"),
        ("parts/codec/stc.py", "codec"),
        ("rng.py", "rest"),  # serves all: its caller counts
    ],
)
def test_files_belong_to_stages(file: str, stage: str) -> None:
    assert overhead.stage_of(file) == stage


def test_every_start_of_a_stage_is_a_place_of_the_package_or_one_to_come() -> None:
    package = Path(anyfleet.__file__).parent
    for name, starts in overhead.STAGES:
        found = [start for start in starts if list(package.glob(f"{start.rstrip('/')}*"))]
        assert found, name


def test_stages_add_up_to_the_round() -> None:
    (table,) = overhead.tables(QUICK, [3], ["fedavg"], ["steady"], seconds=0.2)
    (row,) = table.rows
    cells = dict(zip(table.head, row, strict=True))
    assert cells["cohort"] == 3
    assert cells["processor, ms"] > 0  # type: ignore[operator]
    each = [cells[name] for name in overhead.NAMES]
    assert sum(each) == pytest.approx(1e3 * cells["ms a round"] / 3)  # type: ignore[arg-type,operator]
    host, training = cells["host, ms"], cells["training, ms"]
    assert host + training == pytest.approx(cells["ms a round"])  # type: ignore[operator]
    assert training > 0  # type: ignore[operator]
    assert cells["µs an order"] == pytest.approx(1e3 * host / 3)  # type: ignore[operator]


@pytest.mark.parametrize("name", overhead.CASES)
def test_an_idle_trainer_leaves_the_model_as_it_was(name: str) -> None:
    task = built(TINY, "cpu")
    method = overhead.idle(overhead.CASES[name].make(3))
    _, result = next(measuring.play_rounds(method, task, QUICK))
    assert result.record.replies > 0
    for tensor, value in task.params.items():
        assert torch.equal(result.round.params[tensor], value)


def test_stages_name_files_that_there_are() -> None:
    files = [
        str(file.relative_to(overhead.PACKAGE)) for file in Path(overhead.PACKAGE).rglob("*.py")
    ]
    named = [path for _, paths in overhead.STAGES for path in paths]
    assert [path for path in named if not any(file.startswith(path) for file in files)] == []


def test_the_target_of_the_host() -> None:
    assert overhead.target(1000, 1, "steady") == 24.5
    assert overhead.target(100, 5, "changing") == pytest.approx(37.5)


def test_the_way_of_an_order_is_counted() -> None:
    found = way.walked("sequential", QUICK)
    assert 50 < len(found.files) < len(found.functions) < found.calls
    assert set(found.carriers) < found.structs
    assert "TrainingResult" in found.carriers
    assert not any(code.co_name.startswith("<") for code in found.functions)


def test_the_way_goes_through_the_threads_of_a_pool() -> None:
    found = way.walked("threads", QUICK)
    assert {"PackedBody", "TrainingResult", "PackedReply"} <= set(found.carriers)


def test_carriers_hold_parameters_or_bytes() -> None:
    shapes = frozenset({(3, 4)})
    assert way.carries({"a": (torch.zeros(3, 4),)}, shapes)
    assert way.carries([torch.zeros(7, 3, 4)], shapes)
    assert way.carries(b"x", shapes)
    assert not way.carries({"a": torch.zeros(4)}, shapes)
    assert not way.carries(torch.zeros(3, 4, dtype=torch.int64), shapes)


# -- peers


def test_the_plain_loop_takes_the_mean_of_local_sgd() -> None:
    work = replace(TINY, users=2, cohort=2, batch=4)  # one local step with all samples
    x, y = peers.on_device(work, "cpu")
    net = measuring.new_net(work)
    rounds = peers.plain(work, QUICK)
    made: list[torch.nn.Module] = []
    make = measuring.new_net

    def kept(own: measuring.Workload) -> torch.nn.Module:
        made.append(make(own))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "new_net", kept)
        next(rounds)
    loss = sum(
        torch.nn.functional.cross_entropy(net(x[user]), y[user]) for user in range(work.users)
    )
    assert isinstance(loss, torch.Tensor)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    for after, before, gradient in zip(
        made[0].parameters(), net.parameters(), gradients, strict=True
    ):
        torch.testing.assert_close(after, before - work.lr * gradient / 2)


def test_a_peer_that_is_absent_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.NEEDS, "pfl", ("a_package_that_nobody_has",))
    asked = peers.Asked(peers=("pfl",), engines=("sequential",), processes=(1, 2))
    product, other = peers.rows(TINY, QUICK, asked)
    assert product[2] == "product, sequential"
    assert isinstance(product[4], float)
    assert other[-1] == "not run: not installed"
    assert "not installed" in capsys.readouterr().err


def test_a_plain_loop_runs_in_a_process_of_its_own() -> None:
    timing, setting = peers.started("plain", TINY, QUICK, None)
    assert timing.ms > 0
    assert setting.endswith(("thread", "threads"))


def test_peers_are_held_against_auto_or_the_fastest() -> None:
    rows = [(("P", "tf32", f"product, {name}"), ms) for name, ms in (("auto", 3.0), ("x", 2.0))]
    assert peers._held(rows) == 3.0
    assert peers._held(rows[1:]) == 2.0
    assert peers._held([]) is None


def test_targets_speak_of_one_process_and_of_the_best_workers() -> None:
    def tried(peer: str, ratio: float) -> tuple[tuple[measuring.Cell, ...], Timing]:
        return ("w", "p", peer, "", 1.0, 1.0, 1.0, 1.0, ratio, ""), Timing(ratio, 0, 0, 0, 1, 0)

    p, gpu_ = measuring.WORKLOADS["P"], Options(device="cuda", precision="tf32")
    rows = peers._judged([tried("pfl, 1", 50.0), tried("pfl, 2", 20.0)], p, gpu_, "pfl")
    assert [row[-1] for row in rows] == ["met (≥ 45.0×)", ""]
    work = measuring.WORKLOADS["C.1"]
    rows = peers._judged([tried("2", 4.0), tried("1", 2.0)], work, QUICK, "flower")
    assert [row[-1] for row in rows] == ["", "missed by 33 % (≥ 3.00×)"]


def test_a_peer_is_tried_with_tf32_and_without() -> None:
    asked = Options(device="cuda", precision="tf32")
    kinds = {(each.tf32, each.search) for each in peers.settings("pfl", asked, 1)}
    assert len(kinds) == 4
    assert {each.tf32 for each in peers.settings("pfl", asked, 3)} == {True}
    assert {each.tf32 for each in peers.settings("pfl", replace(asked, precision="bf16"), 1)} == {
        False
    }


# -- unequal devices, scale, roofline


def test_the_equivalent_width_has_the_mean_of_the_flop() -> None:
    task = built(replace(measuring.WORKLOADS["C.2"], users=2), "cpu")
    mean = sum(hetero.flops(task, width) for width in hetero.WIDTHS) / 5
    assert hetero.flops(task, hetero.equivalent(task)) == pytest.approx(mean, rel=0.15)


def test_every_method_is_measured() -> None:
    made = hetero.every(4)
    assert set(made) == set(methods.__all__)
    assert next(iter(made)) == "fedavg"
    assert {name for name, (_, everyone) in made.items() if everyone} == {
        "centralised",
        "fedadp",
        "local",
        "whale",
    }
    for make, _ in made.values():
        assert make(TINY).train is not None


@pytest.mark.parametrize(
    ("engine", "text"),
    [("stacked", "stacked (1 for 3 orders)"), ("sequential", "no: trained one by one")],
)
def test_a_method_says_whether_it_was_stacked(engine: str, text: str) -> None:
    method = fedavg(count=3)
    rounds = measuring.play_rounds(method, built(TINY, "cpu"), replace(QUICK, engine=engine))
    assert hetero.stacked(rounds, method, []) == text
    start = type(method.train).start
    assert "counted" not in start.__qualname__  # the part is as it was


def test_the_work_of_a_forward_pass_is_counted() -> None:
    # 28² · 16 · 75 + 10² · 32 · 400 + 800 · 500 + 500 · 300 + 300 · 10
    assert roofline.multiply_adds(measuring.WORKLOADS["C.3"]) == 2_773_800


def test_the_roofline_is_measured() -> None:
    cells = roofline.row(TINY, replace(QUICK, rounds=1))
    ms, _, _, _, compute, move, ratio, told = cells
    assert isinstance(ms, float)
    assert ratio == pytest.approx(ms / max(compute, move))  # type: ignore[type-var, operator]
    assert "5.00" in str(told)


@pytest.mark.parametrize("size", scale.SIZES[:3])
def test_models_have_about_so_many_parameters(size: int) -> None:
    found = sum(each.numel() for each in scale.sized(size).parameters())
    assert found == pytest.approx(size, rel=0.05)


def test_scale_says_what_an_order_takes() -> None:
    ms, _, _, each, accelerator, process = scale.row(TINY, QUICK)
    assert each == pytest.approx(1e3 * ms / 3)
    assert accelerator is None
    assert process > 50


# -- the page, one command, and the checks on a GPU


def test_a_section_that_crashes_is_told() -> None:
    tables, problem = speed.run_section(speed.Section("x", "no_such_one", (), 1.0), [], 1.0)
    assert tables == []
    assert problem == "ended with status 1"


def test_tables_of_one_name_are_joined() -> None:
    one = Table("a", "A", ("x",), (("1",),), ("n",), "first")
    two = Table("a", "A", ("x",), (("2",),), ("n", "m"), "second")
    (found,) = speed.merged([one, two])
    assert found.rows == (("1",), ("2",))
    assert found.notes == ("n", "m")
    assert found.command == "first\nsecond"


def test_sections_name_benchmarks_that_exist() -> None:
    for section in (*speed._on_gpu(), *speed._on_cpu()):
        assert (measuring.ROOT / "benchmarks" / f"{section.module}.py").exists()
    names = [section.name for section in speed._on_gpu()]
    assert names[0].startswith("P")
    assert names.index("widths") < names.index("roofline") < names.index("methods")


def test_the_page_is_what_its_results_say() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    checks = page.RESULTS / "checks.txt"
    said = checks.read_text(encoding="utf-8") if checks.exists() else ""
    again = page.illustrated(page.filled(text, page.read(), said))
    assert again == text, "run `python -m benchmarks.page`"


def test_the_page_shows_tables_and_pictures(tmp_path: Path) -> None:
    head = ("work", "precision", "who", "ms a round")
    rows = (("P", "tf32", "product, stacked", 12.0), ("P", "tf32", "pfl, 1 process", 500.0))
    about = measuring.about(QUICK)
    results = {"h200": (about, {"peers": Table("peers", "Peers", head, rows)})}
    text = "<!-- table h200 peers -->\nold\n<!-- end -->\n<!-- picture speed_peers.svg -->\n"
    assert [file.name for file in page.draw(results, tmp_path)] == ["speed_peers.svg"]
    made = page.illustrated(page.filled(text, results), tmp_path)
    assert "| pfl, 1 process | 500 |" in made.replace("| P | tf32 ", "")
    assert "old" not in made
    assert "](pictures/speed_peers.svg)" in made
    assert page.illustrated(page.filled(made, results), tmp_path) == made
    assert page.NOTHING.strip() in page.filled(text, {})


def test_every_picture_is_on_the_page() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- picture (\S+) -->", text)) == set(page.DRAWN) == set(page.CAPTIONS)


def test_precisions_are_those_of_the_demo() -> None:
    assert (demo.TASK, demo.SGD, demo.FLEET) == (precisions.TASK, precisions.SGD, precisions.FLEET)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_its_checks_are_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"make gpu: commit {measuring.commit()}; ")
    assert shown.endswith("not run: no CUDA device\n")
