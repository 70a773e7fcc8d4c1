"""A fleet from a table: every row is a device, and may belong to the owner of its data."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.errors import refuse
from anyfleet.names import near
from anyfleet.world.fleet import Fleet, declare, listed
from anyfleet.world.group import Group
from anyfleet.world.links import Link, bluetooth, lte, wifi
from anyfleet.world.sheet import AS_GROUP, LEVEL, Faults, Sheet, read
from anyfleet.world.world import World

_LINKS: dict[str, Callable[[], Link]] = {"wifi": wifi, "lte": lte, "bluetooth": bluetooth}


@dataclass(frozen=True)
class Table(Fleet):
    """A fleet from a CSV file: a header, and one row for each device.

    Columns are named as those of a group (`speed`, `memory`, `battery` …, and `level`); `slowest`
    and `fastest` are the ends of its `frequency`, `up` and `down` bits per second, `power` and
    `receive` the watts of its radio. All are plain numbers, and those of a device do not change.
    `link` names "wifi", "lte" or "bluetooth". What has no column is as in the device's group, and
    so is a cell with "-". `group` names the group: one of `groups`, which say what a cell cannot
    (availability, losses, laws); without `groups`, those that the column names, of level 0.

    With a column `owner` a device has the row of the owner whose data it has (under the partition
    `ByOwner`); devices of one owner share a row, and rows of owners without a device stay unused.
    Without it, device 0 has the first row, and there are as many rows as devices. Nothing is drawn.

    The file is read once, when the part is made. `sha256` is that of the file: given, as in the
    configuration of a run, another file is refused.
    """

    groups: tuple[Group, ...] = ()
    file: Path | str = field(kw_only=True)
    sha256: str = field(default="", kw_only=True)
    _sheet: Sheet = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse(self._faults())
        file = Path(self.file)
        faults = Faults(file)
        sheet = read(file, faults)
        if self.sha256 not in ("", sheet.sha256):
            raise ValueError(
                f"Table.sha256 is that of another file: {file} has changed since. Put the old one "
                "back, or leave sha256 out."
            )
        object.__setattr__(self, "file", file)  # a path and its text are one file, and one part
        object.__setattr__(self, "sha256", sheet.sha256)
        object.__setattr__(self, "_sheet", sheet)
        self._check_cells(faults)
        faults.refuse()

    def _faults(self) -> Iterator[str]:
        if self.links:
            yield (
                "Table.links are dealt at random, and a table says which device has which: use the "
                'columns "link", or "up" and "down".'
            )
        for number, group in enumerate(self.groups):
            if group.count is not None or group.devices:
                yield (
                    f"Table.groups.{number} has a count or devices of its own: the column "
                    '"group" says who belongs to it.'
                )
        names = Counter(group.name for group in self.groups)
        if len(self.groups) > 1 and (names[""] or max(names.values()) > 1):
            yield 'Table.groups must have names, each another, for the column "group".'

    def _check_cells(self, faults: Faults) -> None:
        """Look for what does not fit the groups, or another cell of its row."""
        texts, before = self._sheet.texts, len(faults)
        if len(self.groups) > 1 and "group" not in texts:
            faults.add(' needs a column "group", which names one of the groups for each device.')
        if self.groups and "group" in texts:
            self._check_names("group", [group.name for group in self.groups], faults)
        self._check_names("link", [AS_GROUP, *_LINKS], faults)
        if len(faults) > before:
            return  # what follows asks the groups
        for row in np.flatnonzero(self._reversed).tolist():
            place = self._sheet.at(row, "slowest")
            faults.add(f"{place}: the slowest frequency is above the fastest.")
        own = {"up", "down"} & self._sheet.numbers.keys()
        if own and any(group.link.shared for group in self._kinds):
            faults.add(
                f", column {min(own)}: a rate of one's own does not fit the link of a group "
                "that its devices share."
            )

    def _check_names(self, column: str, known: Sequence[str], faults: Faults) -> None:
        for row, name in enumerate(self._sheet.texts.get(column, ())):
            if name not in known:
                hint = near(name, known) or f"; there are: {', '.join(known)}."
                faults.add(f"{self._sheet.at(row, column)}: there is no {column} {name!r}{hint}")

    @cached_property
    def _kinds(self) -> tuple[Group, ...]:
        """The groups; those that the table names where no others are given."""
        if self.groups:
            return self.groups
        names = dict.fromkeys(self._sheet.texts.get("group", ("table",)))
        return tuple(Group(name=name, level=0) for name in names)

    @cached_property
    def _group(self) -> Ints:
        """The number of each row's group."""
        if "group" not in self._sheet.texts:
            return np.zeros(len(self._sheet), dtype=np.int64)
        numbers = {group.name: number for number, group in enumerate(self._kinds)}
        return np.array([numbers[name] for name in self._sheet.texts["group"]], dtype=np.int64)

    @property
    def _reversed(self) -> Flags:
        """Which rows have a slowest frequency above their fastest."""
        ranges = np.array([group.frequency for group in self._kinds])[self._group]
        slowest, fastest = (
            self._or(name, ranges[:, end]) for end, name in enumerate(("slowest", "fastest"))
        )
        above: Flags = slowest > fastest
        return above

    def _or(self, name: str, default: Floats) -> Floats:
        own = self._sheet.numbers.get(name)
        return default if own is None else np.where(np.isnan(own), default, own)

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self._sheet)

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of the rows, in the order of the file; none without such a column."""
        return self._sheet.texts.get("owner", ())

    def build(self, samples: Ints, seed: int, owners: Sequence[str] = ()) -> World:
        """Make the world of this table, with one device for each entry of `samples`.

        `owners` says whose data each device has; it must be there if the table names owners.
        """
        rows = self._rows(len(samples), owners)
        group = self._group[rows]
        declared = [n if g.level is None else g.level for n, g in enumerate(self._kinds)]
        level = self._or(LEVEL, np.array(declared, dtype=np.float64)[self._group])[rows]
        return World(
            groups=self._kinds,
            links=(*(each.link for each in self._kinds), *(make() for make in _LINKS.values())),
            reports=self.reports,
            declared=declare(self._kinds, group, level.astype(np.int64), samples, self.counting),
            group=group.astype(np.int32),
            link=self._link[rows].astype(np.int32),
            seed=seed,
            own={n: own[rows] for n, own in self._sheet.numbers.items() if n != LEVEL},
            dealt=self._words(owners),
        )

    @cached_property
    def _link(self) -> Ints:
        """The number of each row's link: that of its group, or one of those with a name."""
        if "link" not in self._sheet.texts:
            return self._group
        numbers = {name: len(self._kinds) + number for number, name in enumerate(_LINKS)}
        named = np.array([numbers.get(name, -1) for name in self._sheet.texts["link"]])
        return np.where(named < 0, self._group, named)

    def _rows(self, count: int, owners: Sequence[str]) -> Ints:
        """The row of each device."""
        if not self.owners:
            if count != len(self._sheet):
                raise ValueError(
                    f"Table.file {self.file} has {len(self._sheet)} rows, but the task has {count} "
                    'devices: there must be one row for each, or a column "owner".'
                )
            return np.arange(count)
        refuse(self._strangers(count, owners))
        places = {owner: row for row, owner in enumerate(self.owners)}
        return np.array([places[owner] for owner in owners], dtype=np.int64)

    def _strangers(self, count: int, owners: Sequence[str]) -> Iterator[str]:
        """What is wrong with devices whose owner has no row."""
        nobody = [device for device, owner in enumerate(owners or [""] * count) if not owner]
        if nobody:
            yield (
                f"Table.file {self.file} names owners, but these devices have not the data of one "
                f"owner: {listed(nobody)}. Use data with owners and the partition ByOwner, or "
                'leave out the column "owner".'
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

    def _words(self, owners: Sequence[str]) -> str:
        """How devices came to their rows."""
        name, rows = Path(self.file).name, len(self._sheet)
        if self.owners:
            unused = rows - len(set(self.owners) & set(owners))
            told = f"Each device has the row of its data's owner in {name}; no row is drawn."
            told += f" {unused} of {rows} rows have no device." if unused else ""
        else:
            told = f"Devices are the rows of {name}, in their order; no row is drawn."
        if not self.groups and LEVEL not in self._sheet.numbers:
            told += ' All are of level 0: there is no column "level".'
        return told
