"""Depths: how many of the last layers a device trains (specification §1.3)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from anyfleet.core.messages import Plans
from anyfleet.core.slots import Plan, State
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint
from anyfleet.elastic.program import held_names
from anyfleet.papers import FEDPMT, Paper
from anyfleet.parts.plan.widths import menu_of


@dataclass(frozen=True)
class TrainedLayersByLevel(Plan):
    """A device of level `p` runs the whole model and trains its last layers only.

    With `widths` = I there are I depths: of L layers the strongest level trains all, the next all
    but one, and so on down to L - I + 1; without it there is a depth for every layer. Or `trained`
    says how many of the last layers each level trains, strongest first. A level beyond the last
    depth has the last; a model with fewer layers has fewer depths.
    """

    depths: int | None = None
    trained_layers: tuple[int, ...] = ()

    papers: ClassVar[tuple[Paper, ...]] = (FEDPMT,)

    def __post_init__(self) -> None:
        check_depths("TrainedLayersByLevel", self.depths, self.trained_layers)

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        firsts = depths(view.blueprint, self.depths, self.trained_layers)
        levels = view.devices.level[plans.device].tolist()
        wants = (
            replace(want, first_trained_layer=firsts[min(level, len(firsts) - 1)])
            for want, level in zip(plans.sub_model_sizes, levels, strict=True)
        )
        return replace(plans, sub_model_sizes=tuple(wants))


@dataclass(frozen=True)
class TrainedLayersMenu(Plan):
    """Offers all depths, as in `TrainedLayersByLevel`; the method's `choose` decides on the device.

    The choice that a device reports is the place in this menu: 0 trains everything.
    """

    depths: int | None = None
    trained_layers: tuple[int, ...] = ()

    papers: ClassVar[tuple[Paper, ...]] = (FEDPMT,)

    def __post_init__(self) -> None:
        check_depths("TrainedLayersMenu", self.depths, self.trained_layers)

    @property
    def provides(self) -> frozenset[str]:
        entries = self.depths or len(set(self.trained_layers))
        # As many as the model has layers: how many is not known yet.
        return menu_of(entries) if entries else frozenset({"menu"})

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        firsts = sorted(set(depths(view.blueprint, self.depths, self.trained_layers)))
        menus = (
            tuple(replace(want, first_trained_layer=first) for first in firsts)
            for want in plans.sub_model_sizes
        )
        return replace(plans, menus=tuple(menus))


def check_depths(owner: str, widths: int | None, trained: tuple[int, ...]) -> None:
    """Depths are counted from 1, and given in one way only."""
    if widths is not None and trained:
        raise ValueError(
            f"{owner} takes depths or trained_layers, got depths={widths} and trained_layers={trained}."
        )
    if widths is not None and widths < 1:
        raise ValueError(
            f"{owner}.depths must be at least 1, got {widths}. "
            "Leave it out for a depth for every layer."
        )
    for position, count in enumerate(trained):
        if count < 1:
            raise ValueError(
                f"{owner}.trained_layers must be at least 1 each, got {count} at position {position}."
            )


def depths(
    blueprint: Blueprint, widths: int | None = None, trained: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The first trained layer of every depth, strongest first, as `TrainedLayersByLevel` counts them."""
    layers = learning(blueprint)
    most = len(layers)
    counts = trained or range(most, most - min(widths or most, most), -1)
    # What trains everything is the whole model, whatever stands before its first learning layer.
    return tuple(0 if count >= most else layers[most - count] for count in counts) or (0,)


@lru_cache(maxsize=256)
def learning(blueprint: Blueprint) -> tuple[int, ...]:
    """The layers with something to train; what is frozen or never used does not count."""
    used = {n for node in blueprint.program.nodes for n in held_names(node.arguments)}
    moving = used - set(blueprint.frozen)
    return tuple(n for n, layer in enumerate(blueprint.layers) if moving & set(layer.params))
