"""The bundle of a fleet: the same task without its data, and nothing that is damaged or code."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anyfleet.device.bundle import bundle_of, read_bundle, write_bundle
from anyfleet.errors import ConfigError, StoreError
from anyfleet.tasks.augment import Flip, Shift
from anyfleet.tasks.losses import squared_error
from tests.helpers import small

TASK = small.task()


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) - target).square().to(output.dtype)


def test_a_bundle_is_the_task_without_its_data(tmp_path: Path) -> None:
    written = write_bundle(replace(TASK, augment=Shift(2)), tmp_path / "bundle")
    found = read_bundle(tmp_path / "bundle")
    assert found.digest == written.digest
    assert found.blueprint == TASK.blueprint
    assert small.identical(found.params, TASK.params)
    assert small.identical(found.buffers, TASK.buffers)
    assert (found.classes, found.classified) == (TASK.classes, TASK.classified)
    assert (found.functions.loss, found.functions.metrics) == (TASK.loss, TASK.metrics)
    assert found.functions.augment == Shift(2)
    files = sorted(each.name for each in (tmp_path / "bundle").iterdir())
    assert files == ["blueprint.msgpack", "bundle.json", "tensors.safetensors"]
    size = sum(each.stat().st_size for each in (tmp_path / "bundle").iterdir())
    assert size < 2 * 4 * TASK.blueprint.numel() + 20_000  # no samples are in it


@pytest.mark.parametrize(
    "change",
    [
        {"loss": squared_error},
        {"metrics": {}},
        {"augment": Flip()},
        {"classes": 11},
        {"classified": False},
        {"params": {name: value + 1e-7 for name, value in TASK.params.items()}},
        {"buffers": {name: value + 1 for name, value in TASK.buffers.items()}},
        {"blueprint": replace(TASK.blueprint, remarks=("other",))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_covers_all_of_the_content(change: dict[str, Any]) -> None:
    assert bundle_of(replace(TASK, **change)).digest != bundle_of(TASK).digest
    assert bundle_of(replace(TASK)).digest == bundle_of(TASK).digest


def test_data_do_not_matter() -> None:
    other = replace(TASK, train=TASK.train.map(torch.zeros_like))
    assert bundle_of(other).digest == bundle_of(TASK).digest


def test_a_function_without_a_name_is_refused_with_what_to_do(tmp_path: Path) -> None:
    task = replace(TASK, loss=lambda output, target: output[:, 0], metrics={"own": own_loss})
    with pytest.raises(ConfigError) as caught:
        write_bundle(task, tmp_path / "bundle")
    (problem,) = caught.value.problems
    assert problem.path == "loss"
    assert "Define it at the top of a module" in problem.message
    assert "installed there" in problem.message
    assert not (tmp_path / "bundle").exists()


def test_code_of_other_packages_must_be_allowed_on_both_sides(tmp_path: Path) -> None:
    task, package = replace(TASK, metrics={"own": own_loss}), __name__.partition(".")[0]
    with pytest.raises(ConfigError, match="outside the allowed packages"):
        write_bundle(task, tmp_path / "bundle")
    write_bundle(task, tmp_path / "bundle", [package])
    with pytest.raises(ConfigError, match="outside the allowed packages"):
        read_bundle(tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle", [package]).functions.metrics["own"] is own_loss


@pytest.mark.parametrize("name", ["os:system", "anyfleet.experiment:load", "anyfleet.cli:main"])
def test_a_bundle_cannot_name_other_code(name: str, tmp_path: Path) -> None:
    write_bundle(TASK, tmp_path)
    file = tmp_path / "bundle.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "functions": {**said["functions"], "loss": name}}))
    with pytest.raises(ConfigError):
        read_bundle(tmp_path)


@pytest.mark.parametrize("name", ["bundle.json", "blueprint.msgpack", "tensors.safetensors"])
def test_damage_is_noticed(name: str, tmp_path: Path) -> None:
    write_bundle(TASK, tmp_path)
    file, content = tmp_path / name, (tmp_path / name).read_bytes()
    for spoilt in (b"", content[:-9], content[: len(content) // 2] + b"\x07" + content[-20:]):
        file.write_bytes(spoilt)
        with pytest.raises(StoreError, match="Copy the folder"):
            read_bundle(tmp_path)
    if name == "tensors.safetensors":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(StoreError, match="differs from what the server wrote"):
            read_bundle(tmp_path)
    file.unlink()
    with pytest.raises(StoreError, match="there is no"):
        read_bundle(tmp_path)


def test_another_format_and_links_are_refused(tmp_path: Path) -> None:
    write_bundle(TASK, tmp_path / "one")
    file = tmp_path / "one" / "bundle.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(StoreError, match="has format 99"):
        read_bundle(tmp_path / "one")
    elsewhere = tmp_path / "elsewhere.json"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link"):
        read_bundle(tmp_path / "one")
