"""From a request of the schedule to orders: plan, extract, cut, squeeze."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Ints, join
from anyfleet.core.check_in import Choices
from anyfleet.core.compression import compress
from anyfleet.core.evaluation import served
from anyfleet.core.layout import Symbols, dense
from anyfleet.core.message_size import fetch_bits, index_bits, menu_bits, statistics_bits
from anyfleet.core.messages import Kind, Params, Plans, SubModelSize, Trees
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, downlink
from anyfleet.core.return_checks import Caller, cut_out, drafted, planned
from anyfleet.core.view import Request, View
from anyfleet.elastic import Slice
from anyfleet.tracebacks import during

_TRAINS = (Kind.TRAIN, Kind.HOLD)


@dataclass(frozen=True, eq=False)
class PlanningState:
    """What the loop keeps about its devices when it issues orders."""

    seed: int
    issued: int
    visits: Ints
    acknowledged: Ints
    states: Mapping[str, Any]
    held: tuple["HeldResult", ...] = ()  # FETCH: what the devices hold


class HeldResult(NamedTuple):
    """The size of a result that waits on its device."""

    slice: Slice
    width: float
    key: int  # of the order that it answers: its codec drew with it


@dataclass(frozen=True, eq=False)
class PlannedCohort:
    """Orders to submit, those that a planner declined, and the reasons."""

    orders: Cohort
    entries: tuple[tuple[int, ...], ...]  # the place of what is left of each menu in its plan
    menus: tuple[tuple[SubModelSize, ...], ...]  # the plan
    declined: Cohort
    reasons: tuple[str, ...]


def plan_cohort(
    request: Request, devices: Ints, *, method: Method, view: View, desk: PlanningState
) -> PlannedCohort:
    """One order per device, still without the trees: a device may first choose from its menu."""
    count = len(devices)
    plans = _plans(devices, method, view, desk)
    slices, menus = _slices(plans, method, view, desk)
    # A device that chooses is planned for with the first entry until it has chosen.
    first = [
        menu[0] if menu else plans.sub_model_sizes[row] for row, menu in enumerate(plans.menus)
    ]
    shares, keys = [want.widest for want in first], _keys(devices, desk)
    if request.kind == Kind.FETCH:
        slices, menus = tuple(held.slice for held in desk.held), ((),) * count
        shares = [held.width for held in desk.held]
        keys = torch.tensor([held.key for held in desk.held])
    orders = Cohort(
        id=desk.issued + np.arange(count),
        device=devices,
        visit=desk.visits[devices],
        key=keys,
        slices=slices,
        width=np.array(shares, dtype=np.float64),
        menus=menus,
        choice=np.full(count, -1),
        utility=np.full(count, np.nan),
        hyperparameters=plans.hyperparameters,
        trees=({},) * count,
        symbols=(None,) * count,
        bits=np.zeros(count),
        delivered_width=np.ones(count),
        column_width=view.devices.column_width[devices],
        acknowledged=desk.acknowledged[devices],
        held_order=np.array(
            request.held_orders if len(request.held_orders) else (-1,) * count, dtype=np.int64
        ),
        kind=request.kind,
        round_index=view.round_index,
        cohort_key=int(rng.fold(rng.root(desk.seed, "cohort"), view.round_index)),
        job=method.job(),
    )
    if request.kind == Kind.FETCH:
        return PlannedCohort(orders, ((),) * count, ((),) * count, orders.take([]), ())
    return _sorted_out(orders, plans, view)


def _sorted_out(orders: Cohort, plans: Plans, view: View) -> PlannedCohort:
    """Orders to submit apart from those that nobody shall get."""
    orders, entries, full = _fitting(orders, view)
    # A planner declines training; a device can always be asked something that it can hold.
    skipped = plans.declined if orders.kind in _TRAINS else ("",) * len(orders)
    reasons = [a or b for a, b in zip(skipped, full, strict=True)]
    drafted = PlannedCohort(orders, tuple(entries), plans.menus, orders.take([]), ())
    return _apart(drafted, reasons)


def _apart(drafted: PlannedCohort, reasons: Sequence[str]) -> PlannedCohort:
    """With those orders set aside for which there is a reason."""
    no = [row for row, reason in enumerate(reasons) if reason]
    go = np.setdiff1d(np.arange(len(reasons)), no)
    return PlannedCohort(
        orders=drafted.orders.take(go),
        entries=tuple(drafted.entries[row] for row in go),
        menus=tuple(drafted.menus[row] for row in go),
        declined=join([drafted.declined, drafted.orders.take(no)]),
        reasons=(*drafted.reasons, *(reasons[row] for row in no)),
    )


def _fitting(orders: Cohort, view: View) -> tuple[Cohort, list[tuple[int, ...]], list[str]]:
    """The orders without menu entries that a device cannot hold, and why it gets none at all.

    Between them, the places that the entries left have in the whole menu. By what devices report:
    nobody is asked for what it says it has no room for.
    """
    room = view.conditions(orders.device).memory
    entries, menus, reasons = [], [], []
    for row, menu in enumerate(orders.menus):
        batch = int(orders.hyperparameters.batch_size[row]) if orders.kind in _TRAINS else None
        needs = {e: view.memory(e, batch) for e in menu or (orders.slices[row],)}
        entries.append(tuple(i for i, entry in enumerate(menu) if needs[entry] <= room[row]))
        menus.append(tuple(menu[i] for i in entries[row]))
        reasons.append(too_large(min(needs.values()), float(room[row])))
    slices = tuple(
        kept[0] if kept else ordered for kept, ordered in zip(menus, orders.slices, strict=True)
    )
    return replace(orders, menus=tuple(menus), slices=slices), entries, reasons


def too_large(needed: float, there: float) -> str:
    """Why an order does not fit into a memory; empty if it does."""
    if needed <= there:
        return ""
    return f"out of memory: needs {needed / 1e6:.3g} MB, has {there / 1e6:.3g} MB"


def apply_choices(drafted: PlannedCohort, choices: Choices) -> PlannedCohort:
    """After devices have chosen from what they could hold of their menus, or declined all of it."""
    orders = drafted.orders
    slices = tuple(
        menu[entry] if menu else ordered
        for menu, entry, ordered in zip(orders.menus, choices.entry, orders.slices, strict=True)
    )
    pairs = zip(drafted.entries, choices.entry, strict=True)
    # By its place in the plan: one number means one size, whatever else a device could hold.
    choice = np.array([left[entry] if left else -1 for left, entry in pairs], dtype=np.int64)
    share = np.array(
        [
            menu[place].widest if menu else planned
            for menu, place, planned in zip(drafted.menus, choice, orders.width, strict=True)
        ]
    )
    orders = replace(
        orders,
        slices=slices,
        width=share,
        choice=choice,
        utility=choices.utility,
        hyperparameters=choices.hyperparameters,
    )
    # As with plans: a device declines to train, and can always be asked something.
    reasons = choices.declined if orders.kind in _TRAINS else ("",) * len(orders)
    nothing = np.array([bool(reason) for reason in reasons], dtype=bool)
    orders = replace(orders, choice=np.where(nothing, -1, orders.choice))
    return _apart(replace(drafted, orders=orders), reasons)


def load_models(
    orders: Cohort, *, method: Method, task: Task, params: Params, buffers: Params
) -> Cohort:
    """The orders with what travels down; devices with equal slices share one tree."""
    if orders.kind == Kind.FETCH:
        asked = [fetch_bits(slice_, task.blueprint) for slice_ in orders.slices]
        return replace(orders, bits=np.array(asked))
    found: dict[Hashable, Package] = {}
    sent = []
    for row, slice_ in enumerate(orders.slices):
        # Columns depend on the share as it was planned; without columns nothing does.
        column = float(orders.column_width[row])
        alike = (slice_, column, float(orders.width[row])) if column < 1 else slice_
        if alike not in found:
            one = orders.take([row])
            found[alike] = package(one, params, buffers, method=method, task=task)
        sent.append(found[alike])
    sizes = [
        each.bits + menu_bits(menu, task.blueprint)
        for each, menu in zip(sent, orders.menus, strict=True)
    ]
    trees = tuple(each.trees for each in sent)
    symbols = tuple(each.symbols for each in sent)
    return replace(orders, trees=trees, symbols=symbols, bits=np.array(sizes))


def server_names(slice_: Slice, *, method: Method, task: Task) -> dict[str, str]:
    """Where the server keeps a width's own normalisation; empty when all widths share one."""
    return method.norm.own_names(task.blueprint, slice_)


def branch(
    orders: Cohort,
    *,
    method: Method,
    task: Task,
    params: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> None:
    """Starts a width's own normalisation from the common one when it is first used, in place."""
    for slice_ in set(orders.slices):
        for name, mine in server_names(slice_, method=method, task=task).items():
            tree = params if name in params else buffers
            if mine not in tree:
                tree[mine] = tree[name]


def _keys(devices: Ints, desk: PlanningState) -> Tensor:
    """Addressed by device and visit: the same whatever the order of events."""
    key = rng.fold(rng.root(desk.seed, "order"), torch.from_numpy(devices))
    return rng.fold(key, torch.from_numpy(desk.visits[devices]))


def _plans(devices: Ints, method: Method, view: View, desk: PlanningState) -> Plans:
    count = len(devices)
    with during("train", method.train):
        numbers = method.train.hyperparameters(view.round_index, view.devices.samples[devices])
    drafts = Plans(
        device=devices,
        sub_model_sizes=tuple(SubModelSize(device=int(device)) for device in devices),
        hyperparameters=drafted(numbers, Caller("train", method.train, view.round_index), count),
        menus=((),) * count,
        declined=("",) * count,
    )
    key = rng.fold(rng.root(desk.seed, "plan"), view.round_index)
    with during("plan", method.plan):
        plans = method.plan(drafts, view, desk.states["plan"], key)
    return planned(plans, Caller("plan", method.plan, view.round_index), drafts, view.blueprint)


def _slices(
    plans: Plans, method: Method, view: View, desk: PlanningState
) -> tuple[tuple[Slice, ...], tuple[tuple[Slice, ...], ...]]:
    state = desk.states["extract"]
    keys = rng.fold(rng.root(desk.seed, "extract"), torch.from_numpy(plans.device))
    # By visit: a device may be asked twice within a step of an asynchronous run.
    keys = rng.fold(keys, torch.from_numpy(desk.visits[plans.device]))

    caller = Caller("extract", method.extract, view.round_index)

    def extract(want: SubModelSize, row: int) -> Slice:
        with during("extract", method.extract):
            found = method.extract(want, view, state, keys[row])
        return cut_out(found, caller, view.blueprint)

    menus = tuple(
        tuple(extract(want, row) for want in menu) for row, menu in enumerate(plans.menus)
    )
    # A device that chooses is answered with the first entry until it has chosen.
    slices = (
        menu[0] if menu else extract(plans.sub_model_sizes[row], row)
        for row, menu in enumerate(menus)
    )
    return tuple(slices), menus


class Package(NamedTuple):
    """What travels down to a device."""

    trees: Trees
    symbols: Symbols
    bits: float


def package(
    order: Cohort, params: Params, buffers: Params, *, method: Method, task: Task
) -> Package:
    """The sub-model as a device gets it with its order, without what never travels."""
    blueprint, norm, slice_ = task.blueprint, method.norm, order.slices[0]
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
    return Package(trees, compressed.symbols, bits)
