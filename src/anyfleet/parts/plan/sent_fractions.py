"""How far each device compresses its upload, decided on the server."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.config.number_values import Unbounded
from anyfleet.core.messages import SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.signals import FollowsSentFraction, SentFraction, Signal
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.elastic import WHOLE
from anyfleet.errors import refuse
from anyfleet.formulas.fedhq import fedhq_upload_seconds
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.plan.slice_costs import different_options
from anyfleet.parts.plan.target_seconds import sample_of
from anyfleet.parts.plan.widths import WholeModel

_LOWEST = 1e-6  # a device whose link is down still gets an order, which fails


@dataclass(frozen=True)
class SentFractionByLevel(Wrapper, Plan):
    """The sent fraction of each level, strongest first; levels beyond the end have the last one.

    `inner` plans the sizes. NaN asks for none: devices of that level send as the codec likes.
    """

    sent_fractions: tuple[float, ...]  # of each level, strongest first
    inner: Plan = field(default_factory=WholeModel)

    requires: ClassVar[frozenset[Signal]] = frozenset({FollowsSentFraction()})
    decides: ClassVar[frozenset[Signal]] = frozenset({SentFraction()})

    def __post_init__(self) -> None:
        given = self.sent_fractions
        if not given or not all(0 < each <= 1 or math.isnan(each) for each in given):
            raise ValueError(
                f"SentFractionByLevel.sent_fractions must lie in (0, 1], got {given}. "
                "Write nan for a level that sends as the codec likes."
            )

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        level = np.minimum(view.devices.level[plans.device], len(self.sent_fractions) - 1)
        return plans.with_hyperparameters(sent_fraction=np.array(self.sent_fractions)[level])


class _Kept(NamedTuple):
    inner: State
    seconds: float


@dataclass(frozen=True)
class SentFractionByLink(Plan):
    """The sent fraction that a device's link carries in `seconds` (FedHQ, specification §1.16).

    `inner` plans the sizes. Without `seconds`, they are chosen once, before the first round: such
    that the mean sent fraction of the devices, as their links are then, is `sent_fraction`. Where
    `inner` offers a menu, its largest entry is in time.
    """

    sent_fraction: float = 1 / 33
    seconds: Unbounded | None = None
    inner: Plan = field(default_factory=WholeModel)

    requires: ClassVar[frozenset[Signal]] = frozenset({FollowsSentFraction()})
    decides: ClassVar[frozenset[Signal]] = frozenset({SentFraction()})
    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        given = self.sent_fraction
        if not 0 < given <= 1:
            yield f"SentFractionByLink.sent_fraction must lie in (0, 1], got {given}."
        if self.seconds is not None and not self.seconds > 0:
            yield f"SentFractionByLink.seconds must be positive, got {self.seconds}."

    def init(self, view: View) -> _Kept:
        seconds = self.seconds or _seconds(self.sent_fraction, view)
        return _Kept(self.inner.init(view), seconds)

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: _Kept
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(updates, diagnostics, view, state.inner))

    def diagnostics(self, state: _Kept) -> Mapping[str, Any]:
        return {**self.inner.diagnostics(state.inner), "upload_seconds": state.seconds}

    def __call__(self, plans: Plans, view: View, state: _Kept, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state.inner, key)
        bit_rate = view.conditions(plans.device).bit_rate_up
        options, index = different_options(plans)
        largest = np.array([max(_bits(size, view) for size in sizes) for sizes in options])
        bits = largest[index]
        # Seconds may be infinite: a link that is down carries nothing even then.
        carried = np.multiply(
            bit_rate, state.seconds, where=bit_rate > 0, out=np.zeros(len(bit_rate))
        )
        sent_fraction = np.clip(carried / np.maximum(bits, 1.0), _LOWEST, 1.0)
        return plans.with_hyperparameters(sent_fraction=sent_fraction)


def _seconds(sent_fraction: float, view: View) -> float:
    """Return the seconds in which the mean sent fraction of the whole model is as given."""
    links = view.conditions(sample_of(view)).bit_rate_up
    return fedhq_upload_seconds(links, view.message_bits(WHOLE, 1.0).update, sent_fraction)


def _bits(size: SubModelSize, view: View) -> float:
    """Return the bits of an uncompressed update of this size."""
    return view.message_bits(size.prefix(view.blueprint), 1.0).update
