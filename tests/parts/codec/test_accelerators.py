"""Codecs off the host: the same numbers, without waiting for what an accelerator computes.

There is no accelerator here, so tensors of the host are treated as if they were elsewhere, and
whatever would wait for them is counted.
"""

import math
import sys
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Compressed
from anyfleet.parts.codec import (
    ErrorFeedback,
    Fgc,
    Hq,
    Plain,
    Qsgd,
    Raw,
    Stc,
    TopK,
    Uveq,
    fgc,
    hq,
    ranking,
    uveq,
)
from anyfleet.parts.codec.kernels import Kernels
from tests.parts.codec.test_codecs import message_layout, names, normal, same

# Of these, what becomes of one tensor does not depend on the others of its message.

BY_TENSOR: list[Codec] = [
    Raw("fp16"),
    Plain(),
    TopK(0.1),
    TopK(0.3, Qsgd(4, 32)),
    TopK(0.5, TopK(0.5, Stc(0.5))),
    Stc(0.05),
    Qsgd(),
    Qsgd(2**20, None),
    ErrorFeedback(),
]
DIRECT = [*BY_TENSOR, Stc(0.05, "model")]
# Who is left in a search depends on what comes out of its tries: that is waited for. FedHQ's
# halvings are tried together, and UVeQFed's checks two by two.
MOST_WAITS: list[tuple[Codec, int]] = [
    (Hq(bucket=64), 1),
    (Uveq(), 3),
    (Uveq(3.0, 1), 3),
    (TopK(0.3, Uveq(3.0)), 3),
    (Fgc(), 12),
    (ErrorFeedback(Fgc()), 12),
]
SEARCHING = [codec for codec, _ in MOST_WAITS]
WAITING = ("_local_scalar_dense", "nonzero", "equal", "bincount", "masked_select", "unique")


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of calls that need numbers of an accelerator on the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        flags = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool
            for each in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        self.count += flags or name.startswith(WAITING)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Patches under which no tensor is on the host."""
    for name, module in list(sys.modules.items()):
        if name.startswith("anyfleet.parts.codec.") and hasattr(module, "on_host"):
            monkeypatch.setattr(module, "on_host", lambda _: False)
    return monkeypatch


def compressed(codec: Codec, rows: int, columns: int, rate: float, *, odd: bool) -> Compressed:
    around = message_layout(columns, torch.float32, rows)
    tree = normal(around)
    if odd:
        for at, value in enumerate(tree.values()):
            value[at % rows] = 0.5  # all are equal
            value[(at + 1) % rows] *= value[(at + 1) % rows] > 0
    rates = torch.full((rows,), rate, dtype=torch.float64)
    return codec.compress(around.flattened(tree), rates, around, {})


def check_same(one: Compressed, two: Compressed) -> None:
    for field in ("received", "kept", "state"):
        assert same(getattr(one, field), getattr(two, field))
    assert same(one.symbols.quantisation_levels, two.symbols.quantisation_levels)
    assert same(one.symbols.kept, two.symbols.kept)
    assert torch.equal(one.bits, two.bits)
    assert torch.equal(one.distortion, two.distortion)


CASES = [(1, math.nan, False), (4, 0.04, True)]


@pytest.mark.parametrize("codec", [*DIRECT, *SEARCHING], ids=names)
@pytest.mark.parametrize(("columns", "rate", "odd"), CASES)
def test_the_same_numbers_as_on_the_host(
    codec: Codec, columns: int, rate: float, request: pytest.FixtureRequest, *, odd: bool
) -> None:
    host = compressed(codec, 3, columns, rate, odd=odd)
    request.getfixturevalue("elsewhere")
    check_same(host, compressed(codec, 3, columns, rate, odd=odd))


@pytest.mark.parametrize("codec", [*DIRECT, Stc(0.6), *SEARCHING], ids=names)
def test_the_same_numbers_as_on_the_host_of_a_large_tensor(
    codec: Codec, request: pytest.FixtureRequest
) -> None:
    """Products of counts, of which some tens of thousands are kept here, need 64 bits."""
    sizes = {"weight": (600, 500), "bias": (600,)}
    tensors = {name: TensorLayout(size, (prod(size),)) for name, size in sizes.items()}
    key = torch.stack([rng.root(0, "one"), rng.root(0, "two")])
    layout = MessageLayout(tensors, torch.float32, key)
    rows = {
        name: torch.stack([rng.normal(rng.fold(each, name), prod(size)) for each in key]).float()
        for name, size in sizes.items()
    }
    rates = torch.full((2,), 0.1, dtype=torch.float64)
    host = codec.compress(rows, rates, layout, {})
    request.getfixturevalue("elsewhere")
    check_same(host, codec.compress(rows, rates, layout, {}))


def waits(codec: Codec, rows: int, rate: float = 0.05) -> int:
    around = message_layout(2, torch.float32, rows)
    flat = around.flattened(normal(around))
    rates = torch.full((rows,), rate, dtype=torch.float64)
    codec.compress(flat, rates, around, {})  # what is known ahead is found once
    counted = Waits()
    with counted:
        codec.compress(flat, rates, around, {})
    return counted.count


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("codec", DIRECT, ids=names)
def test_nothing_is_waited_for(codec: Codec) -> None:
    assert waits(codec, 3) == 0


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("codec", "most"), MOST_WAITS, ids=names)
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_a_search_waits_for_who_is_left_and_seldom(
    codec: Codec, most: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Tensor] = []

    def still_left(flags: Tensor) -> Tensor:
        looks.append(flags)
        return ranking.still_left(flags)

    for module in (fgc, hq, uveq):
        monkeypatch.setattr(module, "still_left", still_left)
    found = waits(codec, 9, rate)
    assert 1 <= found <= most
    # The same looks are made twice, and counted once.
    assert len(looks) == 2 * found


@pytest.mark.usefixtures("elsewhere")
def test_who_is_done_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    quantised = Kernels.quantised

    def seen(self: Kernels, count: Tensor, levels: Tensor) -> Symbols:
        tried.append(len(count))
        return quantised(self, count, levels)

    monkeypatch.setattr(Kernels, "quantised", seen)
    around = message_layout(2, torch.float32, 9)
    rates = torch.tensor([0.01, *[1.0] * 8], dtype=torch.float64)
    Fgc().compress(around.flattened(normal(around)), rates, around, {})
    assert tried[-1] == 1 < tried[0] == 9


@pytest.mark.parametrize("codec", BY_TENSOR, ids=names)
@pytest.mark.parametrize("place", ["host", "elsewhere"])
def test_tensors_together_become_what_each_becomes_alone(
    codec: Codec, place: str, request: pytest.FixtureRequest
) -> None:
    if place == "elsewhere":
        request.getfixturevalue("elsewhere")
    around = message_layout(2, torch.float32, 3)
    rows, asked = around.flattened(normal(around)), torch.full((3,), math.nan, dtype=torch.float64)
    together = codec.compress(rows, asked, around, {})
    for name in rows:
        mine = replace(around, tensors={name: around.tensors[name]})
        alone = codec.compress({name: rows[name]}, asked, mine, {})
        for field in ("received", "kept", "state"):
            assert same(getattr(alone, field), _only(name, getattr(together, field)))
        for field in ("numbers", "quantisation_levels", "kept", "scales"):
            assert same(
                getattr(alone.symbols, field), _only(name, getattr(together.symbols, field))
            )


def _only(name: str, tree: Params) -> Params:
    return {name: tree[name]} if name in tree else {}


def test_waiting_is_seen() -> None:
    """On the host codecs may look at what they have, and do."""
    assert waits(Qsgd(), 3) > 0
