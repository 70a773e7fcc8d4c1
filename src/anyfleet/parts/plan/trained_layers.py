"""How many of the last layers a device trains (FedPMT, specification §1.3)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.core.plans import Plans
from anyfleet.core.signals import Menu, Signal
from anyfleet.core.slots import Plan, State
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint
from anyfleet.elastic.program import held_names
from anyfleet.papers import FEDPMT, Paper


@dataclass(frozen=True)
class TrainedLayersByLevel(Plan):
    """The number of trained layers of each level: all devices run the whole model.

    With `depths` = I there are I depths: of L layers the strongest level trains all, the next all
    but one, and so on down to L - I + 1. Without it there is a depth for every layer. Or
    `trained_layers` says how many of the last layers each level trains, strongest first. A level
    beyond the last depth has the last; a model with fewer layers has fewer depths.
    """

    depths: int | None = None
    trained_layers: tuple[int, ...] = ()

    papers: ClassVar[tuple[Paper, ...]] = (FEDPMT,)

    def __post_init__(self) -> None:
        check_depths("TrainedLayersByLevel", self.depths, self.trained_layers)

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        firsts = first_trained_layers(view.blueprint, self.depths, self.trained_layers)
        level = np.minimum(view.devices.level[plans.device], len(firsts) - 1)
        return plans.with_first_trained_layers(np.array(firsts)[level])


@dataclass(frozen=True)
class TrainedLayersMenu(Plan):
    """A menu of depths, as in `TrainedLayersByLevel`; the method's `choose` decides on the device.

    The choice that a device reports is the place in this menu: 0 trains everything.
    """

    depths: int | None = None
    trained_layers: tuple[int, ...] = ()

    papers: ClassVar[tuple[Paper, ...]] = (FEDPMT,)

    def __post_init__(self) -> None:
        check_depths("TrainedLayersMenu", self.depths, self.trained_layers)

    @property
    def provides(self) -> frozenset[Signal]:
        # Without a number there are as many as the model has layers, which is not known yet.
        return frozenset({Menu(self.depths or len(set(self.trained_layers)) or None)})

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        firsts = sorted(set(first_trained_layers(view.blueprint, self.depths, self.trained_layers)))
        menus = [
            [replace(size, first_trained_layer=first) for first in firsts]
            for size in plans.sub_model_sizes
        ]
        return plans.with_menus(menus, plans.size_index)


def check_depths(owner: str, depths: int | None, trained_layers: tuple[int, ...]) -> None:
    """Raise ValueError unless depths are given in one way only, and are counted from 1."""
    if depths is not None and trained_layers:
        raise ValueError(
            f"{owner} takes depths or trained_layers, got depths={depths} and "
            f"trained_layers={trained_layers}."
        )
    if depths is not None and depths < 1:
        raise ValueError(
            f"{owner}.depths must be at least 1, got {depths}. "
            "Leave it out for a depth for every layer."
        )
    for position, count in enumerate(trained_layers):
        if count < 1:
            raise ValueError(
                f"{owner}.trained_layers must be at least 1 each, got {count} at position "
                f"{position}."
            )


def first_trained_layers(
    blueprint: Blueprint, depths: int | None = None, trained_layers: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the first trained layer of every depth, as `TrainedLayersByLevel` counts them."""
    layers = trainable_layers(blueprint)
    most = len(layers)
    counts = trained_layers or range(most, most - min(depths or most, most), -1)
    # What trains everything is the whole model, whatever stands before its first learning layer.
    return tuple(0 if count >= most else layers[most - count] for count in counts) or (0,)


@lru_cache(maxsize=256)
def trainable_layers(blueprint: Blueprint) -> tuple[int, ...]:
    """Return the layers with something to train; what is frozen or never used does not count."""
    used = {n for node in blueprint.program.nodes for n in held_names(node.arguments)}
    moving = used - set(blueprint.frozen)
    return tuple(n for n, layer in enumerate(blueprint.layers) if moving & set(layer.params))
