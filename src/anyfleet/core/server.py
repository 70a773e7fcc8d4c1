"""The server's bookkeeping between two steps: who was asked, who answered, what is known."""

from collections.abc import Callable, Mapping, Sequence
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
from anyfleet.core.incoming import IncomingReplies, RepliedOrder
from anyfleet.core.ledger import LedgerWriter
from anyfleet.core.message_size import expected_bits
from anyfleet.core.messages import (
    Charges,
    Conditions,
    Events,
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
from anyfleet.core.return_checks import Caller
from anyfleet.core.screening import (
    Screen,
    Sizes,
    believable,
    most_at_first,
    not_finite,
    sound,
    too_large,
)
from anyfleet.core.seam import Round, Runtime, Snapshot
from anyfleet.core.time_and_energy import Amount, Demand, training
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatus, OrderStatuses, Request, View
from anyfleet.elastic import Cost, Slice, cost
from anyfleet.errors import CompositionError
from anyfleet.tracebacks import during

_TRAINING = (Kind.TRAIN, Kind.HOLD, Kind.FETCH)
# What an update may change of the model, in words.
_CHANGES = {"params": "a change", "buffers": "a change of the statistics"}


class _Changes(NamedTuple):
    """What some updates change of the model, and how large each change is."""

    arrivals: Updates
    orders: Ints
    sizes: Floats
    known: Sizes  # of earlier rounds, to remember with these

    @classmethod
    def of(cls, answers: Sequence[RepliedOrder], arrivals: Updates) -> "_Changes":
        orders = np.array([int(answer.order.id[0]) for answer in answers], dtype=np.int64)
        return cls(arrivals, orders, arrivals.root_mean_squares(), Sizes.none())

    def without(self, refused: Sequence[int]) -> "_Changes":
        rows = np.flatnonzero(~np.isin(self.orders, refused))
        left = self.arrivals.take(rows), self.orders[rows], self.sizes[rows]
        return _Changes(*left, self.known)


class Server:
    """The loop's own bookkeeping. Mutable, and never handed out."""

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
        self.holding: dict[int, HeldResult] = {}  # of orders whose results wait on the devices
        self.replied: list[RepliedOrder] = []
        self.seen: dict[int, OrderStatus] = {}  # the same orders, as policies see them
        self.failed: list[OrderStatus] = []
        self.declined: list[OrderStatus] = []
        self.ledger = LedgerWriter(self.devices, task.blueprint)
        self.screen = Screen.of(task, self.devices.samples, runtime.limits)
        self.sizes = {what: Sizes.none() for what in _CHANGES}
        initial = {"params": task.params, "buffers": task.buffers}
        self.most = {what: most_at_first(what, initial[what]) for what in _CHANGES}
        self.states: dict[str, Any] = {}
        self._check_start()
        for name, part in method.policies().items():
            with during(name, part):
                self.states[name] = part.init(self.view())

    def _check_start(self) -> None:
        """Check what parts say once, before the first round."""
        norm, schedule = self.method.norm, self.method.schedule
        with during("norm", norm):
            returned.normalised(norm, self._caller("norm"), self.task.blueprint)
        with during("schedule", schedule):
            returned.staleness(schedule.staleness, self._caller("schedule"))

    def _caller(self, slot: str) -> Caller:
        return Caller(slot, getattr(self.method, slot), self.round_index)

    # -- what policies see

    def view(self) -> View:
        """A snapshot for policies."""
        return View(
            blueprint=self.task.blueprint,
            devices=self.devices,
            round_index=self.round_index,
            now=self.runtime.now(),
            started=self.started,
            free=self.runtime.free,
            under_way=OrderStatuses.of(self.seen.values()),
            replied=OrderStatuses.of(_status(a.order, a.reply.report[0]) for a in self.replied),
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
        """The loss on a batch of the server split that `key` draws."""
        return server_loss(self.task, params, self.buffers, self.method.norm, key)

    def cost(self, slice_: Slice, batch: int) -> Cost:
        return cost(self.task.blueprint, slice_, batch)

    def training_cost(self, slice_: Slice, batch: int, processed: int, steps: int) -> Demand:
        train, blueprint = self.method.trainer, self.task.blueprint
        amount = Amount(batch, processed, steps)
        return training(train, blueprint, slice_, amount, self.devices.counting)

    def message_bits(self, slice_: Slice, sent_fraction: float) -> MessageBits:
        return expected_bits(slice_, self.job, self.task.blueprint, sent_fraction)

    def key(self, purpose: str) -> Tensor:
        """Addressed by what and when, and by how many orders were issued before."""
        key = rng.fold(rng.root(self.seed, purpose), self.round_index)
        return rng.fold(key, self.issued)

    # -- asking

    def fill(self) -> None:
        """Issues what the schedule wants now."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            asked = schedule.start(self.view())
        for wanted in returned.requests(asked, self._caller("schedule"), self.holding):
            request = self._fetched(wanted) if wanted.kind == Kind.FETCH else wanted
            chosen = self._chosen(request)
            if len(chosen):
                self._submit(request, chosen)

    def _fetched(self, request: Request) -> Request:
        """Return the request for those of the held results that the selection picks."""
        view = self.view()
        held = view.replied.where(np.isin(view.replied.order, request.held_orders))
        with during("select", self.method.select):
            picked = self.method.select.fetch(view, held)
        found = returned.fetched(picked, self._caller("select"), held)
        return replace(request, devices=found.device, held_orders=found.order)

    def _chosen(self, request: Request) -> Ints:
        if request.kind == Kind.FETCH and request.devices is not None:
            return np.asarray(request.devices)
        if request.devices is not None:
            return returned.cohort(request.devices, self._caller("schedule"), self.view())
        key = rng.fold(rng.root(self.seed, "select"), self.round_index)
        # Several draws within a step (asynchronous) differ by what was issued before.
        begun = (
            any(o.round_index == self.round_index for o in self.under_way.values()) or self.replied
        )
        key = rng.fold(key, self.issued) if begun else key
        view = self._choice(request)
        with during("select", self.method.select):
            ids = self.method.select(view, self.states["select"], key)
        ids = returned.cohort(ids, self._caller("select"), view)
        if request.count is None or request.count >= len(ids):
            return ids
        # Drawn, not cut off: selections come in order, and the first would always win.
        kept: Ints = ids[rng.sample(rng.fold(key, "fewer"), len(ids), request.count).numpy()]
        return kept

    def _choice(self, request: Request) -> View:
        """What a selection sees: how many are wanted, and only devices of the wanted level."""
        view, level = replace(self.view(), most_devices=request.count), request.level
        if level is None:
            return view
        return replace(view, free=lambda ids: view.free(ids) & (self.devices.level[ids] == level))

    def _submit(self, request: Request, devices: Ints) -> None:
        held = tuple(self.holding.pop(int(order)) for order in request.held_orders)
        desk = PlanningState(
            self.seed, self.issued, self.visits, self.acknowledged, self.states, held
        )
        drafted = plan_cohort(request, devices, method=self.method, view=self.view(), desk=desk)
        if any(drafted.orders.menus):
            drafted = apply_choices(drafted, self.runtime.check_in(drafted.orders))
        self.issued += len(devices)
        if request.kind in (Kind.TRAIN, Kind.HOLD):
            # Only training counts: asking a device something must not change what it draws.
            self.visits[devices] += 1
        for row, reason in enumerate(drafted.reasons):
            order = drafted.declined.take([row])
            self.declined.append(_status(order))
            self.ledger.failed(order, no_charges(int(order.id[0]), self.runtime.now()), reason)
        orders = drafted.orders
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
        self.seen |= {int(row.id[0]): _status(row) for row in rows}

    # -- waiting

    def ready(self, view: View) -> bool:
        """Whether the schedule wants to step now."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            ready = schedule.ready(view)
        return returned.truth(ready, self._caller("schedule"))

    def patience(self, view: View) -> tuple[float | None, int]:
        """Until when the schedule waits, and for how many outcomes."""
        schedule, caller = self.method.schedule, self._caller("schedule")
        with during("schedule", schedule):
            alarm, enough = schedule.alarm(view), schedule.enough(view)
        return returned.alarm(alarm, caller), returned.enough(enough, caller)

    # -- hearing

    def receive(self, events: Events) -> None:
        """Files what came in."""
        for lost in events.failures:
            self._lose(self._land(lost.order), lost.charges, lost.reason)
        if events.replies is None or events.charges is None:
            return
        updates, charges = events.replies.rows(), events.charges.rows()
        orders = [self._land(int(update.order[0])) for update in updates]
        refusals = self.screen.refusals(orders, updates)
        for order, update, charge, why in zip(orders, updates, charges, refusals, strict=True):
            if why:
                self._lose(order, charge, f"refused: {why}")
                continue
            self.replied.append(RepliedOrder(order, update, charge))
            if order.kind == Kind.HOLD:
                held = HeldResult(order.slices[0], float(order.width[0]), int(order.key[0]))
                self.holding[int(order.id[0])] = held
        self.replied = self._young(self.replied, self.round_index)
        # What came too late does not count: for its device it is as good as lost.
        for answer in self.replied:
            if answer.result_of is not None:
                self.acknowledged[answer.order.device[0]] = answer.result_of

    def _young(self, answers: list[RepliedOrder], step: int) -> list[RepliedOrder]:
        """Those that may count in this step; the others are too old and given up."""
        oldest = step - self.method.schedule.staleness
        for answer in answers:
            if answer.order.round_index < oldest:
                self.failed.append(_status(answer.order))
                self.ledger.replied(answer.order, answer.reply, answer.charges, "stale")
                self._unhear(answer)
        return [answer for answer in answers if answer.order.round_index >= oldest]

    def _unhear(self, answer: RepliedOrder) -> None:
        """Forget what was heard but will not count: its device has to send it again."""
        device = answer.order.device[0]
        if self.acknowledged[device] == answer.result_of:
            self.acknowledged[device] = -1

    def _land(self, order_id: int) -> Cohort:
        del self.seen[order_id]
        return self.under_way.pop(order_id)

    def _lose(self, order: Cohort, charges: Charges, reason: str) -> None:
        self.failed.append(_status(order))
        self.ledger.failed(order, charges, reason)

    # -- stepping

    def finish_round(self) -> Round:
        """Aggregates what arrived, lets the policies learn, and starts the next step."""
        self._drop()
        later = self._later()
        # Told in the step that ends: what is open when the next one begins is not in a snapshot.
        later = self._young(later, self.round_index + 1)
        changes = self._admitted()
        view, self.diagnostics = self.view(), {}
        held = self._aggregate(changes, view) if changes else ""
        self._enter(held)
        if not held:
            arrivals = changes["params"].arrivals if changes else None
            self._learn(arrivals, replace(view, model=self.params, diagnostics=self.diagnostics))
        told: dict[str, Any] = {}
        for name, part in self.method.policies().items():
            with during(name, part):
                tells = part.diagnostics(self.states[name])
            told |= returned.told(tells, self._caller(name))
        self.diagnostics = {**told, **self.diagnostics}
        answers = tuple(a.as_reply() for a in self.replied if a.order.kind not in _TRAINING)
        ledger = self.ledger.close(self.round_index, self.runtime.now())
        self.round_index += 1
        self.started = self.runtime.now()
        self.runtime.begin_round(self.round_index)
        self.replied, self.failed, self.declined = later, [], []
        # A schedule can only fetch what it sees: of the others nobody will ask again.
        still = {int(answer.order.id[0]) for answer in later}
        self.holding = {order: held for order, held in self.holding.items() if order in still}
        return Round(
            index=self.round_index - 1,
            time=self.started,
            params=dict(self.params),
            buffers=dict(self.buffers),
            diagnostics=self.diagnostics,
            ledger=ledger,
            replies=answers,
            sub_model=self._sub_model(),
            snapshot=self.snapshot(),
        )

    def _sub_model(self) -> Callable[[SubModelSize], Slice]:
        """What the extraction cuts out of the model as it is now."""
        view, state, key = self.view(), self.states["extract"], self.key("test")
        extract, caller = self.method.extract, self._caller("extract")

        def sub_model(want: SubModelSize) -> Slice:
            with during("extract", extract):
                found = extract(want, view, state, key)
            return returned.cut_out(found, caller, view.blueprint)

        return sub_model

    def _later(self) -> list[RepliedOrder]:
        """Take out what is left to a later step, and put the rest in the order of issue."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            later = schedule.later(self.view())
        there = {int(answer.order.id[0]) for answer in self.replied}
        left = set(returned.orders(later, self._caller("schedule"), there, "replied to").tolist())
        self.replied.sort(key=lambda answer: int(answer.order.id[0]))
        waiting = [a for a in self.replied if int(a.order.id[0]) in left]
        self.replied = [a for a in self.replied if int(a.order.id[0]) not in left]
        return waiting

    def _drop(self) -> None:
        schedule = self.method.schedule
        with during("schedule", schedule):
            asked = schedule.drop(self.view())
        dropped = returned.orders(asked, self._caller("schedule"), self.under_way, "under way")
        if len(dropped):
            for lost in self.runtime.cancel(tuple(dropped.tolist()), "too late"):
                self._lose(self._land(lost.order), lost.charges, lost.reason)

    def _admitted(self) -> dict[str, "_Changes"]:
        """Return what this step's updates change; those that are far too large are refused."""
        trained = [answer for answer in self.replied if answer.reply.trained]
        told = [answer for answer in trained if answer.has_statistics]
        incoming, found = IncomingReplies(self.method, self.task, self.round_index), {}
        if trained:
            found["params"] = _Changes.of(trained, incoming.trained(trained, self.params))
        if told:
            found["buffers"] = _Changes.of(told, incoming.statistics(told, self.buffers))
        refused: dict[int, str] = {}
        for what, changes in list(found.items()):
            growth = self.runtime.limits.growth
            device, sizes = changes.arrivals.device, changes.sizes
            verdict = self.sizes[what].judge(device, sizes, growth, self.most[what])
            found[what] = changes._replace(known=verdict.known)
            for row in np.flatnonzero(verdict.above):
                why = too_large(_CHANGES[what], float(sizes[row]), verdict.limit)
                refused.setdefault(int(changes.orders[row]), f"refused: {why}")
        if not refused:
            return found
        for answer in trained:
            if (order := int(answer.order.id[0])) in refused:
                self._lose(answer.order, answer.charges, refused[order])
                self._unhear(answer)
        self.replied = [a for a in self.replied if int(a.order.id[0]) not in refused]
        left = {what: changes.without(list(refused)) for what, changes in found.items()}
        return {what: changes for what, changes in left.items() if len(changes.orders)}

    def _aggregate(self, changes: Mapping[str, "_Changes"], view: View) -> str:
        """Make the new model, or return why the old one and all that belongs to it are kept."""
        key, state = self.key("aggregate"), self.states["aggregate"]
        arrivals, aggregate = changes["params"].arrivals, self.method.aggregate
        with during("aggregate", aggregate):
            stepped = aggregate(self.params, state, arrivals, view, key)
        stepped = returned.aggregated(stepped, self._caller("aggregate"), self.params)
        buffers = dict(self.buffers)
        if "buffers" in changes:
            # Averaged by samples, whatever the aggregator: they are measurements.
            mean = changes["buffers"].arrivals.mean(changes["buffers"].arrivals.samples)
            buffers |= {name: buffers[name] + mean[name] for name in mean}
        wrong = [*not_finite(stepped.model, self.params), *not_finite(buffers, self.buffers)]
        if sound(state) and not sound(stepped.state):
            wrong.append("the state of the aggregator")
        if wrong:
            self.diagnostics = {"held": tuple(arrivals.device.tolist()), "not_finite": tuple(wrong)}
            return f"held: the new model is not finite: {wrong[0]}"
        self.params, self.buffers, self.diagnostics = (
            dict(stepped.model),
            buffers,
            stepped.diagnostics,
        )
        self.states["aggregate"] = stepped.state
        for what, each in changes.items():
            self.sizes[what] = each.known.after(each.arrivals.device, each.sizes)
        return ""

    def _enter(self, held: str) -> None:
        """Enter the replies of this step into the ledger; `held` is why no update counts."""
        for answer in self.replied:
            reason = held if answer.reply.trained else ""
            self.ledger.replied(answer.order, answer.reply, answer.charges, reason)
            if reason:
                self._unhear(answer)

    def _learn(self, arrivals: Updates | None, view: View) -> None:
        """Let the policies learn from the step; NaN may well mean "unknown" in their states."""
        for name, part in self.method.policies().items():
            with during(name, part):
                self.states[name] = part.learn(self.states[name], arrivals, self.diagnostics, view)

    # -- resuming

    def snapshot(self) -> Snapshot:
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
            sizes=dict(self.sizes),
        )

    def restore(self, saved: Snapshot) -> None:
        self.params, self.buffers = dict(saved.params), dict(saved.buffers)
        self.states, self.diagnostics = dict(saved.states), saved.diagnostics
        self.round_index, self.started, self.issued = saved.round_index, saved.started, saved.issued
        self.visits, self.acknowledged = saved.visits.copy(), saved.acknowledged.copy()
        self.under_way, self.holding = dict(saved.under_way), dict(saved.holding)
        self.replied = list(saved.waiting)
        self.sizes = dict(saved.sizes)
        self.runtime.begin_round(self.round_index)
        self.seen = {order_id: _status(order) for order_id, order in saved.under_way.items()}


def _status(order: Cohort, report: Report | None = None) -> OrderStatus:
    """Return a single order as parts see it."""
    (number,), (device,) = order.id, order.device
    return OrderStatus(int(number), int(device), order.round_index, order.kind, report=report or {})
