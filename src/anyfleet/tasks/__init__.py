"""Data, partitions, networks: what a federation learns.

`Embedded`, `Mnist` … describe a task and build it from a seed; `Task.of` makes one from a user's
own module and data. The networks are in `anyfleet.tasks.zoo`.
"""

from anyfleet.tasks.augment import Augment, Flip, InTurn, Shift
from anyfleet.tasks.data import Data
from anyfleet.tasks.losses import absolute_error, accuracy, cross_entropy, squared_error
from anyfleet.tasks.own import Own
from anyfleet.tasks.partition import (
    BalancedClasses,
    ByOwner,
    Case1,
    Case2,
    ClassCounts,
    Contiguous,
    Dirichlet,
    DirichletSizes,
    Domains,
    Given,
    Iid,
    LogNormalSizes,
    Mixed,
    Partition,
    SigmaRho,
    TwoClassDisjoint,
    XClass,
)
from anyfleet.tasks.specs import (
    Cifar10,
    DigitsFive,
    Embedded,
    FashionMnist,
    Har,
    Mnist,
    Pooled,
    Shakespeare,
    Synthetic,
    TaskSpec,
)
from anyfleet.tasks.split import Split
from anyfleet.tasks.synthetic import Generator
from anyfleet.tasks.task import Task, pooled

__all__ = [
    "Augment",
    "BalancedClasses",
    "ByOwner",
    "Case1",
    "Case2",
    "Cifar10",
    "ClassCounts",
    "Contiguous",
    "Data",
    "DigitsFive",
    "Dirichlet",
    "DirichletSizes",
    "Domains",
    "Embedded",
    "FashionMnist",
    "Flip",
    "Generator",
    "Given",
    "Har",
    "Iid",
    "InTurn",
    "LogNormalSizes",
    "Mixed",
    "Mnist",
    "Own",
    "Partition",
    "Pooled",
    "Shakespeare",
    "Shift",
    "SigmaRho",
    "Split",
    "Synthetic",
    "Task",
    "TaskSpec",
    "TwoClassDisjoint",
    "XClass",
    "absolute_error",
    "accuracy",
    "cross_entropy",
    "pooled",
    "squared_error",
]
