"""Partial work: as many local steps as a device's time allows."""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from anyfleet.local import limits
from anyfleet.method import Around, Plan, State
from anyfleet.plan.choices import BITS_PER_PARAMETER
from anyfleet.plan.levels import Whole
from anyfleet.types import Plans
from anyfleet.view import View


@dataclass(frozen=True)
class StepsWithin(Around):
    """Limits local steps so that download, training and upload fit into `seconds` (METHODS §1.2).

    `inner` plans the sizes first; a device with no time for a single step still does one.
    """

    seconds: float
    inner: Plan = field(default_factory=Whole)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"StepsWithin.seconds must be positive, got {self.seconds}.")

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state, key)
        own = view.conditions(plans.device)
        samples = view.devices.samples[plans.device].tolist()
        whole = limits(plans.numbers, samples)
        steps = plans.numbers.steps.copy()
        for row, want in enumerate(plans.wants):
            cost = view.cost(view.blueprint.prefix(want.share, want.first, want.rounding), 1)
            traffic = BITS_PER_PARAMETER * (
                cost.params / own.down[row] + cost.sent_params / own.up[row]
            )
            batch = min(int(plans.numbers.batch[row]), max(1, samples[row]))
            step = batch * (cost.forward_flops + cost.backward_flops) / own.speed[row]
            affordable = int((self.seconds - traffic) / step) if step else whole[row]
            steps[row] = np.clip(affordable, 1, max(1, whole[row]))
        return replace(plans, numbers=replace(plans.numbers, steps=steps))
