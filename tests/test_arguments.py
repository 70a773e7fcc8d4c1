"""Mistakes from Python: each is refused early, and says what is wrong and what to do.

What a user's own part returns is in `test_returned.py`, what it raises in `test_tracebacks.py`.
"""

import copy
import inspect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet import Experiment, methods, play
from anyfleet.arguments import unfit
from anyfleet.arrays import Ints
from anyfleet.core.method import SLOTS, Method
from anyfleet.core.slots import Select, State
from anyfleet.core.view import View
from anyfleet.errors import AnyfleetError, BadCall, CompositionError, ConfigError, Refusal
from anyfleet.experiment import load
from anyfleet.methods import fedavg, heterofl
from anyfleet.names import SYNONYMS, near
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.choose import First
from anyfleet.parts.codec import ErrorFeedback, Qsgd, Raw, TopK, Uveq
from anyfleet.parts.plan import TargetSeconds, WidthMenu
from anyfleet.parts.schedule import Deadline, Surveyed, Synchronous
from anyfleet.parts.select import Uniform
from anyfleet.parts.train import Decaying, Gradient, Sgd
from anyfleet.runtime import Stacked
from anyfleet.tasks import Embedded, Split, Synthetic, Task
from anyfleet.world import Group, Steady
from tests.helpers import small

Call = Callable[[], Any]


def fedavg_mean(*_: Any) -> None:
    """An aggregator as a newcomer may write one."""


class Fastest:
    """Looks like a selection, and is none."""

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return view.idle

    def __repr__(self) -> str:
        return "Fastest()"


def wrong(value: Any) -> Any:
    """A value that mypy shall not see."""
    return value


FEDAVG: Any = fedavg
EXPERIMENT: Any = Experiment

# --- the eleven -------------------------------------------------------------------------------

MISUSES: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    "a function in a slot": (
        lambda: replace(fedavg(), aggregate=wrong(fedavg_mean)),
        CompositionError,
        (
            "aggregate must be an Aggregate",
            "got the function fedavg_mean",
            "did you forget to call it?",
        ),
    ),
    "a class in a slot": (
        lambda: replace(fedavg(), aggregate=wrong(Mean)),
        CompositionError,
        ("aggregate must be an Aggregate", "the class Mean", "did you forget the parentheses?"),
    ),
    "a part of another slot": (
        lambda: replace(fedavg(), select=wrong(WidthMenu())),
        CompositionError,
        ("select must be a Select", "got a WidthMenu", "for the slot plan"),
    ),
    "a part that only looks like one": (
        lambda: replace(fedavg(), select=wrong(Fastest())),
        CompositionError,
        ("select must be a Select", "make Fastest a subclass of anyfleet.parts.Select"),
    ),
    "another library's word": (
        lambda: FEDAVG(learning_rate=0.1),
        TypeError,
        ("fedavg() has no argument 'learning_rate'", 'did you mean "lr"?'),
    ),
    "a text for a number": (
        lambda: FEDAVG(lr="0.1"),
        TypeError,
        ("fedavg.lr must be a number", "the text '0.1'", "leave out the quotation marks"),
    ),
    "a broken count": (
        lambda: FEDAVG(count=2.5),
        TypeError,
        ("fedavg.count must be a whole number", "got 2.5"),
    ),
    "method and task swapped": (
        lambda: EXPERIMENT(fedavg(), small.task()),
        TypeError,
        ("Experiment.task", "is it the method?", "Experiment.method", "is it the task?"),
    ),
    "a method that was not called": (
        lambda: EXPERIMENT(small.task(), methods.heterofl),
        TypeError,
        ("Experiment.method must be a Method", "function heterofl", "did you forget to call it?"),
    ),
    "a method by its name": (
        lambda: EXPERIMENT(small.task(), "fedavg"),
        TypeError,
        ("Experiment.method must be a Method", "the text 'fedavg'", "pass the thing itself"),
    ),
    "rounds as a text": (
        lambda: EXPERIMENT(small.task(), fedavg(), rounds="3"),
        TypeError,
        ("Experiment.rounds must be a whole number", "the text '3'", "quotation marks"),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_says_what_is_wrong_and_what_to_do(name: str) -> None:
    call, kind, words = MISUSES[name]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, AnyfleetError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_there_are_eleven_of_them() -> None:
    assert len(MISUSES) == 11


# --- more of the kind -------------------------------------------------------------------------

MORE: dict[str, tuple[Call, str]] = {
    "a typo": (lambda: Uniform(cuont=3), r'Uniform\(\) has no argument \'cuont\', .* "count"\?'),  # type: ignore[call-arg]
    "clients": (lambda: Split(clients=3), r'no argument \'clients\', did you mean "devices"\?'),  # type: ignore[call-arg]
    "a slot's typo": (lambda: replace(fedavg(), agregate=Mean()), r'did you mean "aggregate"\?'),  # type: ignore[call-arg]
    "a slot as an option": (
        lambda: FEDAVG(select=Uniform(3)),
        r"'select': it is a slot .* use dataclasses\.replace\(fedavg\(\.\.\.\), select=",
    ),
    "an option of an option": (
        lambda: Task.of(small.net(), small.patterns(9, 1), devices=3),  # type: ignore[call-arg]
        r"Task\.of\(\) has no argument 'devices': it belongs to split; use split=Split\(devices=",
    ),
    "rounds by another name": (
        lambda: EXPERIMENT(small.task(), fedavg(), num_rounds=3),
        r'did you mean "rounds"\?',
    ),
    "an inner part not called": (
        lambda: TargetSeconds(wrong(WidthMenu)),
        r"TargetSeconds\.inner .*the parentheses\?",
    ),
    "an inner codec not called": (lambda: ErrorFeedback(wrong(Raw)), r"inner must be a Codec"),
    "a learning rate not called": (
        lambda: Gradient(wrong(Decaying)),
        r"Gradient\.lr must be a LearningRate",
    ),
    "a number for a learning rate": (
        lambda: Gradient(wrong(0.1)),
        r"Gradient\.lr must be a LearningRate.*0\.1",
    ),
    "a word nobody knows": (
        lambda: Deadline(3.0, wrong("latee")),
        r'late must be "dropped" or "counted"',
    ),
    "numbers that are none": (
        lambda: heterofl(widths=wrong((1, "half"))),
        r"widths must be a tuple in which each is a number",
    ),
    "one for many": (
        lambda: WidthMenu(wrong(3)),
        r"WidthMenu\.widths must be a tuple of numbers, got 3",
    ),
    "True for a number": (lambda: Uniform(True), r"count must be a whole number or None, got True"),
    "a class for a model": (
        lambda: Task.of(wrong(nn.Linear), small.patterns(9, 1)),
        r"Task\.of\.module must be a Module.*parentheses",
    ),
    "a task not made": (
        lambda: EXPERIMENT(Synthetic, fedavg()),
        r"Experiment\.task must be a TaskSpec, got the class Synthetic; .*parentheses\?",
    ),
    "play of a method": (lambda: play(wrong(fedavg())), r"play\.experiment must be an Experiment"),
    "a group's typo": (lambda: Group(sped=1e9), r'did you mean "speed"\?'),  # type: ignore[call-arg]
    "an engine's text": (lambda: Stacked(wrong("64")), r"Stacked\.chunk must be a whole number"),
    "a flag as a number": (lambda: Sgd(0.9, wrong(1)), r"Sgd\.nesterov must be True or False"),
}


MORE |= {
    "a model by its name": (
        lambda: Task.of(wrong("net"), small.patterns(9, 1)),
        r"Task\.of\.module must be a torch\.nn\.Module, got the text 'net'",
    ),
    "model and data swapped": (
        lambda: Task.of(wrong(small.patterns(9, 1)), wrong(small.net())),
        r"Task\.of\.module .*is it the training data\?\nTask\.of\.train must be a data set, .*",
    ),
    "a class for a loss": (
        lambda: Task.of(small.net(), small.patterns(9, 1), loss=wrong(nn.CrossEntropyLoss)),
        r'loss must be a function .*class CrossEntropyLoss; .*parentheses \(reduction="none"',
    ),
    "a class for a metric": (
        lambda: Task.of(small.net(), small.patterns(9, 1), metrics={"mine": wrong(nn.L1Loss)}),
        r"mine must be a function .*the class L1Loss; did you forget the parentheses\?",
    ),
    "a method's setting": (
        lambda: EXPERIMENT(small.task(), fedavg(), epochs=3),
        r"no argument 'epochs': it belongs to the method; use methods\.fedavg\(epochs=\.\.\.\)",
    ),
    "a method's learning rate": (
        lambda: EXPERIMENT(small.task(), fedavg(), lr=0.1),
        r"no argument 'lr': it belongs to the method; use methods\.fedavg\(lr=",
    ),
    "one detail": (
        lambda: EXPERIMENT(small.task(), fedavg(), details="groups"),
        r"^Experiment\.details must be a tuple, got the text 'groups'; write \('groups',\)\.$",
    ),
    "one owner": (
        lambda: Group(devices=wrong("ada")),
        r"^Group\.devices must be a tuple, got the text 'ada'; write \('ada',\)\.$",
    ),
    "widths in an array": (
        lambda: EXPERIMENT(small.task(), fedavg(), widths=np.array([1.0, 0.5])),
        r"^Experiment\.widths must be a tuple of numbers, got a ndarray .*tolist\(\)\)\.$",
    ),
    "an array for a number": (
        lambda: Deadline(wrong(np.array([1.0, 2.0]))),
        r"^Deadline\.seconds must be a number, got a ndarray",
    ),
    "a setting that a part inside has too": (
        lambda: Embedded(devices=wrong("20")),
        r"^Embedded\.devices must be a whole number, got the text '20'",
    ),
    "one override": (
        lambda: load("recipes/fedavg.toml", "rounds=3"),
        r"^overrides must be a list of texts, .*; write \['rounds=3'\]\.$",
    ),
    "one package": (
        lambda: load("recipes/fedavg.toml", allow="os"),
        r"^allow must be a list of texts, got the text 'os'; write \['os'\]\.$",
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_parts_tasks_and_fleets_are_as_strict(name: str) -> None:
    call, words = MORE[name]
    with pytest.raises(BadCall, match=words):
        call()


def test_what_a_class_says_itself_is_said_and_the_rest_beside_it() -> None:
    with pytest.raises(BadCall) as caught:
        Uveq(0.0, wrong(3))
    assert [text.split(" ")[0] for text in caught.value.problems] == [
        "Uveq.bits_each",
        "Uveq.dimension",
    ]
    with pytest.raises(BadCall, match=r"use ErrorFeedback\(TopK\(\.\.\.\)\)"):
        TopK(0.1, wrong(ErrorFeedback()))
    with pytest.raises(BadCall, match=r"Deadline\.seconds .*\n.*Deadline\.late must be"):
        Deadline(-1.0, wrong("latee"))


@dataclass(frozen=True)
class Lookalike:
    """Has all that a plan has, and derives from none."""

    reports = requires = provides = decides = frozenset[str]()
    measures = ()

    def init(self, view: View) -> None: ...

    def learn(self, *_: Any) -> None: ...

    def diagnostics(self, state: State) -> dict[str, Any]:
        return {}

    def __call__(self, *_: Any) -> None: ...


def test_inner_parts_derive_from_their_slot_too() -> None:
    with pytest.raises(BadCall, match=r"TargetSeconds\.inner must be a Plan, got a Lookalike"):
        TargetSeconds(wrong(Lookalike()))


def test_all_that_is_wrong_with_a_call_comes_at_once() -> None:
    with pytest.raises(BadCall) as caught:
        FEDAVG(lr="0.1", count=2.5, learning_rate=1)
    assert len(caught.value.problems) == 3
    with pytest.raises(CompositionError) as composed:
        replace(fedavg(), select=wrong(None), plan=wrong(WidthMenu), uplink=wrong("Raw"))
    assert len(composed.value.problems) == 3


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot_refuses_what_is_none_of_its_parts(slot: str) -> None:
    others: list[Any] = [None, "Mean", fedavg_mean, Mean, object(), fedavg()]
    for other in others:
        with pytest.raises(CompositionError, match=rf"{slot} must be an? {SLOTS[slot].__name__}"):
            replace(fedavg(), **{slot: other})


def test_values_that_always_fitted_still_do() -> None:
    count: Any = np.int64(3)
    assert FEDAVG(count=count, lr=np.float32(0.1), decay=1).select == Uniform(3)
    assert heterofl(widths=wrong([1.0, 0.5])).plan is not None  # a list is as good as a tuple
    assert Surveyed(Synchronous(), wrong("evaluate")).ask == "evaluate"
    assert Gradient(lr=lambda step: 0.1 / (step + 1)).hyperparameters(0, np.array([1])).lr[0] == 0.1
    for made in (Uniform(3), WidthMenu(), fedavg(), Split()):
        assert copy.deepcopy(made) == made


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (1, float, True),
        (True, float, False),
        (np.True_, bool, True),
        (None, int | None, True),
        ("1", int | None, False),
        ((1, 2), tuple[int, int], True),
        ((1, 2, 3), tuple[int, int], False),
        (abs, Callable[..., Any], True),
        (3, Callable[..., Any], False),
        (object(), Any, True),
    ],
)
def test_what_an_annotation_lets_through(value: Any, kind: Any, fits: bool) -> None:
    assert (not unfit(value, kind)) == fits


def test_checked_calls_keep_their_signatures() -> None:
    assert list(inspect.signature(Experiment).parameters)[:3] == ["task", "method", "fleet"]
    assert list(inspect.signature(Uniform).parameters) == ["count", "fraction"]
    assert list(inspect.signature(Method).parameters)[:2] == ["select", "schedule"]
    assert list(inspect.signature(Uniform(3)).parameters) == ["view", "state", "key"]
    assert list(inspect.signature(fedavg).parameters) == ["count", "training"]
    assert str(fedavg.__doc__).startswith("Return FedAvg: `count` devices a round")


def test_words_of_other_libraries_lead_to_options_that_exist() -> None:
    """A row of the table that names nothing would mislead."""
    known = set(inspect.signature(Task.of).parameters) | {"widths", "nested_widths", "width"}
    parts = (Experiment, Split, Gradient, Decaying, Deadline, Synchronous, Uniform)
    for part in (*parts, Steady, Qsgd, TopK):
        known |= set(inspect.signature(part).parameters)
    known |= {"lr", "decay", "mu", "weight_decay", "workers", "data", "model"}
    assert {option for meant in SYNONYMS.values() for option in meant} <= known
    assert near("learning_rate", ["lr", "leaning"]) == ', did you mean "lr"?'


# --- run files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ("method.lr=-1", "method.lr", "lr must be positive"),
        ("method.lr=inf", "method.lr", ""),
        ("method.decay=2", "method.decay", "decay must lie in (0, 1]"),
        ("method.learning_rate=0.1", "method.learning_rate", 'did you mean "lr"?'),
        ("method.batch=8", "method.batch", 'did you mean "batch_size"?'),
        ("method.count=2.5", "method.count", "integer"),
    ],
)
def test_a_run_file_says_it_of_the_same_key(change: str, path: str, words: str) -> None:
    for recipe in ("fedavg", "heterofl", "fedrescue"):
        with pytest.raises(ConfigError) as caught:
            load(f"recipes/{recipe}.toml", [change])
        assert [problem.path for problem in caught.value.problems] == [path]
        assert words in caught.value.problems[0].message


@pytest.mark.parametrize("lr", [-1.0, 0.0, math.inf, math.nan])
def test_a_bad_learning_rate_is_refused_by_its_own_name(lr: float) -> None:
    with pytest.raises(Refusal, match=r"^lr must be positive and finite, got"):
        fedavg(lr=lr)


# --- one's own parts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Some(Select):
    """A user's part gets the checks of its slot."""

    count: int = 2

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return view.idle[: self.count]


def test_a_users_own_part_is_checked_like_ours() -> None:
    with pytest.raises(BadCall, match=r"Some\.count must be a whole number"):
        Some(wrong("2"))
    with pytest.raises(BadCall, match=r'no argument \'cuont\', did you mean "count"'):
        Some(cuont=2)  # type: ignore[call-arg]
    step = small.steps(replace(fedavg(lr=0.1), select=Some(2)), small.task(), 1)[0]
    assert all(torch.isfinite(value).all() for value in step.params.values())


class Bare(Select):
    """A selection for others to derive from."""

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return view.idle[:2]


@dataclass(frozen=True)
class WithInitVar(Bare):
    count: int = 1
    start: InitVar[int] = 0

    def __post_init__(self, start: int) -> None:
        object.__setattr__(self, "count", self.count + start)


@dataclass(frozen=True)
class OwnInit(Bare):
    count: int = 1

    def __init__(self, amount: int) -> None:
        object.__setattr__(self, "count", amount)


class Fewer(Uniform):
    """Derives from one of ours, and takes something else."""

    def __init__(self, n: int) -> None:
        super().__init__(count=n)


class Kept(Bare):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.options = options


LOOSE: dict[str, Any] = {"__init__": lambda self, count=1, **options: None}
Unannotated: Any = type("Unannotated", (Bare,), LOOSE)


class ByPlace(Bare):
    def __init__(self, name: str, /, count: int = 1) -> None:
        self.count = count


@dataclass(frozen=True)
class Explained(Bare):
    count: "how many of them" = 1  # type: ignore[valid-type]  # noqa: F722
    kind: "np.nosuch" = 1  # type: ignore[name-defined]
    many: "int[3]" = 1  # type: ignore[type-arg, valid-type]
    real: float = 1.0


@dataclass(frozen=True)
class NamedCls(Bare):
    cls: int = 1


@dataclass(frozen=True)
class Several(Bare):
    ids: Sequence[int] = ()
    names: Sequence[str] = ()


LEGITIMATE: dict[str, Call] = {
    "an InitVar": lambda: WithInitVar(count=2, start=3),
    "an InitVar replaced": lambda: replace(WithInitVar(2, 3), start=1),
    "a dataclass with its own __init__": lambda: OwnInit(amount=3),
    "a subclass with its own __init__": lambda: Fewer(n=3),
    "any keyword": lambda: Kept(1, 2, a=1, b=2),
    "any keyword, not annotated": lambda: Unannotated(count="any", extra=3),
    "by place only": lambda: ByPlace("mine", 3),
    "annotations that are no types": lambda: Explained(count=3, kind=4, many=5),
    "a field named cls": lambda: NamedCls(cls=3),
    "a range": lambda: Several(range(3)),
    "a deque": lambda: Several(deque([1])),
    "an array": lambda: Several(wrong(np.arange(3))),
    "a text of letters": lambda: Several(names="abc"),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_a_users_part_may_be_made_in_any_way(name: str) -> None:
    made = LEGITIMATE[name]()
    assert type(copy.deepcopy(made)) is type(made)
    assert replace(fedavg(), select=made).select is made


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: WithInitVar(start=wrong("3")), r"WithInitVar\.start must be a whole number"),
        (lambda: WithInitVar(strat=3), r'no argument \'strat\', did you mean "start"\?'),  # type: ignore[call-arg]
        (lambda: OwnInit(wrong("3")), r"OwnInit\.amount must be a whole number"),
        (lambda: Fewer(count=3), r"Fewer\(\) has no argument 'count'"),  # type: ignore[call-arg]
        (lambda: ByPlace("mine", wrong("3")), r"ByPlace\.count must be a whole number"),
        (lambda: Explained(real=wrong("3")), r"Explained\.real must be a number"),
        (lambda: Several(wrong("abc")), r"Several\.ids must be a tuple in which each"),
        (lambda: Several(wrong(deque(["a"]))), r"Several\.ids must be a tuple in which each"),
        (lambda: Several(wrong({1, 2})), r"Several\.ids must be a tuple of whole numbers"),
    ],
)
def test_and_what_it_does_say_is_still_checked(call: Call, words: str) -> None:
    with pytest.raises(BadCall, match=words):
        call()


def test_numbers_in_a_wrapping_are_refused_with_what_to_write() -> None:
    for lr in (torch.tensor(0.1), np.array(0.1)):
        with pytest.raises(BadCall, match=r"lr must be a number, .*; use \.item\(\)\."):
            FEDAVG(lr=lr)
    with pytest.raises(BadCall, match=r"each is a number, .*; use \.item\(\)\."):
        WidthMenu(tuple(torch.tensor([1.0, 0.5])))
    with pytest.raises(BadCall, match=r"lr must be a number, .*; use float\("):
        FEDAVG(lr=Decimal("0.1"))
    with pytest.raises(BadCall, match=r"must be a whole number, got 10\.0; write 10\."):
        FEDAVG(count=10.0)
    with pytest.raises(BadCall, match=r"must be a tuple of numbers, .*; use tuple\(….tolist\(\)\)"):
        heterofl(widths=wrong(np.array([1.0, 0.5])))


DECLARED: dict[str, tuple[str, Any, str]] = {
    "a tuple of reports": (
        "reports",
        ("loss",),
        r"`reports` must be a frozenset of texts, got \('loss',\)",
    ),
    "a text": (
        "provides",
        "menu",
        r"`provides` .*; write for example provides = frozenset\(\{Menu\(5\)\}\)",
    ),
    "no texts": (
        "reports",
        frozenset({3}),
        r"`reports` must be a frozenset of texts, got frozenset",
    ),
    "a tuple of requires": (
        "requires",
        ("menu",),
        r"`requires` must be a frozenset of signals, got \('menu',\)",
    ),
    "a forgotten @property": (
        "reports",
        lambda self: frozenset(),
        r"put @property above `def reports`",
    ),
    "requires, forgotten": ("requires", lambda self: {}, r"put @property above `def requires`"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_what_a_part_says_of_itself_has_the_type_of_its_slot(name: str) -> None:
    attribute, value, words = DECLARED[name]
    part: Any = type("Mine", (Uniform,), {attribute: value})(3)
    with pytest.raises(CompositionError, match=rf"select=.*{words}"):
        replace(fedavg(), select=part)


@pytest.mark.parametrize("attribute", ["learns_from", "decides", "requires"])
def test_so_does_what_a_choice_says_of_itself(attribute: str) -> None:
    part: Any = type("Mine", (First,), {attribute: ("loss",)})()
    with pytest.raises(CompositionError, match=rf"choose=.*: `{attribute}` must be"):
        replace(fedavg(), choose=part)


def test_a_set_is_as_good_and_an_inner_part_is_looked_at_too() -> None:
    part: Any = type("Mine", (Uniform,), {"reports": {"loss"}})(3)
    assert replace(fedavg(), select=part).reported == {"loss"}
    inner: Any = type("Mine", (WidthMenu,), {"provides": ("menu",)})()
    with pytest.raises(CompositionError, match=r"plan=.*: `provides` must be a frozenset"):
        replace(fedavg(), plan=TargetSeconds(inner))


@pytest.mark.parametrize("cache", ["no", 1, None])
def test_whether_devices_keep_their_model_is_true_or_false(cache: Any) -> None:
    with pytest.raises(CompositionError, match=r"cache must be True or False, got"):
        replace(fedavg(), cache=cache)


class Stand:
    """Passes everything on to what it stands for."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def test_a_task_may_be_a_stand_in_for_one() -> None:
    assert EXPERIMENT(Stand(small.task()), fedavg()).rounds == 20
    with pytest.raises(BadCall, match=r"Experiment\.task must be a TaskSpec, got a Stand"):
        EXPERIMENT(Stand(3), fedavg())


def test_a_part_that_lacks_its_method_cannot_be_made() -> None:
    @dataclass(frozen=True)
    class Idle(Select):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Idle()  # type: ignore[abstract]
