"""Sizes by declared level."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from anyfleet.core.messages import Plans, SubModelSize
from anyfleet.core.slots import Plan, State
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint
from anyfleet.elastic.blueprint import Rounding
from anyfleet.papers import HETEROFL, Paper


def check_widths(owner: str, shares: tuple[float, ...]) -> None:
    """Refuse shares of a model that do not lie in (0, 1]."""
    if not shares:
        raise ValueError(
            f"{owner}.widths must name at least one width. For the whole model use WholeModel()."
        )
    for position, share in enumerate(shares):
        if not 0 < share <= 1:
            raise ValueError(
                f"{owner}.widths must lie in (0, 1], got {share} at position {position}. "
                "For the whole model use WholeModel()."
            )


def check_descent(owner: str, shares: tuple[float, ...]) -> None:
    """Refuse shares by level that do not go downwards."""
    down = tuple(sorted(shares, reverse=True))
    if tuple(shares) != down:
        raise ValueError(
            f"{owner}.widths must go downwards, since level 0 is the strongest; got {shares}. "
            f"Write {down}."
        )


def menu_of(entries: int) -> frozenset[str]:
    """What a plan gives that offers so many sizes: choosers may need as many."""
    return frozenset({"menu", f"menu of {entries}"})


@dataclass(frozen=True)
class WholeModel(Plan):
    """Everybody trains the whole model."""

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        return plans


@dataclass(frozen=True)
class WidthByLevel(Plan):
    """A device of level `p` trains the `p`-th share of each hidden layer; beyond, the last.

    With `layers="linear"` only fully connected hidden layers are cut and convolutions stay complete
    (FedDrop on the CNNs of specification §1.4).
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    layers: Literal["all", "linear"] = "all"

    papers: ClassVar[tuple[Paper, ...]] = (HETEROFL,)

    def __post_init__(self) -> None:
        check_widths("WidthByLevel", self.widths)
        check_descent("WidthByLevel", self.widths)
        if self.layers not in ("all", "linear"):
            raise ValueError(f'WidthByLevel.layers must be "all" or "linear", got {self.layers!r}.')

    def init(self, view: View) -> State:
        cut = set(view.blueprint.counts(1.0))
        if self.layers == "linear" and cut == convolved(view.blueprint):
            raise ValueError(
                'WidthByLevel.layers="linear" leaves nothing to cut: this model has no fully '
                'connected hidden layer. Use "all".'
            )
        return None

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        levels = view.devices.level[plans.device]
        shares = [self.widths[min(level, len(self.widths) - 1)] for level in levels]
        complete = convolved(view.blueprint) if self.layers == "linear" else ()
        ratios = tuple((axis, 1.0) for axis in sorted(complete))
        wants = (
            replace(want, width=share, axis_widths=ratios)
            for want, share in zip(plans.sub_model_sizes, shares, strict=True)
        )
        return replace(plans, sub_model_sizes=tuple(wants))


def convolved(blueprint: Blueprint) -> frozenset[str]:
    """The axes, among those that a share cuts, that hold channels of some convolution."""
    found = {
        axis
        for node in blueprint.program.nodes
        if node.op.startswith("aten.conv")
        for dim in node.dims or ()
        for product in dim
        for axis in product
    }
    return frozenset(found & set(blueprint.counts(1.0)))


@dataclass(frozen=True)
class WidthMenu(Plan):
    """Offers several sizes; the method's `choose` decides on the device.

    `capped`: nobody is offered more than the share of its level, counted as `WidthByLevel` does.
    Channels that a share does not divide are rounded up, or to the nearest number ("round").
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    capped: bool = False
    rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        check_widths("WidthMenu", self.widths)
        check_descent("WidthMenu", self.widths)
        if self.rounding not in ("ceil", "round"):
            raise ValueError(
                f'WidthMenu.rounding must be "ceil" or "round", got {self.rounding!r}.'
            )

    @property
    def provides(self) -> frozenset[str]:
        return menu_of(len(self.widths))

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        levels = view.devices.level[plans.device] if self.capped else np.zeros(len(plans), int)
        starts = np.minimum(levels, len(self.widths) - 1).tolist()
        menus = (
            tuple(
                SubModelSize(width=share, rounding=self.rounding, device=device)
                for share in self.widths[start:]
            )
            for device, start in zip(plans.device.tolist(), starts, strict=True)
        )
        return replace(plans, menus=tuple(menus))
