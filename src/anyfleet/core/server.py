"""The server: which orders are under way, which replies came in, and the model made of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core import return_checks as returned
from anyfleet.core.calibration import calibrated
from anyfleet.core.check_in import MessageBits
from anyfleet.core.evaluation import server_loss
from anyfleet.core.events import Events, Failures
from anyfleet.core.ledger import LedgerWriter
from anyfleet.core.message_size import expected_bits
from anyfleet.core.messages import (
    Charges,
    Conditions,
    Kind,
    Params,
    Report,
    SubModelSize,
    no_charges,
)
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import (
    HeldResult,
    PlanningState,
    apply_choices,
    branch,
    load_models,
    plan_cohort,
)
from anyfleet.core.replies import IncomingReplies, RepliedOrder
from anyfleet.core.return_checks import Caller
from anyfleet.core.screening import (
    Screen,
    UpdateSizes,
    believable,
    most_at_first,
    not_finite,
    sound,
    too_large,
)
from anyfleet.core.seam import Reply, Round, Runtime, Snapshot
from anyfleet.core.time_and_energy import Amount, Demand, training
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatus, OrderStatuses, Request, View
from anyfleet.elastic import Cost, Slice, cost
from anyfleet.errors import CompositionError
from anyfleet.tracebacks import during

_TRAINING = (Kind.TRAIN, Kind.HOLD, Kind.FETCH)
# What an update may change, and how a refusal calls it.
_CHANGES = {"params": "a change", "buffers": "a change of the statistics"}


class _Changes(NamedTuple):
    """Updates of one round, of the parameters or of the statistics, with their sizes."""

    updates: Updates
    orders: Ints
    sizes: Floats  # root mean square of each update
    known: UpdateSizes  # of earlier rounds, to remember with these

    @classmethod
    def of(cls, replies: Sequence[RepliedOrder], updates: Updates) -> "_Changes":
        """Return the updates of these replies with their sizes; nothing is known before."""
        orders = np.array([replied.number for replied in replies], dtype=np.int64)
        return cls(updates, orders, updates.root_mean_squares(), UpdateSizes.none())

    def without(self, refused: Collection[int]) -> "_Changes":
        """Return all but the updates of refused orders."""
        rows = np.flatnonzero(~np.isin(self.orders, list(refused)))
        left = self.updates.take(rows), self.orders[rows], self.sizes[rows]
        return _Changes(*left, self.known)


class Server:
    """The server's side of a run: the model, the orders and what is known of every device.

    It is mutable and belongs to the loop; parts see a `View` of it.
    """

    def __init__(self, method: Method, task: Task, runtime: Runtime, seed: int) -> None:
        with during("train", method.train):
            misfits = method.misfits(task)
        if misfits:
            raise CompositionError(*misfits.values())
        with during("uplink", method.uplink):
            self.method = calibrated(method, task, seed)
        self.job = self.method.job()
        self.task, self.runtime, self.seed = task, runtime, seed
        self.devices = runtime.devices()
        self.params, self.buffers = dict(task.params), dict(task.buffers)
        self.diagnostics: Mapping[str, Any] = {}
        self.round_index, self.issued, self.started = 0, 0, runtime.now()
        runtime.begin_round(self.round_index)
        self.visits = np.zeros(len(self.devices), dtype=np.int64)
        self.acknowledged = np.full(len(self.devices), -1, dtype=np.int64)
        self.under_way: dict[int, Cohort] = {}
        self.statuses: dict[int, OrderStatus] = {}  # the orders under way, as parts see them
        self.holding: dict[int, HeldResult] = {}  # of orders whose results wait on the devices
        self.replied: list[RepliedOrder] = []
        self.failed: list[OrderStatus] = []
        self.declined: list[OrderStatus] = []
        self.ledger = LedgerWriter(self.devices, task.blueprint)
        self.screen = Screen.of(task, self.devices.samples, runtime.limits)
        self.update_sizes = {what: UpdateSizes.none() for what in _CHANGES}
        initial = {"params": task.params, "buffers": task.buffers}
        self.absurd_sizes = {what: most_at_first(what, initial[what]) for what in _CHANGES}
        self.states: dict[str, Any] = {}
        self._check_start()
        for name, part in method.policies().items():
            with during(name, part):
                self.states[name] = part.init(self.view())

    def _check_start(self) -> None:
        """Check what parts state once, before the first round."""
        norm, schedule = self.method.norm, self.method.schedule
        with during("norm", norm):
            returned.normalised(norm, self._caller("norm"), self.task.blueprint)
        with during("schedule", schedule):
            returned.staleness(schedule.staleness, self._caller("schedule"))

    def _caller(self, slot: str) -> Caller:
        """Return the part of a slot as errors name it."""
        return Caller(slot, getattr(self.method, slot), self.round_index)

    # -- what parts see

    def view(self) -> View:
        """Return what parts see of the run now."""
        return View(
            blueprint=self.task.blueprint,
            devices=self.devices,
            round_index=self.round_index,
            now=self.runtime.now(),
            started=self.started,
            free=self.runtime.free,
            under_way=OrderStatuses.of(self.statuses.values()),
            replied=OrderStatuses.of(
                _status(each.order, each.reply.report_of(0)) for each in self.replied
            ),
            failed=OrderStatuses.of(self.failed),
            declined=OrderStatuses.of(self.declined),
            model=self.params,
            diagnostics=self.diagnostics,
            conditions=self.conditions,
            server_loss=self.server_loss,
            cost=self.cost,
            training_cost=self.training_cost,
            message_bits=self.message_bits,
        )

    def conditions(self, devices: Ints) -> Conditions:
        """Return what these devices report of themselves, as far as it can be believed."""
        return believable(self.runtime.conditions(devices))

    def server_loss(self, params: Params, key: Tensor) -> float:
        """Return the loss on a batch of the server split that `key` draws."""
        return server_loss(self.task, params, self.buffers, self.method.norm, key)

    def cost(self, slice_: Slice, batch: int) -> Cost:
        """Return what one pass of a slice costs, for a batch of that many samples."""
        return cost(self.task.blueprint, slice_, batch)

    def training_cost(self, slice_: Slice, batch: int, processed: int, local_steps: int) -> Demand:
        """Return what training a slice demands, by batch size, samples and local steps."""
        train, blueprint = self.method.trainer, self.task.blueprint
        amount = Amount(batch, processed, local_steps)
        return training(train, blueprint, slice_, amount, self.devices.counting)

    def message_bits(self, slice_: Slice, sent_fraction: float) -> MessageBits:
        """Return the bits of the messages about a slice, at a sent fraction; NaN: not asked."""
        return expected_bits(slice_, self.job, self.task.blueprint, sent_fraction)

    def key(self, purpose: str) -> Tensor:
        """Return the key of a purpose, by the round and by how many orders were issued before."""
        key = rng.fold(rng.root(self.seed, purpose), self.round_index)
        return rng.fold(key, self.issued)

    # -- issuing

    def issue(self) -> None:
        """Issue the orders that the schedule requests now."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            requests = schedule.start(self.view())
        for each in returned.requests(requests, self._caller("schedule"), self.holding):
            request = self._fetched(each) if each.kind == Kind.FETCH else each
            devices = self._selected(request)
            if len(devices):
                self._submit(request, devices)

    def _fetched(self, request: Request) -> Request:
        """Return the request for those of the held results that the selection picks."""
        view = self.view()
        held = view.replied.where(np.isin(view.replied.order, request.held_orders))
        with during("select", self.method.select):
            picked = self.method.select.fetch(held, view)
        found = returned.fetched(picked, self._caller("select"), held)
        return replace(request, devices=found.device, held_orders=found.order)

    def _selected(self, request: Request) -> Ints:
        """Return the devices of a request: those it names, or those the selection picks."""
        if request.kind == Kind.FETCH and request.devices is not None:
            return np.asarray(request.devices)
        if request.devices is not None:
            return returned.cohort(request.devices, self._caller("schedule"), self.view())
        key = rng.fold(rng.root(self.seed, "select"), self.round_index)
        # Several draws within a round (asynchronous) differ by what was issued before.
        begun = (
            any(o.round_index == self.round_index for o in self.under_way.values()) or self.replied
        )
        key = rng.fold(key, self.issued) if begun else key
        view = self._candidates(request)
        with during("select", self.method.select):
            picked = self.method.select(view, self.states["select"], key)
        devices = returned.cohort(picked, self._caller("select"), view)
        if request.count is None or request.count >= len(devices):
            return devices
        # Drawn, not cut off: selections come in order, and the first would always win.
        rows = rng.sample(rng.fold(key, "fewer"), len(devices), request.count).numpy()
        fewer: Ints = devices[rows]
        return fewer

    def _candidates(self, request: Request) -> View:
        """Return what a selection sees.

        That is the number requested; only devices of the requested level are free.
        """
        view, level = replace(self.view(), most_devices=request.count), request.level
        if level is None:
            return view
        return replace(view, free=lambda ids: view.free(ids) & (self.devices.level[ids] == level))

    def _submit(self, request: Request, devices: Ints) -> None:
        """Plan one order for each device, and send those that nobody declines."""
        held = tuple(self.holding.pop(int(order)) for order in request.held_orders)
        state = PlanningState(
            self.seed, self.issued, self.visits, self.acknowledged, self.states, held
        )
        planned = plan_cohort(request, devices, method=self.method, view=self.view(), state=state)
        if (planned.orders.menu_index >= 0).any():
            planned = apply_choices(planned, self.runtime.check_in(planned.orders))
        self.issued += len(devices)
        if request.kind in (Kind.TRAIN, Kind.HOLD):
            # Only training counts: a survey must not change what a device draws.
            self.visits[devices] += 1
        for row, reason in enumerate(planned.reasons):
            order = planned.declined.take([row])
            self.declined.append(_status(order))
            self.ledger.failed(order, no_charges(int(order.id[0]), self.runtime.now()), reason)
        orders = planned.orders
        if not len(orders):
            return
        method, task = self.method, self.task
        branch(orders, method=method, task=task, params=self.params, buffers=self.buffers)
        orders = load_models(
            orders, method=method, task=task, params=self.params, buffers=self.buffers
        )
        self.runtime.submit(orders)
        rows = orders.rows()
        self.under_way |= {int(row.id[0]): row for row in rows}
        self.statuses |= {int(row.id[0]): _status(row) for row in rows}

    # -- waiting

    def ready(self, view: View) -> bool:
        """Return whether the schedule ends the round now."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            ready = schedule.ready(view)
        return returned.truth(ready, self._caller("schedule"))

    def patience(self, view: View) -> tuple[float | None, int]:
        """Return until when the schedule waits, and for how many replies and failures."""
        schedule, caller = self.method.schedule, self._caller("schedule")
        with during("schedule", schedule):
            alarm, enough = schedule.alarm(view), schedule.enough(view)
        return returned.alarm(alarm, caller), returned.enough(enough, caller)

    # -- receiving

    def receive(self, events: Events) -> None:
        """Enter the replies and failures that came in."""
        self._fail_all(events.failures)
        if events.replies is None or events.charges is None:
            return
        replies, charges = events.replies.rows(), events.charges.rows()
        orders = [self._close(int(reply.order[0])) for reply in replies]
        refusals = self.screen.refusals(orders, replies)
        for order, reply, charge, why in zip(orders, replies, charges, refusals, strict=True):
            if why:
                self._fail(order, charge, f"refused: {why}")
                continue
            self.replied.append(RepliedOrder(order, reply, charge))
            if order.kind == Kind.HOLD:
                held = HeldResult(order.slice_of(0), float(order.width[0]), int(order.key[0]))
                self.holding[int(order.id[0])] = held
        self.replied = self._without_stale(self.replied, self.round_index)
        # A reply that came too late does not count: for its device it is as good as lost.
        for replied in self.replied:
            if replied.result_of is not None:
                self.acknowledged[replied.order.device[0]] = replied.result_of

    def _without_stale(self, replies: list[RepliedOrder], round_index: int) -> list[RepliedOrder]:
        """Return the replies that may count in a round; the others are too old, and fail."""
        oldest = round_index - self.method.schedule.staleness
        for replied in replies:
            if replied.order.round_index < oldest:
                self.failed.append(_status(replied.order))
                self.ledger.replied(replied.order, replied.reply, replied.charges, "stale")
                self._revoke(replied)
        return [replied for replied in replies if replied.order.round_index >= oldest]

    def _revoke(self, replied: RepliedOrder) -> None:
        """Revoke the acknowledgement of a result that will not count: it has to be sent again."""
        device = replied.order.device[0]
        if self.acknowledged[device] == replied.result_of:
            self.acknowledged[device] = -1

    def _close(self, number: int) -> Cohort:
        """Return an order that is no longer under way."""
        del self.statuses[number]
        return self.under_way.pop(number)

    def _fail_all(self, failures: Failures | None) -> None:
        """Enter the orders to which no reply will come."""
        for failure in failures.rows() if failures is not None else ():
            self._fail(self._close(int(failure.order[0])), failure.charges, failure.reason[0])

    def _fail(self, order: Cohort, charges: Charges, reason: str) -> None:
        """Enter an order without a reply that counts."""
        self.failed.append(_status(order))
        self.ledger.failed(order, charges, reason)

    # -- ending a round

    def finish_round(self) -> Round:
        """Aggregate the replies, let the parts learn from the round, and begin the next one."""
        self._drop()
        # Entered into the round that ends: what is open when the next begins is in no snapshot.
        later = self._without_stale(self._take_later(), self.round_index + 1)
        changes = self._accepted()
        view, self.diagnostics = self.view(), {}
        held = self._aggregate(changes, view) if changes else ""
        self._enter(held)
        if not held:
            updates = changes["params"].updates if changes else None
            self._learn(updates, replace(view, model=self.params, diagnostics=self.diagnostics))
        self.diagnostics = {**self._diagnosed(), **self.diagnostics}
        surveys = tuple(_reply(each) for each in self.replied if each.order.kind not in _TRAINING)
        ledger = self.ledger.close(self.round_index, self.runtime.now())
        self.round_index += 1
        self.started = self.runtime.now()
        self.runtime.begin_round(self.round_index)
        self.replied, self.failed, self.declined = later, [], []
        # A schedule can only fetch what it sees: of the others nobody will ask again.
        still = {replied.number for replied in later}
        self.holding = {order: held for order, held in self.holding.items() if order in still}
        return Round(
            index=self.round_index - 1,
            time=self.started,
            params=dict(self.params),
            buffers=dict(self.buffers),
            diagnostics=self.diagnostics,
            ledger=ledger,
            replies=surveys,
            sub_model=self._sub_model(),
            snapshot=self.snapshot(),
        )

    def _diagnosed(self) -> dict[str, Any]:
        """Return what the parts add to the record of the round, out of their states."""
        found: dict[str, Any] = {}
        for name, part in self.method.policies().items():
            with during(name, part):
                diagnostics = part.diagnostics(self.states[name])
            found |= returned.diagnostics(diagnostics, self._caller(name))
        return found

    def _sub_model(self) -> Callable[[SubModelSize], Slice]:
        """Return a function that cuts sub-models as the extraction does now."""
        view, state, key = self.view(), self.states["extract"], self.key("test")
        extract, caller = self.method.extract, self._caller("extract")

        def sub_model(size: SubModelSize) -> Slice:
            with during("extract", extract):
                found = extract.for_evaluation(size, view, state, key)
            return returned.cut_out(found, caller, view.blueprint)

        return sub_model

    def _take_later(self) -> list[RepliedOrder]:
        """Take out the replies that are left to a later round; sort the others by order."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            later = schedule.later(self.view())
        known = {replied.number for replied in self.replied}
        left = set(returned.orders(later, self._caller("schedule"), known, "replied to").tolist())
        self.replied.sort(key=lambda replied: replied.number)
        waiting = [replied for replied in self.replied if replied.number in left]
        self.replied = [replied for replied in self.replied if replied.number not in left]
        return waiting

    def _drop(self) -> None:
        """Cancel the orders that the schedule drops."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            found = schedule.drop(self.view())
        dropped = returned.orders(found, self._caller("schedule"), self.under_way, "under way")
        if len(dropped):
            self._fail_all(self.runtime.cancel(dropped, "too late"))

    def _accepted(self) -> dict[str, "_Changes"]:
        """Return what this round's updates change; those that are far too large are refused."""
        trained = [replied for replied in self.replied if replied.reply.trained[0]]
        measured = [replied for replied in trained if replied.has_statistics]
        incoming, found = IncomingReplies(self.method, self.task, self.round_index), {}
        if trained:
            found["params"] = _Changes.of(trained, incoming.trained(trained, self.params))
        if measured:
            found["buffers"] = _Changes.of(measured, incoming.statistics(measured, self.buffers))
        refused: dict[int, str] = {}
        for what, changes in list(found.items()):
            growth = self.runtime.limits.growth
            device, sizes = changes.updates.device, changes.sizes
            known, absurd = self.update_sizes[what], self.absurd_sizes[what]
            verdict = known.compare(device, sizes, growth, absurd)
            found[what] = changes._replace(known=verdict.known)
            for row in np.flatnonzero(verdict.above):
                why = too_large(_CHANGES[what], float(sizes[row]), verdict.limit)
                refused.setdefault(int(changes.orders[row]), f"refused: {why}")
        if not refused:
            return found
        for replied in trained:
            if replied.number in refused:
                self._fail(replied.order, replied.charges, refused[replied.number])
                self._revoke(replied)
        self.replied = [replied for replied in self.replied if replied.number not in refused]
        left = {what: changes.without(refused) for what, changes in found.items()}
        return {what: changes for what, changes in left.items() if len(changes.orders)}

    def _aggregate(self, changes: Mapping[str, "_Changes"], view: View) -> str:
        """Make the new model, or return why the old one and all that belongs to it are kept."""
        key, state = self.key("aggregate"), self.states["aggregate"]
        updates, aggregate = changes["params"].updates, self.method.aggregate
        with during("aggregate", aggregate):
            found = aggregate(self.params, updates, view, state, key)
        new = returned.aggregated(found, self._caller("aggregate"), self.params)
        buffers = dict(self.buffers)
        if "buffers" in changes:
            # Averaged by samples, whatever the aggregator: they are measurements.
            mean = changes["buffers"].updates.mean(changes["buffers"].updates.samples)
            buffers |= {name: buffers[name] + mean[name] for name in mean}
        wrong = [*not_finite(new.model, self.params), *not_finite(buffers, self.buffers)]
        if sound(state) and not sound(new.state):
            wrong.append("the state of the aggregator")
        if wrong:
            self.diagnostics = {"held": tuple(updates.device.tolist()), "not_finite": tuple(wrong)}
            return f"held: the new model is not finite: {wrong[0]}"
        self.params, self.buffers = dict(new.model), buffers
        self.diagnostics, self.states["aggregate"] = new.diagnostics, new.state
        for what, each in changes.items():
            self.update_sizes[what] = each.known.after(each.updates.device, each.sizes)
        return ""

    def _enter(self, held: str) -> None:
        """Enter the replies of this round into the ledger; `held` is why no update counts."""
        for replied in self.replied:
            reason = held if replied.reply.trained[0] else ""
            self.ledger.replied(replied.order, replied.reply, replied.charges, reason)
            if reason:
                self._revoke(replied)

    def _learn(self, updates: Updates | None, view: View) -> None:
        """Let the parts learn from the round; NaN may well mean "unknown" in their states."""
        for name, part in self.method.policies().items():
            with during(name, part):
                self.states[name] = part.learn(updates, self.diagnostics, view, self.states[name])

    # -- resuming

    def snapshot(self) -> Snapshot:
        """Return all that is needed to go on after this round."""
        return Snapshot(
            params=dict(self.params),
            buffers=dict(self.buffers),
            states=dict(self.states),
            diagnostics=self.diagnostics,
            round_index=self.round_index,
            started=self.started,
            issued=self.issued,
            visits=self.visits.copy(),
            acknowledged=self.acknowledged.copy(),
            under_way=dict(self.under_way),
            holding=dict(self.holding),
            waiting=tuple(self.replied),
            update_sizes=dict(self.update_sizes),
        )

    def restore(self, saved: Snapshot) -> None:
        """Go on after the round that a snapshot was taken of."""
        self.params, self.buffers = dict(saved.params), dict(saved.buffers)
        self.states, self.diagnostics = dict(saved.states), saved.diagnostics
        self.round_index, self.started, self.issued = saved.round_index, saved.started, saved.issued
        self.visits, self.acknowledged = saved.visits.copy(), saved.acknowledged.copy()
        self.under_way, self.holding = dict(saved.under_way), dict(saved.holding)
        self.replied = list(saved.waiting)
        self.update_sizes = dict(saved.update_sizes)
        self.runtime.begin_round(self.round_index)
        self.statuses = {number: _status(order) for number, order in saved.under_way.items()}


def _status(order: Cohort, report: Report | None = None) -> OrderStatus:
    """Return a single order as parts see it."""
    (number,), (device,) = order.id, order.device
    return OrderStatus(int(number), int(device), order.round_index, order.kind, report=report or {})


def _reply(replied: RepliedOrder) -> Reply:
    """Return a reply as the caller of the loop sees it."""
    order, reply = replied.order, replied.reply
    device, samples = int(order.device[0]), int(reply.samples[0])
    return Reply(device, order.kind, reply.report_of(0), reply.trees_of(0), samples)
