"""The times of orders: download and training when they are submitted, upload when they are trained.

How an order ends early is known with them: the earliest failure counts.
"""

from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.delivery import cut_orders
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.messages import Conditions
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import too_large
from anyfleet.core.stacks import Replies
from anyfleet.core.time_and_energy import Effort
from anyfleet.runtime.simulated.charging import demand
from anyfleet.runtime.simulated.clock import Events
from anyfleet.runtime.simulated.failures import (
    OUT_OF_MEMORY,
    REFUSED,
    battery_empty,
    earliest,
    offline,
    when,
)
from anyfleet.runtime.simulated.phases import Phases, SteadyCost, follow, transfer_cost
from anyfleet.runtime.simulated.transfers import draw_transfers, event_keys
from anyfleet.runtime.simulated.under_way import Submitted, UnderWay
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import Moments, When


def begin(
    orders: Cohort,
    now: When,
    own: Conditions,
    active: Ints,
    *,
    world: World,
    task: Task,
    states: DeviceStates,
) -> UnderWay:
    """Return orders that are submitted now, as rows of the table; their events have no number.

    `own` are the true conditions of the devices, `active` devices use the band of each.
    """
    devices, count = orders.device, len(orders)
    transfer = draw_transfers(orders, world, now, active)
    received = orders
    if world.lossy:
        received = cut_orders(orders, transfer.width_down, task.blueprint)
    samples = world.declared.samples[devices]
    need = demand(received, samples, task, world.declared.counting, states)
    start = Moments(np.full(count, now.now), np.full(count, now.round_index))
    links = _Links("down", devices, active, own.bit_rate_down, own.receive_power)
    download = _transfer(world, links, start, received.bits, np.ones(count, dtype=bool))
    compute = _compute(world, received, need.effort, start, own, download.seconds)
    after, trained = download.seconds, download.seconds + compute.seconds
    failures = {
        "battery empty": battery_empty((download, compute), own.battery),
        "no link": when(np.isinf(after), 0.0),
        "out of memory": when(need.memory > own.memory, after),
    }
    if world.mortal:
        dies = world.dies(devices, event_keys(orders, world.seed, "death"), now)
        failures["died"] = when(dies, after + compute.seconds / 2)
    failed_after, reason = _with_offline(world, devices, start, failures, trained)
    fails = reason >= 0
    large = np.flatnonzero(reason == OUT_OF_MEMORY)
    needed, there = need.memory[large].tolist(), own.memory[large].tolist()
    none, nowhere, no = np.zeros(count), np.full(count, -1), np.zeros(count, dtype=bool)
    detail = nowhere.copy()
    detail[large] = np.arange(len(large))
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
        uploading=no,
        events=events,
        failed_after=failed_after,
        reason=reason,
        carried_out=no,
        replies=_no_replies(orders),
        did_nothing=no,
        detail=detail,
        cohorts=(Submitted(orders, received),),
        details=tuple(map(too_large, needed, there)),
    )


def _with_offline(
    world: World, devices: Ints, start: Moments, failures: dict[str, Floats], seconds: Floats
) -> tuple[Floats, Ints]:
    """Return the `earliest` failures, if devices that go offline in these seconds fail too."""
    if world.always_online:
        return earliest(failures)
    soonest = np.minimum(np.min([*failures.values()], axis=0), seconds)
    return earliest({**failures, "went offline": offline(world, devices, start, soonest)})


def _no_replies(orders: Cohort) -> Replies:
    none, nothing = np.zeros(len(orders)), np.zeros(len(orders), dtype=np.int64)
    return Replies(
        order=orders.id,
        device=orders.device,
        samples=nothing,
        bits=none,
        delivered_width=none,
        stack_index=nothing - 1,
        place=nothing,
        stacks=(),
    )


def with_uploads(orders: UnderWay, round_index: int, world: World) -> UnderWay:
    """Return orders with the uploads that begin when each is trained, in this round."""
    start = Moments(orders.events.trained, np.full(len(orders), round_index))
    # Bit rates are computed again only if a round or time can have changed them meanwhile.
    same = (orders.round_index == round_index) & (start.now < orders.bit_rate_until)
    bits, device = orders.replies.bits, orders.device
    links = _Links("up", device, orders.active, orders.bit_rate_up, orders.send_power)
    upload = _transfer(world, links, start, bits, same)
    refused = (orders.detail >= 0) & ~orders.did_nothing
    left = orders.battery - (orders.download.joules + orders.compute.joules)
    failures = {
        "battery empty": battery_empty((upload,), left),
        "no link": when(np.isinf(upload.seconds), 0.0),
        "nothing came through": when(orders.transfer.width_up <= 0, 0.0),
        # A reply that the server refuses has arrived, and is charged.
        "refused": when(refused, upload.seconds),
    }
    # A device that was online when the round began stays for its order: only time changes that.
    there = Moments(start.now, orders.round_index)
    after, reason = _with_offline(world, device, there, failures, upload.seconds)
    # An order that its device refuses reached it, and it did nothing.
    after = np.where(orders.did_nothing, 0.0, after)
    ends = start.now + np.where(np.isfinite(after), after, upload.seconds)
    # A failure counts its seconds from the start of the order; of such an order, the download.
    download = orders.download.seconds
    failed_after = np.where(orders.did_nothing, download, download + orders.compute.seconds + after)
    return orders.having(
        bits_up=bits,
        upload=upload,
        upload_round=start.round_index,
        events=orders.events.having(ends=ends),
        failed_after=failed_after,
        reason=np.where(orders.did_nothing, REFUSED, reason),
    )


class _Links(NamedTuple):
    """One direction of the links of some devices."""

    way: Way
    device: Ints
    active: Ints  # devices that use the band of each
    bit_rate: Floats  # when the orders were submitted
    watts: Floats


def _transfer(world: World, links: _Links, start: Moments, bits: Floats, holds: Flags) -> Phases:
    """Return transfers of bits; where it `holds`, the bit rate at the start is that of before."""
    usual = transfer_cost(bits, links.bit_rate, links.watts)
    if world.steady_links and holds.all():
        return Phases.steady(*usual)

    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        rate = links.bit_rate[rows]
        new = np.flatnonzero(~holds[rows] | (moments.now > start.now[rows]))
        if len(new):
            device, active = links.device[rows[new]], links.active[rows[new]]
            rate[new] = world.bit_rate(links.way, device, moments.take(new), active)
        return transfer_cost(bits[rows], rate, links.watts[rows])

    def until(rows: Ints, moments: Moments) -> Floats:
        return world.bit_rates_until(links.device[rows], moments)

    return follow(start, usual.seconds, cost, until)


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
    usual = SteadyCost(*effort.spent(own, frequency))
    if not world.changing_pace:
        return Phases.steady(*usual)
    still = world.compute_until(devices, start)

    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        mine, changed = own.take(rows), np.flatnonzero(moments.now >= still[rows])
        if len(changed):
            then, names = moments.take(changed), world.changing_pace
            found = world.compute_conditions(devices[rows[changed]], then, names)
            columns = {name: getattr(mine, name).copy() for name in found}
            for name, values in found.items():
                columns[name][changed] = values
            mine = mine.having(**columns)
        return SteadyCost(*effort.take(rows).spent(mine, frequency[rows]))

    # After a download that never ends, computing never begins: any finite start will do.
    begun = Moments(start.now + np.where(np.isfinite(after), after, 0.0), start.round_index)
    return follow(
        begun,
        usual.seconds,
        cost,
        lambda rows, moments: world.compute_until(devices[rows], moments),
    )
