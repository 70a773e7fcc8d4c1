"""What devices choose from their menus, at check-in, before anything is downloaded."""

from collections.abc import Sequence

import numpy as np

from anyfleet.columns import join
from anyfleet.elastic.counting import Counting
from anyfleet.lessons import SCALAR_BITS
from anyfleet.local import limits, processed
from anyfleet.packing import index_bits, traffic
from anyfleet.timing import Amount, training
from anyfleet.types import Choices, Conditions, Memory, Offer, Orders, Own, Task


def decide(
    orders: Orders,
    conditions: Conditions,
    memories: Sequence[Memory],
    task: Task,
    counting: Counting = "flops",
) -> Choices:
    """What each device chooses from its menu; `counting` is what its speed counts."""
    rows = []
    for order, known, memory in zip(orders.rows(), conditions.rows(), memories, strict=True):
        (menu,) = order.menus
        if not menu:
            rows.append(Choices(np.array([-1]), order.numbers, np.array([np.nan])))
            continue
        samples = task.size(int(order.device[0]))
        own = Own(known, samples, memory)
        rows.append(order.job.choose(_offers(order, samples, task, counting), own, order.numbers))
    return join(rows)


def _offers(order: Orders, samples: int, task: Task, counting: Counting) -> list[Offer]:
    """The entries of a menu; all of it has to come down with whichever is chosen."""
    (menu,), job, blueprint = order.menus, order.job, task.blueprint
    reading = sum(index_bits(entry, blueprint) for entry in menu)
    (steps,), batch = limits(order.numbers, [samples]), int(order.numbers.batch[0])
    amount = Amount(batch, processed(steps, samples, batch), steps)
    offers = []
    for entry in menu:
        down, up = traffic(entry, job.norm, blueprint, job.report)
        needed = training(job.train, blueprint, entry, amount, counting)
        both = down + reading, up + SCALAR_BITS
        offers.append(Offer(needed, *both, entry.first, menu=reading, answer=SCALAR_BITS))
    return offers
