"""The simulated world: who the devices are, how fast they compute, how their links behave."""

from anyfleet.world.availability import Always, Diurnal, Intermittent
from anyfleet.world.column_loss import ColumnLoss
from anyfleet.world.distributions import Categorical, Disc, LogNormal, Normal, Uniform
from anyfleet.world.fleet import Fleet
from anyfleet.world.group import Group
from anyfleet.world.links import Shannon, Steady, bluetooth, lte, wifi
from anyfleet.world.presets import (
    cell,
    levels,
    lossy,
    steep,
    testbed,
    unequal_coefficient,
    unequal_distance,
)
from anyfleet.world.processes import Redrawn, Replayed, Wandering
from anyfleet.world.quantities import When
from anyfleet.world.table import Table
from anyfleet.world.world import Reports, World

__all__ = [
    "Always",
    "Categorical",
    "ColumnLoss",
    "Disc",
    "Diurnal",
    "Fleet",
    "Group",
    "Intermittent",
    "LogNormal",
    "Normal",
    "Redrawn",
    "Replayed",
    "Reports",
    "Shannon",
    "Steady",
    "Table",
    "Uniform",
    "Wandering",
    "When",
    "World",
    "bluetooth",
    "cell",
    "levels",
    "lossy",
    "lte",
    "steep",
    "testbed",
    "unequal_coefficient",
    "unequal_distance",
    "wifi",
]
