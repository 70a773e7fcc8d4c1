"""Files of strangers: none of their code runs, whichever way they come in."""

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyfleet import config
from anyfleet.cli.app import app
from anyfleet.config.number_values import DEEPEST
from anyfleet.errors import AnyfleetError, ConfigError
from anyfleet.experiment import Experiment, build, load
from anyfleet.runtime import Threads
from anyfleet.store import Terms, environment, reopen
from tests.helpers import runs

TASK = """
[task]
use = "Embedded"
limit = 200
server = 0
devices = 4
model = { use = "perceptron", hidden = [8] }
"""
METHOD = """
[method]
use = "fedavg"
count = 2
"""
OWN = """
[task]
use = "Own"
devices = 4
model = { use = "perceptron", hidden = [8] }
"""
ASKS = '[allow]\npackages = ["canary_part"]\n'
# Whatever is done with this module, it leaves a trace.
CANARY = """
from pathlib import Path

HERE = Path(__file__).parent
(HERE / "IMPORTED").touch()


def run(**anything: str):
    (HERE / "CALLED").touch()


class part:
    def __init__(self, **anything: str) -> None:
        (HERE / "CALLED").touch()
"""
MAKES_FOLDER = 'use = "anyfleet.store:fresh", parent = ".", name = "PWNED"'
CLAIMS_FOLDER = 'use = "anyfleet.store.recording:claim", path = "PWNED"'
SHELL = 'use = "subprocess:getoutput", cmd = "touch PWNED"'

# What the file is, and what must be said about it.
EVIL: dict[str, tuple[str, str]] = {
    # -- as they were found
    "a file that loads another one with overrides": (
        '[task]\nuse = "anyfleet.experiment:load"\npath = "second.toml"\n'
        "overrides = ['allow.packages=[\"subprocess\"]', "
        '\'task={use="subprocess:getoutput",cmd="touch PWNED"}\']\n' + METHOD,
        'task.use: "anyfleet.experiment:load" is no part that may stand here',
    ),
    "a file that loads another one with its own allow": (
        '[task]\nuse = "anyfleet:load"\npath = "second.toml"\n' + METHOD,
        'task.use: "anyfleet:load" is no part',
    ),
    "the demonstration with an out of its own": (
        '[task]\nuse = "anyfleet.cli.demo:demonstrate"\nrounds = 1\nseed = 0\n'
        'references = false\nout = "PWNED"\nthreads = 1\n' + METHOD,
        'task.use: "anyfleet.cli.demo:demonstrate" is no part',
    ),
    # -- the file as a whole
    "top": ('use = "anyfleet.experiment:load"\npath = "second.toml"\n' + TASK + METHOD, "use: "),
    "allow that is a package of ours": (
        '[allow]\npackages = ["anyfleet", "anyfleet.store"]\n[task]\n'
        'use = "anyfleet.store:fresh"\nparent = "."\nname = "PWNED"\n' + METHOD,
        'task.use: "anyfleet.store:fresh" is no part',
    ),
    # -- the task
    "task in a shell": (
        '[allow]\npackages = ["subprocess"]\n[task]\n' + SHELL.replace(", ", "\n") + METHOD,
        "subprocess belongs to Python itself",
    ),
    "task beside the file": (
        ASKS + '[task]\nuse = "canary_part:run"\n' + METHOD,
        'asks for the code of "canary_part"',
    ),
    "task in a task": (
        f'[task]\nuse = "Pooled"\ninner = {{ {CLAIMS_FOLDER} }}\n' + METHOD,
        "task.inner.use: ",
    ),
    "task that is built already": ('[task]\nuse = "Task"\n' + METHOD, "task.use: "),
    "partition": (TASK + f"partition = {{ {MAKES_FOLDER} }}\n" + METHOD, "task.partition.use: "),
    "augment": (
        TASK + 'augment = { use = "canary_part:part" }\n' + METHOD,
        "--allow canary_part",
    ),
    "model": (
        TASK.replace('use = "perceptron", hidden = [8]', MAKES_FOLDER) + METHOD,
        'task.model.use: "anyfleet.store:fresh" is no part',
    ),
    "model by name alone": (
        TASK.replace('{ use = "perceptron", hidden = [8] }', '"anyfleet.cli.app:main"') + METHOD,
        "task.model.use: ",
    ),
    "model from torch": (
        TASK.replace(
            'use = "perceptron", hidden = [8]', 'use = "torch.hub:load", repo_or_dir = "."'
        )
        + METHOD,
        "--allow torch",
    ),
    "data": (OWN + f"data = {{ {CLAIMS_FOLDER} }}\n" + METHOD, "task.data.use: "),
    "data that is a part of something else": (
        OWN + 'data = { use = "anyfleet.tasks:Embedded" }\n' + METHOD,
        "task.data.use: ",
    ),
    "data from a load": (
        OWN + 'data = { use = "anyfleet.experiment:load", path = "second.toml" }\n' + METHOD,
        "task.data.use: ",
    ),
    "loss": (
        OWN + 'loss = "anyfleet.store.disk:write"\ndata = "canary_part:run"\n' + METHOD,
        "task.loss: ",
    ),
    "loss that is no loss": (
        OWN + 'loss = "anyfleet.tasks:pooled"\ndata = "canary_part:run"\n' + METHOD,
        "task.loss: pooled does not return a Tensor",
    ),
    "metric": (
        OWN + 'metrics = { a = "os:system" }\ndata = "canary_part:run"\n' + METHOD,
        "task.metrics.a: ",
    ),
    # -- the method, slot by slot
    "method": ('[method]\nuse = "anyfleet.store:fresh"\nparent = "."\nname = "PWNED"\n' + TASK, ""),
    "method beside the file": ('[method]\nuse = "canary_part:run"\n' + TASK, "--allow canary_part"),
    "method that a method imports": (
        '[method]\nuse = "anyfleet.methods.fedavg:replace"\n' + TASK,
        "method.use: ",
    ),
    "select": (
        TASK + METHOD + 'select = { use = "anyfleet.cli.run:folder_for", out = "PWNED", '
        'name = "PWNED" }\n',
        "method.select.use: ",
    ),
    "schedule": (
        ASKS + TASK + METHOD + 'schedule = { use = "canary_part:part" }\n',
        "--allow canary_part",
    ),
    "plan": (
        TASK
        + METHOD
        + 'plan = { use = "anyfleet.analysis.plots:draw", file = "PWNED", runs = {} }\n',
        "method.plan.use: ",
    ),
    "choose": (
        TASK + METHOD + f'plan = {{ use = "Assigned", inner = {{ use = "WidthMenu" }}, '
        f"choose = {{ {MAKES_FOLDER} }} }}\n",
        "method.plan.choose.use: ",
    ),
    "extract": (TASK + METHOD + 'extract = { use = "canary_part:part" }\n', "method.extract.use: "),
    "train": (
        TASK + METHOD + 'train = { use = "anyfleet.experiment:load", path = "second.toml" }\n',
        "method.train.use: ",
    ),
    "train with a learning rate of its own": (
        TASK + METHOD + 'train = { use = "Gradient", lr = { use = "canary_part:part" } }\n',
        "method.train.lr.use: ",
    ),
    "norm": (
        TASK + METHOD + 'norm = { use = "importlib:import_module", name = "canary_part" }\n',
        "method.norm.use: ",
    ),
    "uplink": (
        TASK + METHOD + f'uplink = {{ use = "ErrorFeedback", inner = {{ {CLAIMS_FOLDER} }} }}\n',
        "method.uplink.inner.use: ",
    ),
    "downlink": (
        TASK + METHOD + "downlink = { use = \"builtins:exec\", source = \"open('PWNED', 'w')\" }\n",
        "method.downlink.use: ",
    ),
    "aggregate": (
        TASK + METHOD + 'aggregate = { use = "ServerOptimised", inner = { use = "Mean" }, '
        f"optimiser = {{ {SHELL} }} }}\n",
        "method.aggregate.optimiser.use: ",
    ),
    # -- the fleet, the engine, the limits
    "fleet": (TASK + METHOD + f"[fleet]\n{MAKES_FOLDER.replace(', ', chr(10))}\n", "fleet.use: "),
    "law": (
        TASK + METHOD + '[[fleet.groups]]\nspeed = { use = "canary_part:part" }\n',
        "fleet.groups.0.speed",
    ),
    "link": (
        TASK + METHOD + f"[[fleet.groups]]\nlink = {{ {CLAIMS_FOLDER} }}\n",
        "fleet.groups.0.link.use: ",
    ),
    "engine": (
        TASK + METHOD + '[engine]\nuse = "anyfleet.runtime:Simulated"\n',
        "engine.use: ",
    ),
    "engine that allows what it likes": (
        TASK + METHOD + '[engine]\nuse = "Threads"\nallow = ["canary_part"]\n',
        "engine.allow: asks for canary_part. ",
    ),
    "limits": (
        TASK + METHOD + f"[limits]\n{CLAIMS_FOLDER.replace(', ', chr(10))}\n",
        "limits.use: ",
    ),
    # -- what is not even a run
    "tables in tables": (TASK + METHOD + f"[{'a.' * 400}a]\n", "more than 100 parts"),
    "lists in lists": (TASK + METHOD + f"x = {'[' * 5000}{']' * 5000}\n", "nested too deeply"),
    "lists in lists that Python can read": (
        TASK + METHOD + f"x = {'[' * 60}{']' * 60}\n",
        "tables or lists deep",
    ),
    "a number of thousands of digits": (f"seed = {'9' * 5000}\n" + TASK + METHOD, "not valid TOML"),
    "rounds without end": (f"rounds = {10**30}\n" + TASK + METHOD, "rounds: a whole number must"),
    "rounds that are no whole number": ("rounds = 1e30\n" + TASK + METHOD, "rounds: "),
    "an infinite learning rate": (
        TASK + METHOD + "lr = inf\n",
        "method.lr: expected a finite number",
    ),
    "a learning rate that is no number": (
        TASK + METHOD + "lr = nan\n",
        "method.lr: expected a finite numbe",
    ),
    "an infinite share": ("widths = [inf]\n" + TASK + METHOD, "widths.0: expected a finite number"),
    "a device that never ends": (
        TASK + METHOD + "[[fleet.groups]]\nspeed = 1e-300\n",
        "fleet.groups.0.speed: Group.speed must be at least 1e-09",
    ),
    "a link that never ends": (
        TASK
        + METHOD
        + "[[fleet.groups]]\n"
        + "link = { use = 'Steady', bit_rate_up = 1e-300, bit_rate_down = 1.0 }\n",
        "Steady.bit_rate_up must be finite bits per second",
    ),
    "a key without end": (f"{'a.' * 20_000}a = 1\n" + TASK + METHOD, "key of more than 100 parts"),
    "a quoted key without end": (
        TASK + METHOD + "[" + '"\\"a" . ' * 20_000 + "a]\n",
        "key of more than 100 parts",
    ),
    "devices without end": (
        TASK.replace("devices = 4", f"devices = {2**63 - 1}") + METHOD,
        "devices must be at least 1 and at most 100,000,000",
    ),
    "devices without end in a generator": (
        f'[task]\nuse = "Synthetic"\ndata = {{ devices = {2**63 - 1} }}\n' + METHOD,
        "Generator.devices must be at most 100,000,000",
    ),
    "a group without end": (
        TASK + METHOD + f"[[fleet.groups]]\ncount = {2**62}\n",
        "Group.count must be at most 100,000,000",
    ),
    "a device file": (
        TASK + METHOD + "[[fleet.groups]]\n"
        "speed = { use = 'Replayed', file = '/dev/zero', field = 'a' }\n",
        "/dev/zero is not a plain file",
    ),
}


def command(*words: str) -> str:
    """What a command says that fails on purpose."""
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    return result.output


def loaded(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder / "evil.toml")
    return str(caught.value)


def resumed(folder: Path) -> str:
    """A run folder with the file as its configuration, and beside it what the file names."""
    run = folder / "run"
    shutil.copy(folder / "evil.toml", run / "config.toml")
    return command("resume", str(run))


WAYS: dict[str, Callable[[Path], str]] = {
    "load": loaded,
    "validate": lambda _: command("validate", "evil.toml"),
    "run": lambda _: command("run", "evil.toml"),
    "compare": lambda _: command("compare", "evil.toml", "--seeds", "1"),
    "resume": resumed,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died after a step; not to be changed."""
    return runs.written(tmp_path_factory.mktemp("killed") / "run", runs.results()[:1])


@pytest.fixture
def folder(tmp_path: Path, killed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stranger's folder; whatever appears in it was their doing."""
    (tmp_path / "canary_part.py").write_text(CANARY)
    second = "[allow]\npackages = ['subprocess', 'canary_part']\n[task]\n" + SHELL.replace(
        ", ", "\n"
    )
    (tmp_path / "second.toml").write_text(second + METHOD)
    run = shutil.copytree(killed, tmp_path / "run")
    recorded = environment.read(run)
    text = (run / "environment.json").read_text()
    (run / "environment.json").write_text(text.replace('"home": ""', f'"home": "{tmp_path}"'))
    assert environment.read(run).home == str(tmp_path) != recorded.home
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("canary_part", None)


def listed(folder: Path) -> set[Path]:
    return {file.relative_to(folder) for file in folder.rglob("*") if "run" not in file.parts}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVIL)
def test_nothing_of_an_evil_file_runs(folder: Path, name: str, way: str) -> None:
    text, told = EVIL[name]
    (folder / "evil.toml").write_text(text)
    before = listed(folder)
    assert told in WAYS[way](folder)
    assert listed(folder) == before
    assert not (folder / "run" / "PWNED").exists()
    assert "canary_part" not in sys.modules


def test_the_canary_sings(folder: Path) -> None:
    """So that the silence above means something."""
    file = folder / "evil.toml"
    file.write_text(EVIL["extract"][0])
    with pytest.raises(ConfigError):
        load(file, allow=["canary_part"])
    assert (folder / "IMPORTED").exists()
    file.write_text(EVIL["method beside the file"][0])
    with pytest.raises(ConfigError):
        load(file, allow=["canary_part"])
    assert (folder / "CALLED").exists()


OVERRIDES = {
    "the task": ("task={" + SHELL + "}", "belongs to Python itself"),
    "a load": ('task={use="anyfleet.experiment:load",path="second.toml"}', "task.use: "),
    "a slot": ("method.select.use=canary_part:part", "--allow canary_part"),
    "a model": ("task.model={" + MAKES_FOLDER + "}", "task.model.use: "),
    "what is allowed": ('allow.packages=["canary_part"]', "allow: cannot be an override"),
    "whatever is allowed": ('allow={packages=["canary_part"]}', "allow: cannot be an override"),
    "a deep path": (".".join("a" * 500) + "=1", "tables or lists deep"),
    "a deep value": (f"seed={'[' * 5000}", "nested too deeply"),
    "a key without end": ("seed={" + "a." * 20_000 + "a=1}", "key of more than 100 parts"),
    "a learning rate": ("method.lr=inf", "method.lr: expected a finite number"),
    "the rounds": (f"rounds={10**30}", "rounds: a whole number must fit into 64 bits"),
    "a number of thousands of digits": (f"seed={'9' * 5000}", "seed: "),
}


@pytest.mark.parametrize("way", ["load", "validate", "run", "compare"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_nothing_of_an_evil_override_runs(folder: Path, name: str, way: str) -> None:
    change, told = OVERRIDES[name]
    (folder / "good.toml").write_text(TASK + METHOD)
    before = listed(folder)
    if way == "load":
        with pytest.raises(ConfigError) as caught:
            load("good.toml", [change])
        assert told in str(caught.value)
    else:
        assert told in command(way, "good.toml", change)
    assert listed(folder) == before
    assert "canary_part" not in sys.modules


def test_control_characters_of_a_file_do_not_reach_the_terminal(folder: Path) -> None:
    (folder / "evil.toml").write_text('"\\u001b[2J" = 1\nseed = "\\u001b]0;x"\n' + TASK + METHOD)
    shown = command("validate", "evil.toml")
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown


# --- what a file asks for, and who grants it ----------------------------------------------------

MINE = """
from dataclasses import dataclass
from anyfleet.parts.select import Everyone

@dataclass(frozen=True)
class Mine(Everyone):
    pass
"""
ASKING = (
    '[allow]\npackages = ["door_part"]\n'
    + TASK
    + '[method]\nuse = "fedavg"\nselect = { use = "door_part:Mine" }\n'
    + '[fleet]\nuse = "levels"\n'
)


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that asks for the module beside it."""
    (tmp_path / "door_part.py").write_text(MINE)
    (tmp_path / "asks.toml").write_text(ASKING)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "asks.toml"
    sys.modules.pop("door_part", None)


ASKED: Sequence[tuple[str, ...]] = (
    ("validate", "asks.toml"),
    ("run", "asks.toml", "rounds=1", "--out", "out"),
    ("compare", "asks.toml", "rounds=1", "--seeds", "1", "--out", "out"),
    ("cite", "asks.toml"),
)


@pytest.mark.parametrize("words", ASKED, ids=lambda words: words[0])
def test_a_request_is_shown_and_granted_by_the_caller_alone(
    asking: Path, words: tuple[str, ...]
) -> None:
    told = command(*words)
    where = f'allow.packages: the file asks for the code of "door_part", from {asking.parent}. '
    assert where in told
    assert "--allow door_part" in told
    assert "door_part" not in sys.modules
    result = CliRunner().invoke(app, [*words, "--allow", "door_part"])
    assert result.exit_code == 0, result.output


UNNEEDED: Sequence[tuple[str, ...]] = (
    ("validate", "asks.toml"),
    ("run", "asks.toml", "rounds=1", "--out", "out"),
    ("compare", "asks.toml", "rounds=1", "--seeds", "2", "--out", "out"),
    ("fleet", "show", "asks.toml", "--out", "fleet.png"),
    ("resume", "run"),
)


@pytest.mark.parametrize("words", UNNEEDED, ids=lambda words: words[0])
def test_a_request_that_is_not_needed_is_shown_once_and_left_alone(
    asking: Path, killed: Path, words: tuple[str, ...]
) -> None:
    request = '[allow]\npackages = ["door_part"]\n'
    asking.write_text(request + TASK + METHOD + '[fleet]\nuse = "levels"\n')
    run = shutil.copytree(killed, asking.parent / "run")
    with (run / "config.toml").open("a") as written:
        written.write(request)
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 0, result.output
    told = 'note: allow.packages: the file asks for the code of "door_part"'
    assert result.output.count(told) == 1
    assert "--allow door_part" in result.output
    assert "It was not needed here." in result.output
    assert "door_part" not in sys.modules


def test_python_grants_a_request_by_argument(asking: Path) -> None:
    with pytest.raises(ConfigError, match=r'allow=\["door_part"\] in Python'):
        load(asking)
    assert type(load(asking, allow=["door_part"]).method.select).__name__ == "Mine"


def test_the_run_folder_says_how_to_go_on(asking: Path) -> None:
    words = ["run", "asks.toml", "rounds=1", "--out", "out", "--allow", "door_part"]
    shown = CliRunner().invoke(app, words).output
    assert "anyfleet resume out --allow door_part" in shown
    head = Path("out/config.toml").read_text().splitlines()[0]
    assert head.endswith("anyfleet run config.toml --allow door_part")
    del sys.modules["door_part"]
    more = Terms(rounds=2)
    with pytest.raises(ConfigError, match="--allow door_part"):
        reopen(Path("out"), more)
    assert "door_part" not in sys.modules
    reopen(Path("out"), Terms(rounds=2, allow=("door_part",))).past.lock.release()


def test_nothing_but_what_was_allowed_is_found_beside_a_file(
    asking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that looks for another one, in vain as a rule, shall not find a stranger's."""
    (asking.parent / "wanted_by_a_library.py").write_text("raise SystemExit\n")
    (asking.parent / "door_part.py").write_text(
        "try:\n    import wanted_by_a_library\nexcept ImportError:\n    pass\n" + MINE
    )
    path, finders = list(sys.path), list(sys.meta_path)
    load(asking, allow=["door_part"])
    assert (sys.path, sys.meta_path) == (path, finders)


def test_a_namesake_of_an_installed_package_is_refused(
    asking: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path_factory.mktemp("installed")
    (installed / "door_part.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(installed)
    with pytest.raises(ConfigError, match=r"door_part lies next to the run file, but .*installed"):
        load(asking, allow=["door_part"])


INSIDE = """
from dataclasses import dataclass, field
from anyfleet.core.slots import Codec
from anyfleet.parts.codec import Raw
from anyfleet.parts.select import Everyone

@dataclass(frozen=True)
class Mine(Everyone):
    codec: Codec = Raw()
    anything: object = None
"""


def test_a_part_inside_another_may_be_of_any_home_that_has_its_kind(asking: Path) -> None:
    (asking.parent / "door_part.py").write_text(INSIDE)
    trust = ["door_part"]
    inner = load(
        asking, ['method.select.codec.use="anyfleet.parts.codec:Stc"'], trust
    ).method.select
    assert type(inner.codec).__name__ == "Stc"  # type: ignore[attr-defined]
    for use in ("anyfleet.parts.select:Everyone", "anyfleet.store:fresh", "anyfleet.world:Fleet"):
        with pytest.raises(ConfigError, match=r"method\.select\.codec\.use: "):
            load(asking, [f'method.select.codec.use="{use}"'], trust)
    with pytest.raises(ConfigError, match=r"method\.select\.anything\.use: "):
        load(asking, ['method.select.anything={use="anyfleet.parts.codec:Stc"}'], trust)


# --- the user's own settings --------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text('[allow]\npackages = ["door_part"]\n')
    file.chmod(0o600)
    monkeypatch.setenv("ANYFLEET_SETTINGS", str(file))
    return file


def test_settings_open_installed_packages_only(
    asking: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stranger's file there may lie another module of a name that the user trusts."""
    with pytest.raises(ConfigError, match="door_part cannot be imported") as caught:
        load(asking)
    assert "settings open installed packages only" in str(caught.value)
    assert "use --allow door_part" in str(caught.value)
    monkeypatch.syspath_prepend(asking.parent)
    experiment = load(asking, ['engine.use="Threads"'])
    assert type(experiment.method.select).__name__ == "Mine"
    assert experiment.engine == Threads(allow=("door_part",))


def test_without_settings_nothing_is_allowed(
    asking: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ANYFLEET_SETTINGS")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.read(asking).allow == ()
    home = tmp_path / ".config" / "anyfleet"
    home.mkdir(parents=True)
    (home / "settings.toml").write_text('[allow]\npackages = ["theirs"]\n')
    (home / "settings.toml").chmod(0o644)
    assert config.read(asking).allow == ("theirs",)
    assert config.read(asking, allow=["mine"]).allow == ("mine", "theirs")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other rights")
@pytest.mark.parametrize("right", [stat.S_IWGRP, stat.S_IWOTH])
def test_settings_that_others_can_write_are_refused(
    asking: Path, settings: Path, right: int
) -> None:
    settings.chmod(0o600 | right)
    with pytest.raises(ConfigError, match=r"settings\.toml: can be written by others.*chmod go-w"):
        config.read(asking)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[allow]\npackages = 3\n", "expected \\[allow\\]"),
        ("[alow]\npackages = []\n", "alow: unknown key"),
        ("= 3\n", "not valid TOML"),
        (f"a = {'[' * 5000}", "not valid TOML"),
    ],
)
def test_wrong_settings_are_told(asking: Path, settings: Path, text: str, told: str) -> None:
    settings.write_text(text)
    with pytest.raises(ConfigError, match=rf"settings\.toml: .*{told}"):
        config.read(asking)


def test_settings_have_a_full_path(
    asking: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one would be another file in every folder, also in a stranger's."""
    monkeypatch.setenv("ANYFLEET_SETTINGS", "settings.toml")
    with pytest.raises(ConfigError, match="is not a full path"):
        config.read(asking)
    monkeypatch.setenv("ANYFLEET_SETTINGS", str(asking.parent / "none.toml"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.read(asking)


# --- sizes --------------------------------------------------------------------------------------

LARGE = (
    "[task]\nuse = 'Synthetic'\nmodel = { use = 'perceptron', features = 4611686018427387904 }\n"
)
OWN_NETWORK = """
from torch import nn

def net() -> nn.Module:
    raise RuntimeError("my own words")
"""


@pytest.mark.parametrize("way", ["validate", "run", "compare"])
def test_sizes_that_no_machine_has_are_a_problem_of_the_file(folder: Path, way: str) -> None:
    (folder / "large.toml").write_text(LARGE + METHOD)
    told = command(way, "large.toml")
    assert "task: cannot be built: " in told
    assert "Are its sizes too large for this machine?" in told


def test_an_error_of_a_users_network_is_none_of_the_file(asking: Path) -> None:
    (asking.parent / "door_part.py").write_text(OWN_NETWORK)
    text = TASK.replace('{ use = "perceptron", hidden = [8] }', '{ use = "door_part:net" }')
    asking.write_text(text + METHOD)
    with pytest.raises(RuntimeError, match="my own words"):
        build(load(asking, allow=["door_part"]))


# --- numbers and depth --------------------------------------------------------------------------


def test_infinity_stands_only_where_it_means_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TASK + METHOD + "[method.schedule]\nuse = 'Synchronous'\npatience = inf\n")
    experiment = load(file, ["limits.norm=inf"])
    assert experiment.limits.norm == float("inf")
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml(config.dump(experiment, complete=True)))
    assert load(again) == experiment
    with pytest.raises(ConfigError, match=r"limits\.norm: expected a finite number, got nan"):
        load(file, ["limits.norm=nan"])


def test_data_may_be_as_deep_as_any_run_file_needs_and_no_deeper() -> None:
    def nested(depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        for _ in range(depth):
            data = {"a": data}
        return data

    with pytest.raises(ConfigError, match="unknown key"):
        config.load(nested(DEEPEST), Experiment)
    with pytest.raises(ConfigError, match=r"^a\.a.*: is nested more than 32 tables"):
        config.load(nested(DEEPEST + 1), Experiment)
    with pytest.raises(AnyfleetError):
        config.load({"use": nested(100_000)}, Experiment)


def test_a_settings_file_of_somebody_else_is_refused(
    asking: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: settings.stat().st_uid + 1)
    if settings.stat().st_uid == 0:
        assert config.read(asking).allow == ("door_part",)  # what root writes is trusted
    else:
        with pytest.raises(ConfigError, match="belongs to somebody else"):
            config.read(asking)
