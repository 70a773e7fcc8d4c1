"""Partial work: as many local steps as a device's time allows."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from anyfleet.local import limits
from anyfleet.method import Around, Plan, State
from anyfleet.plan.levels import Whole
from anyfleet.timing import crossing_seconds
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
        own, numbers = view.conditions(plans.device), plans.numbers
        samples = view.devices.samples[plans.device].tolist()
        whole = limits(numbers, samples)
        steps = numbers.steps.copy()
        for row, (want, mine) in enumerate(zip(plans.wants, own.rows(), strict=True)):
            slice_ = want.prefix(view.blueprint)
            down, up = view.traffic(slice_)
            batch = int(numbers.batch[row])
            crossing = crossing_seconds(down, mine.down) + crossing_seconds(up, mine.up)
            left = self.seconds - float(crossing[0])
            # Time is linear in both: what one step takes by itself, and what one sample adds.
            step, sample = (
                view.training(slice_, batch, *each).effort.seconds(mine, numbers.frequency[[row]])
                for each in ((0, 1), (1, 0))
            )
            pace = Pace(float(step[0]), float(sample[0]))
            steps[row] = max(1, min(whole[row], fitting(left, pace, samples[row], batch)))
        return replace(plans, numbers=replace(numbers, steps=steps))


class Pace(NamedTuple):
    """Seconds that a step takes by itself, and that each sample adds."""

    step: float
    sample: float


def fitting(seconds: float, pace: Pace, samples: int, batch: int) -> int:
    """The most steps that fit into `seconds`; the last batch of an epoch may be short."""
    if not samples:
        return 0
    # A billionth more than there is: a budget that fits exactly must not fail by rounding.
    seconds = max(0.0, seconds) * (1 + 1e-9)
    per_epoch = -(-samples // batch)
    epoch = per_epoch * pace.step + samples * pace.sample
    epochs = int(seconds / epoch)
    rest = int((seconds - epochs * epoch) / (pace.step + batch * pace.sample))
    return epochs * per_epoch + min(rest, per_epoch - 1)
