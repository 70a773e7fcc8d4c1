"""Partial work: as many local steps as a device's time allows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.local_training import local_steps
from anyfleet.core.message_size import menu_bits
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.time_and_energy import transfer_seconds
from anyfleet.core.view import View
from anyfleet.elastic import Slice
from anyfleet.papers import FEDPROX, Paper
from anyfleet.parts.plan.widths import WholeModel


@dataclass(frozen=True)
class LocalStepsWithin(Wrapper, Plan):
    """As many local steps as download, training and upload have time for within `seconds`.

    FedProx, specification §1.2. `inner` plans the sizes first. A device with no time for a single
    local step still does one.

    Where `inner` offers a menu, the server does not know what a device will choose, and the entry
    that allows the most local steps sets the limit: at least one entry is in time.
    `LargestInTime(seconds)` then takes the largest one that is; any other chooser may take longer
    than `seconds`. With `Assigned(inner, choose)` every choice has its own limit.
    """

    seconds: float
    inner: Plan = field(default_factory=WholeModel)

    papers: ClassVar[tuple[Paper, ...]] = (FEDPROX,)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"LocalStepsWithin.seconds must be positive, got {self.seconds}.")

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        if not len(plans):
            return plans
        # A row for every size that a device may train.
        options = [plans.options_of(row) for row in range(len(plans))]
        rows = np.repeat(np.arange(len(plans)), [len(sizes) for sizes in options])
        slices = [size.prefix(view.blueprint) for sizes in options for size in sizes]
        each = iter(self._most(plans.take(rows), slices, view))
        most = [max(islice(each, len(sizes))) for sizes in options]
        samples = view.devices.samples[plans.device].tolist()
        pairs = zip(local_steps(plans.hyperparameters, samples), most, strict=True)
        return plans.with_hyperparameters(local_steps=[max(1, min(pair)) for pair in pairs])

    def _most(self, plans: Plans, slices: Sequence[Slice], view: View) -> list[int]:
        """Return how many local steps there is time for with each of the slices."""
        own, given = view.conditions(plans.device), plans.hyperparameters
        samples, batches = view.devices.samples[plans.device].tolist(), given.batch_size.tolist()
        bits = [
            view.message_bits(*pair)
            for pair in zip(slices, given.sent_fraction.tolist(), strict=True)
        ]
        down, up = np.array([(each.down, each.up) for each in bits]).T
        down = down + _menu_bits(plans, view)
        left = self.seconds - (
            transfer_seconds(down, own.bit_rate_down) + transfer_seconds(up, own.bit_rate_up)
        )

        def takes(processed: int, steps: int) -> list[float]:
            pairs = zip(slices, batches, strict=True)
            efforts = [view.training_cost(*pair, processed, steps).effort for pair in pairs]
            seconds: list[float] = join(efforts).seconds(own, given.frequency).tolist()
            return seconds

        # Time is linear in both: what one local step takes by itself, and what one sample adds.
        steps = map(StepSeconds, takes(0, 1), takes(1, 0))
        return list(map(fitting, left.tolist(), steps, samples, batches))


def _menu_bits(plans: Plans, view: View) -> list[int]:
    """Return the bits of each device's menu, which come down so that it can choose."""
    blueprint = view.blueprint
    bits = [menu_bits([size.prefix(blueprint) for size in menu], blueprint) for menu in plans.menus]
    return [bits[number] if number >= 0 else 0 for number in plans.menu_index]


class StepSeconds(NamedTuple):
    """The seconds that a local step takes by itself, and that each sample adds."""

    per_local_step: float
    per_sample: float


def fitting(seconds: float, step: StepSeconds, samples: int, batch: int) -> int:
    """Return the most local steps that fit into `seconds`; an epoch's last batch may be short."""
    if not samples or math.isnan(step.per_local_step + step.per_sample):
        return 0  # nothing to train on, or a device that does not know how fast it is
    # A billionth more than there is: a budget that fits exactly must not fail by rounding.
    seconds = max(0.0, seconds) * (1 + 1e-9)
    per_epoch = -(-samples // batch)
    epoch = per_epoch * step.per_local_step + samples * step.per_sample
    epochs = int(seconds / epoch)
    rest = int((seconds - epochs * epoch) / (step.per_local_step + batch * step.per_sample))
    return epochs * per_epoch + min(rest, per_epoch - 1)
