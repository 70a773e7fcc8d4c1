"""A CSV file with one row for each device, read into columns; its faults with line and column."""

import csv
import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anyfleet.arrays import Floats, Ints
from anyfleet.errors import refuse
from anyfleet.names import near
from anyfleet.world.group import HIGHEST_LEVEL, out_of_range
from anyfleet.world.world import OWN

TEXTS = ("owner", "group", "link")
LEVEL = "level"
_NUMBERS = (LEVEL, *OWN)
AS_GROUP = "-"  # a cell that leaves a number or a link to the device's group

# Numbers that are no columns of a group: the least they may be, and whether that itself is allowed.
_FURTHER = {
    "exponent": (0.0, False),
    "slowest": (0.0, False),
    "fastest": (0.0, False),
    "up": (0.0, False),
    "down": (0.0, False),
    "power": (0.0, True),
    "receive": (0.0, True),
}
# What a group has and a cell has not.
_ELSEWHERE = {
    "name": 'the group of a device stands in the column "group".',
    "frequency": 'the ends of its range stand in the columns "slowest" and "fastest".',
    "count": "every row is one device.",
    "devices": "every row is one device.",
    "availability": 'say it in [[fleet.groups]], and name the group in the column "group".',
    "loss": 'say it in [[fleet.groups]], and name the group in the column "group".',
}
_LARGEST = 1 << 28  # bytes of a file that is read
_BLOCK = 1 << 16  # rows that are turned into numbers together
_TOLD = 20  # faults that are told one by one


@dataclass(frozen=True, eq=False)
class Sheet:
    """The columns of a file: a number is NaN where the group's counts."""

    numbers: Mapping[str, Floats]
    texts: Mapping[str, tuple[str, ...]]
    lines: Ints  # of the file, for each row
    sha256: str

    def __len__(self) -> int:
        return len(self.lines)

    def at(self, row: int, column: str) -> str:
        """The place of a cell, in words."""
        return _place(int(self.lines[row]), column)


class Faults:
    """What is wrong with a file: the first faults in words, and how many there are."""

    def __init__(self, file: Path) -> None:
        self._file, self._told, self._count = file, list[str](), 0

    def __len__(self) -> int:
        return self._count

    def add(self, what: str) -> None:
        """Note one more."""
        self._count += 1
        if self._count <= _TOLD:
            self._told.append(f"Table.file {self._file}{what}")

    def refuse(self) -> None:
        """Raise all of them at once, if there are any."""
        more = self._count - _TOLD
        end = [f"Table.file {self._file}: {more} more faults like these."] if more > 0 else []
        refuse((*self._told, *end))


def read(file: Path, faults: Faults) -> Sheet:
    """Read a table of devices. What is wrong with its cells is added to `faults`.

    What leaves nothing to read is raised.
    """
    content = _content(file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Table.file {file}, line {line}: not UTF-8 text. Save it as CSV in UTF-8."
        ) from error
    try:
        return _sheet(text, faults, hashlib.sha256(content).hexdigest())
    except csv.Error as error:
        raise ValueError(f"Table.file {file} is no CSV file: {error}.") from error


def _content(file: Path) -> bytes:
    try:
        if file.exists() and not file.is_file():
            raise ValueError(f"Table.file {file} is no file.")
        if (size := file.stat().st_size) > _LARGEST:
            raise ValueError(
                f"Table.file {file} is too large: {size:,} bytes, and at most {_LARGEST:,} are "
                "read. Leave out columns that are the same for all, and say them in a group."
            )
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"Table.file {file} cannot be read: {error.strerror}.") from error
    if not content.strip():
        raise ValueError(f"Table.file {file} is empty: its first line names the columns.")
    return content


def _sheet(text: str, faults: Faults, sha256: str) -> Sheet:
    # Strict: a quotation mark that is never closed would swallow the rows after it.
    records = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [name.strip() for name in next((cells for cells in records if cells), [])]
    for fault in _bad_header(header):
        faults.add(f", line {records.line_num}: {fault}")
    numbers: dict[str, list[Floats]] = {name: [] for name in header if name in _NUMBERS}
    texts: dict[str, list[str]] = {name: [] for name in header if name in TEXTS}
    lines: list[Ints] = []
    before = len(faults)
    for places, rows in _blocks(records, len(header), faults):
        cells = dict(zip(header, zip(*rows, strict=True), strict=True))
        for name, found in numbers.items():
            found.append(_floats(cells[name], places, name, faults))
        for name, words in texts.items():
            words.extend(_words(cells[name], places, name, faults))
        lines.append(np.array(places, dtype=np.int64))
    if not lines:
        if len(faults) == before:  # otherwise there are rows, all of another length
            faults.add(" has no rows below its header: every row is one device.")
        faults.refuse()
    sheet = Sheet(
        {name: np.concatenate(parts) for name, parts in numbers.items()},
        {name: tuple(parts) for name, parts in texts.items()},
        np.concatenate(lines),
        sha256,
    )
    for name in sheet.numbers:
        _check_range(sheet, name, faults)
    _check_owners(sheet, faults)
    return sheet


def _bad_header(header: Sequence[str]) -> Iterator[str]:
    known = (*TEXTS, *_NUMBERS)
    listing = ", ".join(known)
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        yield "columns are separated by commas."
        return
    for name in dict.fromkeys(header):
        if header.count(name) > 1:
            yield f"the column {name!r} stands there {header.count(name)} times."
        if name not in known:
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else near(name, known)
            yield f"unknown column {name!r}{hint or f'; there are: {listing}.'}"


def _blocks(
    records: "Iterator[list[str]]", width: int, faults: Faults
) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Some rows at a time, with the lines in which they stand; refuses those of another length."""
    places: list[int] = []
    rows: list[list[str]] = []
    for cells in records:
        if not cells:  # An empty line, as at the end of many files.
            continue
        line = records.line_num  # type: ignore[attr-defined]
        if len(cells) != width:
            faults.add(
                f", line {line}: expected {width} cells, as in the header, got {len(cells)}."
            )
            continue
        places.append(line)
        rows.append(cells)
        if len(rows) == _BLOCK:
            yield places, rows
            places, rows = [], []
    if rows:
        yield places, rows


def _floats(cells: Sequence[str], lines: Sequence[int], name: str, faults: Faults) -> Floats:
    """The numbers of some cells; NaN where there is none."""
    try:
        found = np.array([math.nan if cell == AS_GROUP else float(cell) for cell in cells])
    except ValueError:
        found = np.array([_float(cell) for cell in cells])
    for row in np.flatnonzero(np.isnan(found)).tolist():
        cell = cells[row].strip()
        if not cell:
            faults.add(
                f"{_place(lines[row], name)}: the number is missing. Write it, or {AS_GROUP} for "
                "that of its group."
            )
        elif cell != AS_GROUP:
            faults.add(f"{_place(lines[row], name)}: {cell!r} is no number.")
    return found


def _float(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _words(cells: Sequence[str], lines: Sequence[int], name: str, faults: Faults) -> list[str]:
    words = [cell.strip() for cell in cells]
    for line, word in zip(lines, words, strict=True):
        if not word:
            faults.add(f"{_place(line, name)}: there is no {name}.")
    return words


def _check_range(sheet: Sheet, name: str, faults: Faults) -> None:
    values = sheet.numbers[name]
    given = values[~np.isnan(values)]
    # Ranges have no gaps: where both ends fit, all fit, if they are whole where they must be.
    ends = (float(given.min()), float(given.max())) if len(given) else ()
    whole = name != LEVEL or bool((given == np.floor(given)).all())
    if whole and not any(_misfit(name, end) for end in ends):
        return
    for row in np.flatnonzero(~np.isnan(values)).tolist():
        if told := _misfit(name, float(values[row])):
            faults.add(f"{sheet.at(row, name)}: {told}")


def _misfit(name: str, value: float) -> str:
    """Why a number cannot stand in a column; empty if it can."""
    if name == LEVEL:
        fits = 0 <= value <= HIGHEST_LEVEL and value == math.floor(value)
        return "" if fits else f"must be a whole number in 0 … {HIGHEST_LEVEL}, got {value:g}."
    if name not in _FURTHER:
        return next((told.strip() for told in out_of_range("", name, value)), "")
    least, included = _FURTHER[name]
    if (value >= least if included else value > least) and value < math.inf:
        return ""
    return f"must be finite and {'at least' if included else 'above'} {least:g}, got {value:g}."


def _check_owners(sheet: Sheet, faults: Faults) -> None:
    """Refuse owners with two rows: a device has one."""
    first: dict[str, int] = {}
    for row, owner in enumerate(sheet.texts.get("owner", ())):
        if owner and owner in first:
            line = sheet.lines[first[owner]]
            faults.add(f"{sheet.at(row, 'owner')}: {owner!r} has a row already, in line {line}.")
        first.setdefault(owner, row)


def _place(line: int, column: str) -> str:
    return f", line {line}, column {column}"
