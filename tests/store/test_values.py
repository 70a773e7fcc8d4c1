"""Values of a run as plain data and back: all of them, shared as before, and no code."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from anyfleet.core.messages import Kind, SubModelSize
from anyfleet.elastic import Slice
from anyfleet.names import Factory, FrozenMapping
from anyfleet.store import decode, encode
from anyfleet.store.serialisation import misfit
from anyfleet.store.tensor_blocks import ALIGNMENT
from anyfleet.world import World
from tests.helpers.values import Colour, Halved, Holder, Pair, through

PLAIN: list[Any] = [
    None,
    True,
    0,
    -(1 << 63),
    (1 << 63) - 1,
    1 << 64,
    -(10**30),
    0.1,
    -0.0,
    5e-324,
    1e22,
    2.0,
    math.inf,
    -math.inf,
    "",
    'text "with" ü and \n',
    b"",
    b"\x00\xff",
    (),
    (1, (2, ("three",))),
    [],
    [1, [2.0]],
    {},
    {"a": 1, "ref": {"id": 2}, "id": 3},
    {1: "one", (2, 3): "two and three", Kind.TRAIN: None},
    {1, 2},
    frozenset({"a"}),
    Kind.FETCH,
    Colour.BLUE,
    Pair(1, Pair((), [])),
    Holder.Inner(5),
    Slice((("a", (0, 2)),), 1),
    SubModelSize(0.5, axis_widths=(("x", 0.25),)),
    Factory.of(Pair, left=(1, 2)),
    FrozenMapping({"a": (1,)}),
    torch.bfloat16,
    Colour,
    through,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value).partition(" at 0x")[0])
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = through(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)  # also the sign of zero, and what is float and what is not


def test_a_number_that_is_none_comes_back_as_such() -> None:
    assert math.isnan(through(math.nan))
    back = through(MappingProxyType({"a": math.nan}))
    assert type(back) is MappingProxyType
    assert math.isnan(back["a"])


NUMBERS = [np.bool, np.int8, np.uint16, np.int64, np.uint64, np.float16, np.float32, np.float64]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5), (2, 0, 3)])
def test_arrays_and_their_scalars_keep_type_and_shape(kind: Any, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) * 1.7).reshape(shape).astype(kind)
    back = through(array)
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    scalar = kind(1)
    assert type(through(scalar)) is type(scalar)
    assert through(scalar) == scalar


def test_odd_arrays_keep_their_numbers() -> None:
    base = np.arange(60.0).reshape(6, 10)
    base[0, 0] = np.nan
    odd = [base[::-1], base[:, ::3], np.asfortranarray(base), base.astype(">f8"), base[2:3, :4]]
    fixed = base.copy()
    fixed.flags.writeable = False
    for array in [*odd, fixed]:
        np.testing.assert_array_equal(through(array), array)
    assert through(np.asfortranarray(base)).flags.f_contiguous
    assert math.isinf(through(np.float32(np.inf)))


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (5, 7)])
def test_tensors_keep_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) * 1.7).reshape(shape).to(dtype)
    back = through(tensor)
    assert (back.dtype, back.shape, back.stride()) == (dtype, tensor.shape, tensor.stride())
    assert torch.equal(back, tensor)


def test_tensors_share_memory_as_before_and_lie_in_it_alike() -> None:
    base = torch.randn(20, 30)
    views = {
        "rows": base[3:9],
        "corner": base[:12, 5:25],
        "turned": base.t(),
        "one": base[7],
        "spread": base[0].expand(4, 30),
        "last": torch.randn(1, 9, 1, 1).to(memory_format=torch.channels_last),
    }
    back = through(views)
    for name, value in views.items():
        assert torch.equal(back[name], value), name
        assert back[name].stride() == value.stride(), name
        assert (back[name].data_ptr() - value.data_ptr()) % ALIGNMENT == 0, name
    back["turned"][4, 7] = 1e6  # only to see who else sees it
    assert back["rows"][4, 4] == back["one"][4] == back["turned"][4, 7] == 1e6


def test_only_memory_that_somebody_sees_is_written() -> None:
    data = torch.randn(100_000)
    document = encode([data[:20], data[-20:], data[10:30]], {})
    assert sum(block.numel() for block in document.blocks.values()) < 100


def test_what_is_shared_is_written_once_and_shared_again() -> None:
    tree = {"w": torch.randn(1000)}
    held = Holder((tree, Pair(1)))
    values = [held, {"again": held, "tree": tree}, held.value[1], tree["w"]]
    document = encode(values, {})
    assert [block.numel() for block in document.blocks.values()] == [1000]
    back = through(values)
    assert back[1]["again"] is back[0]
    assert back[1]["tree"] is back[0].value[0]
    assert back[2] is back[0].value[1]
    assert back[3] is back[1]["tree"]["w"]


def test_two_paths_of_the_same_text_are_two_tensors() -> None:
    back = through({"a.b": torch.zeros(10), "a": {"b": torch.ones(10)}})
    assert (float(back["a.b"].sum()), float(back["a"]["b"].sum())) == (0.0, 10.0)


def test_a_dataclass_has_what_it_had_whatever_its_construction_does() -> None:
    assert through(Halved(1.0)).number == 0.5
    holder = Holder(1)
    object.__setattr__(holder, "extra", 7)
    assert through(holder).extra == 7


def test_tensors_from_elsewhere_are_put_onto_the_device_of_the_task() -> None:
    document = encode({"a": torch.zeros(4, 5), "small": torch.zeros(2), "here": torch.ones(9)}, {})
    for name in ("a", "small"):
        document.root["dict"][name]["device"] = "cuda:0"
    back = decode(document, {}, device="meta")
    assert [back[name].device.type for name in back] == ["meta", "meta", "cpu"]
    assert back["a"].shape == (4, 5)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers(), inner)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=20,
    )
)
def test_any_nest_of_plain_values_comes_back(value: Any) -> None:
    assert repr(through(value)) == repr(value)


def test_the_surroundings_of_a_run_are_named_and_put_back() -> None:
    world = World.__new__(World)  # never looked into
    document = encode({"here": Holder(world)}, {"world": World})
    assert document.root["dict"]["here"]["fields"]["value"] == {"known": "world"}
    assert through({"here": Holder(world)}, world=world)["here"].value is world


# --- types --------------------------------------------------------------------------------------


@dataclass
class Columns:
    """Its types are spelled as numpy spells them on newer Pythons: by the statement `type`."""

    plain: "Column"
    several: "tuple[Column, ...]"
    queue: list[tuple[float, int]]


Column = TypeAliasType("Column", np.ndarray[Any, np.dtype[np.float64]])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("plain", np.zeros(1), [1.0]),
        ("several", (np.zeros(1),), ([1.0],)),
        ("queue", [(0.5, 1)], [(0.5, "x")]),
        ("queue", [], [0.5]),
    ],
)
def test_aliases_and_lists_are_looked_into(name: str, good: Any, bad: Any) -> None:
    assert misfit(Columns, {name: good}) == ""
    assert name in misfit(Columns, {name: bad})
