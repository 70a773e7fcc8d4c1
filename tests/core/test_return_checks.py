"""What a user's part returns is checked where it returns: part, round, what came, what was due."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.arrays import Ints
from anyfleet.core.check_in import CheckIns
from anyfleet.core.layout import MessageLayout
from anyfleet.core.messages import Aggregated, Hyperparameters, Kind, Params, SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Select, State, TrainingContext, TrainingResult
from anyfleet.core.updates import Updates
from anyfleet.core.view import Ids, OrderStatuses, Request, View
from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import BadReturn
from anyfleet.methods import fedavg
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.choose import First
from anyfleet.parts.codec import Raw
from anyfleet.parts.extract import Leading
from anyfleet.parts.norm import BatchStatistics
from anyfleet.parts.plan import WholeModel, WidthMenu
from anyfleet.parts.schedule import HoldAndFetch, Synchronous
from anyfleet.parts.select import Uniform
from anyfleet.parts.train import Gradient
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Data, Split, Task
from anyfleet.tracebacks import note
from tests.helpers import small

Change = Callable[[Any], Any]
BASE = fedavg(count=2, lr=0.1)


@lru_cache(maxsize=1)
def task() -> Task:
    """Four devices, a model with two axes to cut."""
    generator = torch.Generator().manual_seed(1)
    data = Data(torch.randn(60, 4, generator=generator), torch.arange(60) % 3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    return Task.of(net, data, split=Split(devices=4, test_share=0.2, server=10))


# Each part does what its base does, and then what `change` makes of it, in the second round only:
# the first one must pass.


@dataclass(frozen=True)
class Selects(Select):
    change: Change

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        ids = Uniform(2)(view, state, key)
        return ids if view.round_index == 0 else self.change(ids)


@dataclass(frozen=True)
class Fetches(Uniform):
    count: int | None = 2
    change: Change = field(default=tuple)

    def fetch(self, held: OrderStatuses, view: View) -> Ids:
        return held.order if view.round_index == 0 else self.change(held.order)


@dataclass(frozen=True)
class Schedules(Synchronous):
    """Changes the answer of one of its methods."""

    name: str = ""
    change: Change = field(default=tuple)

    def start(self, view: View) -> Any:
        return self._changed("start", super().start(view), view)

    def ready(self, view: View) -> Any:
        return self._changed("ready", super().ready(view), view)

    def alarm(self, view: View) -> Any:
        return self._changed("alarm", super().alarm(view), view)

    def enough(self, view: View) -> Any:
        return self._changed("enough", super().enough(view), view)

    def drop(self, view: View) -> Any:
        return self._changed("drop", super().drop(view), view)

    def later(self, view: View) -> Any:
        return self._changed("later", super().later(view), view)

    def _changed(self, name: str, found: Any, view: View) -> Any:
        return self.change(found) if name == self.name and view.round_index else found


@dataclass(frozen=True)
class Planning(WholeModel):
    change: Change = field(default=tuple)

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        return self.change(plans) if view.round_index else plans


@dataclass(frozen=True)
class Chooses(First):
    change: Change = field(default=tuple)

    def __call__(self, check_ins: CheckIns) -> Any:
        return self.change(super().__call__(check_ins))


@dataclass(frozen=True)
class Extracts(Leading):
    change: Change = field(default=tuple)

    def __call__(
        self, size: SubModelSize, view: View, state: State, key: Tensor, device: int | None
    ) -> Slice:
        found = super().__call__(size, view, state, key, device)
        return self.change(found) if view.round_index else found

    def for_evaluation(self, size: SubModelSize, view: View, state: State, key: Tensor) -> Slice:
        return size.prefix(view.blueprint)


@dataclass(frozen=True)
class Trains(Gradient):
    """Training itself does not know the round."""

    drafts: Change | None = None
    ends: Change | None = None

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        found = super().hyperparameters(round_index, samples)
        return self.drafts(found) if self.drafts and round_index else found

    def finish(self, context: TrainingContext, state: Any) -> TrainingResult:
        found = super().finish(context, state)
        return self.ends(found) if self.ends else found


@dataclass(frozen=True)
class Squeezes(Raw):
    change: Change = field(default=tuple)

    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
    ) -> Any:
        return self.change(super().compress(rows, sent_fraction, layout, state))


@dataclass(frozen=True)
class Keeps(BatchStatistics):
    names: Any = frozenset()

    def stays(self, blueprint: Blueprint) -> Any:
        return self.names


@dataclass(frozen=True)
class Aggregates(Mean):
    change: Change = field(default=tuple)
    telling: Any = field(default_factory=dict)

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        found = super().__call__(model, updates, view, state, key)
        return self.change(found) if view.round_index else found

    def diagnostics(self, state: State) -> Any:
        return self.telling


def numbers(**arrays: Any) -> Change:
    return lambda plans: replace(plans, hyperparameters=replace(plans.hyperparameters, **arrays))


def sizes(size: Any) -> Change:
    return lambda plans: plans.with_sizes((size,) * len(plans))


def model(change: Change) -> Change:
    """A new model with one tensor changed."""
    return lambda stepped: replace(
        stepped, model={**stepped.model, "0.weight": change(stepped.model["0.weight"])}
    )


def ends(**trees: Change) -> Gradient:
    return Trains(
        ends=lambda result: result._replace(
            **{name: change(getattr(result, name)) for name, change in trees.items()}
        )
    )


def selects(change: Change) -> Method:
    return replace(BASE, select=Selects(change))


def schedules(name: str, change: Change) -> Method:
    return replace(BASE, schedule=Schedules(name=name, change=change))


def plans(change: Change) -> Method:
    return replace(BASE, plan=Planning(change=change))


def chooses(change: Change) -> Method:
    return replace(BASE, plan=WidthMenu((1.0, 0.5)), choose=Chooses(change=change))


def extracts(change: Change) -> Method:
    return replace(BASE, extract=Extracts(change=change))


def sends(change: Change) -> Method:
    return replace(BASE, uplink=Squeezes(change=change))


def aggregates(change: Change) -> Method:
    return replace(BASE, aggregate=Aggregates(change=change))


SIZE = SubModelSize()
WRONG: dict[str, tuple[Method, str]] = {
    "ids in a text": (selects(lambda ids: "01"), r"returned the str '01' for an array in round 2"),
    "ids in a set": (selects(set), r"returned the set \{.*\} for an array in round 2; due"),
    "ids in a tensor": (selects(torch.from_numpy), r"a tensor of torch\.int64 .* for an array"),
    "half ids in a list": (selects(lambda ids: [0.5]), r"returned the list \[0\.5\] in round 2"),
    "flags in a list": (selects(lambda ids: [True]), r"returned the list \[True\] in round 2"),
    "lists in a list": (selects(lambda ids: [[0]]), r"returned the list \[\[0\]\] in round 2"),
    "an id beyond all": (selects(lambda ids: [10**30]), r"returned the list \[10+\] in round 2"),
    "ids twice in a list": (selects(lambda ids: [0, 0]), r"devices twice \(0\)"),
    "ids out of range": (selects(lambda ids: ids + 4), r"do not exist .*; due is .*from 0 to 3"),
    "negative ids": (selects(lambda ids: -1 - ids), r"do not exist"),
    "ids twice": (selects(lambda ids: np.repeat(ids, 2)), r"devices twice"),
    "ids that are floats": (selects(lambda ids: ids + 0.5), r"an array of float64"),
    "ids that are flags": (
        selects(lambda ids: np.ones(4, dtype=bool)),
        r"True and False.*numpy\.flatnonzero",
    ),
    "ids in rows": (selects(lambda ids: ids[None]), r"shape \[1, 2\]"),
    "no ids": (selects(lambda ids: None), r"returned None for an array"),
    "held orders of others": (
        replace(BASE, schedule=HoldAndFetch(), select=Fetches(change=lambda held: held + 9)),
        r"select=.*orders that are not held \(",
    ),
    "held orders twice": (
        replace(BASE, schedule=HoldAndFetch(), select=Fetches(change=lambda held: [*held, *held])),
        r"select=.*orders twice \(",
    ),
    "held orders by a flag": (
        replace(BASE, schedule=HoldAndFetch(), select=Fetches(change=lambda held: held > 0)),
        r"select=.*True and False",
    ),
    "a request alone": (schedules("start", lambda _: Request()), r"schedule=.*a Request alone"),
    "no requests": (schedules("start", lambda _: None), r"schedule=.*returned None"),
    "a request for nothing": (
        schedules("start", lambda _: (Request(count=-1),)),
        r"a Request with count=-1",
    ),
    "a strange kind": (
        schedules("start", lambda _: (Request(kind=any),)),  # type: ignore[arg-type]
        r"a Request of kind",
    ),
    "a strange order": (
        schedules("start", lambda _: (Request(Kind.FETCH, held_orders=(99,)),)),
        r"orders \[99\] .*due is orders whose results are held",
    ),
    "devices by a schedule": (
        schedules("start", lambda _: (Request(devices=(7,)),)),
        r"schedule=.*do not exist \(7\)",
    ),
    "devices in a text": (
        schedules("start", lambda _: (Request(devices="01"),)),  # type: ignore[arg-type]
        r"schedule=.*the str '01' for an array.*devices of a Request",
    ),
    "devices that are halves": (
        schedules("start", lambda _: (Request(devices=np.array([0.5])),)),
        r"schedule=.*an array of float64.*devices of a Request",
    ),
    "busy devices": (
        schedules("start", lambda _: (Request(devices=(0,)), Request(devices=(0,)))),
        r"schedule=.*not idle \(0\)",
    ),
    "neither yes nor no": (schedules("ready", lambda _: None), r"True or False from `ready`"),
    "no time": (
        schedules("alarm", lambda _: float("nan")),
        r"a time in seconds, or None, from `alarm`",
    ),
    "not enough": (schedules("enough", lambda _: 0), r"at least 1 from `enough`"),
    "an order to drop": (schedules("drop", lambda _: (99,)), r"not under way \(99\)"),
    "orders to drop by flags": (
        schedules("drop", lambda _: np.array([True])),
        r"True and False.*numpy\.flatnonzero",
    ),
    "orders to drop in a set": (schedules("drop", lambda _: {1}), r"the set \{1\} for an array"),
    "an order for later": (schedules("later", lambda _: (99,)), r"not replied to \(99\)"),
    "an order for later twice": (schedules("later", lambda _: [3, 3]), r"orders twice \(3\)"),
    "no plans": (plans(lambda _: None), r"plan=.*returned None.*Plans"),
    "plans for others": (
        plans(lambda drafts: replace(drafts, device=drafts.device[::-1])),
        r"plans for the devices",
    ),
    "too few sizes": (
        plans(lambda plans: plans.with_sizes([SIZE])),
        r"\[0\]\) for size_index.*an array of 2 whole numbers",
    ),
    "a size that is not listed": (
        plans(lambda plans: plans.with_sizes([SIZE], np.array([0, 3]))),
        r"3 for size_index.*whole numbers from 0 to 0",
    ),
    "a menu that is not listed": (
        plans(lambda plans: plans.with_menus([[SIZE]], np.array([-1, 1]))),
        r"1 for menu_index.*whole numbers from -1 to 0",
    ),
    "sizes in a list": (
        plans(lambda plans: replace(plans, sub_model_sizes=[SIZE])),
        r"the list \[.* for sub_model_sizes",
    ),
    "too few reasons": (
        plans(lambda plans: replace(plans, declined=("",))),
        r"a tuple of 1 for declined.*a tuple of 2",
    ),
    "a rate in a list": (plans(numbers(lr=[0.1, 0.1])), r"the list \[.*\] for hyperparameters\.lr"),
    "a rate that is none": (
        plans(numbers(lr=np.array([0.1, np.nan]))),
        r"nan for hyperparameters\.lr",
    ),
    "no epochs": (
        plans(numbers(epochs=np.zeros(2, dtype=np.int64))),
        r"0, 0 for hyperparameters\.epochs",
    ),
    "half a batch": (
        plans(numbers(batch_size=np.array([1.5, 2]))),
        r"float64.*for hyperparameters\.batch_size",
    ),
    "too many rates": (
        plans(numbers(sent_fraction=np.ones(3))),
        r"shape \[3\] for hyperparameters\.sent_fraction",
    ),
    "wider than the model": (plans(sizes(replace(SIZE, width=1.5))), r"the width 1\.5"),
    "nothing of the model": (plans(sizes(replace(SIZE, width=0.0))), r"the width 0\.0"),
    "a layer that is not there": (
        plans(sizes(replace(SIZE, first_trained_layer=9))),
        r"first .* is 9",
    ),
    "a width for a size": (plans(sizes(0.5)), r"SubModelSize"),
    "a menu of widths": (
        plans(lambda plans: plans.with_menu([0.5])),
        r"SubModelSize",
    ),
    "declined by True": (
        plans(lambda drafts: replace(drafts, declined=(True,) * len(drafts))),
        r"declined without a text",
    ),
    "no choice": (chooses(lambda _: 0), r"choose=.*returned the int 0.*; .*Choices"),
    "no entry of the menu": (
        chooses(lambda choice: replace(choice, entry=choice.entry + 2)),
        r"entry 2 of a menu of 2",
    ),
    "an entry in a list": (chooses(lambda choice: replace(choice, entry=[0])), r"for entry"),
    "no slice": (extracts(lambda _: {}), r"extract=.*returned the dict {}.*Slice"),
    "another model's axis": (
        extracts(lambda _: Slice((("other", (0, 1)),))),
        r"a slice of another model \(.*other",
    ),
    "indices out of range": (
        extracts(lambda _: Slice(((axis(), (0, 9)),))),
        r"a slice of another model \(.*0 to 9",
    ),
    "no numbers": (replace(BASE, train=Trains(drafts=lambda _: None)), r"train=.*Hyperparameters"),
    "a batch of nothing": (
        replace(BASE, train=Trains(drafts=lambda n: replace(n, batch_size=0 * n.batch_size))),
        r"train=.*0, 0 for hyperparameters\.batch_size",
    ),
    "no result": (replace(BASE, train=Trains(ends=lambda _: None)), r"train=.*Result"),
    "a parameter is gone": (
        replace(BASE, train=ends(params=lambda tree: {})),
        r"train=.*params without 0\.weight",
    ),
    "a parameter too many": (
        replace(BASE, train=ends(params=lambda tree: {**tree, "extra": tree["0.bias"]})),
        r"params with extra",
    ),
    "another shape": (
        replace(BASE, train=ends(params=lambda tree: {n: v[..., :1] for n, v in tree.items()})),
        r"shape \[5, 1\].*for '0\.weight' of params .*due is a tensor .*shape \[5, 4\]",
    ),
    "a strange mask": (
        replace(BASE, train=ends(mask=lambda tree: {"other": torch.ones(1)})),
        r"a mask 'other'",
    ),
    "nothing squeezed": (sends(lambda _: None), r"uplink=.*Compressed"),
    "squeezed out of shape": (
        sends(lambda s: replace(s, received={n: v[0] for n, v in s.received.items()})),
        r"uplink=.*of received .*due is a tensor",
    ),
    "bits without number": (
        sends(lambda s: replace(s, bits=s.bits * float("nan"))),
        r"bits that are negative or not finite",
    ),
    "bits in one row": (sends(lambda s: replace(s, bits=s.bits[0])), r"for bits"),
    "names that stay": (
        replace(BASE, norm=Keeps(frozenset({"head"}))),
        r"norm=.*'head' from `stays`",
    ),
    "a list that stays": (replace(BASE, norm=Keeps(["0.bias"])), r"a frozenset of names"),
    "a model alone": (aggregates(lambda s: s.model), r"aggregate=.*returned the dict .*Aggregated"),
    "a model that shrinks": (
        aggregates(lambda s: replace(s, model={"0.weight": s.model["0.weight"]})),
        r"the new model without 0\.bias",
    ),
    "a model that grows": (
        aggregates(lambda s: replace(s, model={**s.model, "extra": torch.ones(1)})),
        r"the new model with extra",
    ),
    "a model of arrays": (aggregates(model(lambda value: value.numpy())), r"the ndarray"),
    "a model out of shape": (aggregates(model(lambda value: value.T)), r"shape \[4, 5\]"),
    "a model in double": (aggregates(model(lambda value: value.double())), r"torch\.float64"),
    "diagnostics in a list": (
        aggregates(lambda s: replace(s, diagnostics=[1])),
        r"for diagnostics",
    ),
    "diagnostics of a state in a list": (
        replace(BASE, aggregate=Aggregates(change=lambda s: s, telling=[1])),
        r"from `diagnostics`",
    ),
}


def axis() -> str:
    return next(iter(task().blueprint.counts(1.0)))


@pytest.mark.parametrize("name", WRONG)
def test_what_a_part_returns_is_checked_where_it_returns(name: str) -> None:
    method, words = WRONG[name]
    with pytest.raises(BadReturn, match=words) as caught:
        small.steps(method, task(), 2)
    whole = f"{caught.value} {note(caught.value)}"
    assert re.search(r"; due is .*", whole)
    assert re.search(r" in round [12][;.]", whole)


@pytest.mark.parametrize("engine", [Sequential(), Stacked(), Threads(allow=("tests",))], ids=str)
def test_it_is_checked_whoever_carries_orders_out(engine: Engine) -> None:
    for name in ("a parameter is gone", "bits without number"):
        method = replace(WRONG[name][0], schedule=Synchronous())
        if isinstance(engine, Threads):
            method = replace(BASE, train=Loses()) if "gone" in name else method
            if "bits" in name:
                continue  # a change is no part of a message
        with pytest.raises(BadReturn, match=WRONG[name][1]):
            small.steps(method, task(), 1, engine=engine)


@dataclass(frozen=True)
class Loses(Gradient):
    """A trainer that can travel in an order."""

    def finish(self, context: TrainingContext, state: Any) -> TrainingResult:
        return super().finish(context, state)._replace(params={})


@pytest.mark.parametrize("form", [np.int32, np.int64, np.uint8, list, tuple])
def test_whole_numbers_of_any_width_are_ids_also_in_a_sequence(form: Any) -> None:
    change = form if form in (list, tuple) else lambda ids: ids.astype(form)
    steps = small.steps(selects(change), task(), 2)
    assert small.identical(
        steps[1].params, small.steps(selects(lambda ids: ids), task(), 2)[1].params
    )


def test_an_empty_cohort_is_a_cohort() -> None:
    steps = small.steps(selects(lambda ids: np.array([])), task(), 2)
    assert small.identical(steps[1].params, steps[0].params)


# --- the task's own functions -----------------------------------------------------------------


def averaged(output: Tensor, target: Tensor) -> Tensor:
    """One value for each sample as long as there are two: what a quick test sees."""
    values = nn.functional.cross_entropy(output, target, reduction="none")
    return values if len(output) == 2 else values.mean()


def test_a_loss_with_a_mean_over_the_batch_is_found_in_training() -> None:
    changed = replace(task(), loss=averaged)
    words = r"loss=averaged returned a tensor of shape \[\].*reduction="
    with pytest.raises(BadReturn, match=words):
        small.steps(BASE, changed, 1)


def test_a_metric_without_a_value_for_each_sample_is_found() -> None:
    from anyfleet.experiment import Experiment, play

    changed = replace(task(), metrics={"mean": lambda output, target: output.mean()})
    with pytest.raises(BadReturn, match=r"metric mean=<lambda> returned a tensor of shape \[\]"):
        next(play(Experiment(changed, BASE, rounds=1)))


def test_an_augmentation_keeps_its_samples() -> None:
    changed = replace(task(), augment=lambda x, key: x[:1])
    with pytest.raises(BadReturn, match=r"augment=<lambda> returned a tensor of shape \[1, 4\]"):
        small.steps(BASE, changed, 1)
