"""The server: which orders are under way, which replies came in, and the model made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Flags, Floats, Ints, join
from anyfleet.core import return_checks as returned
from anyfleet.core.arriving import Transfer
from anyfleet.core.calibration import calibrated
from anyfleet.core.check_in import MessageBits, OrderChoices
from anyfleet.core.evaluation import server_loss
from anyfleet.core.events import Events
from anyfleet.core.ledger import Ledger, LedgerWriter
from anyfleet.core.message_size import expected_bits
from anyfleet.core.messages import (
    OF_TRAINING,
    TRAINING,
    Charges,
    Conditions,
    Kind,
    Params,
    SubModelSize,
    no_charges,
)
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, IssuedOrders
from anyfleet.core.planning import (
    PlannedCohort,
    PlanningState,
    apply_choices,
    branch,
    load_models,
    plan_cohort,
)
from anyfleet.core.replies import IncomingReplies, RepliedOrders
from anyfleet.core.return_checks import Caller
from anyfleet.core.screening import (
    Screen,
    Screened,
    UpdateSizes,
    believable,
    finiteness,
    most_at_first,
    sized,
    too_large,
    unsound,
)
from anyfleet.core.seam import Reply, Round, Runtime, Snapshot
from anyfleet.core.slots import Policy
from anyfleet.core.stacks import kept_twice
from anyfleet.core.time_and_energy import Amount, Demand, training
from anyfleet.core.updates import Updates, add_delta
from anyfleet.core.view import OrderStatuses, Request, View
from anyfleet.elastic import Cost, Slice, cost
from anyfleet.errors import CompositionError
from anyfleet.tracebacks import during

# What an update may change, and how a refusal calls it.
_CHANGES = {"params": "a change", "buffers": "a change of the statistics"}
_CAUTIOUS = 10  # rounds in which no replies are trusted, after one that did not count
_NOBODY, _NO_ORDERS, _NO_REPLIES = OrderStatuses.of(()), IssuedOrders.none(), RepliedOrders.none()


class _Changes(NamedTuple):
    """Updates of one round, of the parameters or of the statistics, with their sizes."""

    updates: Updates
    orders: Ints
    sizes: Floats  # root mean square of each update
    known: UpdateSizes  # of earlier rounds, to remember with these
    refused: Mapping[int, str]  # why some of the orders' updates are far too large
    measured: Callable[[], Floats] | None = None  # the sizes, where no check of replies finds them

    def without(self, refused: Ints) -> "_Changes":
        """Return all but the updates of refused orders."""
        rows = np.flatnonzero(~np.isin(self.orders, refused))
        left = self.updates.take(rows), self.orders[rows], self.sizes[rows]
        return _Changes(*left, self.known, {})


class _Unchecked(NamedTuple):
    """What a round was ended with before the numbers of its replies had come in.

    All that an accelerator has to compute for the checks was asked of it before the next round
    began: it would come to what is asked later only after the training of that round.
    """

    orders: IssuedOrders
    screened: Callable[[], Screened]
    changes: Mapping[str, _Changes]
    finite: Transfer | None  # one that is finite only if the new model is; None: nobody knows


@dataclass(frozen=True, eq=False)
class Ending:
    """A round that has ended, whose books are not closed yet."""

    round: Callable[..., Round]  # given its ledger and the snapshot after it
    close: Callable[[], Ledger]
    snapshot: Snapshot
    unchecked: _Unchecked | None  # None: its replies have been checked


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
        self.params, self.buffers = dict(task.params), dict(task.buffers)
        self.diagnostics: Mapping[str, Any] = {}
        self.round_index, self.issued, self.started = 0, 0, runtime.now()
        runtime.begin_round(self.round_index)
        self.devices = runtime.devices()
        self.screen = Screen.of(task, self.job, self.devices.samples, runtime.limits)
        self.visits = self.acknowledged = np.empty(0, dtype=np.int64)
        self.under_way = _NO_ORDERS
        self.offered: tuple[PlannedCohort, ...] = ()  # those from whose menus devices still choose
        self.holding = _NO_ORDERS  # orders whose results wait on their devices
        self.replied = _NO_REPLIES
        self._open_round()
        self.update_sizes = {what: UpdateSizes.none() for what in _CHANGES}
        initial = {"params": task.params, "buffers": task.buffers}
        self.absurd_sizes = {what: most_at_first(what, initial[what]) for what in _CHANGES}
        # Replies of this round that have not been checked, and whether their model is finite.
        self.trusted: tuple[IssuedOrders, Callable[[], Screened]] | None = None
        self.finite: Transfer | None = None
        self.cautious_until = 0  # the round from which on replies may be trusted
        self.states: dict[str, Any] = {}
        self.learning, self.diagnosing = (_with_own(method, n) for n in ("learn", "diagnostics"))
        self._check_start()
        for name, part in method.policies().items():
            with during(name, part):
                self.states[name] = part.init(self.view())

    def _open_round(self) -> None:
        """Begin a round's books, with the devices that are enrolled now."""
        self._read_roster()
        self.failed = self.declined = _NOBODY
        self.ledger = LedgerWriter(self.task.blueprint)

    def _read_roster(self) -> None:
        """Read which devices are enrolled now."""
        devices = self.runtime.devices()
        if devices is not self.devices:
            self.devices, self.screen = devices, replace(self.screen, declared=devices.samples)
        if joined := len(devices) - len(self.visits):
            self.visits = np.concatenate([self.visits, np.zeros(joined, dtype=np.int64)])
            self.acknowledged = np.concatenate([self.acknowledged, np.full(joined, -1)])

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

    def view(self, most_devices: int | None = None) -> View:
        """Return what parts see of the run now."""
        return View(
            blueprint=self.task.blueprint,
            devices=self.devices,
            round_index=self.round_index,
            now=self.runtime.now(),
            started=self.started,
            free=self.runtime.free,
            under_way=self.under_way.statuses,
            replied=self.replied.statuses,
            failed=self.failed,
            declined=self.declined,
            model=self.params,
            diagnostics=self.diagnostics,
            conditions=self.conditions,
            free_memory=self.runtime.free_memory,
            server_loss=self.server_loss,
            cost=self.cost,
            training_cost=self.training_cost,
            message_bits=self.message_bits,
            most_devices=most_devices,
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
        amount, counting = Amount(batch, processed, local_steps), self.devices.counting
        return training(self.job.trainer, self.task.blueprint, slice_, amount, counting)

    def message_bits(self, slice_: Slice, sent_fraction: float) -> MessageBits:
        """Return the bits of the messages about a slice, at a sent fraction; NaN: not asked."""
        return expected_bits(slice_, self.job, self.task.blueprint, sent_fraction)

    def key(self, purpose: str) -> Tensor:
        """Return the key of a purpose, by the round and by how many orders were issued before."""
        return _key(self.seed, purpose, self.round_index, self.issued)

    # -- issuing

    def issue(self) -> None:
        """Issue the orders that the schedule requests now."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            requests = schedule.start(self.view())
        for each in returned.requests(requests, self._caller("schedule"), self.holding.order):
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
        key = rng.root(self.seed, "select", self.round_index)
        # Several draws within a round (asynchronous) differ by what was issued before.
        begun = (self.under_way.round_index == self.round_index).any() or len(self.replied)
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
        view, level = self.view(request.count), request.level
        if level is None:
            return view
        return replace(view, free=lambda ids: view.free(ids) & (self.devices.level[ids] == level))

    def _submit(self, request: Request, devices: Ints) -> None:
        """Plan one order for each device; send those that nobody declines, or their menus."""
        fetched = None
        if request.kind == Kind.FETCH:
            rows, _ = self.holding.named(np.asarray(request.held_orders))
            fetched = self.holding.take(rows)
            self.holding = self.holding.without(fetched.order)
        state = PlanningState(
            self.seed, self.issued, self.visits, self.acknowledged, self.states, fetched
        )
        planned = plan_cohort(request, devices, method=self.method, view=self.view(), state=state)
        self.issued += len(devices)
        if request.kind in TRAINING:
            # Only training counts: a survey must not change what a device draws.
            self.visits[devices] += 1
        planned = self._without_declined(planned)
        if not (planned.orders.menu_index >= 0).any():
            self._send(planned.orders)
            return
        self.under_way = join([self.under_way, IssuedOrders.of(planned.orders)])
        self.offered = (*self.offered, planned)
        self.runtime.offer(planned.orders)
        # Devices in this process choose at once: the next request finds them at work.
        self.receive(self.runtime.wait(self.runtime.now(), 1))

    def _without_declined(self, planned: PlannedCohort) -> PlannedCohort:
        """Return the cohort without its declined orders, which are entered as that."""
        if not planned.reasons:
            return planned
        declined = IssuedOrders.of(planned.declined)
        self.declined += declined.statuses
        nothing = no_charges(declined.order, self.runtime.now())
        self.ledger.failed(declined, nothing, planned.reasons)
        return replace(planned, declined=planned.declined.take([]), reasons=())

    def _send(self, orders: Cohort) -> None:
        """Send orders with what travels down."""
        if not len(orders):
            return
        models = {"params": self.params, "buffers": self.buffers}
        branch(orders, method=self.method, task=self.task, **models)
        orders = load_models(orders, method=self.method, task=self.task, **models)
        self.runtime.submit(orders)
        self.under_way = join([self.under_way, IssuedOrders.of(orders)])

    def _choose(self, chosen: OrderChoices) -> None:
        """Send the orders of devices that have chosen."""
        offered, self.offered = self.offered, ()
        for planned in offered:
            orders = planned.orders
            rows = np.flatnonzero(np.isin(chosen.order, orders.id))
            decided = np.isin(orders.id, chosen.order)
            if not decided.all():
                left = replace(planned, orders=orders.take(~decided))
                self.offered = (*self.offered, left)
            if len(rows):
                asked = replace(planned, orders=orders.take(decided))
                self.under_way = self.under_way.without(asked.orders.id)
                rows = rows[np.argsort(chosen.order[rows])]
                found = apply_choices(asked, chosen.choices.take(rows))
                self._send(self._without_declined(found).orders)
        # Those that had waited for a choice have smaller numbers than later ones.
        self.under_way = self.under_way.sorted()

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

    def may_trust(self, events: Events) -> bool:
        """Return whether a round may end with these events before their numbers have arrived.

        They have to be the replies to all orders under way. While the accelerator computes them,
        the host ends the round and begins the next one. A round with replies that turn out not to
        count has to be undone (`settle`); some rounds after it nothing is trusted.
        """
        replies = events.replies
        return (
            replies is not None
            and events.failures is None
            and events.choices is None
            and len(replies) == len(self.under_way)
            and not len(self.replied)
            and self.round_index >= self.cautious_until
            and not replies.awaited
            and kept_twice(replies)
        )

    def receive(self, events: Events, *, trusting: bool = False) -> None:
        """Enter the choices, replies and failures that came in; those to closed orders are late.

        With `trusting` replies count as if they had been checked, which `settle` does later.
        """
        if events.free:
            self._read_roster()
        if events.choices is not None:
            self._choose(events.choices)
        if events.failures is not None:
            failures = events.failures
            orders, known = self._close(failures.order)
            failures = failures.take(known)
            self._fail(orders, failures.charges, failures.reason)
        if events.replies is None or events.charges is None:
            return
        orders, known = self._close(events.replies.order)
        replies, charges = events.replies.take(known), events.charges.take(known)
        if trusting:
            self.trusted = orders, self.screen.begin(orders, replies)
            reasons, sizes = [""] * len(replies), np.full(len(replies), np.nan)
        else:
            reasons, sizes = self.screen.check(orders, replies)
        came = RepliedOrders.of(
            orders, replies, charges, sizes, job=self.job, blueprint=self.task.blueprint
        )
        if any(reasons):
            refused = np.array([bool(reason) for reason in reasons])
            bad, came = came.take(refused), came.take(~refused)
            told = [f"refused: {reason}" for reason in reasons if reason]
            self._fail(bad.orders, bad.charges, told)
        if Kind.HOLD in came.orders.kinds:
            held = came.orders.take(came.orders.kind == Kind.HOLD)
            self.holding = join([self.holding, held]).sorted()
        self.replied = self._without_stale(join([self.replied, came]), self.round_index)
        # A reply that came too late does not count: for its device it is as good as lost.
        result = self.replied.orders.result_of
        self.acknowledged[self.replied.orders.device[result >= 0]] = result[result >= 0]

    def _without_stale(self, replied: RepliedOrders, round_index: int) -> RepliedOrders:
        """Return the replies that may count in a round; the others are too old, and fail."""
        stale = replied.orders.round_index < round_index - self.method.schedule.staleness
        if not stale.any():
            return replied
        old = replied.take(stale)
        self.failed += old.orders.statuses
        self.ledger.replied(old, ("stale",) * len(old))
        self._revoke(old.orders)
        return replied.take(~stale)

    def _revoke(self, orders: IssuedOrders) -> None:
        """Revoke the acknowledgements of results that do not count: they have to be sent again."""
        known = orders.device[self.acknowledged[orders.device] == orders.result_of]
        self.acknowledged[known] = -1

    def _close(self, numbers: Ints) -> tuple[IssuedOrders, Flags]:
        """Take out orders that are no longer under way; return which of the numbers were."""
        rows, known = self.under_way.named(numbers)
        closed, left = self.under_way.take(rows), np.ones(len(self.under_way), dtype=bool)
        left[rows] = False
        self.under_way = self.under_way.take(left) if left.any() else _NO_ORDERS
        if self.offered:
            kept = [~np.isin(each.orders.id, numbers) for each in self.offered]
            pairs = zip(self.offered, kept, strict=True)
            self.offered = tuple(
                replace(each, orders=each.orders.take(rest)) for each, rest in pairs if rest.any()
            )
        return closed, known

    def _fail(self, orders: IssuedOrders, charges: Charges, reasons: Sequence[str]) -> None:
        """Enter orders without replies that count."""
        self.failed += orders.statuses
        self.ledger.failed(orders, charges, reasons)

    # -- ending a round

    def finish_round(self) -> Ending:
        """Aggregate the replies, let the parts learn from the round, and begin the next one."""
        view = self.view()
        if self._drop(view):
            view = self.view()
        # Entered into the round that ends: what is open when the next begins is in no snapshot.
        later = self._without_stale(self._take_later(view), self.round_index + 1)
        changes = self._accepted()
        if not changes:
            self.diagnostics = {}
        held = self._aggregate(changes) if changes else ""
        self._enter(held)
        if not held:
            self._learn(changes["params"].updates if changes else None)
        self.diagnostics = {**self._diagnosed(), **self.diagnostics}
        surveys = _surveys(self.replied)
        close = partial(self.ledger.close, self.devices, self.round_index, self.runtime.now())
        unchecked = (
            None if self.trusted is None else _Unchecked(*self.trusted, changes, self.finite)
        )
        self.trusted = self.finite = None
        self.round_index += 1
        self.started = self.runtime.now()
        self.runtime.begin_round(self.round_index)
        # What is kept for long holds on to nothing else.
        if len(later):
            later = later.pruned().having(replies=later.replies.compact())
        self.replied, self.under_way = later, self.under_way.pruned()
        if len(self.holding):
            # A schedule can only fetch what it sees: of the others nobody will ask again.
            still = np.isin(self.holding.order, later.orders.order)
            self.holding = self.holding.take(still).pruned()
        self._open_round()
        ended = partial(
            Round,
            index=self.round_index - 1,
            time=self.started,
            params=dict(self.params),
            buffers=dict(self.buffers),
            diagnostics=self.diagnostics,
            replies=surveys,
            sub_model=self._sub_model(),
            fleet=self.runtime.save(),
        )
        return Ending(ended, close, self.snapshot(), unchecked)

    def settle(self, ending: Ending) -> Round | None:
        """Return a round that has ended, with its ledger; an accelerator is waited for.

        Return None if it ended with a reply that does not count, or with a model that is not
        finite: then `undo` it and play it again.
        """
        snapshot = ending.snapshot
        if ending.unchecked is not None:
            found = self._checked(ending.unchecked)
            if found is None:
                return None
            self.update_sizes |= found
            snapshot = replace(snapshot, update_sizes=dict(self.update_sizes))
        return ending.round(ledger=ending.close(), snapshot=snapshot)

    def undo(self, before: Snapshot) -> None:
        """Go back to the beginning of a round, and trust no replies for some rounds."""
        self.restore(before)
        self.cautious_until = self.round_index + _CAUTIOUS

    def _checked(self, given: "_Unchecked") -> dict[str, UpdateSizes] | None:
        """Return the sizes of updates that are known with these; None if some reply is refused."""
        reasons, sizes = given.screened()
        if any(reasons) or given.finite is None or not np.isfinite(given.finite.values()).all():
            return None
        sorter = np.argsort(given.orders.order)
        found = {}
        for what, each in given.changes.items():
            place = np.searchsorted(given.orders.order, each.orders, sorter=sorter)
            own = sizes[sorter[place]] if each.measured is None else each.measured()
            changes = self._compared(what, each.updates, each.orders, own)
            if changes.refused:
                return None
            found[what] = changes.known.after(each.updates.device, own)
        return found

    def _diagnosed(self) -> dict[str, Any]:
        """Return what the parts add to the record of the round, out of their states."""
        found: dict[str, Any] = {}
        for name, part in self.diagnosing.items():
            with during(name, part):
                diagnostics = part.diagnostics(self.states[name])
            found |= returned.diagnostics(diagnostics, self._caller(name))
        return found

    def _sub_model(self) -> Callable[[SubModelSize], Slice]:
        """Return a function that cuts sub-models as the extraction does now."""
        view, state = self.view(), self.states["extract"]
        extract, caller = self.method.extract, self._caller("extract")
        address = self.seed, "test", self.round_index, self.issued

        def sub_model(size: SubModelSize) -> Slice:
            with during("extract", extract):
                found = extract.for_evaluation(size, view, state, _key(*address))
            return returned.cut_out(found, caller, view.blueprint)

        return sub_model

    def _take_later(self, view: View) -> RepliedOrders:
        """Take out the replies that are left to a later round; sort the others by order."""
        schedule, known = self.method.schedule, self.replied.orders.order
        with during("schedule", schedule):
            later = schedule.later(view)
        left = returned.orders(later, self._caller("schedule"), known, "replied to")
        self.replied = replied = self.replied.take(known.argsort())
        if not len(left):
            return _NO_REPLIES
        waits = np.isin(replied.orders.order, left)
        self.replied = replied.take(~waits)
        return replied.take(waits)

    def _drop(self, view: View) -> bool:
        """Cancel the orders that the schedule drops; return whether there are any."""
        schedule = self.method.schedule
        with during("schedule", schedule):
            found = schedule.drop(view)
        known = self.under_way.order
        dropped = returned.orders(found, self._caller("schedule"), known, "under way")
        if len(dropped):
            self.receive(Events(failures=self.runtime.cancel(dropped, "too late")))
        return len(dropped) > 0

    def _accepted(self) -> dict[str, "_Changes"]:
        """Return what this round's updates change; those that are far too large are refused."""
        trained = self.replied.take(self.replied.replies.trained)
        incoming = IncomingReplies(self.job, self.task, self.round_index)
        found: dict[str, _Changes] = {}
        if len(trained):
            updates = incoming.trained(trained, self.params)
            found["params"] = self._sized("params", updates, trained)
        if trained.replies.with_statistics.any():
            measured = trained.take(trained.replies.with_statistics)
            updates = incoming.statistics(measured, self.buffers)
            found["buffers"] = self._sized("buffers", updates, measured)
        refused: dict[int, str] = {}
        for each in found.values():
            refused = {**each.refused, **refused}
        if not refused:
            return found
        numbers = np.array(sorted(refused))
        bad = trained.take(np.isin(trained.orders.order, numbers))
        self._fail(bad.orders, bad.charges, [refused[order] for order in numbers.tolist()])
        self._revoke(bad.orders)
        self.replied = self.replied.take(~np.isin(self.replied.orders.order, numbers))
        left = {what: changes.without(numbers) for what, changes in found.items()}
        return {what: changes for what, changes in left.items() if len(changes.orders)}

    def _sized(self, what: str, updates: Updates, replied: RepliedOrders) -> "_Changes":
        """Return updates beside the sizes of earlier ones; those that are trusted have no size."""
        orders, sizes = replied.orders.order, replied.sizes
        if self.trusted is not None:
            known = what == "params" and sized(replied.replies)
            measured = None if known else updates.measured_sizes()
            return _Changes(updates, orders, sizes, self.update_sizes[what], {}, measured)
        if what != "params" or np.isnan(sizes).any():
            sizes = updates.root_mean_squares()
        return self._compared(what, updates, orders, sizes)

    def _compared(self, what: str, updates: Updates, orders: Ints, sizes: Floats) -> "_Changes":
        """Return updates of these orders and sizes beside the sizes of earlier ones."""
        verdict = self.update_sizes[what].compare(
            updates.device, sizes, self.runtime.limits.growth, self.absurd_sizes[what]
        )
        refused = {
            int(orders[row]): f"refused: {too_large(_CHANGES[what], sizes[row], verdict.limit)}"
            for row in np.flatnonzero(verdict.above)
        }
        return _Changes(updates, orders, sizes, verdict.known, refused)

    def _aggregate(self, changes: Mapping[str, "_Changes"]) -> str:
        """Make the new model, or return why the old one and all that belongs to it are kept."""
        view, key, state = self.view(), self.key("aggregate"), self.states["aggregate"]
        updates, aggregate = changes["params"].updates, self.method.aggregate
        with during("aggregate", aggregate):
            found = aggregate(self.params, updates, view, state, key)
        new = returned.aggregated(found, self._caller("aggregate"), self.params)
        buffers = dict(self.buffers)
        if "buffers" in changes:
            # Averaged by samples, whatever the aggregator: they are measurements.
            mean = changes["buffers"].updates.mean(changes["buffers"].updates.samples)
            buffers = add_delta(buffers, mean)
        trees = (new.model, self.params), (buffers, self.buffers)
        if self.trusted is not None:
            self.finite = finiteness(trees, new.state, state)
        elif wrong := unsound(trees, new.state, state):
            self.diagnostics = {"held": tuple(updates.device.tolist()), "not_finite": tuple(wrong)}
            return f"held: the new model is not finite: {wrong[0]}"
        self.params, self.buffers = dict(new.model), buffers
        self.diagnostics, self.states["aggregate"] = new.diagnostics, new.state
        if self.trusted is None:
            for what, each in changes.items():
                self.update_sizes[what] = each.known.after(each.updates.device, each.sizes)
        return ""

    def _enter(self, held: str) -> None:
        """Enter the replies of this round into the ledger; `held` is why no update counts."""
        replied, trained = self.replied, self.replied.replies.trained
        reasons = np.where(trained, held, "").tolist()
        self.ledger.replied(replied, reasons)
        if held:
            self._revoke(replied.orders.take(trained))

    def _learn(self, updates: Updates | None) -> None:
        """Let the parts learn from the round; NaN may well mean "unknown" in their states."""
        if not self.learning:
            return
        view = self.view()
        for name, part in self.learning.items():
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
            under_way=self.under_way,
            offered=self.offered,
            holding=self.holding,
            waiting=self.replied,
            update_sizes=dict(self.update_sizes),
        )

    def restore(self, saved: Snapshot) -> None:
        """Go on after the round that a snapshot was taken of."""
        self.params, self.buffers = dict(saved.params), dict(saved.buffers)
        self.states, self.diagnostics = dict(saved.states), saved.diagnostics
        self.round_index, self.started, self.issued = saved.round_index, saved.started, saved.issued
        self.visits, self.acknowledged = saved.visits.copy(), saved.acknowledged.copy()
        self.under_way, self.offered = saved.under_way, saved.offered
        self.holding, self.replied = saved.holding, saved.waiting
        self.update_sizes = dict(saved.update_sizes)
        self.trusted = self.finite = None
        self.runtime.begin_round(self.round_index)
        self._open_round()


def _with_own(method: Method, name: str) -> dict[str, Policy]:
    """Return the policies that do not inherit a default, which would do nothing if called."""
    default = getattr(Policy, name)
    return {s: p for s, p in method.policies().items() if getattr(type(p), name) is not default}


def _key(seed: int, purpose: str, round_index: int, issued: int) -> Tensor:
    return rng.root(seed, purpose, round_index, issued)


def _surveys(replied: RepliedOrders) -> tuple[Reply, ...]:
    """Return the replies that are not about training, as the caller of the loop sees them."""
    orders, replies = replied.orders, replied.replies
    if all(kind in OF_TRAINING for kind in orders.kinds):
        return ()
    return tuple(
        Reply(
            device=int(orders.device[row]),
            kind=Kind(orders.kind[row]),
            report=replies.report_of(row),
            trees=replies.trees_of(row),
            samples=int(replies.samples[row]),
        )
        for row in np.flatnonzero(~np.isin(orders.kind, OF_TRAINING)).tolist()
    )
