"""What devices choose from their menus, at check-in, before anything is downloaded."""

from collections.abc import Sequence

import numpy as np

from anyfleet.columns import join
from anyfleet.elastic import Slice
from anyfleet.local import limits, processed
from anyfleet.packing import index_bits, traffic
from anyfleet.timing import training
from anyfleet.types import Choices, Conditions, Memory, Offer, Orders, Own, Task


def decide(
    orders: Orders, conditions: Conditions, memories: Sequence[Memory], task: Task
) -> Choices:
    """What each device chooses from its menu."""
    rows = []
    for row, order in enumerate(orders.rows()):
        (menu,) = order.menus
        if not menu:
            rows.append(Choices(np.array([-1]), order.numbers))
            continue
        samples = len(task.data(int(order.device[0])))
        own = Own(conditions.take([row]), samples, memories[row])
        offers = [_offer(entry, order, samples, task) for entry in menu]
        rows.append(order.job.choose(offers, own, order.numbers))
    return join(rows)


def _offer(entry: Slice, order: Orders, samples: int, task: Task) -> Offer:
    """One entry of a menu; the whole menu has to come down with it."""
    (menu,), job = order.menus, order.job
    down, up = traffic(entry, job.norm, task.blueprint)
    reading = sum(index_bits(other, task.blueprint) for other in menu)
    (steps,), batch = limits(order.numbers, [samples]), int(order.numbers.batch[0])
    count = processed(steps, samples, batch)
    needed = training(job.train, task.blueprint, entry, batch=batch, processed=count, steps=steps)
    return Offer(needed, down + reading, up)
