"""Widths by declared level, and menus of widths."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from anyfleet.core.messages import SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.signals import Menu, Signal
from anyfleet.core.slots import Plan, State
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint
from anyfleet.elastic.blueprint import Rounding
from anyfleet.papers import HETEROFL, Paper


def check_widths(owner: str, widths: tuple[float, ...]) -> None:
    """Raise ValueError unless there are widths and all of them lie in (0, 1]."""
    if not widths:
        raise ValueError(
            f"{owner}.widths must name at least one width. For the whole model use WholeModel()."
        )
    for position, width in enumerate(widths):
        if not 0 < width <= 1:
            raise ValueError(
                f"{owner}.widths must lie in (0, 1], got {width} at position {position}. "
                "For the whole model use WholeModel()."
            )


def check_descent(owner: str, widths: tuple[float, ...]) -> None:
    """Raise ValueError unless the widths go downwards."""
    down = tuple(sorted(widths, reverse=True))
    if tuple(widths) != down:
        raise ValueError(
            f"{owner}.widths must go downwards, since level 0 is the strongest; got {widths}. "
            f"Write {down}."
        )


@dataclass(frozen=True)
class WholeModel(Plan):
    """The whole model, for every device."""

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        return plans


@dataclass(frozen=True)
class WidthByLevel(Plan):
    """The width of each level, strongest first; levels beyond the end have the last one.

    With `layers="linear"` only fully connected hidden layers are cut, and convolutions stay
    complete (FedDrop on the CNNs of specification §1.4).
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of each level
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
        level = np.minimum(view.devices.level[plans.device], len(self.widths) - 1)
        complete = convolved(view.blueprint) if self.layers == "linear" else ()
        axis_widths = tuple((axis, 1.0) for axis in sorted(complete))
        return plans.with_widths(np.array(self.widths)[level], axis_widths=axis_widths)


def convolved(blueprint: Blueprint) -> frozenset[str]:
    """Return the axes, among those that a width cuts, that hold channels of some convolution."""
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
    """A menu of widths, from which the method's `choose` decides on the device.

    With `capped`, no device is offered more than the width of its level, counted as `WidthByLevel`
    does. Channels that a width does not divide are rounded up, or to the nearest number ("round").
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # largest first
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
    def provides(self) -> frozenset[Signal]:
        return frozenset({Menu(len(self.widths))})

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        sizes = [SubModelSize(width=width, rounding=self.rounding) for width in self.widths]
        if not self.capped:
            return plans.with_menu(sizes)
        level = np.minimum(view.devices.level[plans.device], len(sizes) - 1)
        return plans.with_menus([sizes[first:] for first in range(len(sizes))], level)
