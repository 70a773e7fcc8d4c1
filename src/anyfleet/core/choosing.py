"""What devices choose from their menus at check-in, before anything is downloaded."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from anyfleet.arrays import distinct, grouped, join
from anyfleet.core.check_in import CheckIns, Choices, MenuEntry, listed_entries
from anyfleet.core.local_training import sizes_of
from anyfleet.core.message_size import NUMBER_BITS, expected_bits, menu_bits
from anyfleet.core.messages import ChooserState, Conditions
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.return_checks import Caller, chosen
from anyfleet.core.time_and_energy import TrainingAmounts, trainings
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
    check_ins = replace(check_ins, states=tuple(map(states.__getitem__, asked.tolist())))
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
    own, samples = orders.hyperparameters, sizes_of(task)[orders.device]
    amounts = TrainingAmounts.of(own, samples)
    costs = samples, amounts.local_steps, amounts.batch_size
    first, index = grouped(orders.menu_index, *costs, own.sent_fraction)
    menus = menu_entries(orders.take(first), amounts.take(first), task, counting)
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
    orders: Cohort, amounts: TrainingAmounts, task: Task, counting: Counting
) -> list[tuple[MenuEntry, ...]]:
    """Return the entries of the menus of orders that take these amounts of training.

    The whole menu has to come down, whichever entry is chosen.
    """
    job, blueprint, numbers = orders.job, task.blueprint, orders.menu_index.tolist()
    menus = [orders.menus[number] for number in numbers]
    down = {number: menu_bits(orders.menus[number], blueprint) for number in set(numbers)}
    lengths = list(map(len, menus))
    rows = np.repeat(np.arange(len(orders)), lengths)  # the order of every entry
    slices, index = distinct(list(chain.from_iterable(menus)))
    demand = trainings(job.trainer, blueprint, slices, index, amounts.take(rows), counting)
    fraction = orders.hyperparameters.sent_fraction[rows]
    first, kind = grouped(index, fraction)
    kinds = [
        partial(
            MenuEntry,
            bits=expected_bits(slices[number], job, blueprint, sent_fraction),
            first_trained_layer=slices[number].first_trained_layer,
            channel_share=channel_share(slices[number], blueprint),
            trained_share=trained_share(slices[number], blueprint),
            choice_bits=NUMBER_BITS,
        )
        for number, sent_fraction in zip(index[first], fraction[first].tolist(), strict=True)
    ]
    listed = zip(demand.rows(), kind.tolist(), orders.menu_index[rows].tolist(), strict=True)
    entries = iter([kinds[k](own, menu_bits=down[menu]) for own, k, menu in listed])
    return [tuple(islice(entries, length)) for length in lengths]
