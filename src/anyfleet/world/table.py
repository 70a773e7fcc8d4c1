"""Fleets from a CSV table: one row for each device, one field for each of its numbers."""

import csv
import hashlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.errors import refuse
from anyfleet.names import near
from anyfleet.world.fleet import Fleet, declare, listed
from anyfleet.world.group import HIGHEST_LEVEL, Group, range_faults
from anyfleet.world.links import Link, bluetooth, lte, wifi
from anyfleet.world.world import DEVICE_FIELDS, World

_TEXTS = ("owner", "group", "link")
_LEVEL = "level"
_NUMBERS = (_LEVEL, *DEVICE_FIELDS)
_AS_GROUP = "-"  # a cell that takes the number or the link of the device's group

# Numbers that are not fields of a group: the least value, and whether it is allowed itself.
_FURTHER_RANGES = {
    "exponent": (0.0, False),
    "slowest": (0.0, False),
    "fastest": (0.0, False),
    "bit_rate_up": (0.0, False),
    "bit_rate_down": (0.0, False),
    "send_power": (0.0, True),
    "receive_power": (0.0, True),
}
# Fields that a group has and a table does not, and what to do instead.
_INSTEAD = {
    "name": 'write the group of a device in the field "group".',
    "frequency": 'write the ends of its range in the fields "slowest" and "fastest".',
    "count": "every row is one device.",
    "devices": "every row is one device.",
    "availability": 'write it in [[fleet.groups]], and name the group in the field "group".',
    "column_loss": 'write it in [[fleet.groups]], and name the group in the field "group".',
}
_LARGEST = 1 << 28  # bytes of a file
_BLOCK = 1 << 16  # rows that are parsed together
_LISTED = 20  # faults that an error lists one by one
_LINKS: dict[str, Callable[[], Link]] = {"wifi": wifi, "lte": lte, "bluetooth": bluetooth}


@dataclass(frozen=True, eq=False)
class _Content:
    """The content of a table file by field: a number is NaN where that of the group applies."""

    numbers: Mapping[str, Floats]
    texts: Mapping[str, tuple[str, ...]]
    lines: Ints  # the line of the file in which each row stands
    sha256: str

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int, field_name: str) -> str:
        """Return the place of a cell as text for an error."""
        return _place(int(self.lines[row]), field_name)


class _Faults:
    """The faults of a file: the texts of the first ones, and the number of all."""

    def __init__(self, file: Path) -> None:
        self._file, self._listed, self._count = file, list[str](), 0

    def __len__(self) -> int:
        return self._count

    def add(self, what: str) -> None:
        """Add one fault."""
        self._count += 1
        if self._count <= _LISTED:
            self._listed.append(f"Table.file {self._file}{what}")

    def refuse(self) -> None:
        """Raise all faults at once, if there are any."""
        more = self._count - _LISTED
        end = [f"Table.file {self._file}: {more} more faults like these."] if more > 0 else []
        refuse((*self._listed, *end))


@dataclass(frozen=True)
class Table(Fleet):
    """A fleet from a CSV file with a header and one row for each device.

    The header names the fields, as in a group: `speed`, `memory`, `battery` …, and `level`.
    `slowest` and `fastest` are the ends of the `frequency`; `bit_rate_up`, `bit_rate_down`,
    `send_power` and `receive_power` belong to the link. All are plain numbers and do not change.
    `link` names "wifi", "lte" or "bluetooth". A field that the header does not name, and a cell
    with "-", is as in the device's group. The field `group` names one of `groups`, which say what
    a cell cannot: availability, lost columns, distributions. Without `groups` the field `group`
    itself makes the groups, of level 0.

    With the field `owner` a device has the row of the owner whose data it has (under the partition
    `ByOwner`). Devices of one owner share a row, and rows of owners without a device stay unused.
    Without it, row i is device i, and there must be as many rows as devices. Nothing is drawn.

    The file is read once, when the part is made. A file that does not have the hash `sha256` is
    refused; an empty `sha256`, the default, accepts any file.
    """

    groups: tuple[Group, ...] = ()
    file: Path | str = field(kw_only=True)  # CSV, one row for each device
    sha256: str = field(default="", kw_only=True)
    _content: _Content = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse(self._faults())
        file = Path(self.file)
        faults = _Faults(file)
        content = _read(file, faults)
        if self.sha256 not in ("", content.sha256):
            raise ValueError(
                f"Table.sha256 is that of another file: {file} has changed since. Put the old one "
                "back, or leave sha256 out."
            )
        # A path and its text name the same file, so the parts are equal.
        object.__setattr__(self, "file", file)
        object.__setattr__(self, "sha256", content.sha256)
        object.__setattr__(self, "_content", content)
        self._check_cells(faults)
        faults.refuse()

    def _faults(self) -> Iterator[str]:
        if self.links:
            yield (
                "Table.links would be dealt at random, but a table says which device has which "
                'link: use the field "link", or "bit_rate_up" and "bit_rate_down".'
            )
        for number, group in enumerate(self.groups):
            if group.count is not None or group.devices:
                yield (
                    f"Table.groups.{number} has a count or devices of its own: leave them out, "
                    'the field "group" says which devices belong to it.'
                )
        names = Counter(group.name for group in self.groups)
        if len(self.groups) > 1 and (names[""] or max(names.values()) > 1):
            yield 'Table.groups must have names that differ, for the field "group".'

    def _check_cells(self, faults: _Faults) -> None:
        """Add cells that do not fit the groups, or another cell of their row, to `faults`."""
        texts, before = self._content.texts, len(faults)
        if len(self.groups) > 1 and "group" not in texts:
            faults.add(' needs a field "group" that names one of the groups for each device.')
        if self.groups and "group" in texts:
            self._check_names("group", [group.name for group in self.groups], faults)
        self._check_names("link", [_AS_GROUP, *_LINKS], faults)
        if len(faults) > before:
            return  # what follows needs the groups
        for row in np.flatnonzero(self._reversed).tolist():
            place = self._content.place(row, "slowest")
            faults.add(f"{place}: the slowest frequency is above the fastest.")
        own = {"bit_rate_up", "bit_rate_down"} & self._content.numbers.keys()
        if own and any(group.link.shared for group in self._all_groups):
            faults.add(
                f", field {min(own)}: a device cannot have a bit rate of its own on a link that "
                "the devices of its group share."
            )

    def _check_names(self, field_name: str, known: Sequence[str], faults: _Faults) -> None:
        for row, name in enumerate(self._content.texts.get(field_name, ())):
            if name not in known:
                hint = near(name, known) or f"; there are: {', '.join(known)}."
                place = self._content.place(row, field_name)
                faults.add(f"{place}: there is no {field_name} {name!r}{hint}")

    @cached_property
    def _all_groups(self) -> tuple[Group, ...]:
        """The given groups, or else those that the field `group` names."""
        if self.groups:
            return self.groups
        names = dict.fromkeys(self._content.texts.get("group", ("table",)))
        return tuple(Group(name=name, level=0) for name in names)

    @cached_property
    def _group(self) -> Ints:
        """The number of the group of each row."""
        if "group" not in self._content.texts:
            return np.zeros(len(self._content), dtype=np.int64)
        numbers = {group.name: number for number, group in enumerate(self._all_groups)}
        return np.array([numbers[name] for name in self._content.texts["group"]], dtype=np.int64)

    @property
    def _reversed(self) -> Flags:
        """True for each row whose slowest frequency is above its fastest."""
        ranges = np.array([group.frequency for group in self._all_groups])[self._group]
        slowest, fastest = (
            self._own_or(name, ranges[:, end]) for end, name in enumerate(("slowest", "fastest"))
        )
        above: Flags = slowest > fastest
        return above

    def _own_or(self, name: str, default: Floats) -> Floats:
        """Return the numbers that rows have of their own, and `default` for the others."""
        own = self._content.numbers.get(name)
        return default if own is None else np.where(np.isnan(own), default, own)

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self._content)

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of the rows in the order of the file; () without the field `owner`."""
        return self._content.texts.get("owner", ())

    def build(self, samples: Ints, seed: int, owners: Sequence[str] = ()) -> World:
        """Return the world of this table, with one device for each entry of `samples`.

        `owners` says whose data each device has; a table that names owners needs it.
        """
        rows = self._rows(len(samples), owners)
        group = self._group[rows]
        declared = [n if g.level is None else g.level for n, g in enumerate(self._all_groups)]
        level = self._own_or(_LEVEL, np.array(declared, dtype=np.float64)[self._group])[rows]
        return World(
            groups=self._all_groups,
            links=(
                *(each.link for each in self._all_groups),
                *(make() for make in _LINKS.values()),
            ),
            reports=self.reports,
            declared=declare(
                self._all_groups, group, level.astype(np.int64), samples, self.counting
            ),
            group=group.astype(np.int32),
            link=self._link[rows].astype(np.int32),
            seed=seed,
            device_values={n: own[rows] for n, own in self._content.numbers.items() if n != _LEVEL},
            assignment=self._row_assignment(owners),
        )

    @cached_property
    def _link(self) -> Ints:
        """The number of the link of each row: its group's, or one of those with a name."""
        if "link" not in self._content.texts:
            return self._group
        numbers = {name: len(self._all_groups) + number for number, name in enumerate(_LINKS)}
        named = np.array([numbers.get(name, -1) for name in self._content.texts["link"]])
        return np.where(named < 0, self._group, named)

    def _rows(self, count: int, owners: Sequence[str]) -> Ints:
        """Return the row of each device."""
        if not self.owners:
            if count != len(self._content):
                raise ValueError(
                    f"Table.file {self.file} has {len(self._content)} rows, but the task has "
                    f'{count} devices: give one row for each, or a field "owner".'
                )
            return np.arange(count)
        refuse(self._owner_faults(count, owners))
        places = {owner: row for row, owner in enumerate(self.owners)}
        return np.array([places[owner] for owner in owners], dtype=np.int64)

    def _owner_faults(self, count: int, owners: Sequence[str]) -> Iterator[str]:
        """Yield what is wrong with devices whose owner has no row."""
        unowned = [device for device, owner in enumerate(owners or [""] * count) if not owner]
        if unowned:
            yield (
                f"Table.file {self.file} names owners, but these devices do not have the data of "
                f"one owner: {listed(unowned)}. Use data with owners and the partition ByOwner, "
                'or leave out the field "owner".'
            )
        known, present = set(self.owners), set(owners)
        missing = sorted(present - known - {""})
        if missing:
            unused = sorted(known - present)
            rest = f" Rows whose owner has no device: {listed(unused)}." if unused else ""
            yield (
                f"Table.file {self.file} has no row for the owners of these data: "
                f"{listed(missing)}.{rest}"
            )

    def _row_assignment(self, owners: Sequence[str]) -> str:
        """Return a sentence that says how devices came to their rows."""
        name, rows = Path(self.file).name, len(self._content)
        if self.owners:
            unused = rows - len(set(self.owners) & set(owners))
            text = f"Each device has the row of its data's owner in {name}; no row is drawn."
            text += f" {unused} of {rows} rows have no device." if unused else ""
        else:
            text = f"Devices are the rows of {name}, in their order; no row is drawn."
        if not self.groups and _LEVEL not in self._content.numbers:
            text += ' All are of level 0: there is no field "level".'
        return text


def _read(file: Path, faults: _Faults) -> _Content:
    """Return the content of a table file; add what is wrong with its cells to `faults`.

    Raise ValueError if the file cannot be read as a table at all.
    """
    content = _bytes_of(file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Table.file {file}, line {line}: not UTF-8 text. Save it as CSV in UTF-8."
        ) from error
    try:
        return _parse(text, faults, hashlib.sha256(content).hexdigest())
    except csv.Error as error:
        raise ValueError(f"Table.file {file} is not a CSV file: {error}.") from error


def _bytes_of(file: Path) -> bytes:
    try:
        if file.exists() and not file.is_file():
            raise ValueError(f"Table.file {file} is not a file.")
        if (size := file.stat().st_size) > _LARGEST:
            raise ValueError(
                f"Table.file {file} is too large: {size:,} bytes, and at most {_LARGEST:,} are "
                "read. Leave out fields that are equal for all, and write them in a group."
            )
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"Table.file {file} cannot be read: {error.strerror}.") from error
    if not content.strip():
        raise ValueError(f"Table.file {file} is empty: its first line must name the fields.")
    return content


def _parse(text: str, faults: _Faults, sha256: str) -> _Content:
    # Strict: a quotation mark that is never closed would otherwise swallow the rows after it.
    records = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [name.strip() for name in next((cells for cells in records if cells), [])]
    for fault in _header_faults(header):
        faults.add(f", line {records.line_num}: {fault}")
    numbers: dict[str, list[Floats]] = {name: [] for name in header if name in _NUMBERS}
    texts: dict[str, list[str]] = {name: [] for name in header if name in _TEXTS}
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
        if len(faults) == before:  # otherwise there are rows, all of a wrong length
            faults.add(" has no rows below its header: every row is one device.")
        faults.refuse()
    content = _Content(
        {name: np.concatenate(parts) for name, parts in numbers.items()},
        {name: tuple(parts) for name, parts in texts.items()},
        np.concatenate(lines),
        sha256,
    )
    for name in content.numbers:
        _check_range(content, name, faults)
    _check_owners(content, faults)
    return content


def _header_faults(header: Sequence[str]) -> Iterator[str]:
    known = (*_TEXTS, *_NUMBERS)
    listing = ", ".join(known)
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        yield "fields must be separated by commas."
        return
    for name in dict.fromkeys(header):
        if header.count(name) > 1:
            yield f"the field {name!r} occurs {header.count(name)} times."
        if name not in known:
            hint = f": {_INSTEAD[name]}" if name in _INSTEAD else near(name, known)
            yield f"unknown field {name!r}{hint or f'; there are: {listing}.'}"


def _blocks(
    records: "Iterator[list[str]]", width: int, faults: _Faults
) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Yield blocks of rows with their lines; add rows of a wrong length to `faults`."""
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


def _floats(cells: Sequence[str], lines: Sequence[int], name: str, faults: _Faults) -> Floats:
    """Return the numbers of some cells; NaN where there is none."""
    try:
        found = np.array([math.nan if cell == _AS_GROUP else float(cell) for cell in cells])
    except ValueError:
        found = np.array([_float(cell) for cell in cells])
    for row in np.flatnonzero(np.isnan(found)).tolist():
        cell = cells[row].strip()
        if not cell:
            faults.add(
                f"{_place(lines[row], name)}: the number is missing. Write it, or {_AS_GROUP} for "
                "that of its group."
            )
        elif cell != _AS_GROUP:
            faults.add(f"{_place(lines[row], name)}: {cell!r} is not a number.")
    return found


def _float(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _words(cells: Sequence[str], lines: Sequence[int], name: str, faults: _Faults) -> list[str]:
    words = [cell.strip() for cell in cells]
    for line, word in zip(lines, words, strict=True):
        if not word:
            faults.add(f"{_place(line, name)}: there is no {name}.")
    return words


def _check_range(content: _Content, name: str, faults: _Faults) -> None:
    values = content.numbers[name]
    given = values[~np.isnan(values)]
    # Ranges have no gaps: if both ends fit, all fit, provided that levels are whole numbers.
    ends = (float(given.min()), float(given.max())) if len(given) else ()
    whole = name != _LEVEL or bool((given == np.floor(given)).all())
    if whole and not any(_misfit(name, end) for end in ends):
        return
    for row in np.flatnonzero(~np.isnan(values)).tolist():
        if fault := _misfit(name, float(values[row])):
            faults.add(f"{content.place(row, name)}: {fault}")


def _misfit(name: str, value: float) -> str:
    """Return why a field cannot have a number, or ""."""
    if name == _LEVEL:
        fits = 0 <= value <= HIGHEST_LEVEL and value == math.floor(value)
        return "" if fits else f"must be a whole number in 0 … {HIGHEST_LEVEL}, got {value:g}."
    if name not in _FURTHER_RANGES:
        return next((fault.strip() for fault in range_faults("", name, value)), "")
    least, included = _FURTHER_RANGES[name]
    if (value >= least if included else value > least) and value < math.inf:
        return ""
    return f"must be finite and {'at least' if included else 'above'} {least:g}, got {value:g}."


def _check_owners(content: _Content, faults: _Faults) -> None:
    """Add owners with two rows to `faults`: a device has one row."""
    first: dict[str, int] = {}
    for row, owner in enumerate(content.texts.get("owner", ())):
        if owner and owner in first:
            line = content.lines[first[owner]]
            place = content.place(row, "owner")
            faults.add(f"{place}: {owner!r} already has a row, in line {line}.")
        first.setdefault(owner, row)


def _place(line: int, field_name: str) -> str:
    return f", line {line}, field {field_name}"
