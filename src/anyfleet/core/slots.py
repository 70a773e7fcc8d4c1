"""What a method is made of: the slots, as base classes that parts derive from."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from anyfleet.arguments import Part
from anyfleet.arrays import Ints, join
from anyfleet.core.check_in import Choices, ChoosingDevice, MenuEntry
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import (
    Aggregated,
    ChooserState,
    Devices,
    Hyperparameters,
    Params,
    Plans,
    SubModelSize,
)
from anyfleet.core.objectives import Task
from anyfleet.core.time_and_energy import Work
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatus, Request, View
from anyfleet.elastic import Blueprint, Mode, Priced, Slice
from anyfleet.errors import BadReturn
from anyfleet.tracebacks import quoted

MEASURES = frozenset({"channels", "distortion", "fisher", "loss", "norm"})  # of training
State = Any  # a policy's own, threaded by the loop
Loose = dict[str, Any]  # a trainer's state: nested dicts of tensors


class Policy(Part, Protocol):
    """A server-side part; the loop keeps its state. Defaults are those of one without state."""

    needs_server_loss: ClassVar[bool] = (
        False  # asks for losses on the server split: there must be one
    )

    @property
    def reports(self) -> frozenset[str]:
        """What devices shall measure and report."""
        return frozenset()

    @property
    def requires(self) -> Mapping[str, str]:
        """What other parts must give, each with who would."""
        return {}

    @property
    def provides(self) -> frozenset[str]:
        """What other parts may need: notes of an aggregator, "menu" or "target" of a plan."""
        return frozenset()

    def init(self, view: View) -> State:
        """The state before the first round."""
        return None

    def learn(
        self, state: State, updates: Updates | None, diagnostics: Mapping[str, Any], view: View
    ) -> State:
        """The state after a server step; `arrivals` is None after an empty one."""
        return state

    def diagnostics(self, state: State) -> Mapping[str, Any]:
        """What of its state belongs into the record of a run, after a server step."""
        return {}


class Wrapper(Policy, Protocol):
    """A policy around another of its kind (its field `inner`), without a state of its own."""

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
    """A policy and all the policies it is wrapped around."""
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
    def provides(self) -> frozenset[str]:
        """What other parts may need: "held", results that wait on their devices."""
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
    """What each device of the cohort shall do, decided on the server, for all of them at once."""

    @abstractmethod
    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans: ...


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


class CheckIn(NamedTuple):
    """What a device has before it when it chooses."""

    menu: Sequence[MenuEntry]
    device: ChoosingDevice
    hyperparameters: Hyperparameters  # a batch of one


class Choose(Part, Protocol):
    """Which entry of its menu a device takes, and with which numbers; decided on the device.

    What it learns stays there, as notes. Defaults are those of one that learns nothing.
    """

    @property
    def learns_from(self) -> frozenset[str]:
        """Measures of training that it learns from."""
        return frozenset()

    @property
    def requires(self) -> Mapping[str, str]:
        """What other parts must give, each with who would; most need the "menu" of a plan."""
        return {}

    @property
    def decides(self) -> frozenset[str]:
        """The numbers of an order that it sets itself: "rate", "frequency"."""
        return frozenset()

    @abstractmethod
    def __call__(
        self, menu: Sequence[MenuEntry], device: ChoosingDevice, hyperparameters: Hyperparameters
    ) -> Choices:
        """A batch of one."""

    def together(self, check_ins: Sequence[CheckIn]) -> Choices:
        """What several devices choose, each for itself: a simulator may ask them all at once."""
        found = [self(*each) for each in check_ins]
        for each in found:
            if not isinstance(each, Choices):
                raise BadReturn(
                    f"choose={quoted(self)} returned {type(each).__name__}; due is "
                    "anyfleet.core.check_in.Choices."
                )
        return join(found)

    def learn(self, state: ChooserState, lesson: Lesson) -> ChooserState:
        """The notes after an order."""
        return state

    def measures_initial(self, state: ChooserState, width: float, first_trained_layer: int) -> bool:
        """Whether learning from such an order will measure the initial model.

        By its planned share and its first trained layer.
        """
        return False


class Extract(Policy, Protocol):
    """Which channels make up a sub-model of the wanted size."""

    @abstractmethod
    def __call__(self, size: SubModelSize, view: View, state: State, key: Tensor) -> Slice: ...


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
    """What a codec makes of a stack of devices: rows [devices, entries] by the name of the tensor.

    `anyfleet.parts.codec.distortion` computes the distortion.
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


class Codec(Part, Protocol):
    """How tensors travel: one definition, used for tensors and for bytes.

    A codec sees stacks: of every tensor the rows [devices, entries], in the order in which `layout`
    says that entries travel. `compress` and `restore` go between rows and symbols, for all devices
    of a stack at once. `pack` and `unpack` go between the symbols of one device and bytes.

    `restore(unpack(pack(symbols)))` equals what `compress` says is received, bit for bit: every
    reduction over numbers happens in `compress`, once. Results of one device do not depend on the
    others of its stack. Defaults are those of a codec that sends everything and keeps no state.

    A codec that sends whole numbers is shorter as a `parts.codec.Quantiser` (docs/codecs.md).
    """

    state_name: ClassVar[str] = ""  # the device state that it keeps (`Compressed.state`), or ""

    @property
    def drops(self) -> bool:
        """A flag: the codec leaves entries out. Changes can bear that, weights cannot."""
        return False

    @property
    def follows_sent_fraction(self) -> bool:
        """A flag: the sent fraction of an order decides how much is sent."""
        return False

    @property
    def slack(self) -> Slack:
        """The most by which `bits` exceed the packed bits; receivers refuse what claims more."""
        return Slack()

    @abstractmethod
    def compress(
        self, rows: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout
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


class Aggregate(Policy, Protocol):
    """The new model out of what arrived."""

    @abstractmethod
    def __call__(
        self, model: Params, state: State, updates: Updates, view: View, key: Tensor
    ) -> Aggregated: ...
