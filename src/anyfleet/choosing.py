"""What devices choose from their menus, at check-in, before anything is downloaded."""

from collections.abc import Sequence
from dataclasses import replace

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
    for order, known, memory in zip(orders.rows(), conditions.rows(), memories, strict=True):
        (menu,) = order.menus
        if not menu:
            rows.append(Choices(np.array([-1]), order.numbers))
            continue
        samples = len(task.data(int(order.device[0])))
        own = Own(known, samples, memory)
        # The whole menu has to come down with the entry that is chosen.
        reading = sum(index_bits(entry, task.blueprint) for entry in menu)
        offers = [_offer(entry, order, samples, task) for entry in menu]
        offers = [replace(offer, down=offer.down + reading) for offer in offers]
        rows.append(order.job.choose(offers, own, order.numbers))
    return join(rows)


def _offer(entry: Slice, order: Orders, samples: int, task: Task) -> Offer:
    """One entry of a menu, by itself."""
    job = order.job
    down, up = traffic(entry, job.norm, task.blueprint)
    (steps,), batch = limits(order.numbers, [samples]), int(order.numbers.batch[0])
    count = processed(steps, samples, batch)
    needed = training(job.train, task.blueprint, entry, batch=batch, processed=count, steps=steps)
    return Offer(needed, down, up)
