"""Partial work: as many local steps as a device's time allows."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from anyfleet.local import limits
from anyfleet.method import Around, Plan, State
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
            slice_ = view.blueprint.prefix(want.shares(view.blueprint), want.first, want.rounding)
            cost, (down, up) = view.cost(slice_, 1), view.traffic(slice_)
            left = self.seconds - down / own.down[row] - up / own.up[row]
            sample = (cost.forward_flops + cost.backward_flops) / own.speed[row]
            batch = int(plans.numbers.batch[row])
            steps[row] = max(1, min(whole[row], fitting(left, sample, samples[row], batch)))
        return replace(plans, numbers=replace(plans.numbers, steps=steps))


def fitting(seconds: float, per_sample: float, samples: int, batch: int) -> int:
    """The most steps that fit into `seconds`; the last batch of an epoch may be short."""
    if not samples:
        return 0
    # A billionth more than there is: a budget that fits exactly must not fail by rounding.
    affordable = max(0, int(seconds / per_sample * (1 + 1e-9)))
    epochs, rest = divmod(affordable, samples)
    return epochs * -(-samples // batch) + rest // batch
