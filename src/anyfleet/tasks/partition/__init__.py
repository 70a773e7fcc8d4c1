"""Data partitions of specification §B as parts with one signature (`Partition`)."""

from anyfleet.tasks.partition.dealing import IntArray, Partition, Shares
from anyfleet.tasks.partition.disjoint import BalancedClasses, Dirichlet, TwoClassDisjoint
from anyfleet.tasks.partition.mixtures import Case1, Case2, ClassCounts, Mixed, SigmaRho, XClass
from anyfleet.tasks.partition.natural import ByOwner, Domains
from anyfleet.tasks.partition.sizes import Contiguous, DirichletSizes, Given, Iid, LogNormalSizes

__all__ = [
    "BalancedClasses",
    "ByOwner",
    "Case1",
    "Case2",
    "ClassCounts",
    "Contiguous",
    "Dirichlet",
    "DirichletSizes",
    "Domains",
    "Given",
    "Iid",
    "IntArray",
    "LogNormalSizes",
    "Mixed",
    "Partition",
    "Shares",
    "SigmaRho",
    "TwoClassDisjoint",
    "XClass",
]
