"""Sizes by declared level."""

from dataclasses import dataclass, replace

from torch import Tensor

from anyfleet.method import Policy, State
from anyfleet.types import Plans, Want
from anyfleet.view import View


def check_shares(owner: str, shares: tuple[float, ...]) -> None:
    """Shares of a model lie in (0, 1]."""
    if not shares:
        raise ValueError(
            f"{owner}.shares must name at least one share. For the whole model use Whole()."
        )
    for position, share in enumerate(shares):
        if not 0 < share <= 1:
            raise ValueError(
                f"{owner}.shares must lie in (0, 1], got {share} at position {position}. "
                "For the whole model use Whole()."
            )


@dataclass(frozen=True)
class Whole(Policy):
    """Everybody trains the whole model."""

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        return drafts


@dataclass(frozen=True)
class FixedLevel(Policy):
    """A device of level `p` trains the `p`-th share of each hidden layer; beyond, the last."""

    shares: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

    def __post_init__(self) -> None:
        check_shares("FixedLevel", self.shares)

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        levels = view.devices.level[drafts.device]
        shares = [self.shares[min(level, len(self.shares) - 1)] for level in levels]
        wants = (
            replace(want, share=share) for want, share in zip(drafts.wants, shares, strict=True)
        )
        return replace(drafts, wants=tuple(wants))


@dataclass(frozen=True)
class Menu(Policy):
    """Offers several sizes; the method's `choose` decides on the device."""

    shares: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

    def __post_init__(self) -> None:
        check_shares("Menu", self.shares)

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        menus = (
            tuple(Want(share=share, device=int(device)) for share in self.shares)
            for device in drafts.device
        )
        return replace(drafts, menus=tuple(menus))
