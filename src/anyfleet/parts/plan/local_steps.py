"""Partial work: as many local steps as a device's time allows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, Ints
from anyfleet.core.message_size import menu_bits
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.time_and_energy import TrainingAmounts, transfer_seconds
from anyfleet.core.view import View
from anyfleet.elastic import Slice
from anyfleet.papers import FEDPROX, Paper
from anyfleet.parts.plan.slice_costs import bits_down_and_up, different_options, efforts
from anyfleet.parts.plan.widths import WholeModel

_MANY = 1 << 31  # epochs: more than any device performs


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
        options, index = different_options(plans)
        lengths = np.array([len(sizes) for sizes in options])
        slices = [size.prefix(view.blueprint) for sizes in options for size in sizes]
        # A row for every size that a device may train.
        rows = np.repeat(np.arange(len(plans)), lengths[index])
        starts = np.cumsum(lengths[index]) - lengths[index]
        offered = np.arange(len(rows)) - starts[rows] + (np.cumsum(lengths) - lengths)[index][rows]
        most = np.maximum.reduceat(self._most(plans.take(rows), slices, offered, view), starts)
        own = TrainingAmounts.of(plans.hyperparameters, view.devices.samples[plans.device])
        return plans.with_hyperparameters(
            local_steps=np.maximum(1, np.minimum(own.local_steps, most))
        )

    def _most(self, plans: Plans, slices: Sequence[Slice], index: Ints, view: View) -> Ints:
        """Return how many local steps there is time for, with the slice that each row has."""
        own, given = view.conditions(plans.device), plans.hyperparameters
        samples, batches = view.devices.samples[plans.device], given.batch_size
        down, up = bits_down_and_up(slices, index, given.sent_fraction, view)
        down = down + _menu_bits(plans, view)
        left = self.seconds - (
            transfer_seconds(down, own.bit_rate_down) + transfer_seconds(up, own.bit_rate_up)
        )

        def takes(processed: int, steps: int) -> Floats:
            each = np.full(len(index), processed), np.full(len(index), steps)
            amounts = TrainingAmounts(batches, *each, np.full(len(index), np.nan))
            return efforts(slices, index, amounts, view).seconds(own, given.frequency)

        # Time is linear in both: what one local step takes by itself, and what one sample adds.
        return fitting(left, StepSeconds(takes(0, 1), takes(1, 0)), samples, batches)


def _menu_bits(plans: Plans, view: View) -> Ints:
    """Return the bits of each device's menu, which come down so that it can choose."""
    blueprint = view.blueprint
    bits = [menu_bits([size.prefix(blueprint) for size in menu], blueprint) for menu in plans.menus]
    return np.array([*bits, 0])[plans.menu_index]  # the last one stands for the number -1


class StepSeconds(NamedTuple):
    """The seconds that a local step takes by itself, and that each sample adds."""

    per_local_step: Floats
    per_sample: Floats


def fitting(seconds: Floats, step: StepSeconds, samples: Ints, batch: Ints) -> Ints:
    """Return the most local steps that fit into `seconds`; an epoch's last batch may be short."""
    # A billionth more than there is: a budget that fits exactly must not fail by rounding.
    seconds = np.maximum(0.0, seconds) * (1 + 1e-9)
    some = np.maximum(1, samples)
    per_epoch = -(-some // batch)
    epoch = per_epoch * step.per_local_step + some * step.per_sample
    epochs = _whole_number(seconds / epoch, _MANY)
    rest = (seconds - epochs * epoch) / (step.per_local_step + batch * step.per_sample)
    most = epochs * per_epoch + _whole_number(rest, per_epoch - 1)
    return np.where(samples > 0, most, 0)


def _whole_number(values: Floats, most: Ints | int) -> Ints:
    """Return values without their fractions, up to a limit; 0 for NaN: nothing is known."""
    return np.nan_to_num(np.minimum(values, most)).astype(np.int64)
