"""What a method is made of: the slots, as base classes that parts derive from."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

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
from anyfleet.core.time_and_energy import Work
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatus, Request, View
from anyfleet.elastic import Blueprint, Mode, Priced, Slice

MEASURES = frozenset({"channels", "distortion", "fisher", "loss", "norm"})  # of training
State = Any  # a policy's own, threaded by the loop
Loose = dict[str, Any]  # a trainer's state: nested dicts of tensors


class Policy(Part, Protocol):
    """A part that works on the server.

    The loop keeps its state, hands it to every call and saves it with the run. The part itself
    never changes. The defaults are those of a part without state.
    """

    needs_server_loss: ClassVar[bool] = False  # it asks for losses on the server's samples

    @property
    def reports(self) -> frozenset[str]:
        """The numbers that devices measure and report because of this part."""
        return frozenset()

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals that other parts of the method must provide."""
        return frozenset()

    @property
    def provides(self) -> frozenset[Signal]:
        """The signals that other parts may require."""
        return frozenset()

    @property
    def decides(self) -> frozenset[Signal]:
        """What of an order it sets; no two parts of a method may set the same."""
        return frozenset()

    def init(self, view: View) -> State:
        """Return the state before the first round; by default None."""
        return None

    def learn(
        self, state: State, updates: Updates | None, diagnostics: Mapping[str, Any], view: View
    ) -> State:
        """Return the state after a round; `updates` is None if the round had none.

        `diagnostics` is what the aggregator recorded, `view` has the new model.
        """
        return state

    def diagnostics(self, state: State) -> Mapping[str, Any]:
        """Return what the record of a round has of the state; by default nothing."""
        return {}


class Wrapper(Policy, Protocol):
    """A policy around another of its kind, `inner`, whose state is its own."""

    inner: Policy

    def init(self, view: View) -> State:
        return self.inner.init(view)

    def learn(
        self, state: State, updates: Updates | None, diagnostics: Mapping[str, Any], view: View
    ) -> State:
        return self.inner.learn(state, updates, diagnostics, view)

    def diagnostics(self, state: State) -> Mapping[str, Any]:
        return self.inner.diagnostics(state)


def nested(part: Policy) -> Iterator[Policy]:
    """Yield a policy and all the policies inside it."""
    yield part
    for value in vars(part).values():
        if Policy in type(value).__mro__:
            yield from nested(value)


class Select(Policy, Protocol):
    """Which of the idle devices take part."""

    @abstractmethod
    def __call__(self, view: View, state: State, key: Tensor) -> Ints: ...

    def fetch(self, view: View, held: Sequence[OrderStatus]) -> Sequence[OrderStatus]:
        """Whose results are uploaded, of those that wait on their devices."""
        return held

    def excess(self, devices: Devices) -> str:
        """Say that it asks for more devices than a fleet has, and how many there are."""
        return ""


class Schedule(Part, Protocol):
    """When to ask and when to step; one loop serves all schedules."""

    @property
    @abstractmethod
    def staleness(self) -> int:
        """An answer older than this many steps is lost."""

    @property
    def reports(self) -> frozenset[str]:
        """What devices shall measure and report."""
        return frozenset()

    @property
    def provides(self) -> frozenset[Signal]:
        """The signals that other parts may require."""
        return frozenset()

    @abstractmethod
    def start(self, view: View) -> tuple[Request, ...]:
        """What to issue now."""

    @abstractmethod
    def ready(self, view: View) -> bool:
        """Whether to step now."""

    @abstractmethod
    def alarm(self, view: View) -> float | None:
        """The time at which to look again even if nobody answers."""

    @abstractmethod
    def enough(self, view: View) -> int:
        """How many outcomes must come in before the schedule can decide anything new."""

    def drop(self, view: View) -> tuple[int, ...]:
        """Orders to cancel as this step ends."""
        return ()

    def later(self, view: View) -> tuple[int, ...]:
        """Orders that were answered but shall count in a later step."""
        return ()


class Plan(Policy, Protocol):
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
    initial_fisher: Callable[
        [], float
    ]  # measures the Fisher information of the initial model, that wide


class Choose(Part, Protocol):
    """Which entry of its menu a device takes, and with which hyperparameters.

    The device decides, by what it knows of itself. What a chooser learns is kept on the device
    too. The defaults are those of a chooser that learns nothing.
    """

    @property
    def learns_from(self) -> frozenset[str]:
        """Measures of training that it learns from."""
        return frozenset()

    @property
    def requires(self) -> frozenset[Signal]:
        """The signals that other parts of the method must provide; most choosers need a menu."""
        return frozenset()

    @property
    def decides(self) -> frozenset[Signal]:
        """What of an order it sets; no two parts of a method may set the same."""
        return frozenset()

    @abstractmethod
    def __call__(self, check_ins: CheckIns) -> Choices:
        """Return what each of the devices chooses from its menu.

        Each device decides for itself; a simulator asks all that check in together at once. What
        the entries cost are arrays [entries, devices], for example
        `check_ins.choices(check_ins.seconds.argmin(axis=0))`. A chooser may as well look at one
        device at a time: `check_ins.choices([mine(check_in) for check_in in check_ins])`.
        """

    def learn(self, state: ChooserState, lesson: Lesson) -> ChooserState:
        """Return what a device keeps after it has carried out an order that trained.

        `state` is what it kept before, {} at first: lists of numbers by name. It comes back in
        `CheckIns.states`, and never leaves the device.
        """
        return state

    def measures_initial(self, state: ChooserState, width: float, first_trained_layer: int) -> bool:
        """Whether learning from such an order will measure the initial model.

        By its planned share and its first trained layer.
        """
        return False


class Extract(Policy, Protocol):
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


class Norm(Part, Protocol):
    """How batch normalisation lives in a federation.

    Defaults are those of one normalisation for all: nothing stays behind, no statistics travel.
    """

    training: ClassVar[Mode]
    evaluation: ClassVar[Mode]
    calibrated: ClassVar[bool] = False  # statistics are measured over data before a test

    def stays(self, blueprint: Blueprint) -> frozenset[str]:
        """Parameters and buffers that never leave the device."""
        return frozenset()

    def travels(self, blueprint: Blueprint) -> frozenset[str]:
        """Buffers that are sent both ways and averaged."""
        return frozenset()

    def variant(self, blueprint: Blueprint, slice_: Slice) -> str:
        """Under which name the server keeps the normalisation of this width; "" for one for all."""
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


@dataclass(frozen=True, eq=False)
class TrainingContext:
    """What is the same for every device of a stack: sizes and parts, no values."""

    blueprint: Blueprint  # of the small model
    trained: tuple[str, ...]  # parameters that are updated
    norm: Norm
    task: Task
    width: float = 1.0  # of the model's width, as planned; axes are rounded to whole channels


class Minibatch(NamedTuple):
    """The samples of one local step; rows that are not `valid` are padding."""

    x: Tensor
    y: Tensor
    valid: Tensor
    key: Tensor
    step_index: int = 0  # of the step in its order: the same for all of a stack


class TrainingStart(NamedTuple):
    """What a trainer starts from, in local coordinates."""

    params: Params
    buffers: Params
    seen: Tensor  # labels that occur in the device's data


class TrainingResult(NamedTuple):
    """What training leaves behind, in local coordinates."""

    params: Params
    buffers: Params
    mask: Params  # what of the update counts; an absent name counts whole
    report: dict[str, Tensor]


class Train(Part, Protocol):
    """Local training as pure functions of tensors: no branching on values, no hidden state."""

    @abstractmethod
    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        """The numbers of each device before a planner varies them."""

    @abstractmethod
    def start(self, context: TrainingContext, start: TrainingStart) -> Loose:
        """The state before the first step; "params" and "buffers" hold the model at any time."""

    @abstractmethod
    def step(
        self,
        context: TrainingContext,
        state: Loose,
        batch: Minibatch,
        hyperparameters: Loose,
        draw: Any,
    ) -> Loose: ...

    @abstractmethod
    def finish(self, context: TrainingContext, state: Loose) -> TrainingResult: ...

    def shared_draws(self, key: Tensor, local_steps: int) -> tuple[Any, ...]:
        """One static choice per step, shared by the cohort so that stacks keep one shape."""
        return (None,) * local_steps

    def misfit(self, task: Task) -> str:
        """Why this task cannot be trained like this, and what to do; empty if it can."""
        return ""

    @abstractmethod
    def work(self, priced: Priced, processed: int, local_steps: int) -> Work:
        """Of `processed` samples in `steps` steps; what is drawn at random, as it is expected."""

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one


@dataclass(frozen=True, eq=False)
class Compressed:
    """Trees after compression, as the receiver will see them; stacked, one row per device."""

    tree: Params
    kept: Params  # 1 where an entry was sent, 0 where not; a name that is absent came whole
    symbols: Symbols  # what is packed
    bits: Tensor  # of every row and column
    state: Params  # what the device keeps for its next message
    distortion: Tensor  # of every row, squared error over squared norm


class Slack(NamedTuple):
    """By how much `Codec.bits` may be above what `pack` makes of a column; nothing: exact."""

    column: float = 0.0  # bits
    share: float = 0.0  # of the column
    entry: float = 0.0  # bits for every entry of the column


class Codec(Part, Protocol):
    """One definition, two faces: tensors (`squeeze`, `restore`) and bytes (`pack`, `unpack`).

    `restore(unpack(pack(s.symbols)))` equals `s.tree` and `s.kept` bit for bit. `bits` are an upper
    bound of the packed bits, within the `slack` that the codec states. Every reduction over numbers
    happens in `squeeze`, once; all but `pack` and `unpack` work on stacks of devices. Defaults are
    those of a codec that sends everything and remembers nothing.
    """

    state_name: ClassVar[str] = ""  # the device memory it keeps, or ""

    @property
    def drops(self) -> bool:
        """Whether it leaves entries out: changes can bear that, weights cannot."""
        return False

    @property
    def follows_sent_fraction(self) -> bool:
        """Whether it follows the rate that an order asks for."""
        return False

    @property
    def slack(self) -> Slack:
        """How far `bits` lie above the packed bits at most; receivers refuse what is beyond."""
        return Slack()

    @abstractmethod
    def compress(
        self, tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> Compressed: ...

    @abstractmethod
    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        """Of every row and column."""

    @abstractmethod
    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        """One row as bytes, column by column."""

    @abstractmethod
    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        """The row that the leading columns of a message hold; `BadMessage` if they cannot."""

    @abstractmethod
    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        """Trees and what was kept of them; zero where a column is missing."""

    @property
    def calibrates(self) -> bool:
        """Whether it wants a look at an update before a run (`calibrated`)."""
        return False

    def calibrated(self, update: Params, layout: MessageLayout) -> "Codec":
        """The codec after a look at an update such as devices will send, on the server."""
        return self

    def __hash__(self) -> int:
        return object.__hash__(self)  # frozen dataclasses bring a better one


class Aggregate(Policy, Protocol):
    """The new model out of what arrived."""

    @abstractmethod
    def __call__(
        self, model: Params, state: State, updates: Updates, view: View, key: Tensor
    ) -> Aggregated: ...
