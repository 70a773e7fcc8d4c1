"""Levels, flags, scales and numbers as bytes: all of them, column by column, and how long."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.errors import BadMessage
from anyfleet.parts.codec.bitstream import (
    SLACK_BITS,
    SLACK_SHARE,
    Column,
    SymbolFormat,
    pack,
    packed_bits,
    unpack,
)
from anyfleet.parts.codec.entropy_tables import (
    MOST_SYMBOLS,
    Bins,
    Choice,
    choose,
    from_gaps,
    gap_share,
    gaps,
    to_gaps,
)

SHAPES = {"conv": (20, 6, 3, 3), "matrix": (30, 17), "bias": (7,), "empty": (0, 4)}
LAYOUTS = {
    "entries": SymbolFormat(),
    "kernels": SymbolFormat(kernels=True),
    "both sides": SymbolFormat(signs="within"),
    "buckets": SymbolFormat(bucket=32),
    "numbers": SymbolFormat(numbers=True),
    "all of it": SymbolFormat(signs="within", kernels=True, bucket=8),
}


def message_layout(columns: int, dtype: torch.dtype = torch.float32) -> MessageLayout:
    """Lanes whose columns end somewhere, always between units."""
    layouts = {}
    for name, shape in SHAPES.items():
        unit, count = math.prod(shape[2:]), math.prod(shape[:2])
        ends = tuple(unit * (count * (column + 1) // columns) for column in range(columns))
        layouts[name] = TensorLayout(shape, ends)
    return MessageLayout(layouts, dtype, torch.zeros(2, dtype=torch.int64))


def symbols(
    layout: SymbolFormat, around: MessageLayout, *, keep: float, size: float, rows: int = 2
) -> Symbols:
    """Something of everything that a layout can carry."""
    key = rng.root(int(1000 * keep) + int(size), "symbols")
    values, kept, scales = {}, {}, {}
    for at, (name, tensor_layout) in enumerate(around.tensors.items()):
        own, wide = rng.fold(rng.fold(key, at), torch.arange(rows)), layout.unit(tensor_layout)
        drawn = rng.normal(own, tensor_layout.entries)
        flags = rng.uniform(rng.fold(own, "flags"), tensor_layout.entries // wide) < keep
        if keep < 1:
            kept[name] = flags
            drawn = drawn * flags.repeat_interleave(wide, dim=1)
        values[name] = drawn
        count = 2 if layout.bucket is None else -(-tensor_layout.entries // layout.bucket)
        scales[name] = rng.normal(rng.fold(own, "scales"), count, torch.float32)
    if layout.numbers:
        numbers = {name: each.to(around.dtype) for name, each in values.items()}
        return Symbols(numbers=numbers, kept=kept)
    levels = {name: (size * each).round().to(torch.int32) for name, each in values.items()}
    return Symbols(quantisation_levels=levels, kept=kept, scales=scales)


def equal(one: Params, two: Params) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("keep", [1.0, 0.9, 0.1, 0.0])
@pytest.mark.parametrize("columns", [1, 4])
def test_what_is_packed_is_unpacked(layout: SymbolFormat, keep: float, columns: int) -> None:
    around = message_layout(columns)
    for size in (0.4, 3.0, 1e4, 1e8):
        stack = symbols(layout, around, keep=keep, size=size)
        bits = packed_bits(stack, around, layout)
        for row in range(2):
            one = stack.row(row)
            packed = pack(one, around, layout)
            back = unpack(packed, around, layout)
            assert equal(one.quantisation_levels, back.quantisation_levels)
            assert equal(one.numbers, back.numbers)
            assert equal(one.kept, back.kept)
            for name, sent in back.scales.items():
                assert torch.equal(one.scales[name][:, : sent.shape[1]], sent)
            # As long as was said, and as alone.
            assert torch.equal(packed_bits(one, around, layout)[0], bits[row])
            spare = bits[row] - 8 * torch.tensor([len(column) for column in packed])
            assert (spare >= 0).all()
            assert (spare <= SLACK_BITS + SLACK_SHARE * bits[row]).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_leading_columns_are_what_they_were(layout: SymbolFormat) -> None:
    around = message_layout(5)
    one = symbols(layout, around, keep=0.3, size=3.0).row(0)
    packed = pack(one, around, layout)
    for there in range(6):
        assert pack(one.leading(there), around, layout) == packed[:there]
        back = unpack(packed[:there], around, layout)
        assert back.columns == (there if there < 5 else None)
        for name, tensor_layout in around.tensors.items():
            end = tensor_layout.begins(there)
            tree, mine = (
                (back.numbers, one.numbers)
                if layout.numbers
                else (back.quantisation_levels, one.quantisation_levels)
            )
            assert torch.equal(tree[name][:, :end], mine[name][:, :end])
            assert not tree[name][:, end:].any()


@pytest.mark.parametrize("tensors", [1, 15, 16, 300])
@pytest.mark.parametrize("scales", [0, 127, 128, 255, 256, 65_535, 65_536])
def test_a_header_is_as_long_as_was_said(tensors: int, scales: int) -> None:
    """Without words, which end in two words at most, bits are exact."""
    form = SymbolFormat(numbers=True)
    tree = {f"{at}": torch.ones(1, 1 + at) for at in range(tensors)}
    around = MessageLayout.of(tree)
    one = Symbols(numbers=tree, scales={"0": torch.ones(1, scales)})
    (packed,) = pack(one, around, form)
    assert packed_bits(one, around, form).tolist() == [[8.0 * len(packed) + 64]]


def test_bits_are_near_the_entropy() -> None:
    """Levels, signs and flags of a hundred thousand entries: 2 % above what any code needs."""
    count, keep = 100_000, 0.3
    around = MessageLayout({"w": TensorLayout((count,), (count,))}, torch.float32, torch.zeros(1))
    key = rng.root(5, "entropy")
    kept = rng.uniform(key, count) < keep
    levels = (8 * rng.normal(rng.fold(key, 1), count) * kept).round().to(torch.int32)
    one = Symbols(quantisation_levels={"w": levels[None]}, kept={"w": kept[None]})
    sent = levels[kept].abs()
    shares = torch.bincount(sent).double() / len(sent)
    entropy = -(shares * torch.log2(shares.clamp(min=1e-300))).sum() * len(sent)
    flags = (math.lgamma(count + 1) - math.lgamma(len(sent) + 1)) / math.log(2)
    flags -= math.lgamma(count - len(sent) + 1) / math.log(2)
    bound = float(entropy) + int((sent > 0).sum()) + flags
    (packed,) = pack(one, around, SymbolFormat())
    assert bound <= 8 * len(packed) <= 1.02 * bound


@pytest.mark.parametrize("signs", ["apart", "within"])
def test_a_few_large_levels_do_not_make_the_others_longer(
    signs: Literal["apart", "within"],
) -> None:
    count, layout = 100_000, SymbolFormat(signs=signs)
    around = MessageLayout({"w": TensorLayout((count,), (count,))}, torch.float32, torch.zeros(1))
    levels = (3 * rng.normal(rng.root(6, "large"), count)).round().to(torch.int32)
    large = torch.tensor([300, -5_000, 10**6, -(10**9)], dtype=torch.int32)
    few = torch.cat([large, levels[len(large) :]])
    sizes = []
    for each in (levels, few):
        (packed,) = pack(Symbols(quantisation_levels={"w": each[None]}), around, layout)
        assert torch.equal(unpack((packed,), around, layout).quantisation_levels["w"][0], each)
        sizes.append(len(packed))
    # Four of them, and a table in which they have a place.
    assert sizes[1] - sizes[0] < 300


def test_a_level_beyond_the_tables_has_31_bits_at_most() -> None:
    """One more bit would turn it into a negative number of 4 bytes."""
    count, layout = 1_000, SymbolFormat()
    around = MessageLayout({"w": TensorLayout((count,), (count,))}, torch.float32, torch.zeros(1))
    levels = torch.arange(count, dtype=torch.int32) % 5
    levels[7] = 10**6
    (packed,) = pack(Symbols(quantisation_levels={"w": levels[None]}), around, layout)
    record = msgspec.msgpack.decode(packed, type=Column)
    assert np.frombuffer(record.large, dtype="<u4").tolist() == [10**6]
    most, more = (
        msgspec.msgpack.encode(
            msgspec.structs.replace(record, large=np.array([value], dtype="<u4").tobytes())
        )
        for value in (2**31 - 1, 2**31)
    )
    assert int(unpack((most,), around, layout).quantisation_levels["w"][0, 7]) == 2**31 - 1
    with pytest.raises(BadMessage, match="too large"):
        unpack((more,), around, layout)


def test_a_tensor_of_its_own_kind_gets_a_table_of_its_own() -> None:
    def chosen(*counts: list[int]) -> Choice:
        often = np.array(counts, dtype=np.float64)
        shape = 1, 1, *often.shape
        return choose(Bins(often.ravel(), shape, np.arange(often.size)))

    assert chosen([900, 80, 20], [1800, 160, 40]).use.tolist() == [[0, 0]]
    apart = chosen([90_000, 8_000, 2_000], [2_000, 8_000, 90_000])
    assert apart.use.tolist() == [[0, 1]]
    assert apart.table.reshape(2, 3).argmax(axis=1).tolist() == [0, 2]
    small = chosen([90_000, 8_000, 2_000], [1, 2, 1], [0, 0, 0])
    assert small.use.tolist() == [[0, 0, -1]]
    assert small.lengths.tolist() == [[3, 0, 0, 0]]


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 1023))
def test_gaps_lead_back_to_positions(steps: list[int], longest: int) -> None:
    positions = np.cumsum(np.array(steps, dtype=np.int64)) - 1
    coded = to_gaps(positions, longest)
    assert coded.max(initial=0) <= longest
    assert np.array_equal(from_gaps(coded, longest), positions)


def test_models_of_gaps_are_probabilities() -> None:
    for kept, there in ((1, 10**6), (1, 2), (999, 1000), (10**6 - 1, 10**6)):
        share = int(gap_share(torch.tensor(kept), torch.tensor(there)))
        assert 0 < share < 1 << 16
        assert gaps(share).longest >= 1


# --- from anywhere ------------------------------------------------------------------------------


def tampered(packed: tuple[bytes, ...], key: Tensor) -> Iterator[tuple[bytes, ...]]:
    """The first column with bytes set to others, one after the other."""
    first = packed[0]
    draws = rng.bits(key, 120).reshape(-1, 2) & 0x7FFFFFFF
    for where, value in draws.tolist():
        data = bytearray(first)
        data[where % min(len(first), 200)] = value % 256
        yield (bytes(data), *packed[1:])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_tampered_column_is_refused_or_read(layout: SymbolFormat) -> None:
    around = message_layout(2)
    packed = pack(symbols(layout, around, keep=0.4, size=3.0).row(0), around, layout)
    refused = 0
    for data in tampered(packed, rng.root(3, "tampered")):
        try:
            found = unpack(data, around, layout)
        except BadMessage:
            refused += 1
        else:
            tree = found.numbers if layout.numbers else found.quantisation_levels
            assert {name: rows.shape[1] for name, rows in tree.items()} == {
                name: tensor_layout.entries for name, tensor_layout in around.tensors.items()
            }
    assert refused


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_noise_is_refused(data: bytes) -> None:
    with suppress(BadMessage):
        assert isinstance(unpack((data,), message_layout(1), SymbolFormat()), Symbols)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"flags": []}, "flags of 0 tensors"),
        ({"flags": [(10**9, 10**9), None, None, None]}, "kept units"),
        ({"flags": [(3, 10**9), None, None, None]}, "gap symbols"),
        ({"low": 40}, "low bits"),
        ({"use": [7, 0, 0, 0]}, "not there"),
        ({"tables": [b""]}, "tables that are empty"),
        ({"tables": [bytes([1]) * (MOST_SYMBOLS + 1)]}, "tables that are empty, longer"),
        ({"counts": [10**12, 0, 0, 0]}, "scales"),
        ({"words": b"123"}, "words"),
        ({"large": b"123"}, "large levels"),
        ({"large": bytes(4)}, "more codes beyond"),
        ({"limit": MOST_SYMBOLS}, "tables up to"),
        ({"limit": 1}, "missing"),
        ({"signs": b""}, "too few"),
        ({"signs": bytes(10_000)}, "bytes of signs"),
        ({"signs": bytes(190)}, "longer"),
        ({"use": [0] * 70_000}, "cannot be read"),
        ({"words": bytes(10_000)}, "gaps that do not lead"),
    ],
)
def test_claims_are_checked_against_what_is_there(
    change: dict[str, object], complaint: str
) -> None:
    around, layout = message_layout(1), SymbolFormat()
    (packed,) = pack(symbols(layout, around, keep=0.4, size=3.0).row(0), around, layout)
    record = msgspec.msgpack.decode(packed, type=Column)
    lying = msgspec.msgpack.encode(msgspec.structs.replace(record, **change))
    with pytest.raises(BadMessage, match=complaint):
        unpack((lying,), around, layout)


def test_words_that_nobody_needs_are_refused() -> None:
    around, layout = message_layout(1), SymbolFormat()
    (packed,) = pack(symbols(layout, around, keep=0.4, size=3.0).row(0), around, layout)
    record = msgspec.msgpack.decode(packed, type=Column)
    longer = msgspec.structs.replace(record, words=record.words + bytes(400))
    with pytest.raises(BadMessage, match="more than"):
        unpack((msgspec.msgpack.encode(longer),), around, layout)


def test_columns_must_agree_about_flags() -> None:
    around, layout = message_layout(2), SymbolFormat()
    some = pack(symbols(layout, around, keep=0.4, size=3.0).row(0), around, layout)
    every = pack(symbols(layout, around, keep=1.0, size=3.0).row(0), around, layout)
    with pytest.raises(BadMessage, match="do not agree"):
        unpack((some[0], every[1]), around, layout)


def test_numbers_of_other_kinds_travel_too() -> None:
    around = replace(message_layout(1), dtype=torch.float64)
    one = symbols(SymbolFormat(numbers=True), around, keep=0.5, size=1.0).row(1)
    back = unpack(pack(one, around, SymbolFormat(numbers=True)), around, SymbolFormat(numbers=True))
    assert equal(one.numbers, back.numbers)


@pytest.mark.parametrize("signs", ["apart", "within"])
def test_levels_beyond_a_table_are_counted_with_their_signs(
    signs: Literal["apart", "within"],
) -> None:
    layout = SymbolFormat(signs=signs)
    around = MessageLayout(
        {"only": TensorLayout((5_000,), (5_000,))}, torch.float32, torch.zeros(2).long()
    )
    # Half of them far beyond a table, too many to be sent as they are; the others have nothing but
    # low bits.
    levels = torch.arange(10_000, dtype=torch.int32).view(2, -1) % 23 - 11
    levels[0, ::2] = torch.arange(2_500, dtype=torch.int32) * 400 - 500_000
    said = packed_bits(Symbols(quantisation_levels={"only": levels}), around, layout)
    for row in range(2):
        (column,) = pack(
            Symbols(quantisation_levels={"only": levels[row : row + 1]}), around, layout
        )
        assert (msgspec.msgpack.decode(column, type=Column).low > 4) == (row == 0)
        assert 0 <= float(said[row, 0]) - 8 * len(column) <= SLACK_BITS + SLACK_SHARE * said[row, 0]
