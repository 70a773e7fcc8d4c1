"""Seconds and joules of computing: the worked numbers of specification §A.1 and §3."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Floats
from anyfleet.core.messages import EVERYTHING, Conditions, Hyperparameters
from anyfleet.core.time_and_energy import (
    Amount,
    Counts,
    Demand,
    Effort,
    TrainingAmounts,
    Worker,
    clocked,
    effort_of,
    training,
    trainings,
    transfer_joules,
    transfer_seconds,
)
from anyfleet.core.training_work import Counted, Work
from anyfleet.elastic import Priced, Slice, cost
from anyfleet.elastic.cost.operations import Counting
from anyfleet.methods import fedavg
from tests.helpers import small

FASTEST = np.array([math.nan])  # no frequency asked for

PLAIN = {
    "speed": 1e9,
    "bit_rate_up": 1e6,
    "bit_rate_down": 1e6,
    "memory": 1e9,
    "battery": math.inf,
    "budget": math.inf,
    "load": 1.0,
    "overhead": 0.0,
    "latency": 0.0,
    "bandwidth": math.inf,
    "fixed": 0.0,
    "exponent": math.nan,
    "loss": math.nan,
    "slowest": 1e8,
    "fastest": 3e9,
    "coefficient": 7.5e-27,
    "send_power": 0.1,
    "receive_power": 0.0,
}


def device(**changed: float) -> Conditions:
    return Conditions(**{name: np.array([value]) for name, value in {**PLAIN, **changed}.items()})


def work(flops: float, whole: float | None = None, **besides: float) -> Effort:
    given = {
        "width": 1.0,
        "all_layers": flops,
        "local_steps": 0,
        "calls": 0.0,
        "moved": 0.0,
        **besides,
    }
    return effort_of(
        Counts(flops, given["all_layers"], flops if whole is None else whole),
        given["width"],
        local_steps=int(given["local_steps"]),
        calls=given["calls"],
        moved=given["moved"],
    )


def seconds(effort: Effort, own: Conditions, frequency: Floats = FASTEST) -> float:
    (found,) = effort.seconds(own, frequency)
    return float(found)


def joules(effort: Effort, own: Conditions, frequency: Floats = FASTEST) -> float:
    (found,) = effort.joules(own, frequency)
    return float(found)


def test_a_device_with_a_speed_and_nothing_else_takes_flops_by_speed() -> None:
    assert seconds(work(3e9), device(speed=1.5e9)) == pytest.approx(2.0)


def test_section_3_cycles_by_frequency_and_energy_by_its_square() -> None:
    """alpha x cycles at 438.78 MHz: 9.3706 s and 5.9371 J."""
    cycles = 0.676157 * 833 * 7.3e6
    # A device that does one operation in a cycle: its speed is its frequency.
    own = device(speed=3e9, fastest=3e9)
    clock = np.array([438.78e6])
    assert seconds(work(cycles), own, clock) == pytest.approx(9.3706, rel=2e-5)
    assert joules(work(cycles), own, clock) == pytest.approx(5.9371, rel=4e-5)
    assert joules(work(cycles), own, clock) == pytest.approx(7.5e-27 * 438.78e6**2 * cycles)


def test_flops_per_cycle_divide_the_cycles() -> None:
    """The same operations on a device that does 171 of them in a cycle."""
    slow, fast = device(speed=3e9), device(speed=171 * 3e9)
    assert joules(work(1e9), slow) == pytest.approx(171 * joules(work(1e9), fast))
    assert seconds(work(1e9), slow) == pytest.approx(171 * seconds(work(1e9), fast))


@pytest.mark.parametrize("exponent", [1.0, 1.7])
@pytest.mark.parametrize("share", [0.5, 0.125])
def test_a_1_boards_have_a_fixed_part_and_shrink_with_a_power(
    exponent: float, share: float
) -> None:
    """`T_full (.05 + .95 share^e)`, whatever the FLOP of a slice of that width are."""
    own = device(fixed=0.05, exponent=exponent)
    full = seconds(work(4e9), own)
    assert full == pytest.approx(4.0)
    part = seconds(work(1.1e9, 4e9, width=share), own)
    assert part == pytest.approx(full * (0.05 + 0.95 * share**exponent))
    # Fewer trained layers save what they save in FLOP, of the part that shrinks.
    third = seconds(work(1.1e9 / 3, 4e9, width=share, all_layers=1.1e9), own)
    assert third == pytest.approx(full * (0.05 + 0.95 * share**exponent / 3))


def test_no_work_takes_no_time_not_even_the_fixed_part() -> None:
    own = device(fixed=0.05, exponent=1.7)
    assert seconds(work(0.0, 4e9), own) == seconds(work(0.0, 0.0), own) == 0.0
    assert joules(work(0.0, 4e9), own) == 0.0


def test_steps_calls_and_bytes_add_their_own_seconds() -> None:
    effort = work(1e9, local_steps=7, calls=300, moved=5e6)
    own = device(overhead=0.01, latency=2e-4, bandwidth=1e7)
    assert seconds(effort, own) == pytest.approx(1.0 + 7 * 0.01 + 300 * 2e-4 + 0.5)


def test_other_work_stretches_all_seconds_but_pays_for_its_own_cycles() -> None:
    effort = work(1e9, local_steps=7, calls=300, moved=5e6)
    alone = device(overhead=0.01, latency=2e-4, bandwidth=1e7)
    # What a loaded device reports as its speed is what is left of it.
    loaded = replace(alone, load=np.array([2.5]), speed=alone.speed / 2.5)
    assert seconds(effort, loaded) == pytest.approx(2.5 * seconds(effort, alone))
    assert joules(effort, loaded) == pytest.approx(joules(effort, alone))


def test_frequencies_are_kept_within_the_range() -> None:
    own = device(slowest=1e8, fastest=2e9)
    asked = np.array([5e7, 1e8, 7e8, 2e9, 9e9, math.nan])
    many = Conditions(**{n: np.repeat(getattr(own, n), 6) for n in PLAIN})
    assert clocked(many, asked).tolist() == [1e8, 1e8, 7e8, 2e9, 2e9, 2e9]
    assert seconds(work(1e9), own, np.array([9e9])) == seconds(work(1e9), own)
    assert seconds(work(1e9), own, np.array([5e7])) == pytest.approx(20 * seconds(work(1e9), own))


@given(st.floats(1e8, 3e9), st.floats(1e6, 1e12), st.floats(0, 1), st.floats(1, 5))
def test_slower_takes_longer_and_costs_less(
    frequency: float, flops: float, share: float, load: float
) -> None:
    own = device(load=load, fixed=0.05, overhead=1e-3)
    effort, clock = work(share * flops, flops, local_steps=3), np.array([frequency])
    slowdown = 3e9 / frequency
    assert seconds(effort, own, clock) == pytest.approx(seconds(effort, own) * slowdown)
    assert joules(effort, own, clock) == pytest.approx(joules(effort, own) / slowdown**2)
    # Energy is power times time: eps f³, for as long as the device itself calculates.
    power = 7.5e-27 * frequency**3
    assert joules(effort, own, clock) == pytest.approx(power * seconds(effort, own, clock) / load)


def test_training_counts_samples_and_steps() -> None:
    blueprint, train = small.task().blueprint, fedavg(batch_size=8).train
    for slice_ in (Slice(), blueprint.prefix(0.5)):
        found = training(train, blueprint, slice_, Amount(8, 37, 5), "flops")
        assert found.effort.flops[0] == 37 * cost(blueprint, slice_).flops
        assert found.effort.whole[0] == 37 * cost(blueprint, Slice()).flops
        assert found.effort.local_steps[0] == 5
        assert found.effort.calls[0] >= 5 * cost(blueprint, slice_, 8).calls
        assert found.memory[0] >= cost(blueprint, slice_, 8).memory


def test_work_done_one_after_the_other_adds_up_but_its_memory_does_not() -> None:
    first = Demand(work(1e9, 4e9, width=0.5, local_steps=3, calls=20, moved=5e6), np.array([700.0]))
    after = Demand(work(2e9, 4e9, width=0.5, local_steps=1, calls=30, moved=1e6), np.array([400.0]))
    for one, other in ((first, after), (after, first)):
        both = one.then(other)
        assert both.memory.tolist() == [700.0]
        assert both.effort.width.tolist() == [0.5]
        found = {
            name: getattr(both.effort, name).tolist() for name in ("flops", "all_layers", "whole")
        }
        assert found == {"flops": [3e9], "all_layers": [3e9], "whole": [8e9]}
        assert both.effort.local_steps.tolist() == [4]
        assert both.effort.calls.tolist() == [50]
        assert both.effort.moved.tolist() == [6e6]


def test_a_link_that_carries_nothing_takes_for_ever() -> None:
    assert transfer_seconds(8e6, np.array([2e6, 0.0])).tolist() == [4.0, math.inf]
    assert transfer_seconds(0.0, np.array([2e6, 0.0])).tolist() == [0.0, 0.0]


def test_a_transfer_that_nobody_lives_to_see_counts_as_one_without_a_link() -> None:
    """Otherwise planners and simulator could add up seconds and joules beyond all numbers."""
    rates = np.array([1e-3, 1e-300, 1e-300])
    assert transfer_seconds(np.array([1e6, 1e6, 0.0]), rates).tolist() == [1e9, math.inf, 0.0]


def test_a_radio_draws_power_only_while_bits_cross() -> None:
    seconds = np.array([4.0, 4.0, 0.0, math.inf, math.inf])
    watts = np.array([0.5, 0.0, 0.5, 0.5, 0.0])
    assert transfer_joules(seconds, watts).tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]


@dataclass(frozen=True)
class OneByOne:
    """A trainer of a user's own, who thought of one order only; it goes over its samples twice."""

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        flops = 2 * priced.sample.flops * max(1, int(processed))
        return Work(float(flops), float(priced.batch.memory), 3.0 * int(local_steps), 5.0)


@pytest.mark.parametrize("counting", ["flops", "per_batch"])
@pytest.mark.parametrize("train", [fedavg(batch_size=8).train, OneByOne()], ids=["ours", "own"])
def test_many_orders_take_what_each_of_them_takes(train: Worker, counting: Counting) -> None:
    """The very same bits, whoever is computed with whom."""
    blueprint = small.task().blueprint
    slices = tuple(blueprint.prefix(width) for width in (1.0, 0.5, 0.25))
    drawn = np.random.default_rng(1)
    index, batch = drawn.integers(3, size=40), drawn.choice([4, 8], 40)
    given = Hyperparameters.alike(40, lr=0.1, epochs=2, batch_size=8).changed(
        batch_size=batch, local_steps=drawn.choice([EVERYTHING, 3], 40)
    )
    widths = drawn.choice([math.nan, 0.3], 40)
    amounts = TrainingAmounts.of(given, drawn.integers(0, 50, size=40), widths)
    found = trainings(train, blueprint, slices, index, amounts, counting)
    for row in range(40):
        width = None if math.isnan(widths[row]) else float(widths[row])
        whole = int(amounts.processed[row]), int(amounts.local_steps[row])
        amount = Amount(int(batch[row]), *whole, width)
        alone = training(train, blueprint, slices[index[row]], amount, counting)
        one = found.take([row])
        assert one.memory == alone.memory
        for name in ("flops", "all_layers", "whole", "width", "local_steps", "calls", "moved"):
            assert getattr(one.effort, name) == getattr(alone.effort, name)
