"""The comparison of two trees of the source by what recipes compute."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools import same

from anyfleet.experiment import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    same.write(out, [ROOT / "recipes" / "heterofl.toml"])
    return out


def changed(found: Path, folder: Path, name: str, change: float) -> list[Path]:
    """Return both folders, in the second of which one number is larger by a share of itself."""
    values = dict(np.load(found / "recipes_heterofl.npz"))
    value = values[name].copy()
    value.flat[np.abs(value).argmax()] *= 1 + change
    np.savez(folder / "recipes_heterofl", **dict[str, Any]({**values, name: value}))
    return [found, folder]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("2 params 0.weight", 0.0, 0),
        ("2 params 0.weight", 1e-12, 0),  # the order of sums may change
        ("2 params 0.weight", 1e-6, 1),
        ("2 ledger upload_seconds", 1e-12, 1),
        ("2 ledger loss", 1e-12, 0),  # it is computed from the parameters
        ("2 ledger loss", 1e-6, 1),
        ("2 record joules", 1e-12, 1),
    ],
)
def test_what_differs_is_told(
    found: Path, tmp_path: Path, name: str, change: float, told: int
) -> None:
    folders = changed(found, tmp_path, name, change)
    assert (
        len(same.differences(*(np.load(each / "recipes_heterofl.npz") for each in folders))) == told
    )
    assert same.main([*map(str, folders)]) == told


def test_every_round_is_written_with_its_failures(found: Path) -> None:
    values = np.load(found / "recipes_heterofl.npz")
    assert {name.split()[0] for name in values} == {"0", "1", "2"}
    assert values["0 ledger failure"].shape == values["0 ledger order"].shape


def test_folders_without_anything_are_not_the_same(tmp_path: Path) -> None:
    assert same.main([str(tmp_path), str(tmp_path)]) == 1


def test_a_recipe_of_one_folder_alone_is_told(found: Path, tmp_path: Path) -> None:
    assert same.main([str(found), str(tmp_path)]) == 1


def test_without_names_all_run_files_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = [str(each.relative_to("recipes")) for each in same.run_files()]
    assert "fedavg.toml" in names
    for file in same.run_files():
        load(file)  # an item is no run file, and is refused here
