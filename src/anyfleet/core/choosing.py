"""What devices choose from their menus, at check-in, before anything is downloaded."""

from collections.abc import Hashable, Sequence

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.check_in import Choices, Offer, Own
from anyfleet.core.local_training import limits, processed
from anyfleet.core.message_size import expected
from anyfleet.core.messages import Conditions, Memory
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Orders
from anyfleet.core.packing import index_bits
from anyfleet.core.reports import SCALAR_BITS
from anyfleet.core.return_checks import Caller, chosen
from anyfleet.core.slots import Asked
from anyfleet.core.time_and_energy import Amount, training
from anyfleet.elastic import alpha
from anyfleet.elastic.cost.operations import Counting
from anyfleet.tracebacks import during


def decide(
    orders: Orders,
    conditions: Conditions,
    memories: Sequence[Memory],
    task: Task,
    counting: Counting = "flops",
) -> Choices:
    """What each device chooses from its menu; `counting` is what its speed counts."""
    known: dict[Hashable, list[Offer]] = {}  # many devices have the same menu and as many samples
    asked = []
    rows = zip(orders.rows(), conditions.rows(), memories, strict=True)
    for order, own, memory in rows:
        (menu,), numbers = order.menus, order.numbers
        samples = task.size(int(order.device[0]))
        (steps,), batch = limits(numbers, [samples]), int(numbers.batch[0])
        amount = Amount(batch, processed(steps, samples, batch), steps)
        alike = menu, amount, float(numbers.rate[0])
        if alike not in known:
            known[alike] = _offers(order, amount, task, counting)
        asked.append(Asked(known[alike], Own(own, samples, memory), numbers))
    choosing = [row for row, each in enumerate(asked) if each.menu]
    others = np.setdiff1d(np.arange(len(asked)), choosing)
    none = len(others)
    unasked = orders.numbers.take(others)
    left = Choices(np.full(none, -1), unasked, np.full(none, np.nan), ("",) * none)
    if not choosing:
        return left
    choose = orders.job.choose
    with during("choose", choose):
        found = choose.together([asked[row] for row in choosing])
    caller, lengths = Caller("choose", choose, orders.step), [len(asked[r].menu) for r in choosing]
    found = chosen(found, caller, lengths)
    return join([found, left]).take(np.argsort([*choosing, *others]))


def _offers(order: Orders, amount: Amount, task: Task, counting: Counting) -> list[Offer]:
    """The entries of a menu; all of it has to come down with whichever is chosen."""
    (menu,), job, blueprint = order.menus, order.job, task.blueprint
    reading = sum(index_bits(entry, blueprint) for entry in menu)
    rate = float(order.numbers.rate[0])
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
