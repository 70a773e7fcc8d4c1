"""Partitions by natural owner: a person, a speaker, a domain."""

from dataclasses import dataclass

import numpy as np

from anyfleet.arguments import checked
from anyfleet.tasks.partition.dealing import (
    IntArray,
    Shares,
    at_least,
    check_devices,
    deal,
    even_sizes,
    within,
)


@checked
@dataclass(frozen=True)
class ByOwner:
    """One device per natural owner (HAR subjects, Shakespeare speakers).

    Owners with fewer than `minimum` samples are left out. If more owners remain than devices are
    wanted, the key draws some of them; device order follows owner order.
    """

    minimum: int = 1

    def __post_init__(self) -> None:
        at_least("ByOwner.minimum", self.minimum, 1)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        check_devices(devices, "ByOwner")
        groups = [g for g in _groups(owners, part="ByOwner") if len(g) >= self.minimum]
        if devices > len(groups):
            raise ValueError(
                f"ByOwner: {devices} devices wanted, but only {len(groups)} owners have at least "
                f"{self.minimum} sample(s). Use fewer devices or a smaller minimum."
            )
        chosen = np.random.default_rng(key).choice(len(groups), devices, replace=False)
        return tuple(groups[index] for index in np.sort(chosen))


@checked
@dataclass(frozen=True)
class Domains:
    """DigitsFive (S2): owners are domains; `users` devices divide a `share` of each evenly.

    Labels are iid inside a domain; devices of one domain are neighbours.
    """

    users: int = 2
    share: float = 0.05

    def __post_init__(self) -> None:
        at_least("Domains.users", self.users, 1)
        within("Domains.share", self.share)

    def __call__(
        self, labels: IntArray, devices: int, *, key: int, owners: IntArray | None = None
    ) -> Shares:
        groups = _groups(owners, part="Domains")
        if devices != self.users * len(groups):
            raise ValueError(
                f"Domains: {len(groups)} domains with {self.users} users each make "
                f"{self.users * len(groups)} devices, but {devices} are wanted."
            )
        rng = np.random.default_rng(key)
        shares: Shares = ()
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
