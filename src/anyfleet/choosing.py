"""What devices choose from their menus, at check-in, before anything is downloaded."""

from collections.abc import Hashable, Sequence

import numpy as np

from anyfleet.columns import join
from anyfleet.elastic import alpha
from anyfleet.elastic.counting import Counting
from anyfleet.lengths import expected
from anyfleet.lessons import SCALAR_BITS
from anyfleet.local import limits, processed
from anyfleet.packing import index_bits
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
    known: dict[Hashable, list[Offer]] = {}  # many devices have the same menu and as many samples
    for order, own, memory in zip(orders.rows(), conditions.rows(), memories, strict=True):
        (menu,), numbers = order.menus, order.numbers
        if not menu:
            rows.append(Choices(np.array([-1]), numbers, np.array([np.nan]), ("",)))
            continue
        samples = task.size(int(order.device[0]))
        (steps,), batch = limits(numbers, [samples]), int(numbers.batch[0])
        amount = Amount(batch, processed(steps, samples, batch), steps)
        alike = menu, amount, float(numbers.rate[0])
        if alike not in known:
            known[alike] = _offers(order, amount, task, counting)
        rows.append(order.job.choose(known[alike], Own(own, samples, memory), numbers))
    return join(rows)


def _offers(order: Orders, amount: Amount, task: Task, counting: Counting) -> list[Offer]:
    """The entries of a menu; all of it has to come down with whichever is chosen."""
    (menu,), job, blueprint = order.menus, order.job, task.blueprint
    reading, rate = (
        sum(index_bits(entry, blueprint) for entry in menu),
        float(order.numbers.rate[0]),
    )
    return [
        Offer(
            demand=training(job.train, blueprint, entry, amount, counting),
            traffic=expected(entry, job, blueprint, rate),
            first=entry.first,
            alpha=alpha(entry, blueprint),
            menu=reading,
            answer=SCALAR_BITS,
        )
        for entry in menu
    ]
