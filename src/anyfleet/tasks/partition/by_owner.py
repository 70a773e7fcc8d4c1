"""Partitions by the natural owner of the data: a person, a speaker, a domain."""

from dataclasses import dataclass

import numpy as np

from anyfleet.arguments import checked
from anyfleet.tasks.partition.common import (
    DeviceRows,
    IntArray,
    at_least,
    check_devices,
    deal,
    even_sizes,
    within,
)


@checked
@dataclass(frozen=True)
class ByOwner:
    """One device per natural owner (people in HAR, speakers in Shakespeare).

    Owners with fewer than `minimum` samples are left out. If more owners remain than there are
    devices, the key draws some of them; devices are in the order of their owners.
    """

    minimum: int = 1

    def __post_init__(self) -> None:
        at_least("ByOwner.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        check_devices(devices, "ByOwner")
        groups = [g for g in _groups(owners, part="ByOwner") if len(g) >= self.minimum]
        if devices > len(groups):
            raise ValueError(
                f"ByOwner: the task has {devices} devices, but only {len(groups)} owners have at "
                f"least {self.minimum} sample(s). Use fewer devices or a smaller minimum."
            )
        chosen = np.random.default_rng(key).choice(len(groups), devices, replace=False)
        return tuple(groups[index] for index in np.sort(chosen))


@checked
@dataclass(frozen=True)
class Domains:
    """FedResCuE's DigitsFive: owners are domains; `users` devices divide a `share` of each evenly.

    Labels are i.i.d. within a domain. Devices of one domain follow each other.
    """

    users: int = 2
    share: float = 0.05

    def __post_init__(self) -> None:
        at_least("Domains.users", self.users, 1)
        within("Domains.share", self.share)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> DeviceRows:
        groups = _groups(owners, part="Domains")
        if devices != self.users * len(groups):
            raise ValueError(
                f"Domains: {len(groups)} domains with {self.users} users each make "
                f"{self.users * len(groups)} devices, but the task has {devices}."
            )
        rng = np.random.default_rng(key)
        shares: DeviceRows = ()
        for group in groups:
            total = int(self.share * len(group) + 1e-9)
            if total < self.users:
                raise ValueError(
                    f"Domains: a share of {self.share} of {len(group)} samples is too little for "
                    f"{self.users} users. Raise the share."
                )
            shares += deal(rng, group, even_sizes(total, self.users), part="Domains")
        return shares


def _groups(owners: IntArray | None, *, part: str) -> list[IntArray]:
    if owners is None:
        raise ValueError(f"{part} needs data with natural owners. Use Iid or a partition by class.")
    order = np.argsort(owners, kind="stable")
    starts = np.unique(owners[order], return_index=True)[1]
    return np.split(order, starts[1:])
