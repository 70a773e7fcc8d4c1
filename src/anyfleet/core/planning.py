"""Orders out of a request of the schedule: plan, extract, choose, cut and compress."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints, distinct, every, grouped, join
from anyfleet.core.check_in import Choices
from anyfleet.core.codec_calls import compress
from anyfleet.core.evaluation import served
from anyfleet.core.layout import MessageLayout, dense, tensor_layouts
from anyfleet.core.message_size import fetch_bits, index_bits, menu_bits, statistics_bits
from anyfleet.core.messages import TRAINING, Kind, Params, SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, Download, IssuedOrders, downlink_key, grid
from anyfleet.core.plans import Plans
from anyfleet.core.return_checks import Caller, cut_out, hyperparameters, planned
from anyfleet.core.slots import Norm
from anyfleet.core.view import Request, View
from anyfleet.elastic import Blueprint, Slice
from anyfleet.tracebacks import during


@dataclass(frozen=True, eq=False)
class PlanningState:
    """What the loop knows of its devices when it issues orders."""

    seed: int
    issued: int  # orders so far: the number of the next one
    visits: Ints  # how often each device was asked to train
    acknowledged: Ints  # the last order of each device whose training result counted, or -1
    states: Mapping[str, Any]  # of the policies, by slot
    # FETCH: the orders whose results the devices hold. Their codecs drew with the keys of these.
    held: IssuedOrders | None = None


@dataclass(frozen=True, eq=False)
class PlannedCohort:
    """The orders to submit or to offer, and those that are declined."""

    orders: Cohort
    menus: tuple["PlannedMenu", ...]  # for each menu of the orders, what was planned
    declined: Cohort
    reasons: tuple[str, ...]  # why, for each of the declined


class PlannedMenu(NamedTuple):
    """What a device can hold of a menu: sizes, and their places in the menu as planned."""

    sizes: tuple[SubModelSize, ...]
    places: tuple[int, ...]


def plan_cohort(
    request: Request, devices: Ints, *, method: Method, view: View, state: PlanningState
) -> PlannedCohort:
    """Return one order for each device, still without the model: some devices choose first."""
    count = len(devices)
    plans = _plans(devices, method, view, state)
    if state.held is None:
        cuts, keys = _extracted(plans, method, view, state), _keys("order", devices, state)
    else:
        held = state.held
        none = np.full(count, -1)
        cuts, keys = _Cuts(held.slices, held.slice_index, held.width, (), none, ()), held.key
    fetched = np.asarray(request.held_orders, dtype=np.int64)
    orders = Cohort(
        id=state.issued + np.arange(count),
        device=devices,
        visit=state.visits[devices],
        key=keys,
        slice_index=cuts.slice_index,
        width=cuts.width,
        menu_index=cuts.menu_index,
        choice=np.full(count, -1),
        utility=np.full(count, np.nan),
        hyperparameters=plans.hyperparameters,
        download_index=np.full(count, -1),
        bits=np.zeros(count),
        delivered_width=np.ones(count),
        column_width=view.devices.column_width[devices],
        acknowledged=state.acknowledged[devices],
        held_order=fetched if len(fetched) else np.full(count, -1),
        kind=request.kind,
        round_index=view.round_index,
        cohort_key=int(rng.root(state.seed, "cohort", view.round_index)),
        job=method.job(),
        slices=cuts.slices,
        menus=cuts.menus,
        downloads=(),
    )
    if state.held is not None:
        return PlannedCohort(orders, (), orders.take([]), ())
    planned, full = _fitting(PlannedCohort(orders, cuts.planned, orders.take([]), ()), view)
    # A planner declines training; a device can always be asked something that it can hold.
    if orders.kind not in TRAINING or not any(plans.declined):
        return _apart(planned, full)
    return _apart(planned, [a or b for a, b in zip(plans.declined, full, strict=True)])


def _apart(planned: PlannedCohort, reasons: Sequence[str]) -> PlannedCohort:
    """Return the cohort with those orders declined for which there is a reason."""
    if not any(reasons):
        return planned
    no = np.array([bool(reason) for reason in reasons], dtype=bool)
    return replace(
        planned,
        orders=planned.orders.take(~no),
        declined=join([planned.declined, planned.orders.take(no)]),
        reasons=(*planned.reasons, *filter(None, reasons)),
    )


def _fitting(planned: PlannedCohort, view: View) -> tuple[PlannedCohort, Sequence[str]]:
    """Return the orders without the menu entries that a device cannot hold.

    With them comes why a device gets no order at all, or "". By what devices report: none is asked
    for what it says it cannot hold. One that does not know its memory is asked.
    """
    orders, reasons = planned.orders, [""] * len(planned.orders)
    room = view.free_memory(orders.device)
    room = np.where(np.isnan(room), np.inf, room)
    if every(np.isinf(room)):
        return planned, reasons  # whatever is needed, which takes seconds to find out
    needs = _needs(orders, view)
    least = np.nanmin(needs, axis=1, initial=np.inf)
    for row in np.flatnonzero(least > room).tolist():
        reasons[row] = too_large(float(least[row]), float(room[row]))
    chooses = orders.menu_index >= 0
    fits = needs <= room[:, None]
    if fits[chooses].sum() == (~np.isnan(needs[chooses])).sum():
        return planned, reasons
    # Few different menus are left over: one for each menu and each set of what fits.
    rows = np.flatnonzero(chooses & fits.any(axis=1))
    first, index = grouped(orders.menu_index[rows], *fits[rows].T)
    cuts, menus = [], []
    for row in rows[first].tolist():
        sizes, places = planned.menus[int(orders.menu_index[row])]
        left = np.flatnonzero(fits[row]).tolist()
        cuts.append(tuple(orders.menu_of(row)[place] for place in left))
        menus.append(PlannedMenu(tuple(sizes[i] for i in left), tuple(places[i] for i in left)))
    slices, number = distinct([*orders.slices, *(cut[0] for cut in cuts)])
    menu_index, slice_index = np.full(len(orders), -1), number[orders.slice_index]
    menu_index[rows], slice_index[rows] = index, number[len(orders.slices) + index]
    orders = orders.having(
        menus=tuple(cuts), menu_index=menu_index, slices=slices, slice_index=slice_index
    )
    return replace(planned, orders=orders, menus=tuple(menus)), reasons


def _needs(orders: Cohort, view: View) -> Floats:
    """Return the bytes that each order, or each entry of its menu, needs: [orders, entries].

    NaN stands for entries that there are not.
    """
    trains = orders.kind in TRAINING
    batch = orders.hyperparameters.batch_size
    alike = orders.menu_index, orders.slice_index
    first, index = grouped(*alike, batch) if trains else grouped(*alike)
    options = [orders.menu_of(row) or (orders.slice_of(row),) for row in first.tolist()]
    needs = np.full((len(first), max(map(len, options), default=1)), np.nan)
    for place, row in enumerate(first.tolist()):
        size = int(batch[row]) if trains else None
        needs[place, : len(options[place])] = [view.memory(each, size) for each in options[place]]
    found: Floats = needs[index]
    return found


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
    rows = np.flatnonzero(orders.menu_index >= 0)
    first, index = grouped(orders.menu_index[rows], choices.entry[rows])
    entries = [
        (int(orders.menu_index[row]), int(choices.entry[row])) for row in rows[first].tolist()
    ]
    slices, number = distinct(
        [*orders.slices, *(orders.menus[menu][entry] for menu, entry in entries)]
    )
    slice_index, width = number[orders.slice_index], orders.width.copy()
    slice_index[rows] = number[len(orders.slices) :][index]
    width[rows] = _floats(planned.menus[menu].sizes[entry].widest for menu, entry in entries)[index]
    # By its place in the plan: one number means one size, whatever else a device could hold.
    choice = np.full(len(orders), -1)
    choice[rows] = _floats(planned.menus[menu].places[entry] for menu, entry in entries)[index]
    # As with plans: a device declines to train, and can always be asked something.
    reasons = choices.declined if orders.kind in TRAINING else ("",) * len(orders)
    if any(reasons):
        choice[[bool(reason) for reason in reasons]] = -1
    orders = orders.having(
        slices=slices,
        slice_index=slice_index,
        width=width,
        choice=choice,
        utility=choices.utility,
        hyperparameters=choices.hyperparameters,
    )
    return _apart(replace(planned, orders=orders), reasons)


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def load_models(
    orders: Cohort, *, method: Method, task: Task, params: Params, buffers: Params
) -> Cohort:
    """Return the orders with what travels down; devices with equal slices get one tree."""
    if orders.kind == Kind.FETCH:
        asked = np.array([fetch_bits(slice_, task.blueprint) for slice_ in orders.slices])
        return orders.having(bits=asked[orders.slice_index])
    # Columns depend on the width as it was planned; without columns nothing does.
    column = orders.column_width
    first, index = grouped(orders.slice_index, column, np.where(column < 1, orders.width, 1.0))
    models = {"params": params, "buffers": buffers}
    downloads = _downloads(orders, first.tolist(), method=method, task=task, **models)
    menus = np.array([*(menu_bits(menu, task.blueprint) for menu in orders.menus), 0.0])
    sizes = np.array([each.bits for each in downloads])[index] + menus[orders.menu_index]
    return orders.having(downloads=downloads, download_index=index, bits=sizes)


def branch(
    orders: Cohort,
    *,
    method: Method,
    task: Task,
    params: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> None:
    """Start a width's own normalisation from the common one when it is first used, in place."""
    for number in np.unique(orders.slice_index).tolist():
        names = method.norm.own_names(task.blueprint, orders.slices[number])
        for name, mine in names.items():
            tree = params if name in params else buffers
            if mine not in tree:
                tree[mine] = tree[name]


def _keys(purpose: str, devices: Ints, state: PlanningState) -> Tensor:
    """Return a key of each device, for one purpose.

    They are addressed by device and visit: the same whatever the order of events.
    """
    key = rng.fold(rng.root(state.seed, purpose), torch.from_numpy(devices))
    return rng.fold(key, torch.from_numpy(state.visits[devices]))


def _plans(devices: Ints, method: Method, view: View, state: PlanningState) -> Plans:
    """Return what the plan of the method makes of the trainer's hyperparameters."""
    count = len(devices)
    with during("train", method.train):
        given = method.train.hyperparameters(view.round_index, view.devices.samples[devices])
    given = hyperparameters(given, Caller("train", method.train, view.round_index), count)
    plans = Plans.whole_model(devices, given)
    key = rng.root(state.seed, "plan", view.round_index)
    with during("plan", method.plan):
        found = method.plan(plans, view, state.states["plan"], key)
    caller = Caller("plan", method.plan, view.round_index)
    return planned(found, caller, plans, view.blueprint)


class _Cuts(NamedTuple):
    """The slices of a cohort and of its menus, as fields of a `Cohort`."""

    slices: tuple[Slice, ...]
    slice_index: Ints
    width: Floats
    menus: tuple[tuple[Slice, ...], ...]
    menu_index: Ints
    planned: tuple[PlannedMenu, ...]


def _extracted(plans: Plans, method: Method, view: View, state: PlanningState) -> _Cuts:
    """Return the slice of every device, and the slices of its menu.

    A device that chooses is planned for with the first entry until it has chosen.
    """
    extract, own = method.extract, state.states["extract"]
    caller = Caller("extract", extract, view.round_index)
    if extract.personal:
        # By visit: a device may be asked twice within a round of an asynchronous run.
        keys = _keys("extract", plans.device, state)
    else:
        keys = rng.root(state.seed, "extract", view.round_index).expand(len(plans))
    known: dict[tuple[SubModelSize, int | None], Slice] = {}

    def cut(size: SubModelSize, row: int) -> Slice:
        device = int(plans.device[row]) if extract.personal else None
        if (size, device) not in known:
            with during("extract", extract):
                found = extract(size, view, own, keys[row], device)
            known[size, device] = cut_out(found, caller, view.blueprint)
        return known[size, device]

    chooses = np.array([*map(bool, plans.menus), False])[plans.menu_index]
    alike = np.where(chooses, -1 - plans.menu_index, plans.size_index)
    first, index = grouped(np.arange(len(plans)) if extract.personal else alike)
    options = [plans.options_of(row) for row in first.tolist()]
    cuts = [tuple(cut(s, row) for s in sizes) for row, sizes in zip(first, options, strict=True)]
    slices, number = distinct([each[0] for each in cuts])
    menus = np.flatnonzero(chooses[first])
    numbers = np.full(len(first), -1)
    numbers[menus] = np.arange(len(menus))
    planned = (PlannedMenu(options[i], tuple(range(len(options[i])))) for i in menus)
    return _Cuts(
        slices=slices,
        slice_index=number[index],
        width=_floats(sizes[0].widest for sizes in options)[index],
        menus=tuple(cuts[i] for i in menus),
        menu_index=numbers[index],
        planned=tuple(planned),
    )


def _downloads(
    orders: Cohort,
    rows: Sequence[int],
    *,
    method: Method,
    task: Task,
    params: Params,
    buffers: Params,
) -> tuple[Download, ...]:
    """Return the sub-models as devices get them with these orders, without what never travels."""
    blueprint, norm, dtype = task.blueprint, method.norm, next(iter(params.values())).dtype
    caller = Caller("downlink", method.downlink, orders.round_index)
    key, unasked = downlink_key(orders), torch.full((1,), torch.nan)
    home, travels = _at_home(norm, blueprint), norm.travels(blueprint)
    trees, packed = [], []
    for row in rows:
        slice_ = orders.slice_of(row)
        weights = served(params, blueprint, norm, slice_)
        small = dense({n: v for n, v in weights.items() if n not in home}, slice_, blueprint)
        tensors = tensor_layouts(tuple(small), slice_, grid(orders, row), blueprint)
        stack = {name: value.unsqueeze(0) for name, value in small.items()}
        found = compress(stack, {}, unasked, MessageLayout(tensors, dtype, key), caller)
        # What a codec hands on is the sub-model itself.
        model = {
            name: small[name] if value is stack[name] else value.squeeze(0)
            for name, value in found.received.items()
        }
        tree = {"model": model}
        if travels:
            told = served(buffers, blueprint, norm, slice_)
            told = dense({n: v for n, v in told.items() if n in travels}, slice_, blueprint)
            tree |= {"buffers": told} if told else {}
        trees.append(tree)
        packed.append(found)
    # Fetched together: each would wait for all that an accelerator has to do before it.
    sizes: list[float] = torch.stack([found.bits.sum() for found in packed]).tolist()
    beside = [
        index_bits(orders.slice_of(row), blueprint) + statistics_bits(each)
        for row, each in zip(rows, trees, strict=True)
    ]
    return tuple(
        Download(tree, found.symbols, size + extra)
        for tree, found, size, extra in zip(trees, packed, sizes, beside, strict=True)
    )


@lru_cache(maxsize=256)
def _at_home(norm: Norm, blueprint: Blueprint) -> frozenset[str]:
    """Return the names of the parameters that never travel."""
    return norm.stays(blueprint) | frozenset(blueprint.frozen)
