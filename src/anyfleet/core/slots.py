"""The slots of a method, as abstract classes that parts derive from.

All of them take their arguments in one order: what the part works on, then the `view`, then the
`state` of the part, then the `key` of its randomness. A part that gets nothing of a kind leaves it
out. Parts on devices have no view: a codec has the `layout` of the message in its place. `Train`
and `Measure` take the `context` first, because training maps over all that follows it. The `device`
of an extractor comes last, because most extractors do not look at it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from anyfleet.arguments import Part
from anyfleet.arrays import Ints
from anyfleet.core.check_in import CheckIns, Choices
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import (
    Aggregated,
    ChooserState,
    Devices,
    Hyperparameters,
    Params,
    SubModelSize,
)
from anyfleet.core.objectives import Task
from anyfleet.core.plans import Plans
from anyfleet.core.signals import Signal
from anyfleet.core.training_work import Counted, Work, descent_work
from anyfleet.core.updates import Updates
from anyfleet.core.view import Ids, OrderStatuses, Request, View
from anyfleet.elastic import Blueprint, Mode, Priced, Slice

# Numbers of a report that every method can have; a `Measure` adds others.
MEASURES = frozenset({"distortion", "loss", "norm"})
LOOK_AGAIN = 60.0  # seconds until absent devices are looked for again
State = Any  # a policy's own, threaded by the loop
TrainingState = dict[str, Any]  # a trainer's: nested dicts of tensors


class Slot(Part):
    """The base of all slots: what a part says of itself, by default nothing.

    `Method` asks every part, and every policy inside another policy. Other parts answer for what
    is inside them, as `ErrorFeedback.provides` does.
    """

    @property
    def reports(self) -> frozenset[str]:
        """The numbers that devices measure and report because of this part."""
        return frozenset()

    @property
    def measures(self) -> "tuple[Measure, ...]":
        """What devices measure beside training because of this part."""
        return ()

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals that other parts of the method, or the task, must provide."""
        return frozenset()

    @property
    def provides(self) -> frozenset[Signal]:
        """The signals that other parts may require."""
        return frozenset()

    @property
    def decides(self) -> frozenset[Signal]:
        """What of an order it sets; no two parts of a method may set the same."""
        return frozenset()


class Policy(Slot):
    """A part that works on the server.

    The loop keeps its state, hands it to every call and saves it with the run. The part itself
    never changes. The defaults are those of a part without state.
    """

    def init(self, view: View) -> State:
        """Return the state before the first round; by default None."""
        return None

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: State
    ) -> State:
        """Return the state after a round; `updates` is None if the round had none.

        `diagnostics` is what the aggregator recorded, `view` has the new model.
        """
        return state

    def diagnostics(self, state: State) -> Mapping[str, Any]:
        """Return what the record of a round has of the state; by default nothing."""
        return {}


class Wrapper(Policy):
    """A policy around another of its kind, `inner`, whose state is its own."""

    inner: Policy

    def init(self, view: View) -> State:
        return self.inner.init(view)

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: State
    ) -> State:
        return self.inner.learn(updates, diagnostics, view, state)

    def diagnostics(self, state: State) -> Mapping[str, Any]:
        return self.inner.diagnostics(state)


def nested(part: Policy) -> Iterator[Policy]:
    """Yield a policy and all the policies inside it."""
    yield part
    for value in vars(part).values():
        if isinstance(value, Policy):
            yield from nested(value)


class Select(Policy):
    """The selection: which devices of the fleet are asked to take part.

    It is called whenever the schedule requests orders without naming the devices.
    """

    @abstractmethod
    def __call__(self, view: View, state: State, key: Tensor) -> Ids:
        """Return the numbers of the devices to ask, each one idle (`view.idle`) and none twice.

        The schedule asks at most `view.most_devices`; if more are returned, that many are drawn
        from them at random. `key` addresses the randomness of this call.
        """

    def fetch(self, held: OrderStatuses, view: View) -> Ids:
        """Return the numbers of the orders whose results are uploaded, of those `held`.

        `held` are orders that were carried out and whose results wait on their devices
        (`schedule.HoldAndFetch`); by default all of them are uploaded.
        """
        return held.order

    def excess(self, devices: Devices) -> str:
        """Return a warning if the selection asks for more devices than the fleet has, or ""."""
        return ""


class Schedule(Slot):
    """The schedule: when orders are issued, how long is waited for replies, when a round ends.

    The loop asks `start` for orders to issue, then `ready` whether the round ends. If not, it waits
    for `enough` replies or failures, or until `alarm`, and begins again. When the round ends, the
    orders of `drop` are cancelled, the replies of `later` are left to a later round, and all other
    replies count. A schedule has no state of its own: all that it decides by is in the view.
    """

    @property
    def staleness(self) -> int:
        """The age, in rounds, up to which a reply counts; 0: only in the round that issued it."""
        return 0

    @abstractmethod
    def start(self, view: View) -> Sequence[Request]:
        """Return the requests for orders to issue now; empty for none."""

    @abstractmethod
    def ready(self, view: View) -> bool:
        """Return whether the round ends now, with the replies of `view.replied`."""

    def alarm(self, view: View) -> float | None:
        """Return the time at which to look again even if nothing comes in; None for no such time.

        Seconds since the start of the run, like `view.now`. By default there is none while orders
        are under way; otherwise devices that were absent are looked for again after a minute.
        """
        return None if view.under_way else view.now + LOOK_AGAIN

    def enough(self, view: View) -> int:
        """Return how many replies and failures to wait for before looking again, at least 1.

        More than 1 saves time where fewer could not change what the schedule does.
        """
        return 1

    def drop(self, view: View) -> Ids:
        """Return the numbers of the orders under way that are cancelled as the round ends."""
        return ()

    def later(self, view: View) -> Ids:
        """Return the numbers of the orders whose replies are to count in a later round."""
        return ()


class Plan(Policy):
    """What each device of a cohort shall do, decided on the server."""

    @abstractmethod
    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        """Return the plans with what this part decides for the devices `plans.device`.

        `plans` comes from the trainer, or from the plan inside a wrapper. Write what changes, for
        example `plans.with_widths(array)`, `plans.with_menu(sizes)`,
        `plans.with_hyperparameters(lr=array)` or `plans.declining(mask, "no battery")`. `key`
        addresses the randomness of the round.
        """


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a device can learn from an order that it has carried out."""

    width: float  # of the model's width, as planned
    sub_model_size: tuple[
        float, float
    ]  # of the slice: its width, first trained layer; those of its offer
    measured: Mapping[str, float]  # whether it is reported or not
    # Takes a measure once: of the initial model, that wide, on a minibatch of the device.
    initial: "Callable[[Measure], float]"


class Choose(Slot):
    """Which entry of its menu a device takes, and with which hyperparameters.

    The device decides, by what it knows of itself. Most choosers require a menu. What a chooser
    learns is kept on the device too. The defaults are those of a chooser that learns nothing.
    """

    @property
    def learns_from(self) -> frozenset[str]:
        """The names of the measured numbers that it learns from."""
        return frozenset()

    @abstractmethod
    def __call__(self, check_ins: CheckIns) -> Choices:
        """Return what each of the devices chooses from its menu.

        Each device decides for itself; a simulator asks all that check in together at once. What
        the entries cost are arrays [entries, devices], for example
        `check_ins.choices(check_ins.seconds.argmin(axis=0))`. A chooser may as well look at one
        device at a time: `check_ins.choices([mine(check_in) for check_in in check_ins])`.
        """

    def learn(self, lesson: Lesson, state: ChooserState) -> ChooserState:
        """Return what a device keeps after it has carried out an order that trained.

        `state` is what it kept before, {} at first: lists of numbers by name. It comes back in
        `CheckIns.states`, and never leaves the device.
        """
        return state

    def initial_measures(
        self, width: float, first_trained_layer: int, state: ChooserState
    ) -> "tuple[Measure, ...]":
        """Return what `learn` will measure of the initial model after an order of this size."""
        return ()


class Extract(Policy):
    """Which channels make up a sub-model of some size.

    A part whose slices differ from device to device says so with `personal = True`. It is called
    for each device, with the number and the key of the device. Other parts are called once a round
    for each size, with a key of the round, and `device` is None.
    """

    personal: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, size: SubModelSize, view: View, state: State, key: Tensor, device: int | None
    ) -> Slice:
        """Return the slice of a sub-model of this size that devices train."""

    def for_evaluation(self, size: SubModelSize, view: View, state: State, key: Tensor) -> Slice:
        """Return the slice of this size that is evaluated.

        By default what devices train or, where that is personal, the leading channels.
        """
        if self.personal:
            return size.prefix(view.blueprint)
        return self(size, view, state, key, None)


class Norm(Slot):
    """The treatment of batch normalisation: what is averaged, and what stays on devices.

    Defaults are those of one normalisation for all: nothing stays on a device, no statistics are
    sent.
    """

    training: ClassVar[Mode]  # in which devices train
    evaluation: ClassVar[Mode]  # in which a model is tested
    calibrated: ClassVar[bool] = False  # statistics are measured over data before a test

    def stays(self, blueprint: Blueprint) -> frozenset[str]:
        """Return the names of the parameters and buffers that never leave a device."""
        return frozenset()

    def travels(self, blueprint: Blueprint) -> frozenset[str]:
        """Return the names of the buffers that are sent both ways and averaged."""
        return frozenset()

    def variant(self, blueprint: Blueprint, slice_: Slice) -> str:
        """Return the name under which the server keeps the normalisation of this slice's width.

        "" is that of the whole model, or of one normalisation for all.
        """
        return ""

    def own_names(self, blueprint: Blueprint, slice_: Slice) -> dict[str, str]:
        """Return the tensors of which this width has its own, and their names on the server."""
        variant = self.variant(blueprint, slice_)
        if not variant:
            return {}
        names = (n for s in blueprint.norms for n in (s.weight, s.bias, s.mean, s.variance))
        return {name: f"{name}@{variant}" for name in names if name is not None}

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one


@dataclass(frozen=True)
class TrainingContext:
    """What is the same for all devices that are trained together: shapes and parts, no values.

    `trained` has the names of the parameters that training changes; `blueprint` is that of the
    sub-model, and `width` its planned width.
    """

    blueprint: Blueprint
    trained: tuple[str, ...]
    norm: Norm
    task: Task
    width: float = 1.0  # as planned; axes are rounded to whole channels


class Minibatch(NamedTuple):
    """The samples of one local step.

    `valid` has one boolean for each row; the others are padding. `key` addresses the randomness of
    this local step on this device. `step_index` counts the local steps of an order from 0.
    """

    x: Tensor
    y: Tensor
    valid: Tensor
    key: Tensor
    step_index: int = 0  # the same for devices that are trained together


class TrainingStart(NamedTuple):
    """What a device trains from, in the coordinates of its sub-model."""

    params: Params
    buffers: Params
    seen: Tensor  # one boolean for each label: whether it occurs in the device's data


class TrainingResult(NamedTuple):
    """What training leaves behind, in the coordinates of the sub-model."""

    params: Params
    buffers: Params
    mask: Params  # 1 where the update counts, 0 where not; a name that is absent counts whole
    report: dict[str, Tensor]  # single numbers, or vectors


class Train(Slot):
    """Local training, written for one device as pure functions of tensors.

    Devices with the same shapes are trained together, each method mapped over all of them
    (`torch.func.vmap`). So a method must not branch on the values of tensors, nor keep anything
    outside the state that it returns. Randomness comes from `Minibatch.key`. Steps of stacks that
    come often are recorded as their operators of torch: their Python code, a `print` for example,
    is not run any more. `Sequential` runs it every time.
    """

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        """Return what each device trains with in a round, before a planner varies it.

        `samples` has the number of samples of each device. By default they train for one epoch of
        minibatches of 32, with a learning rate of 0.01.
        """
        return Hyperparameters.alike(len(samples), lr=0.01, epochs=1, batch_size=32)

    def without_hyperparameters(self) -> "Train":
        """Return a trainer that trains alike, without what only `hyperparameters` reads.

        Runs whose trainers are then equal can be trained together, though their orders have other
        learning rates, say. By default the trainer itself, which is always right.
        """
        return self

    @abstractmethod
    def start(self, context: TrainingContext, start: TrainingStart) -> TrainingState:
        """Return the state before the first local step.

        Its entries "params" and "buffers" are the model, and stay so.
        """

    @abstractmethod
    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        """Return the state after one local step.

        `hyperparameters` has the device's own "lr", "batch_size", "local_steps" and
        "sent_fraction"; `draw` is what `shared_draws` returned for this step.
        """

    @abstractmethod
    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        """Return the result of training: the model, what of it counts, and what is reported."""

    def mask(self, context: TrainingContext, seen: Tensor) -> Params | None:
        """Return the mask of the result if labels alone decide it; by default None.

        `seen` has a flag for each label that occurs on the device. How long a reply is, which the
        clock asks for, is then known before an accelerator has trained.
        """
        return None

    def shared_draws(self, local_steps: int, key: Tensor) -> tuple[Any, ...]:
        """Return one value for each local step, drawn for the whole cohort; by default None.

        A value decides shapes (which width to train, say), so that devices can be trained together
        only if all have the same one.
        """
        return (None,) * local_steps

    def substeps(self, context: TrainingContext, draw: Any) -> tuple[Any, ...]:
        """Return what makes up a local step with this draw, in order; by default the draw alone.

        A trainer whose draws seldom repeat divides its step into a few hashable kinds that do, so
        that an accelerator can keep each of them ready. Each is given to `substep`.
        """
        return (draw,)

    def substep(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        substep: Any,
    ) -> TrainingState:
        """Return the state after one of the `substeps`; by default after a whole local step.

        It may add entries to the state for those that follow; the last one of a step leaves them
        out. Where there are several, none may depend on `Minibatch.step_index`.
        """
        return self.step(context, state, batch, hyperparameters, substep)

    def advance(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        substep: Any,
    ) -> TrainingState:
        """Return what `substep` does, where nobody needs the given state any more.

        Only what an earlier substep of the same training made may be written over: it is called in
        no first local step. By default nothing is.
        """
        return self.substep(context, state, batch, hyperparameters, substep)

    def misfit(self, task: Task) -> str:
        """Return why this task cannot be trained like this and what to do, or ""."""
        return ""

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        """Return the work of `processed` samples in `local_steps`, for one order or for many.

        Of what is drawn at random, the expected work. By default that of gradient descent with one
        forward and one backward pass for each local step, and no optimiser state.
        """
        return descent_work(priced, processed, local_steps)

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one


class Measure(Part):
    """Something that a device measures beside training, whatever the trainer.

    A measure adds numbers to the device's report, under names of its own. They stay on the device,
    where a chooser may learn from them, unless some part of the method `reports` them. A part
    brings its measures along in `measures`.
    """

    scalars: ClassVar[frozenset[str]] = frozenset()  # names of single numbers
    vectors: ClassVar[frozenset[str]] = frozenset()  # names of lists of numbers
    nonnegative: ClassVar[frozenset[str]] = frozenset()  # names whose numbers are never below zero

    @property
    def names(self) -> frozenset[str]:
        """The names of all numbers that it adds to a report."""
        return self.scalars | self.vectors

    def length(self, name: str, blueprint: Blueprint, trained: Sequence[str]) -> int:
        """Return how many numbers it reports under a name.

        `blueprint` is that of the sub-model, `trained` has the names of its trained parameters.
        """
        return 1

    @abstractmethod
    def observed(self, train: Train, asked: frozenset[str]) -> Train:
        """Return the trainer with this measure around it.

        `asked` has the names that some part reports or learns from. The model that the trainer
        makes must stay the same; `Train.work` of what is returned has the measure's work in it.
        """

    @abstractmethod
    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        """Return the work of measuring alone, beside such training."""

    def initial(
        self, context: TrainingContext, params: Params, buffers: Params, batch: Minibatch
    ) -> float:
        """Return the measure of one minibatch, for `Lesson.initial`; NaN if there is none.

        It costs the `work` of one local step.
        """
        return float("nan")

    def joined(self, other: "Measure") -> "Measure | None":
        """Return one measure that serves for both, or None: they cannot be in one method.

        Only asked of measures that have names in common. By default equal ones can be joined.
        """
        return self if self == other else None

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one


@dataclass(frozen=True, eq=False)
class Compressed:
    """What a codec makes of a stack of devices: rows [devices, entries] by the name of the tensor.

    `anyfleet.parts.distortion` computes the distortion.
    """

    received: Params  # what the receiver will have; empty: nothing is sent
    kept: Params  # 1 where an entry was sent, 0 where not; a name that is absent was sent whole
    symbols: Symbols  # what is packed
    bits: Tensor  # [devices, columns]
    state: Params  # what the devices keep for their next messages (`Codec.state_name`)
    distortion: Tensor  # [devices]: squared error over squared norm


class Slack(NamedTuple):
    """The most by which `Codec.bits` may exceed what `pack` makes of a column; zeros: exact."""

    column: float = 0.0  # bits
    share: float = 0.0  # of the bits of the column
    entry: float = 0.0  # bits for every entry of the column


class Codec(Slot):
    """How tensors travel: one definition, used for tensors and for bytes.

    A codec sees stacks: of every tensor the rows [devices, entries], in the order in which `layout`
    says that entries travel. `compress` and `restore` go between rows and symbols, for all devices
    of a stack at once. `pack` and `unpack` go between the symbols of one device and bytes.

    `restore(unpack(pack(symbols)))` equals what `compress` says is received, bit for bit: every
    reduction over numbers happens in `compress`, once. Results of one device do not depend on the
    others of its stack. Defaults are those of a codec that sends everything and keeps no state.

    A codec that sends as much as the sent fraction of an order asks for provides
    `FollowsSentFraction`. One that sends whole numbers is shorter as a `parts.codec.Quantiser`
    (docs/codecs.md).
    """

    state_name: ClassVar[str] = ""  # the device state that it keeps (`Compressed.state`), or ""

    @property
    def drops(self) -> bool:
        """A flag: the codec leaves entries out. Changes can bear that, weights cannot."""
        return False

    @property
    def slack(self) -> Slack:
        """The most by which `bits` exceed the packed bits; receivers refuse what claims more."""
        return Slack()

    @property
    def unavailable(self) -> str:
        """Why this machine can neither `pack` nor `unpack`, and what to do; "" if it can."""
        return ""

    @abstractmethod
    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
    ) -> Compressed:
        """Return the compressed rows [devices, entries] of every tensor.

        `state` is what the codec left on the devices after their last messages, as rows (names may
        be absent); `sent_fraction` [devices] is what their orders ask for, NaN where nothing is
        asked and 1 for all that can be sent.
        """

    @abstractmethod
    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        """Return an upper bound of the packed bits, [devices, columns], within `slack`."""

    @abstractmethod
    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        """Return the symbols of one device as bytes, column by column."""

    @abstractmethod
    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        """Return the symbols that the leading columns of a message hold.

        Raise BadMessage for bytes that `pack` cannot have made.
        """

    @abstractmethod
    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        """Return the rows that symbols stand for, and what was kept of them (`Compressed.kept`).

        Entries of columns that did not come are 0, and not kept.
        """

    @property
    def calibrates(self) -> bool:
        """A flag: the codec adapts to a sample update before a run (`calibrated`)."""
        return False

    def calibrated(self, update: Params, layout: MessageLayout) -> "Codec":
        """Return the codec adapted to rows of a sample update that the server computed."""
        return self

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one


class Aggregate(Policy):
    """The aggregation: how the server makes a new model of the updates of a round.

    `for update in updates` gives them one by one; `updates.mean(weights)`, `median`, `norms` and
    the other reductions do the usual work faster. `anyfleet.parts.try_aggregate` calls an
    aggregator on a few tensors.
    """

    @abstractmethod
    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        """Return the new model, the state for the next round, and diagnostics for its record.

        `model` is the current one: every `update.delta` is a change of it, and the new one has the
        same tensors. `state` is what `init` or the last call returned. There is at least one
        update. `key` addresses the randomness of this call.
        """
