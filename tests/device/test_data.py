"""The data of a device: every form that is allowed, and what is wrong is said before it joins."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from anyfleet.device.bundle import Bundle, bundle_of
from anyfleet.device.data import OwnData, own_data
from anyfleet.errors import AnyfleetError, BadName, MissingData
from anyfleet.tasks import Data
from tests.helpers import small


@cache
def bundle() -> Bundle:
    return bundle_of(small.task())


X, Y = (getattr(small.patterns(12, 4), name) for name in "xy")


def made(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnData:
    """Return the data that a factory makes in a module beside the working directory."""
    (tmp_path / "own_samples.py").write_text("made = None\ndef factory():\n    return made\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    module = importlib.import_module("own_samples")
    monkeypatch.setattr(module, "made", value)
    return own_data("own_samples:factory", bundle())


@pytest.mark.parametrize(
    ("value", "tested"),
    [
        ((X, Y), 0),
        ([X.numpy(), Y.numpy()], 0),
        (Data(X, Y), 0),
        (TensorDataset(X, Y), 0),
        ((Data(X, Y), TensorDataset(X[:5], Y[:5])), 5),
        (((X, Y), (X[:3], Y[:3])), 3),
    ],
    ids=["tensors", "arrays", "data", "set", "pair of sets", "pair of tensors"],
)
def test_a_factory_may_make_data_in_any_usual_form(
    value: Any, tested: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(value, tmp_path, monkeypatch)
    assert torch.equal(found.train.x, X)
    assert torch.equal(found.train.y, Y)
    assert len(found.test) == tested


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (7, "made a int; due is"),
        ((X, Y[:5]), "differ in length"),
        ((X[:0], Y[:0]), "no training samples"),
        ((X[:, :, :5], Y), r"The model fails on inputs of shape \[1, 5, 8\]"),
        ((X.double(), Y), "Inputs are torch.float64"),
        ((X, Y + 1), "targets run from"),
        ((X, Y - 1), "targets run from"),
        ((X, Y.float()), "classes are whole numbers"),
        ((X.clone().fill_(np.nan), Y), "12 of 12 training samples"),
        ((Data(X, Y), Data(X[..., :4], Y)), "Test samples have the shape"),
    ],
)
def test_what_does_not_fit_the_model_is_said(
    value: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AnyfleetError, match=match):
        made(value, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("nothing", "is not of the form"),
        ("no_such_module:factory", "there is no module"),
        ("json:factory", "has no function factory"),
        ("json:no way", "is not of the form"),
    ],
)
def test_a_source_that_is_none_is_said(source: str, match: str) -> None:
    with pytest.raises(BadName, match=match):
        own_data(source, bundle())


def test_an_error_of_the_owners_code_keeps_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_samples.py").write_text("def factory():\n    return {}['key']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyError, match="key"):
        own_data("broken_samples:factory", bundle())


def test_a_file_holds_arrays(tmp_path: Path) -> None:
    file, x, y = tmp_path / "samples.npz", X.numpy(), Y.numpy()
    np.savez(file, x=x, y=y)
    assert torch.equal(own_data(str(file), bundle()).train.x, X)
    np.savez(file, x=x, y=y, test_x=x[:4], test_y=y[:4])
    assert len(own_data(str(file), bundle()).test) == 4
    for arrays in ({"x": x}, {"y": y}, {"x": x, "y": y, "test_x": x}, {"a": x, "b": y}):
        np.savez(file, **arrays)
        with pytest.raises(MissingData, match="due are x and y"):
            own_data(str(file), bundle())
    np.savez(file, x=x, y=y[:3])
    with pytest.raises(MissingData, match="differ in length"):
        own_data(str(file), bundle())


def test_a_file_that_is_none_or_holds_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no such file"):
        own_data(str(tmp_path / "none.npz"), bundle())
    (tmp_path / "text.npz").write_text("x")
    with pytest.raises(MissingData, match="cannot be read"):
        own_data(str(tmp_path / "text.npz"), bundle())
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(MissingData, match="cannot be read"):
        own_data(str(tmp_path / "objects.npz"), bundle())


@pytest.mark.parametrize("source", ["there.is:none", "json:nothing"])
def test_a_name_that_is_not_there_is_said_without_a_traceback(source: str) -> None:
    with pytest.raises(BadName, match=r"there is no module|has no function") as caught:
        own_data(source, bundle())
    assert not getattr(caught.value, "__notes__", [])
