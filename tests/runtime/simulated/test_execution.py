"""On which device of torch, by which engine and in which precision a run is carried out."""

import pytest
import torch

from anyfleet import config
from anyfleet.errors import ConfigError
from anyfleet.names import HOMES
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.runtime.simulated.execution import (
    Auto,
    Settings,
    absent,
    device_for,
    execution_of,
    misnamed,
    placed,
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


@pytest.mark.parametrize("engine", [Sequential(), Stacked(), Stacked(chunk=3)], ids=str)
def test_the_first_line_of_a_run_names_the_key_that_pins_its_engine(engine: Engine) -> None:
    execution = execution_of(small.task(), engine, "measured")
    pins = execution.pin.split(", ")
    data = config.override({}, pins)
    assert config.load(data, Settings, homes=HOMES).engine == engine
    assert str(execution).startswith(f"device cpu, engine {type(engine).__name__}")
    assert f"(measured; pin it with {execution.pin}), float32" in str(execution)
    named = execution_of(small.task(dtype=torch.float64), engine)
    assert str(named).endswith("float64")
    assert "pin it" not in str(named)


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
