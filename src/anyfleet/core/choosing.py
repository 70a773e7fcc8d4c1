"""What devices choose from their menus at check-in, before anything is downloaded."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anyfleet.arrays import grouped, join
from anyfleet.core.check_in import CheckIns, Choices, MenuEntry, listed_entries
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.message_size import NUMBER_BITS, expected_bits, menu_bits
from anyfleet.core.messages import ChooserState, Conditions
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.return_checks import Caller, chosen
from anyfleet.core.time_and_energy import Amount, training
from anyfleet.elastic import channel_share, trained_share
from anyfleet.elastic.cost.operations import Counting
from anyfleet.tracebacks import during


def decide(
    orders: Cohort,
    conditions: Conditions,
    states: Sequence[ChooserState],
    task: Task,
    counting: Counting = "flops",
) -> Choices:
    """Return what each device chooses from its menu; those without a menu choose nothing.

    `states` are what the devices' choosers have learned; `counting` says what speeds count.
    """
    asked, others = (
        np.flatnonzero(each) for each in (orders.menu_index >= 0, orders.menu_index < 0)
    )
    nothing = Choices(
        entry=np.full(len(orders), -1),
        hyperparameters=orders.hyperparameters,
        utility=np.full(len(orders), np.nan),
        declined=("",) * len(orders),
    )
    if not len(asked):
        return nothing
    check_ins = _check_ins(orders.take(asked), conditions.take(asked), task, counting)
    check_ins = replace(check_ins, states=tuple(states[row] for row in asked.tolist()))
    choose = orders.job.choose
    with during("choose", choose):
        found = choose(check_ins)
    caller = Caller("choose", choose, orders.round_index)
    found = chosen(found, caller, check_ins.offered.sum(axis=0).tolist())
    return join([found, nothing.take(others)]).take(np.argsort([*asked, *others]))


def _check_ins(orders: Cohort, conditions: Conditions, task: Task, counting: Counting) -> CheckIns:
    """Return the check-ins of devices that all have a menu, without what their choosers learned.

    Many devices have the same menu and as many samples: they share the entries.
    """
    own = orders.hyperparameters
    sizes = [task.size(device) for device in orders.device.tolist()]
    steps = np.array(local_steps(own, sizes), dtype=np.int64)
    samples = np.array(sizes, dtype=np.int64)
    first, index = grouped(orders.menu_index, samples, steps, own.batch_size, own.sent_fraction)
    menus = []
    for row in first.tolist():
        batch, local = int(own.batch_size[row]), int(steps[row])
        amount = Amount(batch, samples_processed(local, sizes[row], batch), local)
        menus.append(menu_entries(orders.take([row]), amount, task, counting))
    entries, numbers = listed_entries(menus)
    return CheckIns(
        device=orders.device,
        entries=entries,
        entry_index=numbers[:, index],
        conditions=conditions,
        samples=samples,
        hyperparameters=own,
        states=(),
    )


def menu_entries(
    order: Cohort, amount: Amount, task: Task, counting: Counting
) -> tuple[MenuEntry, ...]:
    """Return the entries of the menu of a single order.

    The whole menu has to come down, whichever entry is chosen.
    """
    menu, job, blueprint = order.menu_of(0), order.job, task.blueprint
    down = menu_bits(menu, blueprint)
    sent_fraction = float(order.hyperparameters.sent_fraction[0])
    return tuple(
        MenuEntry(
            demand=training(job.trainer, blueprint, slice_, amount, counting),
            bits=expected_bits(slice_, job, blueprint, sent_fraction),
            first_trained_layer=slice_.first_trained_layer,
            channel_share=channel_share(slice_, blueprint),
            trained_share=trained_share(slice_, blueprint),
            menu_bits=down,
            choice_bits=NUMBER_BITS,
        )
        for slice_ in menu
    )
