"""Stacks and workers: who is trained together, and that nobody's result depends on it."""

import itertools
import warnings
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.core.loop import run
from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.core.slots import Codec
from anyfleet.core.time_and_energy import Amount, training
from anyfleet.elastic import WHOLE
from anyfleet.methods import fedavg, fedrescue, heterofl
from anyfleet.parts import codec
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Nothing, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.schedule import Buffered, HoldAndFetch
from anyfleet.parts.select import Everyone, Largest
from anyfleet.runtime import Sequential, Simulated, Stacked, Threads, Workers
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.runtime.simulated.stacking import buckets, shapes, side_by_side, stacks
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.partition import LogNormalSizes
from anyfleet.world import levels
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.changed import with_slices
from tests.methods.test_combinations import AGGREGATORS, TRAINERS

CODECS: dict[str, Codec] = {
    "raw": Raw(),
    "qsgd": Qsgd(4),
    "stc": Stc(0.2),
    "top": TopK(0.3, Qsgd(4)),
    "fgc": Fgc(),
    "hq": Hq(),
    "uveq": Uveq(),
    "feedback": ErrorFeedback(Stc(0.2)),
}
FLEET = levels(speeds=(1e9, 1e8))
# Each trainer with each codec; along the way each codec meets each aggregator. Each trainer with
# each aggregator is in `test_combinations`.
TRIPLES = [
    (trainer, name, list(AGGREGATORS)[(i + j) % len(AGGREGATORS)])
    for i, trainer in enumerate(TRAINERS)
    for j, name in enumerate(CODECS)
]


@lru_cache(maxsize=1)
def task() -> Task:
    """A small net in double precision, and devices with unequal data."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(
            # A bias would be normalised away: codecs would quantise the noise of its gradient.
            nn.Conv2d(1, 4, 3, stride=2, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(36, 10),
        )
    split = Split(devices=5, partition=LogNormalSizes(), test_share=0.0, server=10, seed=5)
    made = Task.of(net, small.patterns(50, 1), small.patterns(10, 2), split=split)
    return made.to(torch.float64)


def end(method: Method, engine: Engine, count: int = 1) -> Params:
    return small.steps(method, task(), count, engine=engine, fleet=FLEET)[-1].params


def test_the_triples_have_all_pairs_and_all_codecs() -> None:
    pairs = {(name, aggregator) for _, name, aggregator in TRIPLES}
    assert pairs == set(itertools.product(CODECS, AGGREGATORS))
    used = {type(each) for each in CODECS.values()}
    others = {codec.Plain, codec.Quantiser, Nothing}  # bases, and what changes no model
    assert used | others == {getattr(codec, name) for name in codec.__all__}


@pytest.mark.parametrize(("trainer", "name", "aggregator"), TRIPLES)
def test_a_round_of_stacks_is_that_of_single_devices(
    trainer: str, name: str, aggregator: str
) -> None:
    base = heterofl(widths=(1.0, 0.5), static_norm=False)
    method = replace(
        base,
        select=Everyone(),
        train=TRAINERS[trainer],
        uplink=CODECS[name],
        aggregate=AGGREGATORS[aggregator],
    )
    one, two = (end(method, engine) for engine in (Sequential(), Stacked()))
    assert small.distance(one, two) < 1e-10
    assert small.distance(one, task().params) > 1e-5


METHODS: dict[str, Method] = {
    "synchronous": fedavg(count=5, lr=0.1, batch_size=4),
    "remembering": replace(
        fedavg(count=4, lr=0.1, batch_size=4), uplink=ErrorFeedback(Stc(0.2)), cache=True
    ),
    "asynchronous": replace(heterofl(lr=0.1, widths=(1.0, 0.5)), schedule=Buffered(4, 2)),
    "held": replace(fedavg(lr=0.1), select=Largest(5, 2), schedule=HoldAndFetch()),
}


@pytest.mark.parametrize("name", METHODS)
def test_workers_equal_the_reference_bit_for_bit(name: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, two = (end(METHODS[name], engine, 3) for engine in (Sequential(), Workers(3)))
    finally:
        torch.set_num_threads(before)
    assert small.identical(one, two)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", [Stacked(), Stacked(2, workers=2), Workers(2)], ids=str)
def test_a_run_that_was_saved_goes_on_bit_for_bit(name: str, engine: Engine) -> None:
    world = small.world(task(), FLEET)
    whole = Simulated(task(), world, engine=engine)
    played = run(METHODS[name], task(), whole, 0)
    half = list(itertools.islice(played, 2))[-1]
    saved = whole.save()
    expected = list(itertools.islice(played, 2))[-1].params
    again = Simulated(task(), world, engine=engine)
    again.restore(saved)
    resumed = run(METHODS[name], task(), again, 0, resume=half.snapshot)
    assert small.identical(expected, list(itertools.islice(resumed, 2))[-1].params)


def test_workers_side_by_side_make_the_same_stacks() -> None:
    ends = [end(METHODS["remembering"], Stacked(2, workers=count), 2) for count in (1, 2)]
    assert small.distance(*ends) < 1e-10


# --- who is trained together --------------------------------------------------------------------


def time_of(parts: list[list[int]], overhead: int = 8) -> int:
    return sum(max(part) * (len(part) + overhead) for part in parts)


@pytest.mark.parametrize("steps", [[5, 5, 5], [1, 40, 40, 2, 39], [*range(1, 13)], [3], [0, 0, 9]])
def test_buckets_cost_the_least_time(steps: list[int]) -> None:
    found = buckets(np.array(steps))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(steps)))
    ordered = sorted(steps, reverse=True)
    cuts = itertools.product([False, True], repeat=len(steps) - 1)
    best = min(
        time_of([list(p) for p in np.split(ordered, 1 + np.flatnonzero(np.array(c, dtype=bool)))])
        for c in cuts
    )
    assert time_of([[steps[row] for row in rows] for rows in found]) == best


def test_every_order_is_in_one_stack_of_its_shape() -> None:
    whole, half = WHOLE, task().blueprint.prefix(0.5)
    asked = orders(fedavg(lr=0.1), task(), [0, 1, 2, 3, 4])
    asked = with_slices(asked, whole, half, whole, half, whole)
    assert [rows.tolist() for rows in shapes(asked, task())] == [[0, 2, 4], [1, 3]]
    found = stacks(asked, task(), chunk=2)
    assert sorted(np.concatenate(found).tolist()) == [0, 1, 2, 3, 4]
    assert max(map(len, found)) == 2
    assert len(stacks(asked, task(), chunk=0, least=3)) >= 3


def test_a_stack_holds_what_is_predicted_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = orders(fedavg(lr=0.1, epochs=1, batch_size=64), task(), [0, 1, 2, 3, 4])
    assert len(stacks(asked, task())) == 1
    cost = training(asked.job.trainer, task().blueprint, WHOLE, Amount(64, 64, 1), "flops")
    one, room = float(cost.memory[0]), "anyfleet.runtime.simulated.stacking._MEMORY"
    for memory, longest in ((1.0, 1), (1.99 * one, 1), (2 * one, 2), (2.99 * one, 2), (5 * one, 5)):
        monkeypatch.setattr(room, memory)
        assert max(map(len, stacks(asked, task()))) == longest


@pytest.mark.parametrize(("fitting", "expected"), [(2, 1), (5, 1), (6, 2), (30, 10)])
def test_as_many_stacks_run_side_by_side_as_fit(
    monkeypatch: pytest.MonkeyPatch, fitting: int, expected: int
) -> None:
    asked = orders(fedavg(lr=0.1, epochs=1, batch_size=64), task(), [0, 1, 2, 3, 4])
    rows = [np.array([0, 4]), np.array([1, 2, 3])]
    stacking = "anyfleet.runtime.simulated.stacking"
    monkeypatch.setattr(f"{stacking}._fitting", lambda *_: fitting)
    assert side_by_side(asked, rows, task()) == expected


def test_cohorts_that_draw_together_are_stacked_by_width() -> None:
    method = fedrescue(lr=0.1, samples=2)
    asked = with_slices(orders(method, task(), [0, 1, 2, 3]), *[WHOLE] * 4)
    asked = replace(asked, width=np.array([1.0, 0.9, 1.0, 0.9]))
    assert [rows.tolist() for rows in shapes(asked, task())] == [[0, 2], [1, 3]]


def test_devices_that_cannot_be_stacked_are_said_so_once() -> None:
    class Compared(nn.Module):
        """Samples see each other."""

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(x.flatten(1) - x.flatten(1).mean(0, keepdim=True))
            return found

    data = Data(torch.randn(40, 1, 8, 8), torch.arange(40) % 10)
    made = Task.of(Compared(), data, split=Split(devices=4, seed=2)).to(torch.float64)
    method = fedavg(count=4, lr=0.1, batch_size=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        two = small.steps(method, made, 2, engine=Stacked())[-1].params
    (warning,) = (each for each in told if "Stacked" in str(each.message))
    assert "samples see each other" in str(warning.message)
    assert small.identical(two, small.steps(method, made, 2, engine=Sequential())[-1].params)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Workers(-1),
        lambda: Stacked(-1),
        lambda: Stacked(workers=0),
        lambda: Threads(workers=0),
    ],
)
def test_numbers_that_make_no_engine_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="at least 1"):
        make()
