"""Codecs off the host: the same numbers, without waiting for what an accelerator computes.

There is no accelerator here, so tensors of the host are treated as if they were elsewhere, and
whatever would wait for them is counted.
"""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    bitstream,
    entropy_tables,
    kernels,
    ranking,
    topk,
    uveq,
)
from tests.parts.codec.test_codecs import message_layout, names, normal, same

DIRECT: list[Codec] = [
    Raw("fp16"),
    Plain(),
    TopK(0.1),
    TopK(0.3, Qsgd(4, 32)),
    TopK(0.5, TopK(0.5, Stc(0.5))),
    Stc(0.05),
    Stc(0.05, "model"),
    Qsgd(),
    Qsgd(2**20, None),
    ErrorFeedback(),
]
# The tries of a search depend on what comes out of them: each is waited for once.
SEARCHING: list[tuple[Codec, int]] = [
    (Hq(bucket=64), 9),
    (Uveq(), 8),
    (Uveq(3.0, 1), 8),
    (TopK(0.3, Uveq(3.0)), 8),
    (Fgc(), 30),
    (ErrorFeedback(Fgc()), 30),
]
WAITING = ("_local_scalar_dense", "nonzero", "equal", "bincount", "masked_select", "unique")


class Waits(TorchDispatchMode):
    """The number of calls that need numbers of an accelerator on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        flags = name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        self.count += flags or name.startswith(WAITING)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Patches under which no tensor is on the host."""
    for module in (ranking, entropy_tables, bitstream, kernels, topk, uveq):
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


@pytest.mark.parametrize("codec", [*DIRECT, *(codec for codec, _ in SEARCHING)], ids=names)
@pytest.mark.parametrize(("columns", "rate", "odd"), CASES)
def test_the_same_numbers_as_on_the_host(
    codec: Codec, columns: int, rate: float, request: pytest.FixtureRequest, *, odd: bool
) -> None:
    host = compressed(codec, 3, columns, rate, odd=odd)
    request.getfixturevalue("elsewhere")
    check_same(host, compressed(codec, 3, columns, rate, odd=odd))


def waits(codec: Codec, rows: int) -> int:
    around = message_layout(2, torch.float32, rows)
    flat = around.flattened(normal(around))
    rates = torch.full((rows,), 0.05, dtype=torch.float64)
    codec.compress(flat, rates, around, {})  # what is known ahead is found once
    with Waits() as counted:
        codec.compress(flat, rates, around, {})
    return counted.count


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("codec", DIRECT, ids=names)
def test_nothing_is_waited_for(codec: Codec) -> None:
    assert waits(codec, 3) == 0


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("codec", "tries"), SEARCHING, ids=repr)
def test_a_search_waits_once_a_try(codec: Codec, tries: int) -> None:
    assert 1 <= waits(codec, 9) <= tries


def test_waiting_is_seen() -> None:
    """On the host codecs may look at what they have, and do."""
    assert waits(Qsgd(), 3) > 0
