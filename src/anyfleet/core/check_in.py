"""What devices choose from, what they know of themselves, and what they decide."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from anyfleet.arrays import Arrays, Floats, Ints
from anyfleet.core.messages import Conditions, DeviceState, Hyperparameters

if TYPE_CHECKING:
    from anyfleet.core.time_and_energy import Demand


class MessageBits(NamedTuple):
    """Bits of an order, as they are expected."""

    down: float
    up: float  # with the update as the uplink codec will send it
    update: float = 0.0  # of the update alone, uncompressed
    sent_fraction: float = 1.0  # the share of those that is sent
    follows: bool = False  # whether the codec follows the rate that an order asks for
    least_fraction: float = 0.0  # the lowest that it can follow, about
    most_fraction: float = 1.0  # the highest that it can use, about

    @property
    def aside(self) -> float:
        """Bits up that no codec makes fewer."""
        return self.up - self.sent_fraction * self.update


@dataclass(frozen=True)
class MenuEntry:
    """What an entry of a menu would cost a device."""

    demand: "Demand"  # a batch of one
    bits: MessageBits  # of the entry alone
    first_trained_layer: int = 0  # first trained layer
    alpha: float = 1.0  # AnycostFL's measure of the slice, 1 for the whole model
    menu_bits: float = 0.0  # bits down, of the menu alone
    choice_bits: float = 0.0  # bits up, of saying what was chosen

    @property
    def down(self) -> float:
        """Bits, with the whole menu."""
        return self.bits.down + self.menu_bits

    @property
    def up(self) -> float:
        """Bits, with what is said of the choice."""
        return self.bits.up + self.choice_bits

    @property
    def without_menu(self) -> "MenuEntry":
        """The same without what it costs that there is a choice."""
        return replace(self, menu_bits=0.0, choice_bits=0.0)

    @property
    def sub_model_size(self) -> tuple[float, float]:
        """Of the model: its width, and from which layer on it is trained."""
        return float(self.demand.effort.width[0]), float(self.first_trained_layer)


@dataclass(frozen=True, eq=False)
class Choices(Arrays):
    """What devices decided at check-in: an entry of the menu, and their own numbers."""

    entry: Ints  # -1 without a menu
    hyperparameters: Hyperparameters
    utility: Floats  # by which it was chosen, from 0 to 1, or not a number
    declined: tuple[str, ...]  # the reason why a device takes nothing of its menu, or ""


@dataclass(frozen=True, eq=False)
class ChoosingDevice:
    """What a device knows of itself when it chooses."""

    conditions: Conditions  # a batch of one
    samples: int
    state: DeviceState
