"""How far each device compresses its upload, decided on the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.config.number_values import Unbounded
from anyfleet.core.messages import Plans, SubModelSize
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.elastic import WHOLE
from anyfleet.errors import refuse
from anyfleet.formulas.fedhq import fedhq_upload_seconds
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.plan.target_seconds import sample_of
from anyfleet.parts.plan.widths import WholeModel

SENT_FRACTION = "sent_fraction"  # what these plans give: an uplink must follow it
_LOWEST = 1e-6  # a link that is down now still gets an order, and loses it


@dataclass(frozen=True)
class SentFractionByLevel(Wrapper, Plan):
    """A device of level `p` uploads at the `p`-th rate, or the last one. `inner` plans sizes.

    NaN asks for none: that level sends as the codec likes.
    """

    sent_fractions: tuple[float, ...]
    inner: Plan = field(default_factory=WholeModel)

    provides: ClassVar[frozenset[str]] = frozenset({SENT_FRACTION})

    def __post_init__(self) -> None:
        wrong = not self.sent_fractions or any(
            not (0 < rate <= 1 or np.isnan(rate)) for rate in self.sent_fractions
        )
        refuse(
            [
                f"SentFractionByLevel.sent_fractions must lie in (0, 1], got {self.sent_fractions}."
                if wrong
                else ""
            ]
        )

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        level = np.minimum(view.devices.level[plans.device], len(self.sent_fractions) - 1)
        numbers = replace(
            plans.hyperparameters,
            sent_fraction=np.array(self.sent_fractions, dtype=np.float64)[level],
        )
        return replace(plans, hyperparameters=numbers)


class _Kept(NamedTuple):
    inner: State
    seconds: float


@dataclass(frozen=True)
class SentFractionByLink(Plan):
    """As much as a device's link carries in `seconds` (FedHQ, specification §1.16). `inner` plans sizes.

    Without `seconds`, they are chosen once, before the first round: such that the mean rate of
    the devices, as their links are then, is `rate`. Where `inner` offers a menu, its largest entry
    is in time.
    """

    sent_fraction: float = 1 / 33
    seconds: Unbounded | None = None
    inner: Plan = field(default_factory=WholeModel)

    provides: ClassVar[frozenset[str]] = frozenset({SENT_FRACTION})
    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)

    def __post_init__(self) -> None:
        refuse(
            [
                ""
                if 0 < self.sent_fraction <= 1
                else f"SentFractionByLink.sent_fraction must lie in (0, 1], got {self.sent_fraction}.",
                ""
                if self.seconds is None or self.seconds > 0
                else f"SentFractionByLink.seconds must be positive, got {self.seconds}.",
            ]
        )

    def init(self, view: View) -> _Kept:
        seconds = self.seconds or _seconds(self.sent_fraction, view)
        return _Kept(self.inner.init(view), seconds)

    def learn(
        self, state: _Kept, updates: Updates | None, diagnostics: Mapping[str, Any], view: View
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(state.inner, updates, diagnostics, view))

    def diagnostics(self, state: _Kept) -> Mapping[str, Any]:
        return {**self.inner.diagnostics(state.inner), "upload_seconds": state.seconds}

    def __call__(self, plans: Plans, view: View, state: _Kept, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state.inner, key)
        links = view.conditions(plans.device).bit_rate_up
        sizes = [
            menu or (want,) for menu, want in zip(plans.menus, plans.sub_model_sizes, strict=True)
        ]
        bits = np.array([max(_bits(want, view) for want in entries) for entries in sizes])
        # Seconds may be infinite: a link that is down carries nothing even then.
        carried = np.multiply(links, state.seconds, where=links > 0, out=np.zeros(len(links)))
        rate = np.clip(carried / np.maximum(bits, 1.0), _LOWEST, 1.0)
        return replace(plans, hyperparameters=replace(plans.hyperparameters, sent_fraction=rate))


def _seconds(rate: float, view: View) -> float:
    links = view.conditions(sample_of(view)).bit_rate_up
    return fedhq_upload_seconds(links, view.message_bits(WHOLE, 1.0).update, rate)


def _bits(want: SubModelSize, view: View) -> float:
    return view.message_bits(want.prefix(view.blueprint), 1.0).update
