"""Stacking: which orders are trained together.

Devices of equal slice shape can share a stack. It is padded to its largest device, so devices with
similar numbers of local steps are put together; and it has to fit into memory.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from anyfleet.arrays import Ints, alike, distinct
from anyfleet.core.local_training import samples_processed, sizes_of
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Train
from anyfleet.core.time_and_energy import Amount, steps_of, training
from anyfleet.elastic import Blueprint, Slice

# Beginning a stack costs as much time in every local step as so many devices in it: a rough number
# that decides how much padding is worth one stack less, not a measured one.
_OVERHEAD = 8  # devices
# What a stack may take, chosen and not measured. An accelerator keeps the updates of the round and
# device states beside it. Last bits of results depend on who is stacked: so it is a share of what
# the machine has, not of what happens to be free.
_MEMORY = 1 << 30  # bytes of the host's memory
_SHARE = 0.4  # of an accelerator's memory


@lru_cache(maxsize=256)
def draws_together(trainer: Train) -> bool:
    """Return whether a trainer draws once for a whole cohort, so that cohorts stay apart."""
    return trainer.shared_draws(1, torch.tensor(0)) != (None,)


def stacks(
    orders: Cohort, task: Task, chunk: int = 0, least: int = 1, *, runs: int = 1
) -> list[Ints]:
    """Return the rows of every stack, ascending, with at most `chunk` devices in each.

    0: as many as memory is predicted to hold, if so many `runs` share it. `least` stacks are made
    where there are as many orders, so that as many workers have something to do.
    """
    found = []
    samples = sizes_of(task)[orders.device]
    steps = steps_of(orders.hyperparameters, samples)
    for alike_rows in shapes(orders, task):
        for rows in buckets(steps[alike_rows]):
            some = alike_rows[rows]
            largest = int(some[np.argmax(samples[some])])
            amount = int(samples[largest]), int(steps[largest])
            most = chunk or max(1, _fitting(orders, largest, *amount, task) // runs)
            count = max(-(-len(some) // most), min(least, len(some)))
            found += np.array_split(some, count) if count > 1 else [some]
    return found


def shapes(orders: Cohort, task: Task) -> list[Ints]:
    """Return the rows of orders that can be stacked."""
    # The shape alone is not enough: a model may hold constants along an axis that is sliced.
    _, shape = distinct([(task.blueprint.local(s), s.first_trained_layer) for s in orders.slices])
    # Where columns begin depends on the slice and on the planned width.
    cut = orders.column_width < 1
    # What a trainer draws for a whole cohort may depend on the planned width.
    drawn = draws_together(orders.job.trainer)
    if not (drawn or np.count_nonzero(cut)):
        return alike(shape[orders.slice_index])
    return alike(
        shape[orders.slice_index],
        orders.column_width,
        np.where(cut, orders.slice_index, -1),
        np.where(cut | drawn, orders.width, 0.0),
    )


def buckets(steps: Ints) -> list[Ints]:
    """Return rows of similar numbers of local steps, such that padding them costs least time."""
    if steps.min() == steps.max():
        return [np.arange(len(steps))]
    values, bucket, counts = np.unique(-steps, return_inverse=True, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    # From the most steps to the fewest: the least time of all buckets up to each value, and where
    # the last of them begins. A bucket takes the steps of its largest device.
    time, begin = np.zeros(len(values) + 1), np.zeros(len(values) + 1, dtype=np.int64)
    for end in range(1, len(values) + 1):
        alone = -values[:end] * (before[end] - before[:end] + _OVERHEAD)
        begin[end] = np.argmin(time[:end] + alone)
        time[end] = (time[:end] + alone)[begin[end]]
    ends, end = [], len(values)
    while end:
        ends.append(end)
        end = int(begin[end])
    return alike(np.searchsorted(ends[::-1], bucket, side="right"))


def side_by_side(orders: Cohort, stacks: Sequence[Ints], task: Task) -> int:
    """Return how many stacks as large as the largest of these fit into memory at once."""
    return at_once([len(some) for some in stacks], capacities(orders, stacks, task))


def at_once(sizes: Sequence[int], capacities: Sequence[int]) -> int:
    """Return how many stacks fit into memory at once, given of how many devices one could be."""
    shares = [size / most for size, most in zip(sizes, capacities, strict=True)]
    return max(1, int(1 / max(shares)))


def capacities(orders: Cohort, stacks: Sequence[Ints], task: Task) -> list[int]:
    """Return how many devices like its largest one would fit into memory, for every stack."""
    samples = sizes_of(task)[orders.device]
    steps = steps_of(orders.hyperparameters, samples)
    rows = [int(some[np.argmax(samples[some])]) for some in stacks]
    return [_fitting(orders, row, int(samples[row]), int(steps[row]), task) for row in rows]


def _fitting(orders: Cohort, row: int, samples: int, steps: int, task: Task) -> int:
    """Return how many devices like that of one order fit into the memory of a stack."""
    device = next(iter(task.params.values())).device
    amount = int(orders.hyperparameters.batch_size[row]), samples, steps
    memory = _memory(orders.job.trainer, task.blueprint, orders.slice_of(row), *amount)
    if device.type == "cuda":
        room = _SHARE * torch.cuda.get_device_properties(device).total_memory
    else:
        room = _MEMORY
    return max(1, int(room / max(1.0, memory)))


@lru_cache(maxsize=4096)
def _memory(
    trainer: Train, blueprint: Blueprint, slice_: Slice, batch: int, samples: int, steps: int
) -> float:
    """Return the bytes that training takes on one device."""
    amount = Amount(batch, samples_processed(steps, samples, batch), steps)
    return float(training(trainer, blueprint, slice_, amount, "flops").memory[0])
