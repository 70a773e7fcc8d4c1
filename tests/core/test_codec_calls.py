"""Large stacks pass through a codec in parts; nobody sees where they were divided."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from anyfleet.core import codec_calls
from anyfleet.core.codec_calls import compress
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.return_checks import Caller
from anyfleet.core.slots import Codec, Compressed
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Nothing, Plain, Raw, Stc, TopK, Uveq

ROWS = 7
CODECS = [Raw("fp16"), Nothing(), TopK(0.1), ErrorFeedback(), Hq(bucket=8), Uveq(), Fgc()]


def stack() -> tuple[dict[str, Tensor], MessageLayout, Tensor]:
    """Return updates, their layout, and sent fractions of which some are not asked for."""
    drawn = torch.Generator().manual_seed(4)
    shapes = {"conv": (4, 3, 3, 3), "linear": (10, 12), "bias": (10,)}
    tree = {n: torch.randn(ROWS, *shape, generator=drawn) for n, shape in shapes.items()}
    fractions = torch.tensor([math.nan, 0.01, 0.5, 0.2, 1.0, math.nan, 0.05], dtype=torch.float64)
    return tree, MessageLayout.of(tree), fractions


def check_same(one: Params, two: Params) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("at_once", [1, 600])
def test_a_stack_in_parts_is_the_stack(
    codec: Codec, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, layout, fractions = stack()
    state = {name: 0.1 * each for name, each in tree.items()} if codec.state_name else {}
    caller = Caller("uplink", codec, 0)
    whole = compress(tree, state, fractions, layout, caller)
    monkeypatch.setattr(codec_calls, "_AT_ONCE", at_once)
    parts = compress(tree, state, fractions, layout, caller)
    check_same(whole.received, parts.received)
    check_same(whole.kept, parts.kept)
    check_same(whole.state, parts.state)
    for row in range(ROWS):
        mine = layout.key[row : row + 1]
        packed = [
            codec.pack(each.symbols.row(row), replace(layout, key=mine)) for each in (whole, parts)
        ]
        assert packed[0] == packed[1]
    assert torch.equal(whole.bits, parts.bits)
    assert torch.equal(whole.distortion, parts.distortion)


@dataclass(frozen=True)
class Sometimes(Plain):
    """Leaves entries out where the first one of a stack is negative."""

    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
    ) -> Compressed:
        whole = rows["linear"][0, 0] > 0
        codec = Plain() if whole else Stc(0.5)
        return replace(codec.compress(rows, sent_fraction, layout, state), symbols=Symbols())


def test_what_one_part_does_not_name_was_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, layout, fractions = stack()
    whole = torch.arange(ROWS) % 3 == 1
    tree["linear"][:, 0, 0] = torch.where(whole, 1.0, -1.0)
    monkeypatch.setattr(codec_calls, "_AT_ONCE", 1)
    found = compress(tree, {}, fractions, layout, Caller("uplink", Sometimes(), 0))
    assert found.kept["linear"].flatten(1).all(dim=1).tolist() == whole.tolist()
