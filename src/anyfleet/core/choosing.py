"""What devices choose from their menus, at check-in, before anything is downloaded."""

from collections.abc import Hashable, Sequence

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.check_in import Choices, ChoosingDevice, MenuEntry
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.message_size import NUMBER_BITS, expected_bits, menu_bits
from anyfleet.core.messages import Conditions, DeviceState
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.return_checks import Caller, chosen
from anyfleet.core.slots import CheckIn
from anyfleet.core.time_and_energy import Amount, training
from anyfleet.elastic import alpha
from anyfleet.elastic.cost.operations import Counting
from anyfleet.tracebacks import during


def decide(
    orders: Cohort,
    conditions: Conditions,
    memories: Sequence[DeviceState],
    task: Task,
    counting: Counting = "flops",
) -> Choices:
    """What each device chooses from its menu; `counting` is what its speed counts."""
    known: dict[
        Hashable, list[MenuEntry]
    ] = {}  # many devices have the same menu and as many samples
    asked = []
    rows = zip(orders.rows(), conditions.rows(), memories, strict=True)
    for order, own, memory in rows:
        (menu,), numbers = order.menus, order.hyperparameters
        samples = task.size(int(order.device[0]))
        (steps,), batch = local_steps(numbers, [samples]), int(numbers.batch_size[0])
        amount = Amount(batch, samples_processed(steps, samples, batch), steps)
        alike = menu, amount, str(numbers.sent_fraction[0])  # as text: NaN equals no other NaN
        if alike not in known:
            known[alike] = _offers(order, amount, task, counting)
        asked.append(CheckIn(known[alike], ChoosingDevice(own, samples, memory), numbers))
    choosing = [row for row, each in enumerate(asked) if each.menu]
    others = np.setdiff1d(np.arange(len(asked)), choosing)
    none = len(others)
    unasked = orders.hyperparameters.take(others)
    left = Choices(np.full(none, -1), unasked, np.full(none, np.nan), ("",) * none)
    if not choosing:
        return left
    choose = orders.job.choose
    with during("choose", choose):
        found = choose.together([asked[row] for row in choosing])
    caller, lengths = (
        Caller("choose", choose, orders.round_index),
        [len(asked[r].menu) for r in choosing],
    )
    found = chosen(found, caller, lengths)
    return join([found, left]).take(np.argsort([*choosing, *others]))


def _offers(order: Cohort, amount: Amount, task: Task, counting: Counting) -> list[MenuEntry]:
    """The entries of a menu; all of it has to come down with whichever is chosen."""
    (menu,), job, blueprint = order.menus, order.job, task.blueprint
    reading = menu_bits(menu, blueprint)
    rate = float(order.hyperparameters.sent_fraction[0])
    return [
        MenuEntry(
            demand=training(job.trainer, blueprint, entry, amount, counting),
            bits=expected_bits(entry, job, blueprint, rate),
            first_trained_layer=entry.first_trained_layer,
            alpha=alpha(entry, blueprint),
            menu_bits=reading,
            choice_bits=NUMBER_BITS,
        )
        for entry in menu
    ]
