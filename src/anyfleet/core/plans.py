"""`Plans`: what each device of a cohort shall do, as a planner writes it."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.messages import Hyperparameters, SubModelSize

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Plans:
    """What each device of a cohort shall do.

    A cohort has few different sub-model sizes and few different menus. Each of them is listed
    once, and every device has the number of its own. A planner returns the plans that it was given
    with some of it changed, for example `plans.with_widths(array)`.
    """

    device: Ints  # the devices of the cohort
    sub_model_sizes: tuple[SubModelSize, ...]  # the different sizes
    size_index: Ints  # the number of each device's size
    menus: tuple[tuple[SubModelSize, ...], ...]  # the different menus
    menu_index: Ints  # the number of each device's menu; -1: none, its size is decided
    hyperparameters: Hyperparameters  # one row for each device
    declined: tuple[str, ...]  # why each device shall not be asked, or ""

    @classmethod
    def whole_model(cls, device: Ints, hyperparameters: Hyperparameters) -> "Plans":
        """Return plans in which every device trains the whole model and has no menu."""
        count = len(device)
        return cls(
            device=device,
            sub_model_sizes=(SubModelSize(),),
            size_index=np.zeros(count, dtype=np.int64),
            menus=(),
            menu_index=np.full(count, -1),
            hyperparameters=hyperparameters,
            declined=("",) * count,
        )

    def __len__(self) -> int:
        return len(self.device)

    # -- reading

    def size_of(self, row: int) -> SubModelSize:
        """Return the size that is planned for the device of a row."""
        return self.sub_model_sizes[int(self.size_index[row])]

    def menu_of(self, row: int) -> tuple[SubModelSize, ...]:
        """Return the menu of the device of a row; () if it has none."""
        number = int(self.menu_index[row])
        return self.menus[number] if number >= 0 else ()

    def options_of(self, row: int) -> tuple[SubModelSize, ...]:
        """Return all sizes that the device of a row may train: its menu, or its one size."""
        return self.menu_of(row) or (self.size_of(row),)

    def take(self, rows: Sequence[int] | Ints) -> "Plans":
        """Return the plans of the given rows, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            device=self.device[index],
            size_index=self.size_index[index],
            menu_index=self.menu_index[index],
            hyperparameters=self.hyperparameters.take(index),
            declined=tuple(self.declined[row] for row in index),
        )

    # -- writing

    def with_sizes(self, sizes: Sequence[SubModelSize], size_index: Ints | None = None) -> "Plans":
        """Return plans with other sizes; devices that have a menu keep it.

        Without `size_index` there is one size for each device.
        """
        if size_index is None:
            different, size_index = _numbered(sizes)
            return replace(self, sub_model_sizes=different, size_index=size_index)
        return replace(self, sub_model_sizes=tuple(sizes), size_index=np.asarray(size_index))

    def with_widths(self, widths: Floats | Sequence[float] | float, **changed: Any) -> "Plans":
        """Return plans in which each device has its width, or all of them the same one.

        What else a size has stays as it is, but for the fields in `changed`.
        """
        each = np.broadcast_to(np.asarray(widths, dtype=np.float64), len(self)).tolist()
        pairs = zip(self.size_index.tolist(), each, strict=True)
        different, size_index = _numbered(pairs)
        sizes = [
            replace(self.sub_model_sizes[number], width=width, **changed)
            for number, width in different
        ]
        return replace(self, sub_model_sizes=tuple(sizes), size_index=size_index)

    def with_first_trained_layers(self, layers: Ints | Sequence[int] | int) -> "Plans":
        """Return plans in which each device trains the layers from its number in `layers` on."""
        each = np.broadcast_to(np.asarray(layers, dtype=np.int64), len(self)).tolist()
        pairs = zip(self.size_index.tolist(), each, strict=True)
        different, size_index = _numbered(pairs)
        sizes = [
            replace(self.sub_model_sizes[number], first_trained_layer=layer)
            for number, layer in different
        ]
        return replace(self, sub_model_sizes=tuple(sizes), size_index=size_index)

    def with_menu(self, entries: Sequence[SubModelSize]) -> "Plans":
        """Return plans in which every device chooses from the same entries."""
        return self.with_menus([entries], np.zeros(len(self), dtype=np.int64))

    def with_menus(self, menus: Sequence[Sequence[SubModelSize]], menu_index: Ints) -> "Plans":
        """Return plans in which each device chooses from the menu of its number; -1: from none."""
        return replace(
            self, menus=tuple(map(tuple, menus)), menu_index=np.asarray(menu_index, dtype=np.int64)
        )

    def without_menus(self) -> "Plans":
        """Return plans in which no device chooses: each trains the size that is planned for it."""
        return self.with_menus((), np.full(len(self), -1))

    def with_hyperparameters(self, **changed: Any) -> "Plans":
        """Return plans with other hyperparameters: an array each, or one number for all devices."""
        return replace(self, hyperparameters=self.hyperparameters.changed(**changed))

    def declining(self, which: Flags | Sequence[bool], reason: str) -> "Plans":
        """Return plans in which some devices are not asked.

        Devices already declined keep their reason.
        """
        pairs = zip(self.declined, which, strict=True)
        told = tuple(before or (reason if now else "") for before, now in pairs)
        return replace(self, declined=told)


def _numbered(items: Iterable[Item]) -> tuple[tuple[Item, ...], Ints]:
    """Return the different items in order of appearance, and the number of each one given."""
    numbers: dict[Item, int] = {}
    index = [numbers.setdefault(item, len(numbers)) for item in items]
    return tuple(numbers), np.array(index, dtype=np.int64)
