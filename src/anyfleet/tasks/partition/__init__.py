"""Partitions: which rows of the data each device has. All have one signature (`Partition`)."""

from anyfleet.tasks.partition.by_class import (
    BalancedClasses,
    Case1,
    Case2,
    ClassCounts,
    Dirichlet,
    Mixed,
    SigmaRho,
    TwoClassDisjoint,
    XClass,
)
from anyfleet.tasks.partition.by_owner import ByOwner, Domains
from anyfleet.tasks.partition.by_size import (
    Contiguous,
    DirichletSizes,
    Given,
    Iid,
    LogNormalSizes,
)
from anyfleet.tasks.partition.common import DeviceRows, IntArray, Partition

__all__ = [
    "BalancedClasses",
    "ByOwner",
    "Case1",
    "Case2",
    "ClassCounts",
    "Contiguous",
    "DeviceRows",
    "Dirichlet",
    "DirichletSizes",
    "Domains",
    "Given",
    "Iid",
    "IntArray",
    "LogNormalSizes",
    "Mixed",
    "Partition",
    "SigmaRho",
    "TwoClassDisjoint",
    "XClass",
]
