"""Tables of rows by device: they hold what a dictionary would, in few blocks with few dead rows."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.device_tables import (
    EMPTY_TABLE,
    NO_NUMBERS,
    DeviceNumbers,
    DeviceTable,
    RowIndex,
)

SMALL = 1 << 30  # rows of a block: all are smaller
BLANK = torch.full((3,), -1.0)
NOBODY = np.empty(0, dtype=np.int64)
IN_FILES = pytest.mark.parametrize("in_file", [False, True], ids=["in memory", "in files"])


def written(
    table: DeviceTable, devices: Ints, values: Tensor, *, in_file: bool = False
) -> DeviceTable:
    return table.changed(table.index.written(devices, SMALL), [values], in_file=in_file)


def without(table: DeviceTable, devices: Ints, *, in_file: bool = False) -> DeviceTable:
    return table.changed(table.index.without(devices), [], in_file=in_file)


def read(table: DeviceTable, devices: Ints) -> Tensor | None:
    rows = table.index.find(devices)
    return None if rows is None else table.read(rows, BLANK)


def filled(draw: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(draw.random((count, 3), dtype=np.float32))


def some(draw: np.random.Generator, devices: int) -> Ints:
    """Return different devices, often few and sometimes all, in any order."""
    count = int(devices ** draw.random())
    return draw.permutation(devices)[:count]


def expected(plain: dict[int, Tensor], devices: Ints) -> Tensor | None:
    rows = [plain.get(device, BLANK) for device in devices.tolist()]
    return torch.stack(rows) if any(device in plain for device in devices.tolist()) else None


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def most_blocks(live: int) -> int:
    """Three for each factor of four, and one that has just been merged."""
    return 3 * (live.bit_length() // 2 + 1) + 1


def checked(table: DeviceTable) -> DeviceTable:
    index = table.index
    live, size = len(index.place), sum(map(len, table.blocks))
    assert table.fits(BLANK)
    assert len(table.blocks) <= most_blocks(live)
    assert live <= size <= 3 * live
    return table


def steps(
    seed: int, devices: int, count: int, *, in_file: bool = False
) -> Iterator[tuple[DeviceTable, dict[int, Tensor]]]:
    """Yield a table after each change, and a dictionary that was changed likewise."""
    draw, table, plain = np.random.default_rng(seed), EMPTY_TABLE, dict[int, Tensor]()
    for _ in range(count):
        chosen = some(draw, devices)
        if draw.random() < 0.1:
            table = without(table, chosen, in_file=in_file)
            plain = {device: row for device, row in plain.items() if device not in chosen}
        else:
            values = filled(draw, len(chosen))
            # Rows move between memory and files when the limit is passed.
            table = written(table, chosen, values, in_file=in_file and draw.random() < 0.8)
            plain = plain | dict(zip(chosen.tolist(), values, strict=True))
        yield table, plain


@pytest.mark.parametrize(("devices", "count"), [(1, 40), (7, 400), (300, 1500)])
def test_a_table_holds_what_a_dictionary_would(devices: int, count: int) -> None:
    draw = np.random.default_rng(1)
    for table, plain in steps(0, devices, count):
        asked = some(draw, devices + 3)  # some of whom never write
        assert same(read(checked(table), asked), expected(plain, asked))
        assert (table.index.has(asked) == np.isin(asked, list(plain))).all()
    assert plain


@IN_FILES
def test_what_is_kept_of_a_table_does_not_change(in_file: bool) -> None:
    """However it goes on, and one can go on from there once more."""
    devices, kept = np.arange(40), []
    for table, plain in steps(2, 40, 300, in_file=in_file):
        kept.append((table, plain))
    assert len({len(table.blocks) for table, _ in kept}) > 3
    draw = np.random.default_rng(3)
    for table, plain in kept:
        assert same(read(checked(table), devices), expected(plain, devices))
        chosen = some(draw, 40)
        values = filled(draw, len(chosen))
        found = read(written(table, chosen, values, in_file=in_file), devices)
        assert same(
            found, expected(plain | dict(zip(chosen.tolist(), values, strict=True)), devices)
        )
        assert same(read(table, devices), expected(plain, devices))


def test_a_row_is_seldom_copied() -> None:
    """One by one is the worst case: a row moves when four blocks of its size have become one."""
    table, moved = EMPTY_TABLE, 0
    count = 4**6
    for device in range(count):
        change = table.index.written(np.array([device]), SMALL)
        moved += 0 if change.merged is None else len(change.merged)
        table = table.changed(change, [torch.full((1, 3), float(device))], in_file=False)
    assert moved <= 7 * count
    found = read(table, np.arange(count))
    assert found is not None
    assert torch.equal(found[:, 0], torch.arange(count, dtype=torch.float32))


@pytest.mark.parametrize("share", [1, 2, 3, 10])
def test_rounds_of_a_fleet_copy_little_more_than_they_write(share: int) -> None:
    """In the long run, when one of so many devices writes in every round."""
    draw, table, fleet = np.random.default_rng(0), EMPTY_TABLE, 600
    moved = size = live = 0
    for _ in range(100):
        change = table.index.written(draw.permutation(fleet)[: fleet // share], SMALL)
        moved += 0 if change.merged is None else len(change.merged)
        table = table.changed(change, [filled(draw, fleet // share)], in_file=False)
        size, live = size + int(table.index.size.sum()), live + len(table.index.place)
        assert len(checked(table).blocks) <= 9
    assert moved <= (0 if share == 1 else 3 * 100 * fleet // share)
    assert size <= 1.7 * live


@pytest.mark.parametrize("large", [0, 30, 200])
def test_large_blocks_are_merged_only_if_they_are_mostly_dead(large: int) -> None:
    draw, table, fleet, moved = np.random.default_rng(0), EMPTY_TABLE, 600, 0
    for _ in range(200):
        chosen = draw.permutation(fleet)[:30]
        change = table.index.written(chosen, large)
        moved += 0 if change.merged is None else len(change.merged)
        table = table.changed(change, [filled(draw, 30)], in_file=False)
        size, live = table.index.size, len(table.index.place)
        assert size.sum() <= 3 * live
        assert (size < large).sum() <= most_blocks(large)
    assert (moved < 200 * 30) == (large < 200)


def test_a_small_block_is_not_copied_because_there_are_large_ones_of_its_size() -> None:
    index, large = EMPTY_TABLE.index, 30
    for first in range(0, 150, 30):
        index = index.written(np.arange(first, first + 30), large).index
    index = index.written(np.flatnonzero(np.arange(150) % 30 < 16), large).index
    assert index.live.tolist() == [14, 14, 14, 14, 14, 80]
    change = index.written(np.arange(200, 214), large)
    assert change.merged is None
    assert change.index.live.tolist() == [14, 14, 14, 14, 14, 80, 14]


def test_a_block_of_which_no_row_is_live_goes() -> None:
    devices, draw = np.arange(9), np.random.default_rng(0)
    table = written(EMPTY_TABLE, devices, filled(draw, 9))
    values = filled(draw, 9)
    again = written(table, devices, values)
    assert [block is values for block in again.blocks] == [True]
    assert without(again, devices).blocks == ()
    assert read(without(again, devices), devices) is None


def test_rows_in_files_are_read_with_those_in_memory() -> None:
    draw, devices = np.random.default_rng(0), np.array([5, 0, 9, 2])
    first, second = filled(draw, 2), filled(draw, 2)
    table = written(EMPTY_TABLE, np.array([0, 2]), first)
    table = written(table, np.array([9, 5]), second, in_file=True)
    files = [block.untyped_storage().filename is not None for block in table.blocks]
    assert files == [False, True]
    found = read(table, devices)
    assert same(found, torch.stack([second[1], first[0], second[0], first[1]]))


def test_numbers_of_devices() -> None:
    numbers, devices = NO_NUMBERS, np.array([7, 3, 5])
    assert numbers.of(devices).tolist() == [-1, -1, -1]
    numbers = numbers.changed(devices, np.array([70, 30, 50]))
    numbers = numbers.changed(np.array([9, 3, 1]), np.array([90, 31, 10]))
    assert numbers.of(np.arange(11)).tolist() == [-1, 10, -1, 31, -1, 50, -1, 70, -1, 90, -1]
    assert numbers.without(np.array([3, 4, 9])).device.tolist() == [1, 5, 7]
    assert numbers.changed(NOBODY, NOBODY).number.tolist() == numbers.number.tolist()


def damaged(table: DeviceTable) -> Iterator[DeviceTable]:
    """Yield tables that can come from a file, but cannot be read."""
    index, place = table.index, table.index.place
    far, backwards = place.number + 10**6, place.device[::-1].copy()
    indices = [
        replace(index, place=DeviceNumbers(place.device, far)),
        replace(index, place=DeviceNumbers(place.device, -place.number - 1)),
        replace(index, place=DeviceNumbers(backwards, place.number)),
        replace(index, place=DeviceNumbers(place.device, place.number.astype(float))),
        replace(index, place=DeviceNumbers(place.device[None], place.number[None])),
        replace(index, start=index.start[::-1].copy()),
        replace(index, start=index.start + 2**62, size=index.size + 2**62),
        replace(index, start=index.start[:1]),
        replace(index, size=index.size + 1),
        replace(index, live=index.live - 1),
        replace(index, live=index.live.astype(float)),
        RowIndex(NO_NUMBERS, NOBODY, NOBODY, NOBODY),
    ]
    yield from (replace(table, index=each) for each in indices)
    yield replace(table, blocks=table.blocks[:1])
    yield replace(table, blocks=tuple(block.double() for block in table.blocks))
    yield replace(table, blocks=tuple(block[:, :2] for block in table.blocks))
    yield replace(table, blocks=table.blocks[::-1])


def test_a_table_from_a_file_must_be_sound() -> None:
    draw = np.random.default_rng(0)
    table = written(EMPTY_TABLE, np.arange(9), filled(draw, 9))
    table = written(table, np.array([2, 20, 30]), filled(draw, 3))
    assert table.fits(BLANK)
    assert EMPTY_TABLE.fits(BLANK)
    for number, other in enumerate(damaged(table)):
        assert not other.fits(BLANK), number
