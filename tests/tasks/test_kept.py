"""What building and pricing a task keeps in the cache: it changes no byte, and never lies."""

import gzip
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools.embed import encode_idx
from torch import Tensor, nn

from anyfleet import cache
from anyfleet.elastic import Blueprint, require_faithful, trace, traced
from anyfleet.elastic.cost import memory
from anyfleet.elastic.verification import faithful
from anyfleet.experiment import load, play
from anyfleet.tasks import Data, Embedded, data_loading, zoo
from anyfleet.tasks import dataset_files as files
from anyfleet.tasks.idx import read_idx
from anyfleet.tasks.split import Division
from anyfleet.tasks.task_checks import check_finite
from tests.helpers import small

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ["heterofl", "anycost", "fedpmt", "whale"]
SMALL = ["rounds=2", "task.limit=600", "task.server=50", 'engine={ use = "Sequential" }']


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(home: Path, kind: str) -> int:
    return len(list((home / kind).glob("*")))


def forget() -> None:
    """Forget what this process knows, as a new one does."""
    memory.saved_bytes.cache_clear()
    memory.pass_bytes.cache_clear()


def fail(*_: object, **__: object) -> None:
    raise AssertionError("computed again")


# --- runs -----------------------------------------------------------------------------------------


def outcome(recipe: str) -> tuple[list[object], dict[str, bytes], bytes]:
    """Return the records of a short run, its model, and the blueprint of its task."""
    forget()
    experiment = load(ROOT / "recipes" / f"{recipe}.toml", SMALL)
    results = list(play(experiment))
    tensors = {**results[-1].round.params, **results[-1].round.buffers}
    model = {name: value.numpy().tobytes() for name, value in tensors.items()}
    task = experiment.task.build(experiment.seed)
    return [repr(each.record) for each in results], model, task.blueprint.to_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_the_same_without_a_cache_with_a_new_and_with_a_full_one(
    recipe: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = outcome(recipe)
    assert entries(home, "networks") == 1
    assert entries(home, "images") >= 4
    assert entries(home, "prices") >= 1
    with monkeypatch.context() as changed:  # nothing is computed again
        changed.setattr("anyfleet.elastic.tracing.tracer.trace", fail)
        changed.setattr(memory, "_pass_bytes", fail)
        changed.setattr(memory, "_saved_bytes", fail)
        second = outcome(recipe)
    monkeypatch.setenv("ANYFLEET_CACHE", "off")
    without = outcome(recipe)
    assert first == second == without


SECOND_START = """
import sys
from pathlib import Path
from anyfleet.elastic.cost import memory
from anyfleet.elastic.tracing import tracer
from anyfleet.experiment import load, prepare
import torch
torch.set_num_threads(1)
del tracer.trace, memory._pass_bytes
prepared = prepare(load(Path(sys.argv[1]), sys.argv[2:]))
print(prepared.task.blueprint.digest.hex())
print(*sorted({"torch._dynamo", "sympy", "scipy", "matplotlib"} & sys.modules.keys()))
"""


def test_another_process_uses_what_this_one_kept_and_imports_no_compiler(home: Path) -> None:
    outcome("heterofl")
    before = cache.holdings()
    words = [sys.executable, "-c", SECOND_START, str(ROOT / "recipes" / "heterofl.toml"), *SMALL]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr
    digest, imported = ran.stdout.split("\n")[:2]
    assert digest == Embedded(limit=600).build(0).blueprint.digest.hex()
    assert imported == ""
    assert cache.holdings() == before


# --- networks -------------------------------------------------------------------------------------

INPUTS = (torch.zeros(2, 1, 28, 28),)


def is_kept(home: Path, module: nn.Module, inputs: tuple[Tensor, ...] = INPUTS) -> bool:
    """Trace a module, and return whether that made an entry."""
    before = entries(home, "networks")
    faithful._of_content.cache_clear()
    found = traced(module, inputs)
    assert found == trace(module, inputs)
    return entries(home, "networks") > before


def test_an_equal_network_is_not_traced_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_kept(home, zoo.cnn_mnist())
    monkeypatch.setattr("anyfleet.elastic.tracing.tracer.trace", fail)
    other = zoo.cnn_mnist()  # with other weights
    require_faithful(other, INPUTS, traced(other, INPUTS))


def test_whatever_changes_a_blueprint_makes_an_entry_of_its_own(home: Path) -> None:
    def plain() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 8))

    frozen, tied, biased, mode = plain(), plain(), plain(), plain()
    frozen[1].weight.requires_grad_(False)
    tied.append(tied[3])
    untied = plain().append(nn.Linear(8, 8))
    biased[3] = nn.Linear(8, 8, bias=False)
    mode[2] = nn.LeakyReLU(0.1)
    slope = plain()
    slope[2] = nn.LeakyReLU(0.2)
    for module in (plain(), frozen, tied, untied, biased, mode, slope, plain().double()):
        dtype = next(module.parameters()).dtype
        assert is_kept(home, module, (INPUTS[0].to(dtype),))
    assert not is_kept(home, plain())
    assert not is_kept(home, frozen)


class Foreign(nn.Module):
    """A network whose code Anyfleet does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.flatten(1))
        return out


def hooked() -> nn.Module:
    module = zoo.cnn_mnist()
    module.register_forward_hook(lambda *_: None)
    return module


def gradient_hooked() -> nn.Module:
    module = zoo.cnn_mnist()
    weight: Any = next(module.parameters())
    weight.register_hook(lambda gradient: 2 * gradient)
    return module


def outfitted() -> nn.Module:
    module = zoo.cnn_mnist()
    module.rule = lambda x: x  # type: ignore[assignment]
    return module


def derived() -> nn.Module:
    linear = type("Linear", (nn.Linear,), {"forward": lambda self, x: x @ self.weight.T})
    linear.__module__ = nn.Linear.__module__  # it only says that it is torch's
    return nn.Sequential(nn.Flatten(), linear(784, 10))


@pytest.mark.parametrize("make", [Foreign, hooked, gradient_hooked, outfitted, derived])
def test_code_of_others_is_traced_every_time(home: Path, make: Callable[[], nn.Module]) -> None:
    assert not is_kept(home, make())


def test_a_file_with_a_name_of_pythons_is_traced_every_time(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
    (tmp_path / "this.py").write_text(text + "        return super().forward(x).relu()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    net = importlib.import_module("this").Net(4, 2)
    traced(net, (torch.zeros(2, 4),))
    assert entries(home, "networks") == 0
    monkeypatch.delitem(sys.modules, "this")


def test_other_code_of_ours_means_other_entries(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_kept(home, zoo.cnn_mnist())
    monkeypatch.setattr(cache, "code_digest", lambda: "another")
    assert is_kept(home, zoo.cnn_mnist())
    monkeypatch.setattr(cache, "code_digest", lambda: None)  # no source: nothing is kept
    assert not is_kept(home, small.net(), (torch.zeros(2, 1, 8, 8),))


def test_an_entry_that_is_no_blueprint_is_traced_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[object] = []
    write = cache.write

    def spy(kind: str, key: object, content: bytes) -> None:
        keys.append(key)
        write(kind, key, content)

    monkeypatch.setattr(cache, "write", spy)
    module = zoo.cnn_mnist()
    good = traced(module, INPUTS)
    for content in (b"", b"\x80", b"\xc1", b"[" * 100_000, good.to_bytes()[:-1]):
        write("networks", keys[0], content)
        assert traced(module, INPUTS) == good
        kept = cache.read("networks", keys[0])
        assert kept is not None
        assert Blueprint.from_bytes(bytes(kept)) == good


# --- prices ---------------------------------------------------------------------------------------


def test_prices_are_of_one_model_layer_and_batch(home: Path) -> None:
    whole = small.task().blueprint
    half = whole.local(whole.prefix(0.5))
    asked = [(whole, 0, 4), (whole, 0, 5), (whole, 1, 4), (half, 0, 4)]
    forget()
    found = [(memory.pass_bytes(*each), memory.saved_bytes(*each)) for each in asked]
    assert entries(home, "prices") == 2 * len(asked)
    assert found == [(memory._pass_bytes(*each), memory._saved_bytes(*each)) for each in asked]
    forget()
    assert found == [(memory.pass_bytes(*each), memory.saved_bytes(*each)) for each in asked]
    assert len(set(found)) == len(asked)


# --- images ---------------------------------------------------------------------------------------


def packed(folder: Path, name: str, fill: int) -> None:
    """Write a packed file of 3 images, whose last pixel is `fill`."""
    folder.mkdir(exist_ok=True)
    pixels = np.zeros((3, 4, 4), np.uint8)
    pixels[-1, -1, -1] = fill
    (folder / f"{name}.gz").write_bytes(gzip.compress(encode_idx(pixels), mtime=0))


def test_images_follow_their_file(home: Path, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte"
    for fill in (7, 8, 7):
        packed(tmp_path / "mnist", name, fill)
        for _ in range(2):
            assert read_idx(tmp_path / "mnist", name)[-1, -1, -1] == fill
    assert entries(home, "images") == 2


def test_moments_follow_the_pixels(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loading, "_WORTH_KEEPING", 1)
    images = files.embedded_images()
    before = entries(home, "images")
    one, two = (data_loading.image_data(images, 100, seed)[0].x for seed in (0, 1))
    assert entries(home, "images") == before + 2
    again = data_loading.image_data(images, 100, 0)[0].x
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    changed = images.train_x[np.arange(len(images.train_x))]
    changed[:, 0, 0, 0] = 255
    data_loading.image_data(images._replace(train_x=changed), 100, 0)
    assert entries(home, "images") == before + 3
    monkeypatch.setenv("ANYFLEET_CACHE", "off")
    assert torch.equal(one, data_loading.image_data(images, 100, 0)[0].x)


def test_a_sum_that_overflows_is_no_fault() -> None:
    large = Data(torch.full((9, 2), 3e38), torch.zeros(9))
    division = Division((torch.arange(8),), (torch.tensor([8]),), large.rows(torch.tensor([0])))
    check_finite(large, division, None)
    large.x[3, 1] = float("inf")
    with pytest.raises(ValueError, match="row 3"):
        check_finite(large, division, None)
