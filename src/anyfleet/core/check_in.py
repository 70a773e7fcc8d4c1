"""Check-in: what devices choose from, what they know of themselves, and what they decide.

`CheckIns` is many devices, `CheckIn` one of them; `MenuEntry` is one entry of a menu, `Choices` is
what the devices decide.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints, join
from anyfleet.core.messages import ChooserState, Conditions, Hyperparameters
from anyfleet.core.time_and_energy import Demand, Effort, transfer_seconds


class MessageBits(NamedTuple):
    """The expected bits of the messages of one order."""

    down: float
    up: float  # with the update as the uplink codec will send it
    update: float = 0.0  # of the update alone, uncompressed
    sent_fraction: float = 1.0  # of the update, as the codec will send it
    follows: bool = False  # whether the codec follows the sent fraction that an order asks for
    least_fraction: float = 0.0  # the lowest sent fraction that it can follow, about
    most_fraction: float = 1.0  # the highest sent fraction that it can use, about

    @property
    def aside(self) -> float:
        """The bits up beside the update, which no codec makes fewer."""
        return self.up - self.sent_fraction * self.update


@dataclass(frozen=True)
class MenuEntry:
    """One entry of a menu: what it would cost a device."""

    demand: Demand  # a batch of one
    bits: MessageBits  # of the entry alone
    first_trained_layer: int = 0
    channel_share: float = 1.0  # of all channels of the model
    trained_share: float = 1.0  # of the parameters of the sub-model
    menu_bits: float = 0.0  # bits down for the whole menu
    choice_bits: float = 0.0  # bits up to say what was chosen

    @property
    def bits_down(self) -> float:
        """The bits down, with those of the whole menu."""
        return self.bits.down + self.menu_bits

    @property
    def bits_up(self) -> float:
        """The bits up, with those that say what was chosen."""
        return self.bits.up + self.choice_bits

    @property
    def width(self) -> float:
        """The width of the sub-model."""
        return float(self.demand.effort.width[0])

    @property
    def sub_model_size(self) -> tuple[float, float]:
        """The width of the sub-model, and its first trained layer."""
        return self.width, float(self.first_trained_layer)

    @property
    def without_menu(self) -> "MenuEntry":
        """The same entry without the bits that a choice costs."""
        return replace(self, menu_bits=0.0, choice_bits=0.0)


@dataclass(frozen=True, eq=False)
class Choices(Arrays):
    """What devices decide at check-in, one row for each device.

    `CheckIns.choices` makes them.
    """

    entry: Ints  # the place in the device's menu; -1 without a menu
    hyperparameters: Hyperparameters  # what the device trains with
    utility: Floats  # by which it chose, from 0 to 1; NaN: it chose otherwise
    declined: tuple[str, ...]  # why a device takes nothing of its menu, or ""


@dataclass(frozen=True, eq=False)
class OrderChoices(Arrays):
    """What devices chose from the menus of orders that they were offered."""

    order: Ints
    choices: Choices


@dataclass(frozen=True, eq=False)
class CheckIn:
    """One device that checks in: its menu, and what it knows of itself."""

    device: int
    menu: tuple[MenuEntry, ...]  # largest first, as the plan offers it; never empty
    conditions: Conditions  # a batch of one
    samples: int
    hyperparameters: Hyperparameters  # a batch of one
    state: ChooserState  # what its chooser has learned

    def seconds(self, entry: MenuEntry) -> float:
        """Return the seconds of download, training and upload, as the device estimates them."""
        own = self.conditions
        compute = entry.demand.effort.seconds(own, self.hyperparameters.frequency)
        transfer = transfer_seconds(entry.bits_down, own.bit_rate_down) + transfer_seconds(
            entry.bits_up, own.bit_rate_up
        )
        return float((compute + transfer)[0])


@dataclass(frozen=True, eq=False)
class CheckIns:
    """The devices that check in together, each with its menu.

    What belongs to a device is an array [devices]. What belongs to the entries of the menus is an
    array [entries, devices], so that the two can be combined: `bits_up / conditions.bit_rate_up`.
    Menus may have different lengths. Where a device has no such entry, `offered` is False, costs
    are infinite and shares are 0.

    A chooser that looks at one device at a time iterates: `for check_in in check_ins`.
    """

    device: Ints
    entries: tuple[MenuEntry, ...]  # the different entries of all menus
    entry_index: Ints  # [entries, devices]: the number of each menu's entries; -1: none
    conditions: Conditions
    samples: Ints
    hyperparameters: Hyperparameters
    states: tuple[ChooserState, ...]  # what each device's chooser has learned

    @classmethod
    def of(cls, check_ins: Sequence[CheckIn]) -> "CheckIns":
        """Return single check-ins, at least one, as one value."""
        entries, index = listed_entries([each.menu for each in check_ins])
        return cls(
            device=np.array([each.device for each in check_ins], dtype=np.int64),
            entries=entries,
            entry_index=index,
            conditions=join([each.conditions for each in check_ins]),
            samples=np.array([each.samples for each in check_ins], dtype=np.int64),
            hyperparameters=join([each.hyperparameters for each in check_ins]),
            states=tuple(each.state for each in check_ins),
        )

    def __len__(self) -> int:
        return len(self.device)

    def __iter__(self) -> Iterator[CheckIn]:
        conditions, hyperparameters = self.conditions.rows(), self.hyperparameters.rows()
        for row, device in enumerate(self.device.tolist()):
            numbers = self.entry_index[:, row]
            yield CheckIn(
                device=device,
                menu=tuple(self.entries[number] for number in numbers[numbers >= 0]),
                conditions=conditions[row],
                samples=int(self.samples[row]),
                hyperparameters=hyperparameters[row],
                state=self.states[row],
            )

    # -- the entries, as arrays [entries, devices]

    @cached_property
    def offered(self) -> Flags:
        """Which entries there are."""
        there: Flags = self.entry_index >= 0
        return there

    @cached_property
    def bits_down(self) -> Floats:
        """The bits down, with those of the whole menu."""
        return self.array(lambda entry: entry.bits_down)

    @cached_property
    def bits_up(self) -> Floats:
        """The bits up as the uplink codec sends by itself, with those that say what was chosen."""
        return self.array(lambda entry: entry.bits_up)

    @cached_property
    def memory(self) -> Floats:
        """The bytes that training takes at its peak."""
        return self.array(lambda entry: float(entry.demand.memory[0]))

    @cached_property
    def flops(self) -> Floats:
        """The FLOP of training."""
        return self.array(lambda entry: float(entry.demand.effort.flops[0]))

    @cached_property
    def width(self) -> Floats:
        """The width of the sub-model."""
        return self.array(lambda entry: entry.width, missing=0.0)

    @cached_property
    def first_trained_layer(self) -> Ints:
        """The first layer that is trained; -1 where there is no entry."""
        found = self.array(lambda entry: entry.first_trained_layer, missing=-1.0)
        return found.astype(np.int64)

    @cached_property
    def channel_share(self) -> Floats:
        """The share of all channels of the model that the sub-model has."""
        return self.array(lambda entry: entry.channel_share, missing=0.0)

    @cached_property
    def trained_share(self) -> Floats:
        """The share of the sub-model's parameters that is trained."""
        return self.array(lambda entry: entry.trained_share, missing=0.0)

    @cached_property
    def download_seconds(self) -> Floats:
        """The seconds of the download."""
        return self.placed(
            transfer_seconds(self.bits_down[self.pairs], self.pair_conditions.bit_rate_down)
        )

    @cached_property
    def compute_seconds(self) -> Floats:
        """The seconds of training, at the frequency of the device's hyperparameters."""
        frequency = self.hyperparameters.frequency[self.pairs[1]]
        return self.placed(self.pair_effort.seconds(self.pair_conditions, frequency))

    @cached_property
    def upload_seconds(self) -> Floats:
        """The seconds of the upload."""
        return self.placed(
            transfer_seconds(self.bits_up[self.pairs], self.pair_conditions.bit_rate_up)
        )

    @cached_property
    def seconds(self) -> Floats:
        """The seconds of download, training and upload."""
        return self.compute_seconds + (self.download_seconds + self.upload_seconds)

    def seconds_without_menus(self, places: Ints, rows: Ints) -> Floats:
        """Return the seconds of one entry for each of these devices, were it ordered alone.

        `places` are those of the entries in the menus of the devices at `rows`.
        """
        numbers, own = self.entry_index[places, rows], self.conditions.take(rows)
        down, up = (
            np.array([getattr(entry.bits, name) for entry in self.entries])[numbers]
            for name in ("down", "up")
        )
        effort = join([entry.demand.effort for entry in self.entries]).take(numbers)
        transfer = transfer_seconds(down, own.bit_rate_down) + transfer_seconds(up, own.bit_rate_up)
        return effort.seconds(own, self.hyperparameters.frequency[rows]) + transfer

    def array(self, fact: Callable[[MenuEntry], float], missing: float = np.inf) -> Floats:
        """Return a fact of every entry as an array [entries, devices]."""
        facts = np.array([fact(entry) for entry in self.entries], dtype=np.float64)
        found: Floats = np.where(self.offered, facts[self.entry_index], missing)
        return found

    # -- the entries that there are, one after the other, device by device

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """The entry and the device of every entry that is offered: two arrays [pairs]."""
        device, entry = np.nonzero(self.offered.T)
        return entry, device

    @cached_property
    def pair_conditions(self) -> Conditions:
        """The conditions of the device of every pair."""
        return self.conditions.take(self.pairs[1])

    @cached_property
    def pair_effort(self) -> Effort:
        """The computing effort of every pair."""
        return join([entry.demand.effort for entry in self.entries]).take(
            self.entry_index[self.pairs]
        )

    def pair_array(self, fact: Callable[[MenuEntry], float]) -> Floats:
        """Return a fact of every entry that is offered, as an array [pairs]."""
        facts = np.array([fact(entry) for entry in self.entries], dtype=np.float64)
        found: Floats = facts[self.entry_index[self.pairs]]
        return found

    def placed(self, values: Floats, missing: float = np.inf) -> Floats:
        """Return an array [pairs] as an array [entries, devices]."""
        found = np.full(self.entry_index.shape, missing)
        found[self.pairs] = values
        return found

    # -- deciding

    def choices(
        self,
        entry: Ints | Sequence[int],
        *,
        utility: Floats | Sequence[float] | None = None,
        declined: Sequence[str] | None = None,
        **hyperparameters: Any,
    ) -> Choices:
        """Return the choices of these devices: for each the place in its menu.

        Devices may decline, each with a reason ("" if it does not), and may set hyperparameters of
        their own (`sent_fraction`, `frequency`, …).
        """
        count = len(self)
        told = np.full(count, np.nan) if utility is None else np.asarray(utility, dtype=np.float64)
        return Choices(
            entry=np.asarray(entry, dtype=np.int64),
            hyperparameters=self.hyperparameters.changed(**hyperparameters),
            utility=told,
            declined=("",) * count if declined is None else tuple(declined),
        )


def listed_entries(
    menus: Sequence[tuple[MenuEntry, ...]],
) -> tuple[tuple[MenuEntry, ...], Ints]:
    """Return the different entries of menus, and their numbers [entries, menus]; -1: none."""
    numbers: dict[int, int] = {}
    entries: list[MenuEntry] = []
    index = np.full((max(map(len, menus)), len(menus)), -1)
    for column, menu in enumerate(menus):
        for row, entry in enumerate(menu):
            if id(entry) not in numbers:
                numbers[id(entry)] = len(entries)
                entries.append(entry)
            index[row, column] = numbers[id(entry)]
    return tuple(entries), index
