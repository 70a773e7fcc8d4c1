"""The costs of training and of messages, for planners of many devices: each is asked for once."""

from collections.abc import Sequence

import numpy as np

from anyfleet.arrays import Floats, Ints, grouped, join
from anyfleet.core.messages import SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.time_and_energy import Effort, TrainingAmounts
from anyfleet.core.view import View
from anyfleet.elastic import Slice


def different_options(plans: Plans) -> tuple[list[tuple[SubModelSize, ...]], Ints]:
    """Return the different lists of sizes that devices may train, and the number of each one's."""
    first, index = grouped(plans.size_index, plans.menu_index)
    return [plans.options_of(row) for row in first.tolist()], index


def efforts(slices: Sequence[Slice], index: Ints, amounts: TrainingAmounts, view: View) -> Effort:
    """Return the effort of so much training; `index` is the number of each order's slice."""
    first, number = grouped(index, amounts.batch_size, amounts.processed, amounts.local_steps)
    orders = zip(
        index[first].tolist(),
        amounts.batch_size[first].tolist(),
        amounts.processed[first].tolist(),
        amounts.local_steps[first].tolist(),
        strict=True,
    )
    different = [view.training_cost(slices[each], *amount).effort for each, *amount in orders]
    return join(different).take(number)


def bits_down_and_up(
    slices: Sequence[Slice], index: Ints, sent_fraction: Floats, view: View
) -> tuple[Floats, Floats]:
    """Return the bits of the messages of orders at their sent fractions."""
    first, number = grouped(index, sent_fraction)
    pairs = zip(index[first].tolist(), sent_fraction[first].tolist(), strict=True)
    found = [view.message_bits(slices[each], fraction) for each, fraction in pairs]
    down, up = np.array([(bits.down, bits.up) for bits in found]).T[:, number]
    return down, up
