"""On which device of torch, by which engine and in which precision a run is carried out."""

import tomllib

import pytest
import torch

from anyfleet import config
from anyfleet.errors import AnyfleetWarning, ConfigError
from anyfleet.names import HOMES
from anyfleet.runtime import Sequential, Stacked, Threads, Workers
from anyfleet.runtime.simulated.captured_training import Precision, arithmetic
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.runtime.simulated.execution import (
    Auto,
    Execution,
    Settings,
    absent,
    device_for,
    execution_of,
    misnamed,
    placed,
    written,
)
from tests.helpers import small

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "cuda:12"])
def test_devices_have_the_names_that_torch_gives_them(device: str) -> None:
    assert misnamed(device) == ""
    assert Settings(device=device).device == device


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", "auto "])
def test_other_names_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match='"auto", "cpu", "cuda" or one such as "cuda:1", got'):
        Settings(device=device)


@needs_no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_told_with_what_to_do(device: str) -> None:
    assert absent(device).startswith(f'"{device}" asks for a GPU, but torch finds no CUDA device')
    assert 'use "cpu", or "auto"' in absent(device)
    assert absent("cpu") == absent("auto") == ""


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("auto", "cuda"), (Stacked(), "cuda"), (Sequential(), "cpu"), (Threads(), "cpu")],
    ids=str,
)
def test_a_gpu_is_for_engines_that_make_use_of_it(
    engine: Engine | Auto, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_for(Settings(engine)).type == expected
    assert device_for(Settings(engine, "cuda:1")) == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_for(Settings(engine)).type == "cpu"


def test_a_task_is_moved_once_and_only_if_need_be() -> None:
    task = small.task()
    assert placed(task, Settings(device="cpu")) is task
    # "meta" is the one other device of torch that every machine has.
    moved = task.to(torch.device("meta"))
    assert {each.device.type for each in moved.params.values()} == {"meta"}
    assert moved.test.x.device.type == moved.train.x.device.type == "meta"
    assert placed(moved, Settings(Sequential())) is moved


def test_a_task_that_cannot_be_moved_is_told() -> None:
    class Fixed:
        """A task of somebody's own."""

        params = {"weight": torch.zeros(1, device="meta")}  # noqa: RUF012

    with pytest.raises(ConfigError, match="device: a Fixed has no `to` that would move it to cpu"):
        placed(Fixed(), Settings(device="cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "engine",
    [Sequential(), Workers(), Stacked(), Stacked(8, workers=2), Stacked(precision="bf16")],
    ids=str,
)
def test_the_first_line_of_a_run_names_the_line_that_pins_its_engine(engine: Engine) -> None:
    execution = execution_of(small.task(), engine, "measured")
    _, _, printed = str(execution).partition("(measured; pin it with ")
    (line,) = execution.pins
    assert printed == f"{line}), {execution.precision}"
    for data in (tomllib.loads(line), config.override({}, [line])):
        assert config.load(data, Settings, homes=HOMES).engine == engine
    assert str(execution).startswith(f"device cpu, engine {type(engine).__name__}")
    named = execution_of(small.task(), engine)
    assert "pin it" not in str(named)


def test_on_a_gpu_the_device_is_pinned_too() -> None:
    execution = Execution("cuda:0", written(Stacked(chunk=8)), "float32", "for a GPU")
    data = tomllib.loads("\n".join(execution.pins))
    expected = Settings(Stacked(chunk=8), "cuda:0")
    assert config.load(data, Settings, homes=HOMES) == expected
    assert str(execution) == (
        "device cuda:0, engine Stacked(chunk=8) (for a GPU; pin it with "
        'engine = { use = "Stacked", chunk = 8 } and device = "cuda:0"), float32'
    )


NOT_TF32 = 'engine.precision = "tf32" has no effect: device cpu computes in float32.'
NOT_ON_DOUBLES = 'engine.precision = "{}" has no effect: this task computes in float64.'
NOT_COMPILED = "engine.compile has no effect on device cpu: it is for GPUs."


@pytest.mark.parametrize(
    ("dtype", "engine", "used", "told"),
    [
        (torch.float32, Stacked(), "float32", []),
        (torch.float64, Stacked(), "float64", []),
        (torch.float64, Sequential(), "float64", []),
        (torch.float32, Stacked(precision="bf16"), "bf16", []),
        (torch.float32, Stacked(precision="tf32"), "float32", [NOT_TF32]),
        (torch.float64, Stacked(precision="tf32"), "float64", [NOT_ON_DOUBLES.format("tf32")]),
        (torch.float64, Stacked(precision="bf16"), "float64", [NOT_ON_DOUBLES.format("bf16")]),
        (torch.float32, Stacked(compile=True), "float32", [NOT_COMPILED]),
    ],
    ids=str,
)
def test_the_precision_is_the_one_that_is_used(
    dtype: torch.dtype,
    engine: Engine,
    used: str,
    told: list[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    execution = execution_of(small.task(dtype=dtype), engine)
    assert execution.precision == used
    assert str(execution).endswith(f", {used}")
    assert [str(each.message) for each in recwarn] == told
    assert all(each.category is AnyfleetWarning for each in recwarn)


@pytest.mark.parametrize(
    ("precision", "dtype", "coarse"),
    [
        ("tf32", torch.float32, False),
        ("bf16", torch.float64, False),
        ("bf16", torch.float32, True),
    ],
)
def test_a_cpu_multiplies_with_the_digits_that_are_told(
    precision: Precision, dtype: torch.dtype, coarse: bool
) -> None:
    values = torch.linspace(0, 1, 9, dtype=dtype).reshape(3, 3) / 3
    with arithmetic(precision, torch.device("cpu")):
        found = values @ values
    assert torch.equal(found.to(dtype), values @ values) != coarse


def test_executions_differ_in_device_engine_and_precision_alone() -> None:
    one = execution_of(small.task(), Stacked(chunk=3), "measured")
    assert one.differences(execution_of(small.task(), Stacked(chunk=3))) == ()
    other = execution_of(small.task(dtype=torch.float64).to(torch.device("meta")), Sequential())
    assert one.differences(other) == (
        "device cpu then, meta now",
        "engine Stacked(chunk=3) then, Sequential now",
        "precision float32 then, float64 now",
    )


def test_an_engine_that_no_file_can_name_is_told_as_python_writes_it() -> None:
    class Odd(Sequential):
        """An engine inside a function."""

    assert "Odd" in str(execution_of(small.task(), Odd()))
