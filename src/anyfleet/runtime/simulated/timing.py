"""The times of orders: download and training when they are submitted, upload when they are trained.

How an order ends early is known with them: the earliest failure counts.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from anyfleet.arrays import Floats, Ints
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Conditions
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import too_large
from anyfleet.core.stacks import Replies
from anyfleet.core.time_and_energy import Effort
from anyfleet.runtime.simulated.charging import demand
from anyfleet.runtime.simulated.clock import Events
from anyfleet.runtime.simulated.failures import battery_empty, earliest, offline, when
from anyfleet.runtime.simulated.phases import Phases, SteadyCost, follow, transfer_cost
from anyfleet.runtime.simulated.transfers import cut_orders, draw_transfers, event_keys
from anyfleet.runtime.simulated.under_way import Submitted, Trained, UnderWay
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import Moments, When

# In the order of the alphabet, which decides between failures at the same time.
_BEFORE = ("battery empty", "died", "no link", "out of memory", "went offline")
_AFTER = ("battery empty", "no link", "nothing came through", "refused", "went offline")


def begin(
    orders: Cohort,
    now: When,
    own: Conditions,
    active: Ints,
    *,
    world: World,
    task: Task,
    states: Mapping[int, DeviceState],
) -> UnderWay:
    """Return orders that are submitted now, as rows of the table; their events have no number.

    `own` are the true conditions of the devices, `active` devices use the band of each.
    """
    devices, count = orders.device, len(orders)
    transfer = draw_transfers(orders, world, now, active)
    received = cut_orders(orders, transfer.width_down, task.blueprint)
    need = demand(received, task, world.declared.counting, states)
    start = Moments(np.full(count, now.now), np.full(count, now.round_index))
    download = _transfer(
        world, "down", devices, start, active, received.bits, own.bit_rate_down, own.receive_power
    )
    compute = _compute(world, received, need.effort, start, own, download.seconds)
    after, trained = download.seconds, download.seconds + compute.seconds
    dies = world.dies(devices, event_keys(orders, world.seed, "death"), now)
    failures = {
        "battery empty": battery_empty((download, compute), own.battery),
        "died": when(dies, after + compute.seconds / 2),
        "no link": when(np.isinf(after), 0.0),
        "out of memory": when(need.memory > own.memory, after),
    }
    soonest, _ = earliest(failures)
    failures["went offline"] = offline(world, devices, start, np.minimum(trained, soonest))
    failed_after, why = earliest(failures)
    fails = np.isfinite(failed_after)
    reason, reasons = np.where(fails, why, -1), list(_BEFORE)
    for row in np.flatnonzero(fails & (why == _BEFORE.index("out of memory"))):
        reason[row] = len(reasons)
        reasons.append(too_large(float(need.memory[row]), float(own.memory[row])))
    none, nowhere = np.zeros(count), np.full(count, -1)
    events = Events(
        training=~fails,
        trained=now.now + trained,
        ends=np.where(fails, now.now + failed_after, np.inf),
        sequence=nowhere,
    )
    return UnderWay(
        id=orders.id,
        device=devices,
        cohort=np.zeros(count, dtype=np.int64),
        row=np.arange(count),
        began=start.now,
        round_index=start.round_index,
        battery=own.battery,
        bit_rate_up=own.bit_rate_up,
        bit_rate_until=world.bit_rates_until(devices, now),
        send_power=own.send_power,
        active=active,
        flops=need.effort.flops,
        bits_down=received.bits,
        bits_up=none,
        transfer=transfer,
        download=download,
        compute=compute,
        upload=Phases.steady(none, none),
        upload_round=nowhere,
        uploading=np.zeros(count, dtype=bool),
        events=events,
        failed_after=failed_after,
        reason=reason,
        trained=_not_carried_out(orders),
        cohorts=(Submitted(orders, received),),
        reasons=tuple(reasons),
    )


def _not_carried_out(orders: Cohort) -> Trained:
    count = len(orders)
    none, nothing = np.zeros(count), np.zeros(count, dtype=np.int64)
    replies = Replies(
        order=orders.id,
        device=orders.device,
        samples=nothing,
        bits=none,
        delivered_width=none,
        stack_index=np.full(count, -1),
        place=nothing,
        stacks=(),
    )
    no_reason = ("",) * count
    return Trained(
        replies, np.zeros(count, dtype=bool), (DeviceState(),) * count, no_reason, no_reason
    )


def with_uploads(orders: UnderWay, round_index: int, world: World) -> UnderWay:
    """Return orders with the uploads that begin when each is trained, in this round."""
    start = Moments(orders.events.trained, np.full(len(orders), round_index))
    # Bit rates are computed again only if a round or time can have changed them meanwhile.
    same = (orders.round_index == round_index) & (start.now < orders.bit_rate_until)
    known = np.where(same, orders.bit_rate_up, np.nan)
    bits, device = orders.trained.replies.bits, orders.device
    upload = _transfer(world, "up", device, start, orders.active, bits, known, orders.send_power)
    refused = np.array([bool(each) for each in orders.trained.refused_by_server], dtype=bool)
    left = orders.battery - (orders.download.joules + orders.compute.joules)
    failures = {
        "battery empty": battery_empty((upload,), left),
        "no link": when(np.isinf(upload.seconds), 0.0),
        "nothing came through": when(orders.transfer.width_up <= 0, 0.0),
        # A reply that the server refuses has arrived, and is charged.
        "refused": when(refused, upload.seconds),
    }
    soonest, _ = earliest(failures)
    # A device that was online when the round began stays for its order: only time changes that.
    there = Moments(start.now, orders.round_index)
    end = np.minimum(upload.seconds, soonest)
    failures["went offline"] = offline(world, device, there, end)
    after, why = earliest(failures)
    fails = np.isfinite(after)
    ends = start.now + np.where(fails, after, upload.seconds)
    # A failure counts its seconds from the start of the order.
    failed_after = orders.download.seconds + orders.compute.seconds + after
    reason, reasons = np.where(fails, why, -1), list(_AFTER)
    for row in np.flatnonzero(fails & (why == _AFTER.index("refused"))):
        reason[row] = len(reasons)
        reasons.append(f"refused: {orders.trained.refused_by_server[row]}")
    for place, why_not in enumerate(orders.trained.refused_by_device):
        if why_not:
            # The order reached its device, which did nothing: only the download is charged.
            reason[place], ends[place] = len(reasons), start.now[place]
            failed_after[place] = orders.download.seconds[place]
            reasons.append(f"refused by the device: {why_not}")
    return replace(
        orders,
        bits_up=bits,
        upload=upload,
        upload_round=start.round_index,
        events=replace(orders.events, ends=ends),
        failed_after=failed_after,
        reason=reason,
        reasons=tuple(reasons),
    )


def _transfer(
    world: World,
    way: Way,
    devices: Ints,
    start: Moments,
    active: Ints,
    bits: Floats,
    known: Floats,
    watts: Floats,
) -> Phases:
    """Return transfers of bits; the `known` bit rates hold at the start, NaN is not known."""

    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        rate = np.where(moments.now == start.now[rows], known[rows], np.nan)
        unknown = np.flatnonzero(np.isnan(rate))
        if len(unknown):
            asked = rows[unknown]
            rates = world.bit_rates(devices[asked], moments.take(unknown), active[asked])
            rate[unknown] = rates.of(way)
        return transfer_cost(bits[rows], rate, watts[rows])

    return follow(start, cost, lambda rows, moments: world.bit_rates_until(devices[rows], moments))


def _compute(
    world: World,
    orders: Cohort,
    effort: Effort,
    start: Moments,
    own: Conditions,
    after: Floats,
) -> Phases:
    """Return the compute phases, which begin `after` so many seconds.

    What only a new round changes stays as it was when the orders were submitted.
    """
    devices, frequency = orders.device, orders.hyperparameters.frequency
    still = world.compute_until(devices, start)

    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        mine, changed = own.take(rows), np.flatnonzero(moments.now >= still[rows])
        if len(changed):
            found = world.compute_conditions(devices[rows[changed]], moments.take(changed))
            columns = {name: getattr(mine, name) for name in found}
            for name, values in found.items():
                columns[name][changed] = values
        part, asked = effort.take(rows), frequency[rows]
        return SteadyCost(part.seconds(mine, asked), part.joules(mine, asked))

    # After a download that never ends, computing never begins: any finite start will do.
    begun = Moments(start.now + np.where(np.isfinite(after), after, 0.0), start.round_index)
    return follow(begun, cost, lambda rows, moments: world.compute_until(devices[rows], moments))
