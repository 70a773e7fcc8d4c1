"""Partial work: as many local steps as a device's time allows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.local_training import local_steps
from anyfleet.core.message_size import menu_bits
from anyfleet.core.messages import Plans, SubModelSize
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.time_and_energy import transfer_seconds
from anyfleet.core.view import View
from anyfleet.elastic import Slice
from anyfleet.papers import FEDPROX, Paper
from anyfleet.parts.plan.widths import WholeModel


@dataclass(frozen=True)
class LocalStepsWithin(Wrapper, Plan):
    """Limits local steps so that download, training and upload fit into `seconds` (specification §1.2).

    `inner` plans the sizes first; a device with no time for a single step still does one.

    Where `inner` offers a menu, the server does not know what a device will choose, and the entry
    that allows the most steps sets the limit: steps are only cut so far that at least one entry
    fits. `LargestInTime(seconds)` then takes the largest one that does; any other chooser may
    take longer than `seconds`. With `Assigned(inner, choose)` every choice has its own limit.
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
        sizes = [
            menu or (want,) for menu, want in zip(plans.menus, plans.sub_model_sizes, strict=True)
        ]
        rows = np.repeat(np.arange(len(plans)), [len(entries) for entries in sizes])
        slices = [entry.prefix(view.blueprint) for entries in sizes for entry in entries]
        each = iter(self._most(plans.take(rows), slices, view))
        most = [max(islice(each, len(entries))) for entries in sizes]
        samples = view.devices.samples[plans.device].tolist()
        pairs = zip(local_steps(plans.hyperparameters, samples), most, strict=True)
        steps = np.array([max(1, min(pair)) for pair in pairs], dtype=np.int64)
        return replace(plans, hyperparameters=replace(plans.hyperparameters, local_steps=steps))

    def _most(self, plans: Plans, slices: Sequence[Slice], view: View) -> list[int]:
        """How many steps there is time for with each of the slices."""
        own, numbers = view.conditions(plans.device), plans.hyperparameters
        samples, batches = view.devices.samples[plans.device].tolist(), numbers.batch_size.tolist()
        rates = numbers.sent_fraction.tolist()
        traffic = [view.message_bits(*pair) for pair in zip(slices, rates, strict=True)]
        down, up = np.array([(each.down, each.up) for each in traffic]).T
        down = down + [_menu_bits(menu, view) for menu in plans.menus]
        left = self.seconds - (
            transfer_seconds(down, own.bit_rate_down) + transfer_seconds(up, own.bit_rate_up)
        )

        def takes(processed: int, steps: int) -> list[float]:
            pairs = zip(slices, batches, strict=True)
            efforts = [view.training_cost(*pair, processed, steps).effort for pair in pairs]
            seconds: list[float] = join(efforts).seconds(own, numbers.frequency).tolist()
            return seconds

        # Time is linear in both: what one step takes by itself, and what one sample adds.
        paces = map(Pace, takes(0, 1), takes(1, 0))
        return list(map(fitting, left.tolist(), paces, samples, batches))


def _menu_bits(menu: Sequence[SubModelSize], view: View) -> int:
    """What comes down so that a device can choose."""
    return menu_bits((entry.prefix(view.blueprint) for entry in menu), view.blueprint)


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
