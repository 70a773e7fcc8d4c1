"""Values that no document can hold, and documents that name what they must not."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anyfleet.errors import StoreError
from anyfleet.store import Document, decode, encode
from tests.helpers import values
from tests.helpers.values import HERE, Holder


def selfish() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"states": {"select": {"history": {object()}}}}, "states.select.history.0: a `object`"),
        ({"a": (1, deque([2]))}, "a.1: a `deque`"),
        ({"a": nn.Parameter(torch.zeros(3))}, "a: a `Parameter`"),
        ({"a": torch.zeros(9, requires_grad=True)}, "a: a tensor that requires grad"),
        ({"a": torch.eye(3).to_sparse()}, "a: a tensor of torch.float32 and torch.sparse"),
        ({"a": torch.zeros(3, dtype=torch.complex64)}, "a: a tensor of torch.complex64"),
        ({"a": np.array([object()])}, "a: an array of object"),
        ({"a": np.array(["text"])}, "a: an array of <U4"),
        ({"a": lambda: 0}, "a: `.*<lambda>`, which is made inside a function"),
        ({"a": selfish()}, "a.0 contains itself"),
    ],
    ids=lambda each: each if isinstance(each, str) else "value",
)
def test_other_values_are_refused_with_their_place(value: Any, told: str) -> None:
    with pytest.raises(StoreError, match=told) as caught:
        encode(value, {})
    if "itself" not in told:
        assert "A state may hold None, bool" in str(caught.value)


def amended(value: Any, change: Callable[[Any], Any]) -> Document:
    document = encode(value, {})
    return replace(document, root=change(document.root))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: root | {"part": "os:system"}, "outside the allowed packages"),
        (lambda root: root | {"part": f"{HERE}x.y:Z"}, "outside the allowed packages"),
        (lambda root: root | {"part": "anyfleet.core.messages:np"}, "not defined in that module"),
        (lambda root: root | {"part": "anyfleet.world.table:Path"}, "not defined in that module"),
        (
            lambda root: root | {"part": "anyfleet.core.messages:Nothing"},
            "made with anyfleet.core.messages:Nothing, which does not",
        ),
        (
            lambda root: root | {"part": "anyfleet.core.messages:SubModelSize"},
            "the code has changed",
        ),
        (lambda root: root | {"part": f"{values.__name__}:through"}, "the code has changed"),
        (lambda root: root | {"fields": {"value": 1}}, "had the fields value"),
        (lambda _: {"named": f"{values.__name__}:Holder", "entries": []}, "was a NamedTuple"),
        (lambda _: {"enum": f"{values.__name__}:Pair", "name": "RED"}, "was an Enum"),
        (lambda _: {"scalar": "object", "value": 1}, "no numbers of type"),
        (lambda _: {"dtype": "nn"}, "this torch has no nn"),
        (lambda _: {"ref": 1}, "cannot be read"),
        (lambda _: {"known": "task"}, "cannot be read"),
        (lambda _: {"something": 1}, "cannot be read"),
        (lambda _: {"tensor": "float32", "shape": [9], "block": "none"}, "cannot be read"),
    ],
)
def test_a_document_can_name_no_other_code(change: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(StoreError, match=told):
        decode(amended(Holder(1), change), {}, allow=[HERE])


def test_own_classes_need_their_package() -> None:
    with pytest.raises(StoreError, match=f"--allow {HERE}"):
        decode(encode(Holder(1), {}), {})
