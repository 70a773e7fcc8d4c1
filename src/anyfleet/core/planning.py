"""Orders out of a request of the schedule: plan, extract, choose, cut and compress."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Ints, distinct, join
from anyfleet.core.check_in import Choices
from anyfleet.core.codec_calls import compress
from anyfleet.core.evaluation import served
from anyfleet.core.layout import dense
from anyfleet.core.message_size import fetch_bits, index_bits, menu_bits, statistics_bits
from anyfleet.core.messages import Kind, Params, SubModelSize, Trees
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, Download, downlink
from anyfleet.core.plans import Plans
from anyfleet.core.return_checks import Caller, cut_out, hyperparameters, planned
from anyfleet.core.view import Request, View
from anyfleet.elastic import Slice
from anyfleet.tracebacks import during

_TRAINS = (Kind.TRAIN, Kind.HOLD)


@dataclass(frozen=True, eq=False)
class PlanningState:
    """What the loop knows of its devices when it issues orders."""

    seed: int
    issued: int  # orders so far: the number of the next one
    visits: Ints  # how often each device was asked to train
    acknowledged: Ints  # the last order of each device whose training result counted, or -1
    states: Mapping[str, Any]  # of the policies, by slot
    held: tuple["HeldResult", ...] = ()  # FETCH: the results that the devices hold


class HeldResult(NamedTuple):
    """A result that waits on its device."""

    slice: Slice
    width: float
    key: int  # of the order that it replies to: its codec drew with it


@dataclass(frozen=True, eq=False)
class PlannedCohort:
    """The orders to submit, and those that are declined."""

    orders: Cohort
    # For each remaining menu entry, its index in the planned menu.
    entries: tuple[tuple[int, ...], ...]
    menus: tuple[tuple[SubModelSize, ...], ...]  # each device's whole menu, as planned
    declined: Cohort
    reasons: tuple[str, ...]  # why, for each of the declined


def plan_cohort(
    request: Request, devices: Ints, *, method: Method, view: View, state: PlanningState
) -> PlannedCohort:
    """Return one order for each device, still without the model: some devices choose first."""
    count = len(devices)
    plans = _plans(devices, method, view, state)
    slices, menus = _slices(plans, method, view, state)
    # A device that chooses is planned for with the first entry until it has chosen.
    widths, keys = [plans.options_of(row)[0].widest for row in range(count)], _keys(devices, state)
    if request.kind == Kind.FETCH:
        slices, menus = tuple(held.slice for held in state.held), ((),) * count
        widths = [held.width for held in state.held]
        keys = torch.tensor([held.key for held in state.held])
    distinct_slices, slice_index = distinct(slices)
    distinct_menus, menu_index = _listed_menus(menus)
    orders = Cohort(
        id=state.issued + np.arange(count),
        device=devices,
        visit=state.visits[devices],
        key=keys,
        slice_index=slice_index,
        width=np.array(widths, dtype=np.float64),
        menu_index=menu_index,
        choice=np.full(count, -1),
        utility=np.full(count, np.nan),
        hyperparameters=plans.hyperparameters,
        download_index=np.full(count, -1),
        bits=np.zeros(count),
        delivered_width=np.ones(count),
        column_width=view.devices.column_width[devices],
        acknowledged=state.acknowledged[devices],
        held_order=np.array(
            request.held_orders if len(request.held_orders) else (-1,) * count, dtype=np.int64
        ),
        kind=request.kind,
        round_index=view.round_index,
        cohort_key=int(rng.fold(rng.root(state.seed, "cohort"), view.round_index)),
        job=method.job(),
        slices=distinct_slices,
        menus=distinct_menus,
        downloads=(),
    )
    if request.kind == Kind.FETCH:
        return PlannedCohort(orders, ((),) * count, ((),) * count, orders.take([]), ())
    return _sorted_out(orders, plans, view)


def _sorted_out(orders: Cohort, plans: Plans, view: View) -> PlannedCohort:
    """Return the orders to submit, and apart from them those that no device shall get."""
    orders, entries, full = _fitting(orders, view)
    # A planner declines training; a device can always be asked something that it can hold.
    skipped = plans.declined if orders.kind in _TRAINS else ("",) * len(orders)
    reasons = [a or b for a, b in zip(skipped, full, strict=True)]
    menus = tuple(map(plans.menu_of, range(len(plans))))
    return _apart(PlannedCohort(orders, tuple(entries), menus, orders.take([]), ()), reasons)


def _apart(planned: PlannedCohort, reasons: Sequence[str]) -> PlannedCohort:
    """Return the cohort with those orders declined for which there is a reason."""
    no = [row for row, reason in enumerate(reasons) if reason]
    go = np.setdiff1d(np.arange(len(reasons)), no)
    return PlannedCohort(
        orders=planned.orders.take(go),
        entries=tuple(planned.entries[row] for row in go),
        menus=tuple(planned.menus[row] for row in go),
        declined=join([planned.declined, planned.orders.take(no)]),
        reasons=(*planned.reasons, *(reasons[row] for row in no)),
    )


def _fitting(orders: Cohort, view: View) -> tuple[Cohort, list[tuple[int, ...]], list[str]]:
    """Return the orders without the menu entries that a device cannot hold.

    With them come the places that the entries left have in the whole menu, and why a device gets no
    order at all, or "". By what devices report: none is asked for what it says it cannot hold.
    """
    room = view.conditions(orders.device).memory
    entries, menus, reasons = [], [], []
    for row in range(len(orders)):
        menu = orders.menu_of(row)
        batch = int(orders.hyperparameters.batch_size[row]) if orders.kind in _TRAINS else None
        needs = [view.memory(slice_, batch) for slice_ in menu or (orders.slice_of(row),)]
        fits = tuple(place for place in range(len(menu)) if needs[place] <= room[row])
        entries.append(fits)
        menus.append(tuple(menu[place] for place in fits))
        reasons.append(too_large(min(needs), float(room[row])))
    slices, slice_index = distinct(
        [kept[0] if kept else orders.slice_of(row) for row, kept in enumerate(menus)]
    )
    listed, menu_index = _listed_menus(menus)
    orders = replace(
        orders, menus=listed, menu_index=menu_index, slices=slices, slice_index=slice_index
    )
    return orders, entries, reasons


def _listed_menus(
    menus: Sequence[tuple[Slice, ...]],
) -> tuple[tuple[tuple[Slice, ...], ...], Ints]:
    """Return the different menus, and the number of each one given; -1 for an empty one."""
    found, index = distinct(menus)
    full = [number for number, menu in enumerate(found) if menu]
    renumbered = np.full(len(found), -1)
    renumbered[full] = np.arange(len(full))
    return tuple(found[number] for number in full), renumbered[index]


def too_large(needed: float, there: float) -> str:
    """Return why an order does not fit into a memory, both in bytes, or ""."""
    if needed <= there:
        return ""
    return f"out of memory: needs {needed / 1e6:.3g} MB, has {there / 1e6:.3g} MB"


def apply_choices(planned: PlannedCohort, choices: Choices) -> PlannedCohort:
    """Return the cohort after devices chose from what they could hold of their menus.

    A device may have declined all of it.
    """
    orders = planned.orders
    chosen = [
        menu[entry] if (menu := orders.menu_of(row)) else orders.slice_of(row)
        for row, entry in enumerate(choices.entry)
    ]
    slices, slice_index = distinct(chosen)
    pairs = zip(planned.entries, choices.entry, strict=True)
    # By its place in the plan: one number means one size, whatever else a device could hold.
    choice = np.array([left[entry] if left else -1 for left, entry in pairs], dtype=np.int64)
    width = np.array(
        [
            menu[place].widest if menu else before
            for menu, place, before in zip(planned.menus, choice, orders.width, strict=True)
        ]
    )
    orders = replace(
        orders,
        slices=slices,
        slice_index=slice_index,
        width=width,
        choice=choice,
        utility=choices.utility,
        hyperparameters=choices.hyperparameters,
    )
    # As with plans: a device declines to train, and can always be asked something.
    reasons = choices.declined if orders.kind in _TRAINS else ("",) * len(orders)
    nothing = np.array([bool(reason) for reason in reasons], dtype=bool)
    orders = replace(orders, choice=np.where(nothing, -1, orders.choice))
    return _apart(replace(planned, orders=orders), reasons)


def load_models(
    orders: Cohort, *, method: Method, task: Task, params: Params, buffers: Params
) -> Cohort:
    """Return the orders with what travels down; devices with equal slices get one tree."""
    if orders.kind == Kind.FETCH:
        asked = np.array([fetch_bits(slice_, task.blueprint) for slice_ in orders.slices])
        return replace(orders, bits=asked[orders.slice_index])
    found: dict[Hashable, int] = {}
    downloads: list[Download] = []
    index = []
    for row in range(len(orders)):
        slice_ = orders.slice_of(row)
        # Columns depend on the width as it was planned; without columns nothing does.
        column = float(orders.column_width[row])
        alike = (slice_, column, float(orders.width[row])) if column < 1 else slice_
        if alike not in found:
            one = orders.take([row])
            downloads.append(package(one, params, buffers, method=method, task=task))
            found[alike] = len(downloads) - 1
        index.append(found[alike])
    menus = np.array([*(menu_bits(menu, task.blueprint) for menu in orders.menus), 0.0])
    sizes = np.array([each.bits for each in downloads])[index] + menus[orders.menu_index]
    return replace(orders, downloads=tuple(downloads), download_index=np.array(index), bits=sizes)


def server_names(slice_: Slice, *, method: Method, task: Task) -> dict[str, str]:
    """Return under which names the server keeps a width's own normalisation.

    Empty when all widths have the same.
    """
    return method.norm.own_names(task.blueprint, slice_)


def branch(
    orders: Cohort,
    *,
    method: Method,
    task: Task,
    params: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> None:
    """Start a width's own normalisation from the common one when it is first used, in place."""
    for slice_ in set(orders.slices):
        for name, mine in server_names(slice_, method=method, task=task).items():
            tree = params if name in params else buffers
            if mine not in tree:
                tree[mine] = tree[name]


def _keys(devices: Ints, state: PlanningState) -> Tensor:
    """Return the keys of the orders.

    They are addressed by device and visit: the same whatever the order of events.
    """
    key = rng.fold(rng.root(state.seed, "order"), torch.from_numpy(devices))
    return rng.fold(key, torch.from_numpy(state.visits[devices]))


def _plans(devices: Ints, method: Method, view: View, state: PlanningState) -> Plans:
    """Return what the plan of the method makes of the trainer's hyperparameters."""
    count = len(devices)
    with during("train", method.train):
        given = method.train.hyperparameters(view.round_index, view.devices.samples[devices])
    given = hyperparameters(given, Caller("train", method.train, view.round_index), count)
    plans = Plans.whole_model(devices, given)
    key = rng.fold(rng.root(state.seed, "plan"), view.round_index)
    with during("plan", method.plan):
        found = method.plan(plans, view, state.states["plan"], key)
    caller = Caller("plan", method.plan, view.round_index)
    return planned(found, caller, plans, view.blueprint)


def _slices(
    plans: Plans, method: Method, view: View, state: PlanningState
) -> tuple[tuple[Slice, ...], tuple[tuple[Slice, ...], ...]]:
    """Return the slice of every device, and the slices of its menu.

    A device that chooses is planned for with the first entry until it has chosen.
    """
    extract, own = method.extract, state.states["extract"]
    root, devices = rng.root(state.seed, "extract"), plans.device.tolist()
    # By visit: a device may be asked twice within a round of an asynchronous run.
    visits = torch.from_numpy(state.visits[plans.device])
    own_keys = rng.fold(rng.fold(root, torch.from_numpy(plans.device)), visits)
    shared_key = rng.fold(root, view.round_index)
    caller = Caller("extract", extract, view.round_index)
    known: dict[tuple[SubModelSize, int | None], Slice] = {}

    def cut(size: SubModelSize, row: int) -> Slice:
        key, device = (own_keys[row], devices[row]) if extract.personal else (shared_key, None)
        if (size, device) not in known:
            with during("extract", extract):
                found = extract(size, view, own, key, device)
            known[size, device] = cut_out(found, caller, view.blueprint)
        return known[size, device]

    menus = tuple(tuple(cut(size, row) for size in plans.menu_of(row)) for row in range(len(plans)))
    slices = tuple(
        menu[0] if menu else cut(plans.size_of(row), row) for row, menu in enumerate(menus)
    )
    return slices, menus


def package(
    order: Cohort, params: Params, buffers: Params, *, method: Method, task: Task
) -> Download:
    """Return the sub-model as a device gets it with its order, without what never travels."""
    blueprint, norm, slice_ = task.blueprint, method.norm, order.slice_of(0)
    home = norm.stays(blueprint) | set(blueprint.frozen)
    weights, like = served(params, blueprint, norm, slice_), next(iter(params.values()))
    small = dense({n: v for n, v in weights.items() if n not in home}, slice_, blueprint)
    around = downlink(order, blueprint, tuple(small), like.dtype)
    stack = {name: value.unsqueeze(0) for name, value in small.items()}
    caller = Caller("downlink", method.downlink, order.round_index)
    unasked = torch.full((1,), torch.nan)
    compressed = compress(stack, {}, unasked, around, caller)
    model = {name: value.squeeze(0) for name, value in compressed.received.items()}
    travels = norm.travels(blueprint)
    told = {n: v for n, v in served(buffers, blueprint, norm, slice_).items() if n in travels}
    told = dense(told, slice_, blueprint)
    trees: Trees = {"model": model} | ({"buffers": told} if told else {})
    bits = float(compressed.bits.sum()) + index_bits(slice_, blueprint) + statistics_bits(trees)
    return Download(trees, compressed.symbols, bits)
