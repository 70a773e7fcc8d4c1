"""What devices choose from their menus at check-in, before anything is downloaded."""

from collections.abc import Hashable, Sequence

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.check_in import CheckIn, CheckIns, Choices, MenuEntry
from anyfleet.core.device_state import DeviceState
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.message_size import NUMBER_BITS, expected_bits, menu_bits
from anyfleet.core.messages import Conditions
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
    states: Sequence[DeviceState],
    task: Task,
    counting: Counting = "flops",
) -> Choices:
    """Return what each device chooses from its menu; those without a menu choose nothing.

    `counting` says what the speeds of the devices count.
    """
    # Many devices have the same menu and as many samples: they share the entries.
    known: dict[Hashable, tuple[MenuEntry, ...]] = {}
    checked_in: list[CheckIn] = []
    rows = zip(orders.rows(), conditions.rows(), states, strict=True)
    for order, own, state in rows:
        menu, hyperparameters = order.menu_of(0), order.hyperparameters
        samples = task.size(int(order.device[0]))
        (steps,) = local_steps(hyperparameters, [samples])
        batch = int(hyperparameters.batch_size[0])
        amount = Amount(batch, samples_processed(steps, samples, batch), steps)
        # As text: NaN equals no other NaN.
        alike = menu, amount, str(hyperparameters.sent_fraction[0])
        if alike not in known:
            known[alike] = menu_entries(order, amount, task, counting)
        checked_in.append(
            CheckIn(
                device=int(order.device[0]),
                menu=known[alike],
                conditions=own,
                samples=samples,
                hyperparameters=hyperparameters,
                state=state.chooser,
            )
        )
    choosing = [row for row, each in enumerate(checked_in) if each.menu]
    others = np.setdiff1d(np.arange(len(checked_in)), choosing)
    none = len(others)
    unasked = orders.hyperparameters.take(others)
    left = Choices(np.full(none, -1), unasked, np.full(none, np.nan), ("",) * none)
    if not choosing:
        return left
    choose, check_ins = orders.job.choose, CheckIns.of([checked_in[row] for row in choosing])
    with during("choose", choose):
        found = choose(check_ins)
    caller = Caller("choose", choose, orders.round_index)
    found = chosen(found, caller, check_ins.offered.sum(axis=0).tolist())
    return join([found, left]).take(np.argsort([*choosing, *others]))


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
