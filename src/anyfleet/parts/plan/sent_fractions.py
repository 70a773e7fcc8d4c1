"""How far each device compresses its upload, decided on the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.config.number_values import Unbounded
from anyfleet.core.messages import UNCUT, Plans, Want
from anyfleet.core.slots import Around, Plan, State
from anyfleet.core.updates import Arrivals
from anyfleet.core.view import View
from anyfleet.elastic import WHOLE
from anyfleet.errors import refuse
from anyfleet.formulas.compression import upload_seconds
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.plan.target_seconds import sample_of
from anyfleet.parts.plan.widths import Whole

RATE = "rate"  # what these plans give: an uplink must follow it
_LOWEST = 1e-6  # a link that is down now still gets an order, and loses it


@dataclass(frozen=True)
class RateByLevel(Around, Plan):
    """A device of level `p` uploads at the `p`-th rate, or the last one. `inner` plans sizes.

    A rate of 1 asks for none: that level sends as the codec likes.
    """

    rates: tuple[float, ...]
    inner: Plan = field(default_factory=Whole)

    gives: ClassVar[frozenset[str]] = frozenset({RATE})

    def __post_init__(self) -> None:
        wrong = not self.rates or any(not 0 < rate <= 1 for rate in self.rates)
        refuse([f"RateByLevel.rates must lie in (0, 1], got {self.rates}." if wrong else ""])

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state, key)
        level = np.minimum(view.devices.level[plans.device], len(self.rates) - 1)
        numbers = replace(plans.numbers, rate=np.array(self.rates, dtype=np.float64)[level])
        return replace(plans, numbers=numbers)


class _Kept(NamedTuple):
    inner: State
    seconds: float


@dataclass(frozen=True)
class RateByLink(Plan):
    """As much as a device's link carries in `seconds` (FedHQ, METHODS §1.16). `inner` plans sizes.

    Without `seconds`, they are chosen once, before the first round: such that the mean rate of
    the devices, as their links are then, is `rate`. Where `inner` offers a menu, its largest entry
    is in time.
    """

    rate: float = 1 / 33
    seconds: Unbounded | None = None
    inner: Plan = field(default_factory=Whole)

    gives: ClassVar[frozenset[str]] = frozenset({RATE})
    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)

    def __post_init__(self) -> None:
        refuse(
            [
                "" if 0 < self.rate <= 1 else f"RateByLink.rate must lie in (0, 1]: {self.rate}.",
                ""
                if self.seconds is None or self.seconds > 0
                else f"RateByLink.seconds must be positive, got {self.seconds}.",
            ]
        )

    def init(self, view: View) -> _Kept:
        seconds = self.seconds or _seconds(self.rate, view)
        return _Kept(self.inner.init(view), seconds)

    def learn(
        self, state: _Kept, arrivals: Arrivals | None, notes: Mapping[str, Any], view: View
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(state.inner, arrivals, notes, view))

    def tells(self, state: _Kept) -> Mapping[str, Any]:
        return {**self.inner.tells(state.inner), "upload_seconds": state.seconds}

    def __call__(self, drafts: Plans, view: View, state: _Kept, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state.inner, key)
        links = view.conditions(plans.device).up
        sizes = [menu or (want,) for menu, want in zip(plans.menus, plans.wants, strict=True)]
        bits = np.array([max(_bits(want, view) for want in entries) for entries in sizes])
        # Seconds may be infinite: a link that is down carries nothing even then.
        carried = np.multiply(links, state.seconds, where=links > 0, out=np.zeros(len(links)))
        rate = np.clip(carried / np.maximum(bits, 1.0), _LOWEST, UNCUT)
        return replace(plans, numbers=replace(plans.numbers, rate=rate))


def _seconds(rate: float, view: View) -> float:
    links = view.conditions(sample_of(view)).up
    return upload_seconds(links, view.traffic(WHOLE, 1.0).update, rate)


def _bits(want: Want, view: View) -> float:
    return view.traffic(want.prefix(view.blueprint), 1.0).update
