"""The commands, as people use them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import anyfleet
from anyfleet.analysis.breakdown import Breakdown
from anyfleet.analysis.comparison import Goal, compare
from anyfleet.analysis.summaries import Spent, ToTarget
from anyfleet.cli import demo
from anyfleet.cli.app import app
from anyfleet.cli.fleet import presets
from anyfleet.cli.tables import amount, apart, drawn, ends, grid, how_many, table, targets
from anyfleet.experiment import RoundRecord, RoundResult, load
from anyfleet.store import Recording, checkpoint, read_rounds

# A command in a process of its own shall be the one that is tested here.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
RUN_FILE = """
rounds = 2

[task]
use = "Embedded"
devices = 4
limit = 200
server = 20
model = { use = "perceptron", hidden = [8] }

[method]
use = "heterofl"
widths = [1.0, 0.5]
count = 2
lr = 0.1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command, with a run file in it."""
    (tmp_path / "small.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


STUDIES = ("compare", "demo", "sweep")


def anyfleet_command(*words: str) -> Any:
    """Of studies, in this process: another one would not know what a test changes here."""
    jobs = ["--jobs", "1"] if words[0] in STUDIES and "--jobs" not in words else []
    return CliRunner().invoke(app, [*words, *jobs] if "--help" not in words else list(words))


def succeeds(*words: str) -> str:
    result = anyfleet_command(*words)
    assert result.exit_code == 0, result.output
    # Nobody's terminal: no colours, no cursor movements.
    assert "\x1b" not in result.output
    assert "\r" not in result.output
    return str(result.output)


def test_version() -> None:
    assert succeeds("--version") == f"anyfleet {anyfleet.__version__}\n"


def test_the_version_does_not_wait_for_torch() -> None:
    question = "import sys, anyfleet.cli; print('torch' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, check=True, env=ENVIRONMENT
    )
    assert told.stdout.strip() == b"False"


def test_the_demo_compares_six_methods_and_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TASK", replace(demo.TASK, limit=600, server=50))
    shown = succeeds("demo", "--rounds", "1", "--references", "--out", "here")
    assert "FedAvg took" in shown
    rows = {line.split()[0] for line in shown.splitlines() if line.endswith(" 0")}
    methods = ["FedAvg", "HeteroFL", "FedPMT", "WHALE-FL", "FedResCuE", "AnycostFL"]
    assert rows == {*methods, "local", "centralised"}
    assert (folder / "here/comparison.png").stat().st_size > 10_000
    home = folder / "here"
    fedavg, heterofl = (read_rounds(home / n / "seed-0")[0] for n in ("fedavg", "heterofl"))
    assert heterofl.down < fedavg.down
    assert heterofl.time < fedavg.time
    (anycost,) = read_rounds(home / "anycostfl/seed-0")
    assert anycost.time <= demo.SECONDS
    assert anycost.up < fedavg.up / 10
    ledgers = [home / name.lower() / "seed-0/ledger.jsonl" for name in methods]
    rows_of = [[json.loads(line) for line in file.read_text().splitlines()] for file in ledgers]
    cohorts = [[row["device"] for row in rows] for rows in rows_of]
    assert all(cohort == cohorts[0] for cohort in cohorts)


def test_a_run_writes_a_folder_and_never_over_another(folder: Path) -> None:
    shown = succeeds("run", "small.toml")
    assert "accuracy" in shown
    assert "s to " not in shown  # one run has no target to compare
    succeeds("run", "small.toml", "rounds=1", "method.lr=0.2")
    first, second = folder / "runs/small", folder / "runs/small-2"
    expected = {"config.toml", "rounds.jsonl", "ledger.jsonl", "model.safetensors"}
    expected |= {"summary.json", "curves.png", "papers.bib", "environment.json", "lock"}
    expected |= {"checkpoints"}
    assert {file.name for file in first.iterdir()} == expected
    assert len(read_rounds(first)) == 2
    assert len(read_rounds(second)) == 1
    chosen = ["engine.use=Sequential", "device=cpu"]
    assert load(second / "config.toml") == load(
        "small.toml", ["rounds=1", "method.lr=0.2", *chosen]
    )


def test_what_is_hardly_meant_is_noted_once(folder: Path) -> None:
    noted = "note: method.select: Uniform.count is 9, but the fleet has 4 devices"
    assert succeeds("validate", "small.toml", "method.count=9").count(noted) == 1
    several = ("compare", "small.toml", "rounds=1", "--seeds", "2", "method.count=9")
    assert succeeds(*several).count(noted) == 1
    assert "note: method.select" not in succeeds("validate", "small.toml")


def test_a_run_from_its_own_config_gives_the_same_bytes(folder: Path) -> None:
    succeeds("run", "small.toml", "--out", "one")
    succeeds("run", "one/config.toml", "--out", "two")
    for name in ("config.toml", "rounds.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes(), name


def test_a_folder_that_is_not_empty_is_refused(folder: Path) -> None:
    result = anyfleet_command("run", "small.toml", "--out", ".")
    assert result.exit_code == 2
    assert "not empty" in result.output
    assert sorted(file.name for file in folder.iterdir()) == ["small.toml"]


def test_a_run_goes_on_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = succeeds("run", "small.toml", "rounds=1")
    assert "pip install 'anyfleet[report]'" in shown
    assert not (folder / "runs/small/curves.png").exists()
    assert (folder / "runs/small/model.safetensors").exists()


def test_validate_shows_method_and_sizes(folder: Path) -> None:
    shown = succeeds("validate", "small.toml")
    assert "WidthByLevel(widths=(1.0, 0.5)" in shown
    assert f"{784 * 8 + 8 + 80 + 10:,}" in shown  # parameters of the whole
    assert f"{784 * 4 + 4 + 40 + 10:,}" in shown  # and of half its width
    assert sorted(file.name for file in folder.iterdir()) == ["small.toml"]


def test_validate_shows_only_widths_that_the_run_uses(folder: Path) -> None:
    def shown(file: str, *changes: str) -> list[str]:
        lines = succeeds("validate", file, *changes).splitlines()
        return [line.split()[1] for line in lines if line.startswith("width ")]

    assert shown("small.toml") == ["1", "0.5"]
    assert shown("small.toml", "widths=[0.5, 0.2]") == ["1", "0.5", "0.2"]
    fedavg = RUN_FILE.replace("heterofl", "fedavg").replace("widths = [1.0, 0.5]", "#")
    (folder / "whole.toml").write_text(fedavg)
    assert shown("whole.toml") == ["1"]
    within = '[method.plan]\nuse = "LocalStepsWithin"\nseconds = 1.0\n'
    (folder / "inside.toml").write_text(
        fedavg + within + 'inner = { use = "WidthByLevel", widths = [0.25] }\n'
    )
    assert shown("inside.toml") == ["1", "0.25"]


def test_validate_tells_all_problems_with_their_paths(folder: Path) -> None:
    changes = ["rouns=3", "evaluate_every=0", "task.devices=0", "method.lr=fast"]
    changes += ["method.select.use=os:system", "fleet.speeds=[]"]
    result = anyfleet_command("validate", "small.toml", *changes)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "6 problems" in result.output
    result = anyfleet_command("validate", "small.toml", *changes, "nonsense", "seed=[1")
    assert "8 problems" in result.output
    for path in ("rouns", "evaluate_every", "task", "method.lr", "method.select", "fleet.speeds"):
        assert f"\n  {path}" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "missing.toml"], "missing.toml: cannot be read"),
        (["run", "small.toml", "nonsense"], "dotted.path=value"),
        (["run", "small.toml", "task.server=9999"], "task: server asks for 9999"),
        (["run", "small.toml", "task.use=Mnist"], "ANYFLEET_DATA"),
        (["compare", "small.toml", "missing.toml"], "missing.toml"),
        (["run", "small.toml", "method.select.use=mine:Own"], "--allow mine"),
    ],
)
def test_errors_are_messages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.setenv("ANYFLEET_DATA", str(folder / "nowhere"))
    result = anyfleet_command(*words)
    assert result.exit_code == 1
    assert told in result.output
    assert "Traceback" not in result.output
    assert not (folder / "runs").exists()


def test_unexpected_errors_keep_their_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("anyfleet.cli.run.from_source", broken)
    assert isinstance(anyfleet_command("run", "small.toml").exception, ZeroDivisionError)


def test_compare_runs_every_file_with_every_seed(folder: Path) -> None:
    (folder / "other.toml").write_text(
        RUN_FILE.replace("heterofl", "fedavg").replace("widths = [1.0, 0.5]", "#")
    )
    shown = succeeds("compare", "small.toml", "other.toml", "rounds=1", "--seeds", "2")
    totals, total_less, costs, cost_less = (
        line for line in shown.splitlines() if line.startswith("other ")
    )
    assert totals.count("±") == 8
    assert costs.count("±") == 3  # both took one round
    assert total_less.startswith("other − small ")
    assert cost_less.startswith("other − small 2 of 2 ")
    results = json.loads((folder / "runs/compare/results.json").read_text())["runs"]
    assert {name: len(group) for name, group in results.items()} == {"small": 2, "other": 2}
    assert (folder / "runs/compare/comparison.png").stat().st_size > 10_000
    seeds = [load(folder / f"runs/compare/small/seed-{s}/config.toml").seed for s in (0, 1)]
    assert seeds == [0, 1]
    assert results["small"][0] != results["small"][1]
    assert results["small"][0]["to_target"]["spent"]["rounds"] == 1


def test_compare_never_drops_a_run_that_misses_the_target(folder: Path) -> None:
    words = ["rounds=1", "widths=[1.0, 0.5]", "--seeds", "2", "--width", "0.5", "--target", "1.0"]
    shown = succeeds("compare", "small.toml", *words)
    assert "To reach 100.0 % at width 0.5:" in shown
    results = json.loads((folder / "runs/compare/results.json").read_text())["runs"]["small"]
    best = max(result["to_target"]["best"] for result in results)
    assert shown.count(f"not reached (best {100 * best:.1f} %)") == 1
    assert [result["to_target"]["spent"] for result in results] == [None, None]


def test_compare_runs_nothing_before_all_fleets_fit(folder: Path) -> None:
    (folder / "wrong.toml").write_text(RUN_FILE + '\n[fleet]\nuse = "testbed"\n')
    result = anyfleet_command("compare", "small.toml", "wrong.toml")
    assert result.exit_code == 1
    assert "wrong: fleet: Fleet.groups have 20 devices but the task has 4" in result.output
    assert not (folder / "runs").exists()


def test_compare_wants_a_width_that_is_evaluated(folder: Path) -> None:
    result = anyfleet_command("compare", "small.toml", "--width", "0.5")
    assert result.exit_code == 1
    assert "small: widths: has no 0.5, which --width asks for" in result.output
    assert not (folder / "runs").exists()


def test_seeds_that_miss_a_target_are_counted() -> None:
    spent = Spent(time=12.0, joules=1.0, bytes=1.0, flops=1.0, rounds=1)
    group = [ToTarget(0.8, 0.9, spent), ToTarget(0.8, 0.7, None)]
    assert how_many(group) == "1 of 2, else best 70.0 %"
    assert how_many(group[:1]) == "1 of 1"
    assert how_many(group[1:]) == "not reached (best 70.0 %)"
    assert how_many([ToTarget(math.nan, math.nan, None)]) == "–"
    assert how_many([]) == "–"


def test_what_a_target_cost_fits_a_terminal_also_when_some_missed_it() -> None:
    def run(*accuracies: float) -> list[RoundRecord]:
        return [
            RoundRecord(k, 13.8, 1e7, 2e7, 1.0, 2e3, 5, 0, 0.5, math.nan, {"accuracy": each})
            for k, each in enumerate(accuracies)
        ]

    runs = {"heterofl": {0: run(0.9), 1: run(0.7, 0.713)}, "local": {0: run(0.5), 1: run(0.713)}}
    screen = Console(width=80, file=StringIO())
    screen.print(drawn(targets(compare(runs, Goal(target=0.8))), screen.width))
    head, *rows = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["runs", "simulated", "s", "kJ", "MB", "rounds"]
    told = [" ".join(row.split()) for row in rows]
    # No interval of a seed that was selected, and no difference from one that never came.
    assert told[0] == "heterofl 1 of 2, else best 71.3 % 13.8 2.0 30.0 1"
    assert told[1] == "local not reached (best 71.3 %) – – – –"
    assert told[2] == "local − heterofl 0 of 2 – – – –"


def test_a_run_tells_why_orders_were_lost(folder: Path) -> None:
    changes = ["fleet.use=levels", "fleet.speeds=[2e9, 1e9]", "fleet.mortality=1.0"]
    assert "4 of 4 orders failed: 4 died." in succeeds("run", "small.toml", *changes)
    assert "failed:" not in succeeds("run", "small.toml")


def test_a_run_tells_for_whom_the_model_is_how_accurate(folder: Path) -> None:
    details = 'details=["groups", "devices", "classes"]'
    shown = succeeds("run", "small.toml", details, "widths=[1.0, 0.5]", "task.test_share=0.3")
    (point,) = read_rounds(folder / "runs/small")[-1:]
    rows = {line[:26].strip(): line[26:].split() for line in shown.splitlines()}
    for name, width in zip(("group: level 1", "class 3"), ("groups", "classes"), strict=True):
        found = [getattr(each, width) for each in point.details]
        values = [each["level 1"] if width == "groups" else each[3] for each in found]
        assert rows[name] == [amount(100 * value) for value in values]
    fairness = [each.fairness for each in point.details]
    assert rows["devices: worst"] == [amount(100 * each.worst) for each in fairness]
    assert rows["devices: 10th percentile"] == [amount(100 * each.tenth) for each in fairness]
    assert "spread" in shown
    summary = json.loads((folder / "runs/small/summary.json").read_text())
    assert summary["result"]["fairness"] == asdict(fairness[0])
    assert "spread" not in succeeds("run", "small.toml")


def test_many_classes_are_told_by_their_ends() -> None:
    details = Breakdown(1.0, classes=(*(k / 100 for k in range(30)), math.nan))
    screen = Console(width=40, file=StringIO())
    screen.print(apart([details], screen.width))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["classes:", "best", "29.0"],
        ["classes:", "worst", "0.0"],
    ]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run", "FILE is a run file"),
        ("resume", "RUN is the folder"),
        ("compare", "FILE is a run file"),
        ("validate", "FILE is a run file"),
        ("fleet show", "NAME is a fleet"),
        ("methods", "NAME is a method"),
        ("parts", "SLOT is one of them"),
        ("fleet profile", "FILE is a run file"),
        ("fleet init", "FILE is a run file"),
        ("fleet add", "NAME is a name"),
    ],
)
def test_help_explains_arguments(command: str, told: str) -> None:
    assert told in succeeds(*command.split(), "--help")


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_many_seeds_fits_a_terminal(width: int) -> None:
    def group(accuracy: float) -> dict[int, list[RoundRecord]]:
        base = RoundRecord(0, 0.0, 0.0, 0.0, 0.0, 0.0, 5, 0, 0.5, math.nan, {"accuracy": accuracy})
        return {
            k: [
                replace(
                    base,
                    time=2e4 + k,
                    down=3e10 + k * 1e9,
                    up=4e9,
                    flops=6e13,
                    joules=5e3,
                    failures=7 + k,
                )
            ]
            for k in range(3)
        }

    screen = Console(width=width, file=StringIO())
    runs = {"asynchronous-with-a-long-name": group(0.8), "fedavg": group(0.7)}
    screen.print(table(runs, 0.75, screen.width))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    heads = "accuracy best simulated kJ GB down up TFLOP failures"
    words = f"{heads} 20,001 ±2 31.0 ±2.5 4.0 60.0 8.0"
    assert set(words.split()) <= set(shown.split())
    assert shown.split().count("±2.5") == 4  # failures and traffic, of both


def test_compare_keeps_files_of_the_same_name_apart(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/small.toml").write_text(RUN_FILE)
    succeeds("compare", "small.toml", "sub/small.toml", "rounds=1", "--seeds", "1")
    made = {path.name for path in (folder / "runs/compare").iterdir() if path.is_dir()}
    assert made == {"small", "small-2"}


# --- fleets -----------------------------------------------------------------------------------

FLEET_FILE = """
[[fleet.groups]]
name = "phones"
speed = { use = "Uniform", low = 1e9, high = 3e9 }
column_loss = { error = { use = "Uniform", low = 0.1, high = 0.2 } }
availability = { use = "Intermittent", share = 0.5 }

[[fleet.groups]]
name = "boards"
count = 3
speed = 8e9
battery = 4e4
"""


def rows_of(shown: str, name: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize("name", presets())
def test_every_fleet_with_a_name_can_be_shown(folder: Path, name: str) -> None:
    assert "GFLOP/s" in succeeds("fleet", "show", name)
    assert [file.name for file in folder.iterdir()] == ["small.toml"]  # no picture unasked
    succeeds("fleet", "show", name, "--out", "fleet.png")
    assert (folder / "fleet.png").stat().st_size > 10_000


def test_the_known_fleets_are_those_of_the_papers() -> None:
    assert {"cell", "levels", "lossy", "testbed"} <= set(presets())
    assert not {"Fleet", "Group", "wifi"} & set(presets())


def test_a_fleet_is_shown_group_by_group(folder: Path) -> None:
    (folder / "fleet.toml").write_text(FLEET_FILE)
    shown = succeeds("fleet", "show", "fleet.toml", "--devices", "8", "--out", "a/b.png")
    assert (folder / "a/b.png").stat().st_size > 10_000
    (boards, reached), (phones, sought) = rows_of(shown, "boards"), rows_of(shown, "phones")
    # devices, level, GFLOP/s, J/GFLOP, battery
    assert (boards[1:4], boards[-1]) == (["3", "1", "8"], "40")
    assert (phones[1:3], phones[-1]) == (["5", "0"], "∞")
    low, high = phones[4].strip("()").split("–")
    assert 1 <= float(low) < float(phones[3]) < float(high) <= 3
    # up, down, online, columns lost
    assert reached[1:] == ["10", "40", "100", "0", "%"]
    assert sought[-2:] == ["10–20", "%"]
    assert "memory" not in shown  # everybody has the usual
    assert "8 devices in 2 groups" in shown
    again = anyfleet_command("fleet", "show", "fleet.toml", "--out", "a/b.png")
    assert again.exit_code == 2
    assert "already exists" in again.output


def test_a_table_is_shown_with_or_without_a_run_file(folder: Path) -> None:
    (folder / "fleet.csv").write_text("owner,group,speed\nbob,phones,2e9\nada,boards,1e9\n")
    (folder / "fleet.toml").write_text('[fleet]\nuse = "Table"\nfile = "fleet.csv"\n')
    for name in ("fleet.csv", "fleet.toml"):
        shown = succeeds("fleet", "show", name)
        ((phones, *_), (boards, *_)) = rows_of(shown, "phones"), rows_of(shown, "boards")
        assert (phones[1:4], boards[1:4]) == (["1", "0", "2"], ["1", "0", "1"])
        assert "Each device has the row of its data's owner in fleet.csv" in shown
    refused = anyfleet_command("fleet", "show", "fleet.csv", "fleet.file=none.csv")
    assert "fleet.file: Table.file none.csv cannot be read" in refused.output


def test_what_is_dealt_at_random_is_said(folder: Path) -> None:
    shown = succeeds("validate", "small.toml", "seed=5")
    assert "Data: Iid(samples=None, share=1.0) divides the data, with seed 5." in shown
    drawn = "Groups are assigned at random (seed 5), independently of the data."
    assert f"Fleet: {drawn}" in shown
    (folder / "fleet.toml").write_text(FLEET_FILE)
    shown = succeeds("fleet", "show", "fleet.toml", "--seed", "5")
    assert drawn in shown
    assert "Random numbers are drawn with seed 5." in shown


def test_a_fleet_has_the_devices_of_its_task(folder: Path) -> None:
    (folder / "small.toml").write_text(RUN_FILE + FLEET_FILE)
    assert "4 devices in 2 groups" in succeeds("fleet", "show", "small.toml")
    shown = succeeds("fleet", "show", "cell", "fleet.devices=7")
    assert "7 devices in 1 group;" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["levls"], 'did you mean "levels"?'),
        (["missing.toml"], "missing.toml: cannot be read"),
        (["small.toml"], "fleet: small.toml has no table [fleet]"),
        (["testbed", "--devices", "21"], "fleet: Fleet.groups have 20 devices"),
        (["levels", "fleet.speds=[1e9]"], 'fleet.speds: unknown key of levels, did you mean "spe'),
        (["fleet.toml", "fleet.groups.1.speed=-1.0"], "fleet.groups.1.speed: Group.speed must be"),
    ],
)
def test_a_fleet_that_cannot_be_shown(folder: Path, words: list[str], told: str) -> None:
    (folder / "fleet.toml").write_text(FLEET_FILE)
    result = anyfleet_command("fleet", "show", *words)
    assert result.exit_code == 1
    assert told in result.output
    assert not (folder / "runs").exists()


def test_a_fleet_is_shown_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = succeeds("fleet", "show", "levels", "--out", "fleet.png")
    assert "GFLOP/s" in shown
    assert "pip install 'anyfleet[report]'" in shown
    assert "pip" not in succeeds("fleet", "show", "levels")


def test_profile_hands_its_options_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, object] = {}
    monkeypatch.setattr(
        "anyfleet.cli.fleet.profile_machine",
        lambda out, **options: called.update(options, out=out),
    )
    succeeds("fleet", "profile", "small.toml", "--name", "mine", "--batch", "8", "--out", "f.toml")
    assert called == {
        "file": Path("small.toml"),
        "name": "mine",
        "batch": 8,
        "allow": [],
        "out": Path("f.toml"),
    }


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_run_that_is_stopped_keeps_everything_so_far(
    folder: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "anyfleet.cli", "run", "small.toml", "rounds=100000"]
    command += ["--engine", "Sequential"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    points = folder / "runs/small/rounds.jsonl"
    patience = time.monotonic() + 120
    while not (points.exists() and points.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < patience
        time.sleep(0.05)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == code, shown
    assert "Traceback" not in shown
    run = folder / "runs/small"
    kept = read_rounds(run)
    assert f"Stopped after {len(kept)} of 100000 rounds" in shown
    assert shown.splitlines()[-1] == "To go on: anyfleet resume runs/small"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ended"], summary["result"]["rounds"]) == ("interrupted", len(kept))
    closed = {
        json.loads(line)["round_index"] for line in (run / "ledger.jsonl").read_text().splitlines()
    }
    assert closed == set(range(len(kept)))
    assert (run / "model.safetensors").stat().st_size > 784 * 8 * 4
    assert checkpoint.examine(checkpoint.found(run)[0]).rounds == len(kept)


@pytest.mark.parametrize(
    ("mean", "margin", "told"),
    [
        (42.34, math.nan, "42.3"),
        (42.34, 7.94, "42.3 ±7.9"),
        (0.0284, math.nan, "0.028"),
        (0.03, 0.014, "0.030 ±0.014"),
        (5.1, 0.88, "5.10 ±0.88"),
        (70.0, 0.0, "70.0 ±0.0"),
        (70.0, 0.004, "70.000 ±0.004"),
        (1196.0, 0.02, "1,196.00 ±0.02"),
        (5.0, 1e-12, "5.0 ±0.0"),
        (1.9e-15, 25.0, "0.0 ±25.0"),
        (-0.09999, 7.653, "-0.1 ±7.7"),
        (0.0071, 0.015, "0.007 ±0.015"),
        (-1e-5, 5.0, "0.0 ±5.0"),
        (12345.6, 12.0, "12,346 ±12"),
        (0.0, math.nan, "0.0"),
        (1.2e-7, math.nan, "1.2e-07"),
        (-1.2e-7, 3e-8, "-1.2e-07 ±3.0e-08"),
        (-0.0034, math.nan, "-0.0034"),
        (math.nan, math.nan, "–"),
    ],
)
def test_numbers_keep_two_digits(mean: float, margin: float, told: str) -> None:
    assert amount(mean, margin) == told


def test_losses_keep_four_digits_and_those_of_their_margin() -> None:
    def group(*losses: float) -> dict[int, list[RoundRecord]]:
        base = RoundRecord(0, 1.0, 0.0, 0.0, 0.0, 0.0, 5, 0, 0.5, math.nan, {"accuracy": 0.5})
        return {
            seed: [replace(base, scores={"accuracy": 0.5, "loss": loss})]
            for seed, loss in enumerate(losses)
        }

    runs = {"one": group(2.29, 2.29), "other": group(2.28, 2.286), "far": group(0.41, 9.75)}
    found = ends(compare(runs, Goal(metric="loss")))
    cells = {name: row[0] for name, row in found.rows.items()}
    assert cells["one"] == "2.290 ±0.000"
    assert cells["other"] == "2.283 ±0.038"
    assert cells["far"] == "5.1 ±59.3"
    assert cells["other − one"] == "-0.007 ±0.038"


def test_a_column_has_the_unit_of_its_means() -> None:
    """A single seed that spent next to nothing does not decide it."""
    base = RoundRecord(0, 1.0, 0.0, 0.0, 0.0, 1.0, 5, 0, 0.5, math.nan, {"accuracy": 0.5})
    runs = {"one": {0: [replace(base, joules=0.002)], 1: [replace(base, joules=21.0)]}}
    assert "J" in ends(compare(runs)).heads
    assert "mJ" not in ends(compare(runs)).heads


def test_a_table_that_is_a_little_too_wide_breaks_few_cells() -> None:
    rows = {"one": ["12.3 ±4.5"] * 5, "a − b": ["+1.2 ±0.3"] * 5}
    shown = StringIO()
    heads = ("simulated s", *"abcd")
    Console(width=100, file=shown).print(grid(heads, rows, 55))
    told = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert len(told) == 4  # the head on two lines, and each row on one
    assert max(map(len, told)) <= 55


def test_small_amounts_keep_two_digits() -> None:
    """Those of very short runs were all 0.000."""
    brief = RoundRecord(0, 4.16e-4, 2e4, 1e6, 1.7e5, 1.0, 5, 0, 0.5, math.nan, {"accuracy": 0.5})
    shown = StringIO()
    Console(width=200, file=shown).print(table({"brief": {0: [brief]}}, 0.5, 200))
    head = " ".join(shown.getvalue().splitlines()[0].split())
    assert head == "accuracy % best % simulated ms ms to 50.0 % J kB down MB up kFLOP failures"
    cells = rows_of(shown.getvalue(), "brief")[0]
    assert cells[3:] == ["0.42", "0.42", "1.0", "20.0", "1.0", "170.0", "0"]


@pytest.mark.parametrize("command", ["run", "compare", "resume"])
def test_sigterm_leaves_a_checkpoint_whatever_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    words = {
        "run": ["run", "small.toml", "--out", "out", "--checkpoint-every", "1000"],
        "compare": ["compare", "small.toml", "--seeds", "1", "--out", "out"],
        "resume": ["resume", "out", "--rounds", "9", "--checkpoint-every", "1000"],
    }
    if command == "resume":
        succeeds("run", "small.toml", "rounds=1", "--out", "out")
    append = Recording.append

    def told_to_end(recording: Recording, result: RoundResult) -> None:
        append(recording, result)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Recording, "append", told_to_end)
    before = signal.getsignal(signal.SIGTERM)
    result = anyfleet_command(*words[command])
    assert (result.exit_code, "Traceback" in result.output) == (143, False), result.output
    assert signal.getsignal(signal.SIGTERM) == before
    run = folder / "out" / ("small/seed-0" if command == "compare" else "")
    assert json.loads((run / "summary.json").read_text())["ended"] == "interrupted"
    kept = len(read_rounds(run))
    assert kept == (2 if command == "resume" else 1)
    assert checkpoint.examine(checkpoint.found(run)[0]).rounds == kept
