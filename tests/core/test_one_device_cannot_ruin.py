"""Runs in which some devices send what would ruin the model: it stays finite, and goes on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.core.device_states import DeviceStates
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.method import Method
from anyfleet.core.screening import (
    EARLY,
    REMEMBERED,
    UpdateSizes,
    Verdict,
    most_at_first,
    not_finite,
    sound,
    unsound,
)
from anyfleet.core.slots import Aggregate
from anyfleet.core.stacks import Replies
from anyfleet.core.view import View
from anyfleet.experiment import Experiment, play
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.aggregate import (
    Aio,
    AngleWeighted,
    Clipped,
    CoordinateMedian,
    Diagnosed,
    ErrorWeighted,
    Mean,
    ServerAdam,
    ServerOptimised,
    ServerSgd,
    Subset,
    TrimmedMean,
)
from anyfleet.parts.codec import ErrorFeedback, TopK
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import WholeModel
from anyfleet.parts.schedule import Buffered, Deadline, HoldAndFetch
from anyfleet.parts.select import Everyone, Largest, Uniform
from anyfleet.runtime import Limits, Simulated
from anyfleet.runtime.simulated.engines import Assignment, Executed
from anyfleet.tasks import Embedded
from anyfleet.world import Fleet, Group, Steady
from tests.helpers import small
from tests.helpers.changed import with_contents
from tests.helpers.engines import Changed, spoilt

BAD = 1  # this device
HUGE = 3.4e38
OFF = Limits(growth=math.inf)
METHOD = replace(fedavg(lr=0.1, batch_size=8), select=Everyone())
AGGREGATES: list[Aggregate] = [
    Mean(),
    Mean("equal", discount=0.5),
    Aio(),
    ErrorWeighted(),
    AngleWeighted(),
    Subset(),
    Diagnosed(),
    Clipped(),
    TrimmedMean(),
    CoordinateMedian(),
    ServerOptimised(optimiser=ServerSgd(1.0, 0.9)),
    ServerOptimised(optimiser=ServerAdam()),
]
Spoil = Callable[[Replies], Replies | None]


@dataclass(frozen=True)
class Spoiling(Changed):
    """What some devices send is another thing; None: it never comes."""

    spoil: Spoil = field(kw_only=True)
    devices: tuple[int, ...] = (BAD,)

    def done(self, given: Assignment, memories: DeviceStates, executed: Executed) -> Executed:
        return spoilt(executed, lambda r: self.spoil(r) if int(r.device[0]) in self.devices else r)


def filled(value: float, *trees: str) -> Callable[[Replies], Replies]:
    """All numbers of these trees are this one."""

    def spoil(update: Replies) -> Replies:
        found = {
            tree: {n: torch.full_like(v, value) for n, v in values.items()}
            if tree in (trees or ("delta", "weights"))
            else values
            for tree, values in update.trees_of(0).items()
        }
        return with_contents(update, trees=found)

    return spoil


def gone(_: Replies) -> None:
    return None


def steps(
    method: Method, spoil: Spoil, count: int = 2, *, limits: Limits | None = None, **given: Any
) -> list[Round]:
    task = small.task(devices=5)
    return small.steps(method, task, count, engine=Spoiling(spoil=spoil, **given), limits=limits)


def rows(played: Sequence[Round]) -> list[SimpleNamespace]:
    return [row for step in played for row in small.rows(step)]


def same_but_for_reasons(one: Sequence[Round], two: Sequence[Round]) -> None:
    assert small.identical(one[-1].params, two[-1].params)
    assert small.identical(one[-1].buffers, two[-1].buffers)
    for mine, theirs in zip(rows(one), rows(two), strict=True):
        assert bool(mine.failure) == bool(theirs.failure)
        assert repr({**vars(mine), "failure": ""}) == repr({**vars(theirs), "failure": ""})


def finite(tree: Params) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in tree.values())


# --- updates that are far too large -------------------------------------------------------------


@pytest.mark.parametrize("part", AGGREGATES, ids=repr)
def test_one_huge_update_counts_for_nothing_from_the_first_round_on(part: Aggregate) -> None:
    method = replace(METHOD, aggregate=part)
    played = steps(method, filled(HUGE))
    told = [row.failure for row in rows(played) if row.device == BAD]
    assert len(told) == 2
    assert all(why.startswith("refused: size: a change of 3.4e+38 a coordinate") for why in told)
    same_but_for_reasons(played, steps(method, gone))


@pytest.mark.parametrize("value", [HUGE, -HUGE, 1e3])
def test_weights_are_judged_by_how_they_change_the_model(value: float) -> None:
    method = replace(METHOD, send="weights")
    played = steps(method, filled(value))
    assert all(
        row.failure.startswith("refused: size") == (row.device == BAD) for row in rows(played)
    )
    same_but_for_reasons(played, steps(method, gone))


def test_large_weights_that_hardly_change_are_no_large_change() -> None:
    """A model with one parameter of a million is nobody's fault."""
    task = small.task(devices=5)
    name = "10.bias"
    large = replace(task, params={**task.params, name: task.params[name] + 1e6})
    played = small.steps(replace(METHOD, send="weights"), large, 2)
    assert not any(row.failure for row in rows(played))


def test_unequal_slices_compare() -> None:
    method = replace(heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=8), select=Everyone())
    assert not any(row.failure for row in rows(steps(method, lambda update: update)))
    played = steps(method, filled(HUGE))
    assert {row.device for row in rows(played) if row.failure} == {BAD}


def test_statistics_have_a_limit_too() -> None:
    method = replace(METHOD, norm=Tracked())
    played = steps(method, filled(HUGE, "buffers"))
    told = {row.failure for row in rows(played) if row.device == BAD}
    assert all(
        why.startswith("refused: size: a change of the statistics of 3.4e+38") for why in told
    )
    same_but_for_reasons(played, steps(method, gone))
    assert finite(played[-1].buffers)


def test_the_limit_can_be_turned_off_or_set() -> None:
    def times(factor: float) -> Spoil:
        def spoil(update: Replies) -> Replies:
            trees = {"delta": {n: factor * v for n, v in update.trees_of(0)["delta"].items()}}
            return with_contents(update, trees=trees)

        return spoil

    assert not any(row.failure for row in rows(steps(METHOD, times(1e4), 1, limits=OFF)))
    assert not any(row.failure for row in rows(steps(METHOD, times(20.0), 1)))
    few = rows(steps(METHOD, times(20.0), 1, limits=Limits(growth=5.0)))
    assert [row.device for row in few if row.failure] == [BAD]
    assert "above 5 × the median" in few[BAD].failure
    with pytest.raises(ValueError, match=r"Limits\.growth must be at least 1"):
        Limits(growth=0.5)


@pytest.mark.parametrize(
    "schedule",
    [
        Buffered(concurrency=5, buffer_size=3),
        Deadline(0.6, late="counted", staleness=2),
        HoldAndFetch(),
    ],
)
def test_every_schedule_goes_on(schedule: Any) -> None:
    select = Largest(5, 4) if isinstance(schedule, HoldAndFetch) else Everyone()
    method = replace(METHOD, schedule=schedule, select=select)
    played = steps(method, filled(HUGE), 5)
    told = [row for row in rows(played) if row.failure.startswith("refused: size")]
    assert {row.device for row in told} == {BAD}
    assert finite(played[-1].params)
    assert played[-1].snapshot.acknowledged[BAD] == -1
    assert not small.identical(played[-1].params, played[-2].params)


def test_what_is_refused_was_not_acknowledged_and_is_sent_again() -> None:
    """Error feedback adds what was refused to the next message, once the device is honest."""
    method = replace(METHOD, uplink=ErrorFeedback(TopK(0.2)))
    played = steps(method, filled(HUGE))
    assert played[-1].snapshot.acknowledged[BAD] == -1
    assert (np.delete(played[-1].snapshot.acknowledged, BAD) >= 0).all()
    same_but_for_reasons(played, steps(method, gone))


def test_nobody_is_refused_when_everybody_is_alike_however_large() -> None:
    played = steps(METHOD, filled(1e3), 1, devices=tuple(range(5)))
    assert not any(row.failure for row in rows(played))


# --- the history ------------------------------------------------------------------------------


MOST = 1e4  # where a change is absurd


def known(*last: float, first: Sequence[float] = ()) -> UpdateSizes:
    """Devices 100, 101, ... with these sizes."""
    return UpdateSizes(
        np.arange(100, 100 + len(last)), np.array(last), np.array(first, dtype=float)
    )


def compared(
    before: UpdateSizes, sizes: Sequence[float], devices: Sequence[int] = (), growth: float = 100.0
) -> Verdict:
    senders = np.array(devices or range(len(sizes)), dtype=np.int64)
    return before.compare(senders, np.array(sizes, dtype=float), growth, MOST)


def above(last: Sequence[float], sizes: Sequence[float], devices: Sequence[int] = ()) -> list[bool]:
    flags: list[bool] = compared(known(*last), sizes, devices).above.tolist()
    return flags


def test_the_limit_is_over_the_median_of_this_round_and_those_before() -> None:
    assert above([1.0, 1.0, 2.0], [201.0, 150.0, 1.0, 0.0]) == [True, False, False, False]
    assert compared(known(1.0, 1.0, 2.0), [9.0]).median == 1.5
    assert above([1.0, 1.0, 2.0], [np.inf]) == [True]


def test_it_is_without_effect_before_three_devices_and_zeros_do_not_count() -> None:
    assert above([], [1.0, 1e3]) == [False, False]
    assert above([], [1.0, 1e3, 0.0]) == [False, False, False]
    assert above([], [1.0, 1e3, 2.0]) == [False, True, False]
    assert above([1.0], [1e3, 2.0]) == [True, False]
    assert above([], []) == []


def test_before_three_devices_only_what_is_absurd_is_refused() -> None:
    assert above([], [1.0, 1.01 * MOST]) == [False, True]
    assert above([], [0.99 * MOST]) == [False]
    assert "with nothing to compare it with" in compared(known(), [1.0]).limit
    assert not compared(known(), [1e38], growth=math.inf).above.any()


def test_a_device_has_one_voice_however_often_it_sends() -> None:
    assert above([], [1.0] * 9 + [1e3], [0] * 9 + [1]) == [False] * 10  # two devices, not ten
    # Its own five sizes are one: the median is that of three others.
    assert above([1.0, 1.0, 1.0], [1e3] * 5, [0] * 5) == [True] * 5
    assert compared(known(1.0, 2.0, 8.0), [4.0, 6.0, 50.0, 0.0], [100] * 4).median == 6.0
    assert compared(known(1.0, 2.0), [4.0, 6.0, 50.0, 0.0], [7] * 4).median == 2.0
    assert compared(known(1.0, 3.0), [2.0, 9.0, 1.0], [7] * 3).median == 2.0


def test_a_device_alone_cannot_have_the_past_forgotten() -> None:
    past = known(*[1e-3] * 50)
    verdict = compared(past, [1.0, 1.1, 0.9], [0, 0, 0])
    assert verdict.above.all()
    assert verdict.known is past
    assert compared(past, [1.0, 1.1, 0.9], [0, 1, 0]).above.all()


def test_the_order_of_arrival_does_not_matter() -> None:
    sizes, devices = np.array([5.0, 1e4, 0.0, 2.0, 400.0]), np.array([3, 1, 1, 4, 3])
    order = np.array([3, 1, 4, 0, 2])
    one, two = (
        compared(known(1.0, 3.0), sizes[rows].tolist(), devices[rows].tolist())
        for rows in (np.arange(5), order)
    )
    assert one.above[order].tolist() == two.above.tolist()
    assert one.above.any()
    after, same = (known(2.0).after(devices[rows], sizes[rows]) for rows in (np.arange(5), order))
    assert repr(after) == repr(same)


def test_when_all_updates_of_a_round_are_larger_the_training_has_changed() -> None:
    """A learning rate that grows a thousandfold must not end the run, nor open the door."""
    past = known(*[1e-3] * 50)
    verdict = compared(past, [1.0, 1.1, 3e38, 0.9])
    assert verdict.above.tolist() == [False, False, True, False]
    assert len(verdict.known.device) == 0
    assert above([1e-3] * 50, [1.0, 1.1, 1e-3]) == [True, True, False]  # somebody is as before
    assert above([1e-3] * 50, [1.0, 1.1]) == [True, True]  # too few to say so


def test_what_is_absurd_is_no_change_of_the_training() -> None:
    assert above([1e-3] * 50, [3e38, 3e38, 3e38]) == [True, True, True]
    assert above([1e-3] * 50, [MOST / 2, MOST / 2, MOST * 2]) == [False, False, True]


def test_the_limit_does_not_shrink_below_what_the_first_devices_sent() -> None:
    """Who joins late, with data that nobody had, begins as the others began."""
    converged = [1e-6] * 30
    assert compared(known(*converged), [1.0], [7]).above.tolist() == [True]
    early = known(*converged, first=[1.0, 0.5, 2.0])
    assert compared(early, [1.0, 101.0], [7, 8]).above.tolist() == [False, True]
    assert compared(early, [1.0], [7]).median == 1.0
    # Two may both be attackers; three have a majority.
    assert compared(known(*converged, first=[1.0, 1.0]), [1.0], [7]).above.all()


def test_only_the_last_devices_that_counted_are_remembered() -> None:
    count = REMEMBERED + 10
    sizes = UpdateSizes.none().after(np.arange(count), np.arange(count, dtype=np.float64))
    assert sizes.device.tolist() == sizes.last.tolist() == list(range(10, count))
    again = sizes.after(np.array([3, 20, 20, 20]), np.array([0.0, 7.0, 9.0, 8.0]))
    assert len(again.device) == REMEMBERED
    assert (again.device[-1], again.last[-1]) == (20, 8.0)
    assert 3 not in again.device  # it changed nothing
    assert np.unique(again.device).size == REMEMBERED


def test_of_the_first_devices_the_first_sizes_stay() -> None:
    sizes = UpdateSizes.none()
    for step in range(EARLY + 5):
        sizes = sizes.after(np.array([0, step]), np.array([1.0, 10.0 + step]))
    assert sizes.first.tolist() == [5.5, *(10.0 + n for n in range(1, EARLY))]
    whole = UpdateSizes.none().after(np.arange(EARLY + 5), np.ones(EARLY + 5))
    assert len(whole.first) == EARLY + 5  # nobody of a round is preferred
    assert len(UpdateSizes.none().after(np.arange(5000), np.ones(5000)).first) == REMEMBERED


def test_where_a_change_is_absurd_goes_by_the_initial_model() -> None:
    initial = {
        "weight": torch.tensor([3.0, -3.0]),
        "mask": torch.tensor([-math.inf, 3.0]),
        "steps": torch.tensor(3),
        "wave": torch.tensor([3j]),
    }
    assert most_at_first("params", initial) == pytest.approx(4e3)
    assert most_at_first("buffers", {}) == 1e12


def test_refused_updates_do_not_enter_it() -> None:
    played = steps(METHOD, filled(HUGE), 2)
    sizes = played[-1].snapshot.update_sizes["params"]
    assert sizes.device.tolist() == [0, 2, 3, 4]
    assert sizes.last.max() < 1
    assert len(sizes.first) == 4
    assert len(played[-1].snapshot.update_sizes["buffers"].device) == 0


@pytest.mark.parametrize(
    "method",
    [METHOD, replace(METHOD, norm=Tracked()), replace(METHOD, send="weights")],
    ids=["changes", "statistics", "weights"],
)
def test_one_of_two_devices_cannot_ruin_it(method: Method) -> None:
    """Nothing tells which of two is right, but 3.4e38 is neither."""
    tree = "buffers" if method.norm == Tracked() else method.send
    engine = Spoiling(spoil=filled(HUGE, tree))
    played = small.steps(method, small.task(devices=2), 3, engine=engine)
    told = [row.failure for row in rows(played) if row.device == BAD]
    assert all("the most with nothing to compare it with" in why for why in told)
    assert not any(row.failure for row in rows(played) if row.device != BAD)
    assert not small.identical(played[-1].params, played[0].params)


@pytest.mark.parametrize("size", [1, 3])
def test_a_fast_device_that_fills_the_buffer_alone_cannot_ruin_it(size: int) -> None:
    """It is honest at first, so that its sizes are the only ones that are known."""
    sent = iter([False] * 8 + [True] * 1_000)

    def spoil(update: Replies) -> Replies:
        return filled(HUGE)(update) if next(sent) else update

    fast = Group(devices=(BAD,), speed=1e14, link=Steady(1e12, 1e12))
    fleet = Fleet(groups=(fast, Group(devices=(0, 2, 3), speed=1e7)))
    method = replace(METHOD, schedule=Buffered(concurrency=4, buffer_size=size), select=Uniform(4))
    task = Embedded(devices=4, limit=200, server=20)
    experiment = Experiment(task, method, fleet, rounds=12, engine=Spoiling(spoil=spoil))
    played = [result.round for result in play(experiment)]
    assert {row.device for row in rows(played)} == {BAD}
    assert any(row.failure.startswith("refused: size") for row in rows(played))
    assert max(float(v.abs().max()) for v in played[-1].params.values()) < 10


def test_a_resumed_run_refuses_what_the_whole_run_refuses() -> None:
    """One device a round: only what was remembered tells that an update is too large."""
    task = small.task(devices=5)
    method = replace(METHOD, select=Uniform(1))
    engine = Spoiling(spoil=filled(5e2), devices=(0, 1, 2, 3, 4))

    def honest_first(count: int) -> list[Round]:
        return list(islice(run(method, task, Simulated(task, small.world(task)), 0), count))

    half = honest_first(8)[-1]
    assert len(half.snapshot.update_sizes["params"].device) >= 3
    later = []
    for sizes in (
        half.snapshot.update_sizes,
        dict.fromkeys(half.snapshot.update_sizes, UpdateSizes.none()),
    ):
        runtime = Simulated(task, small.world(task), engine=engine)
        saved = replace(half.snapshot, update_sizes=sizes)
        later.append(next(run(method, task, runtime, 0, resume=saved)))
    kept, forgotten = ([row.failure for row in small.rows(step)] for step in later)
    assert kept[0].startswith("refused: size")
    assert forgotten == [""]


# --- reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["high", (1.0, 2.0), None, 10**400, [1.0], math.inf], ids=repr)
def test_a_report_of_another_type_is_refused_and_the_run_goes_on(loss: Any) -> None:
    def spoil(update: Replies) -> Replies:
        return with_contents(update, report={**update.report_of(0), "loss": loss})

    played = steps(METHOD, spoil, 2)
    assert all(row.failure.startswith("refused: ") == (row.device == BAD) for row in rows(played))
    same_but_for_reasons(played, steps(METHOD, gone))


# --- new models that are not finite -------------------------------------------------------------


@pytest.mark.parametrize("part", AGGREGATES, ids=repr)
def test_a_model_that_is_not_finite_is_refused_and_everything_kept(part: Aggregate) -> None:
    """Everybody sends so much that twice of it is infinite, and nothing stops them."""
    everybody = tuple(range(5))
    method = replace(METHOD, aggregate=part, norm=Tracked(), plan=Counting())

    def spoil(update: Replies) -> Replies:
        """So that nothing else is wrong with it: what is trained from such a model is NaN."""
        large = filled(3e38)(update)
        return filled(1.0, "buffers")(with_contents(large, report={"loss": 1.0, "distortion": 0.0}))

    played = steps(method, spoil, 3, limits=OFF, devices=everybody)
    held = [step for step in played if "held" in step.diagnostics]
    assert held
    for step in played:
        assert finite(step.params)
        assert finite(step.buffers)
        assert sound(step.snapshot.states["aggregate"])
    for before, after in pairwise(played):
        if "held" not in after.diagnostics:
            continue
        assert small.identical(before.params, after.params)
        assert small.identical(before.buffers, after.buffers)
        assert repr(after.snapshot.states) == repr(before.snapshot.states)
        assert after.diagnostics["held"] == everybody
        assert after.diagnostics["not_finite"]
        assert {row.failure for row in small.rows(after)} == {
            f"held: the new model is not finite: {after.diagnostics['not_finite'][0]}"
        }
        assert (after.snapshot.acknowledged == -1).all()
        assert before.snapshot.update_sizes["params"] is after.snapshot.update_sizes["params"]


class Counting(WholeModel):
    """A planner that counts the steps it learns from."""

    def init(self, view: View) -> int:
        return 0

    def learn(self, updates: Any, diagnostics: Any, view: View, state: Any) -> Any:
        return state + 1


@dataclass(frozen=True)
class Breaking(Mean):
    """A mean that goes wrong in the second step."""

    def __call__(
        self, model: Params, updates: Any, view: View, state: Any, key: Tensor
    ) -> Aggregated:
        stepped = super().__call__(model, updates, view, state, key)
        if view.round_index != 1:
            return stepped
        broken = {**stepped.model, "4.bias": stepped.model["4.bias"] / 0}
        return replace(stepped, model=broken)


def test_the_run_goes_on_after_it_and_its_record_tells() -> None:
    method = replace(METHOD, aggregate=Breaking(), plan=Counting())
    one, two, three = steps(method, lambda update: update, 3)
    assert small.identical(one.params, two.params)
    assert not small.identical(two.params, three.params)
    assert two.diagnostics == {"held": (0, 1, 2, 3, 4), "not_finite": ("4.bias",)}
    assert [step.snapshot.states["plan"] for step in (one, two, three)] == [1, 1, 2]
    assert "held" not in three.diagnostics
    assert (three.snapshot.acknowledged >= 0).all()
    task = Embedded(devices=4, limit=200, server=20)
    experiment = Experiment(task, replace(fedavg(lr=0.1), aggregate=Infinite()), rounds=1)
    (result,) = play(experiment)
    assert sorted(result.record.diagnostics["held"]) == [0, 1, 2, 3]
    assert (result.record.replies, result.record.failures) == (0, 4)


@dataclass(frozen=True)
class Infinite(Mean):
    """A mean that never ends well."""

    def __call__(
        self, model: Params, updates: Any, view: View, state: Any, key: Tensor
    ) -> Aggregated:
        return Aggregated({name: value / 0 for name, value in model.items()}, state)


class Unmeasured(WholeModel):
    """A planner in whose state NaN means that nothing was measured."""

    def init(self, view: View) -> Any:
        return {"scores": (torch.ones(2),)}

    def learn(self, updates: Any, diagnostics: Any, view: View, state: Any) -> Any:
        return {"scores": (torch.tensor([math.nan, view.round_index]),)}


def test_a_policy_may_say_that_something_was_not_measured() -> None:
    played = steps(replace(METHOD, plan=Unmeasured()), lambda update: update, 3)
    for number, step in enumerate(played):
        unknown, last = step.snapshot.states["plan"]["scores"][0].tolist()
        assert math.isnan(unknown)
        assert last == number


def test_what_was_not_finite_before_may_stay_so() -> None:
    mask = torch.tensor([0.0, -math.inf, math.nan])
    old: Mapping[str, Tensor] = {"mask": mask, "weight": torch.ones(2)}
    assert not_finite({"mask": mask.clone(), "weight": torch.zeros(2)}, old) == []
    assert not_finite({"mask": mask + math.inf}, old) == ["mask"]
    assert not_finite({"mask": -mask}, old) == ["mask"]
    assert not_finite({"weight": torch.tensor([1.0, math.nan])}, old) == ["weight"]
    assert not_finite({"new@0.5": torch.tensor([math.inf])}, old) == ["new@0.5"]
    assert not_finite({"steps": torch.tensor(3)}, old) == []


def test_a_model_and_a_state_are_unsound_only_if_they_became_so() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, -math.inf])
    steps = {"steps": torch.tensor(3), "phase": torch.ones(2, dtype=torch.complex64)}
    old = {"mask": bad, "weight": good}
    assert unsound([(old, old), ({**steps, "weight": good + 1}, old)], {"a": good}, None) == []
    assert unsound([({**old, "weight": bad}, old)], None, None) == ["weight"]
    assert unsound([({"weight": good * 2e19}, old)], None, None) == []  # its square is not finite
    assert unsound([({"mask": bad.clone()}, old)], [bad], [bad]) == []
    assert unsound([(old, old)], [bad], [good]) == ["the state of the aggregator"]


def test_states_are_looked_into() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.inf])
    assert sound({"a": [good, (good, None, 3.0, math.inf)], "b": Aggregated({"x": good})})
    for state in (bad, {"a": bad}, [good, bad], (None, {"b": (bad,)}), Aggregated({"x": bad})):
        assert not sound(state)
