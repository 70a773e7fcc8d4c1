"""All codecs × the properties that all of them share. A new codec is one row."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout, tensor_layouts
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Compressed
from anyfleet.elastic import Slice
from anyfleet.parts.codec import (
    ErrorFeedback,
    Fgc,
    Hq,
    Nothing,
    Plain,
    Qsgd,
    Quantiser,
    Raw,
    Stc,
    TopK,
    Uveq,
)
from anyfleet.parts.codec.bitstream import SLACK_BITS, SLACK_SHARE
from anyfleet.wire.frames import framed, read
from tests.helpers import small


@dataclass(frozen=True)
class OneBit(Quantiser):
    """The sign of every entry times the mean magnitude of its tensor, as docs/codecs.md has it."""

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        return Symbols(
            quantisation_levels={name: torch.where(x < 0, -1, 1) for name, x in rows.items()},
            scales={n: x.abs().double().mean(dim=1, keepdim=True) for n, x in rows.items()},
        )

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        signs = symbols.quantisation_levels
        return {name: x * symbols.scale(name) for name, x in signs.items()}


CODECS: list[Codec] = [
    Raw(),
    OneBit(),
    ErrorFeedback(OneBit()),
    TopK(0.3, OneBit()),
    Raw("fp16"),
    Nothing(),
    Plain(),
    TopK(0.1),
    TopK(0.3, Qsgd(4, 32)),
    TopK(0.3, Uveq(3.0)),
    TopK(0.5, TopK(0.5, Stc(0.5))),
    Stc(0.05),
    Stc(0.05, "model"),
    Qsgd(),
    Qsgd(3, None),
    Uveq(),
    Uveq(3.0, 1),
    Hq(bucket=64),
    Fgc(),
    ErrorFeedback(),
    ErrorFeedback(Fgc()),
    ErrorFeedback(Uveq()),
]
BLUEPRINT = small.task().blueprint
NAMES = tuple(BLUEPRINT.params)
ROWS = 3


def names(codec: Codec) -> str:
    return repr(codec)


every = pytest.mark.parametrize("codec", CODECS, ids=names)


def message_layout(
    columns: int = 1, dtype: torch.dtype = torch.float32, rows: int = ROWS
) -> MessageLayout:
    """Of whole models in so many columns."""
    keys = rng.fold(rng.root(5, "codecs"), torch.arange(rows))
    return MessageLayout(
        tensor_layouts(NAMES, Slice(), (columns, 1 / columns), BLUEPRINT), dtype, keys
    )


def bare(sizes: dict[str, int], dtype: torch.dtype = torch.float32, rows: int = 1) -> MessageLayout:
    """Of plain vectors."""
    keys = rng.fold(rng.root(6, "vectors"), torch.arange(rows))
    return MessageLayout({name: TensorLayout((n,), (n,)) for name, n in sizes.items()}, dtype, keys)


def normal(around: MessageLayout, seed: int = 0) -> dict[str, Tensor]:
    """Updates whose tensors have different sizes of entries."""
    found = {}
    for at, (name, tensor_layout) in enumerate(around.tensors.items()):
        key = rng.fold(rng.fold(rng.root(seed, name), "update"), torch.arange(len(around.key)))
        rows = rng.normal(key, tensor_layout.entries, around.dtype) * 2.0**-at
        found[name] = rows.reshape(len(around.key), *tensor_layout.shape)
    return found


def squeezed(
    codec: Codec, tree: Params, around: MessageLayout, rate: float = math.nan
) -> Compressed:
    rates = torch.full((len(around.key),), rate, dtype=torch.float64)
    return codec.compress(around.flattened(tree), rates, around, {})


def row_of(around: MessageLayout, row: int) -> MessageLayout:
    return replace(around, key=around.key[row : row + 1])


def same(one: Params, two: Params) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def check_message(codec: Codec, sent: Compressed, around: MessageLayout) -> None:
    """Every row, through bytes and frames and back: bit for bit, and as long as was said."""
    for row in range(len(around.key)):
        one = row_of(around, row)
        packed = codec.pack(sent.symbols.row(row), one)
        arrived = read(framed(packed), around.columns).bodies
        tree, kept = codec.restore(codec.unpack(arrived, one), one)
        assert same(tree, {name: rows[row : row + 1] for name, rows in sent.received.items()})
        assert same(kept, {name: rows[row : row + 1] for name, rows in sent.kept.items()})
        bits = sent.bits[row]
        spare = bits[: len(packed)] - 8 * torch.tensor([len(column) for column in packed])
        assert (spare >= 0).all()
        assert (spare <= SLACK_BITS + SLACK_SHARE * bits[: len(packed)]).all()


@every
@pytest.mark.parametrize(("columns", "dtype"), [(1, torch.float64), (4, torch.float32)], ids=str)
def test_what_arrives_is_what_was_said(codec: Codec, columns: int, dtype: torch.dtype) -> None:
    around = message_layout(columns, dtype)
    for rate in (math.nan, 0.04):
        tree = normal(around)
        sent = squeezed(codec, tree, around, rate)
        check_message(codec, sent, around)
        assert sent.bits.shape == (ROWS, columns)
        assert sent.distortion.shape == (ROWS,)
        for name, kept in sent.kept.items():
            assert sent.received[name].dtype == dtype
            assert ((kept == 0) | (kept == 1)).all()
            assert not sent.received[name][kept == 0].any()
        if codec.drops:
            assert any((kept == 0).any() for kept in sent.kept.values()) or codec.state_name


@every
def test_a_cut_message_is_its_leading_columns(codec: Codec) -> None:
    around = message_layout(4)
    sent = squeezed(codec, normal(around), around)
    one = row_of(around, 1)
    symbols = sent.symbols.row(1)
    packed = codec.pack(symbols, one)
    stream = framed(packed)
    ends = [len(framed(packed[:there])) for there in range(len(packed) + 1)]
    for there, end in enumerate(ends[:-1]):
        for cut in (end, end + 5):
            arrived = read(stream[:cut], 4).bodies
            assert arrived == packed[:there]
        back, kept = codec.restore(codec.unpack(arrived, one), one)
        tree, flags = codec.restore(symbols.leading(there), one)
        assert same(back, tree)
        assert same(kept, flags)
        for name, tensor_layout in around.tensors.items():
            whole = sent.received[name][1]
            came = back[name][0]
            assert torch.equal(
                came[: tensor_layout.begins(there)], whole[: tensor_layout.begins(there)]
            )
            assert not came[tensor_layout.begins(there) :].any()


@every
@pytest.mark.parametrize(("rate", "dtype"), [(math.nan, torch.float32), (0.04, torch.float64)])
def test_a_stack_is_its_rows(codec: Codec, rate: float, dtype: torch.dtype) -> None:
    around = message_layout(2, dtype)
    tree = normal(around)
    # Devices that send little, and much, are in one stack.
    tree = {n: torch.cat([each[:1], each[1:2].round(), 1e3 * each[2:]]) for n, each in tree.items()}
    together = squeezed(codec, tree, around, rate)
    for row in range(ROWS):
        own = {name: rows[row : row + 1] for name, rows in tree.items()}
        alone = squeezed(codec, own, row_of(around, row), rate)
        mine = together.symbols.row(row)
        assert same(alone.symbols.quantisation_levels, mine.quantisation_levels)
        assert same(alone.symbols.numbers, mine.numbers)
        assert same(alone.symbols.kept, mine.kept)
        assert same(
            alone.received, {name: rows[row : row + 1] for name, rows in together.received.items()}
        )
        assert same(alone.symbols.scales, trimmed(mine.scales, alone.symbols.scales))
        assert same(alone.kept, {name: rows[row : row + 1] for name, rows in together.kept.items()})
        assert torch.equal(alone.bits[0], together.bits[row])
        assert torch.equal(alone.distortion[0], together.distortion[row])


def trimmed(scales: Params, like: Params) -> Params:
    """As many scales as in a stack of one: others may have more."""
    assert all(not each[:, like[name].shape[1] :].any() for name, each in scales.items())
    return {name: each[:, : like[name].shape[1]] for name, each in scales.items()}


def filled(around: MessageLayout, value: Callable[[int], Tensor]) -> dict[str, Tensor]:
    rows = len(around.key)
    return {
        name: value(tensor_layout.entries)
        .to(around.dtype)
        .expand(rows, -1)
        .reshape(rows, *tensor_layout.shape)
        for name, tensor_layout in around.tensors.items()
    }


def one_survivor(count: int) -> Tensor:
    return torch.arange(count).eq(count // 2).double() * -0.3


def alternating(count: int) -> Tensor:
    return 0.5 - torch.arange(count) % 2


CORNERS: dict[str, Callable[[int], Tensor]] = {
    "zeros": torch.zeros,
    "one survivor": one_survivor,
    "equal magnitudes": alternating,
    "huge": lambda n: 1e30 * alternating(n).double() * (1 + torch.arange(n)),
    "small": lambda n: 1e-30 * alternating(n).double() * (1 + torch.arange(n)),
    "hardly a number": lambda n: 1e-42 * alternating(n).double(),
    "too large to square": lambda n: 1e36 * alternating(n).double(),
}
VECTORS = {"tensor": 700, "none": 0, "single": 1, "tiny": 3}


@every
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(codec: Codec, corner: str) -> None:
    # Single numbers overflow first, in scales too.
    for rate, dtype in ((math.nan, torch.float32), (0.05, torch.float64)):
        around = bare(VECTORS, dtype)
        tree = filled(around, CORNERS[corner])
        sent = squeezed(codec, tree, around, rate)
        check_message(codec, sent, around)
        assert all(value.isfinite().all() for value in sent.received.values())
        assert (sent.distortion >= 0).all()
        assert sent.distortion.isfinite().all()
        if corner == "zeros":
            assert not any(value.any() for value in sent.received.values())
            assert codec == Nothing() or not sent.distortion.any()


@every
def test_nothing_to_send(codec: Codec) -> None:
    for sizes in ({}, {"none": 0}):
        around = bare(sizes)
        sent = squeezed(codec, normal(around), around, 0.05)
        check_message(codec, sent, around)
        assert sent.received.keys() == (set() if codec == Nothing() else sizes.keys())


@every
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_hidden(codec: Codec, odd: float) -> None:
    around = bare({"tensor": 700})
    tree = normal(around)
    tree["tensor"][0, 3] = odd
    sent = squeezed(codec, tree, around)
    found = codec.restore(codec.unpack(codec.pack(sent.symbols, around), around), around)[0]
    assert codec == Nothing() or not found["tensor"].isfinite().all()


UNBIASED = [
    Qsgd(2),
    Qsgd(1, 5),
    Qsgd(16, None),
    Uveq(0.8),
    Uveq(3.0),
    Uveq(2.0, 1),
    Hq((2,), keep=1.0),
]


@pytest.mark.parametrize("codec", UNBIASED, ids=names)
def test_unbiased_over_the_shared_randomness(codec: Codec) -> None:
    # A few entries again and again, each time with other draws.
    rows, size, times = 4, 20, 500
    around = bare({"v": size * times}, torch.float64, rows)
    update = normal(bare({"v": size}, torch.float64))["v"].repeat(rows, times)
    sent = squeezed(codec, {"v": update}, around)
    error = (sent.received["v"] - update).reshape(rows * times, size)
    spread = error.std(dim=0)
    assert (spread > 0).all()
    # Five standard errors of a mean: one of a million such numbers is further off.
    assert (error.mean(dim=0).abs() <= 5 * spread / math.sqrt(rows * times)).all()


@every
def test_the_same_again_and_other_with_another_key(codec: Codec) -> None:
    around = message_layout()
    tree = normal(around)
    one, two = (squeezed(codec, tree, around) for _ in range(2))
    assert same(one.received, two.received)
    other = squeezed(codec, tree, replace(around, key=around.key + 1))
    random = any(word in repr(codec) for word in ("Qsgd", "Uveq", "Hq", "Fgc"))
    assert same(one.received, other.received) != random


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TopK(0.0), r"TopK\.keep"),
        (lambda: TopK(0.1, ErrorFeedback()), r"TopK\.then.*ErrorFeedback\(TopK"),  # type: ignore[arg-type]
        (lambda: TopK(0.1, Fgc()), r"TopK\.then.*kernels"),
        (lambda: Stc(1.5), r"Stc\.keep"),
        (lambda: Stc(0.1, "layer"), r"Stc\.scope"),  # type: ignore[arg-type]
        (lambda: Qsgd(0, 0), r"Qsgd\.quantisation_levels.*\n.*Qsgd\.bucket"),
        (lambda: Uveq(0.0, 3), r"Uveq\.bits_each.*\n.*Uveq\.dimension"),  # type: ignore[arg-type]
        (lambda: Hq((4, 2)), r"Hq\.quantisation_levels"),
        (lambda: Hq(bucket=0), r"Hq\.bucket"),
        (lambda: Hq(keep=0.0), r"Hq\.keep"),
        (lambda: ErrorFeedback(ErrorFeedback()), r"ErrorFeedback\.inner"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Codec], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_a_codec_is_tried_in_three_lines() -> None:
    tree = {"w": torch.tensor([[[1.0, -3.0], [2.0, -2.0]]]), "b": torch.tensor([[0.5]])}
    layout = MessageLayout.of(tree)
    found = OneBit().compress(layout.flattened(tree), torch.tensor([math.nan]), layout, {})
    assert layout.unflattened(found.received)["w"].tolist() == [[[2.0, -2.0], [2.0, -2.0]]]
    assert found.received["b"].tolist() == [[0.5]]
    assert float(found.distortion[0]) == pytest.approx(2 / 18.25)
    again = MessageLayout.of(tree, seed=0)
    assert torch.equal(again.key, layout.key)
    assert not torch.equal(MessageLayout.of(tree, seed=1).key, layout.key)


def test_a_codec_of_ones_own_survives_any_number_of_scales() -> None:
    """Who forges a message may leave scales out, or send more than there should be."""
    layout = MessageLayout.of({"w": torch.ones(1, 40)})
    symbols = OneBit().compress({"w": torch.ones(1, 40)}, torch.ones(1), layout, {}).symbols
    for scales, meant in (({}, 0.0), ({"w": torch.tensor([[3.0, 4.0]])}, 3.0)):
        forged = replace(symbols, scales=scales)
        back, _ = OneBit().restore(OneBit().unpack(OneBit().pack(forged, layout), layout), layout)
        assert back["w"].tolist() == [[meant] * 40]


def test_levels_and_scales_of_any_type_travel_as_they_are_meant() -> None:
    """An author need not know the types of the bitstream: they are made to fit, on both ends."""
    layout = MessageLayout.of({"w": torch.ones(1, 3, dtype=torch.float64)})

    class Floats(OneBit):
        def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
            third = torch.full((1, 1), 1 / 3, dtype=torch.float64)
            return Symbols(quantisation_levels={"w": 2.0 * rows["w"]}, scales={"w": third})

    rows = {"w": torch.tensor([[1.0, -1.0, torch.nan]], dtype=torch.float64)}
    found = Floats().compress(rows, torch.ones(1), layout, {})
    assert found.symbols.quantisation_levels["w"].tolist() == [[2, -2, 0]]
    assert found.symbols.scales["w"].dtype == torch.float32
    check_message(Floats(), found, layout)
