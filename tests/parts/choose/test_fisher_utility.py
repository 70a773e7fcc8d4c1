"""WHALE-FL's chooser and extraction: levels from utility, blocks from Fisher information."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from anyfleet import rng
from anyfleet.arrays import Floats
from anyfleet.core.check_in import CheckIn, CheckIns, Choices, MenuEntry, MessageBits
from anyfleet.core.loop import Round
from anyfleet.core.messages import ChooserState, Conditions, Hyperparameters, SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.plans import Plans
from anyfleet.core.server import Server
from anyfleet.core.signals import Menu, TargetTime
from anyfleet.core.slots import Lesson
from anyfleet.core.time_and_energy import Counts, Demand, effort_of
from anyfleet.core.view import View
from anyfleet.elastic import Slice
from anyfleet.formulas.whale import WhaleRegionFisher
from anyfleet.methods import heterofl, whale
from anyfleet.parts.choose import FisherUtility
from anyfleet.parts.extract import FisherBlocks
from anyfleet.parts.extract.fisher_blocks import coordinates_of, regions_of
from anyfleet.parts.plan import TargetSeconds, TrainedLayersMenu, WidthMenu
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Simulated
from anyfleet.world import When, levels
from tests.helpers import small

WHEN = When(0.0, 0)
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)


def offer(seconds: float, width: float = 1.0) -> MenuEntry:
    """An entry that takes so long on a device of one FLOP per second."""
    effort = effort_of(Counts(seconds, seconds, seconds), width, local_steps=0, calls=0, moved=0)
    return MenuEntry(Demand(effort, np.zeros(1)), MessageBits(0.0, 0.0))


def conditions(**changed: float) -> Conditions:
    """Those of a device of one FLOP per second."""
    task = small.task()
    (told,) = small.world(task).conditions(np.array([0]), WHEN, np.ones(1, dtype=np.int64)).rows()
    known = {"speed": 1.0, **changed}
    return replace(told, **{name: np.array([value]) for name, value in known.items()})


def choice(
    utility: FisherUtility,
    state: ChooserState,
    menu: Sequence[MenuEntry],
    given: Hyperparameters,
    own: Conditions | None = None,
) -> Choices:
    """What one device chooses."""
    check_in = CheckIn(0, tuple(menu), own or conditions(), 30, given, state)
    return utility(CheckIns.of([check_in]))


def numbers(batch: int = 32, target: float = float("nan")) -> Hyperparameters:
    given = whale().train.hyperparameters(0, np.array([30]))
    return replace(given, batch_size=np.array([batch]), target_seconds=np.array([target]))


def lesson(values: Sequence[float], share: float = 1.0, birth: float = 1.0) -> Lesson:
    squares = float(np.mean(np.square(values)))
    measured = {"fisher": float(np.mean(values)), "fisher_squares": squares}
    return Lesson(
        share, (share, 0.0), {**measured, "fisher_steps": float(len(values))}, lambda _: birth
    )


def chosen(
    utility: FisherUtility, notes: ChooserState, menu: Sequence[MenuEntry], given: Hyperparameters
) -> tuple[int, float]:
    """The level, counted from 1 for the whole network, and U."""
    found = choice(utility, notes, menu, given)
    return int(found.entry[0]) + 1 + utility.levels - len(menu), float(found.utility[0])


@pytest.mark.parametrize(
    ("seconds", "threshold", "level", "u"),
    [(8, 10, 1, 0.96), (8, 20, 3, 0.48), (8, 50, 5, 0.192), (20, 10, 4, 0.24), (20, 20, 5, 0.12)],
)
def test_1_10_the_worked_example_through_the_chooser(
    seconds: float, threshold: float, level: int, u: float
) -> None:
    utility = FisherUtility(
        effectiveness="literal", window=2, threshold=threshold, penalty=2.0, target=10.0
    )
    notes: ChooserState = {}
    for values in ((9.0, 9.0), (0.2, 0.1), (0.3, 0.2)):  # the first has left the window
        notes = utility.learn(lesson(values), notes)
    menu = [*([offer(1e9)] * 4), offer(seconds)]  # only the smallest network counts
    found, share = chosen(utility, notes, menu, numbers(32))
    assert found == level
    assert share == pytest.approx(u)


def test_1_10_before_it_has_trained_a_device_takes_the_first_level_within_its_cap() -> None:
    menu = [offer(1.0)] * 5
    for first, entries, expected in ((1, 5, 1), (1, 2, 4), (5, 5, 5), (3, 2, 4), (5, 2, 5)):
        utility = FisherUtility(first_level=first, target=1.0)
        level, u = chosen(utility, {}, menu[:entries], numbers())
        assert level == expected
        assert np.isnan(u)


def test_1_10_relative_to_the_initial_model_of_the_same_width() -> None:
    utility = FisherUtility(threshold=20.0, target=1e9)
    assert utility.initial_measures(0.5, 0, {})
    notes = utility.learn(lesson([6.0, 8.0], 0.5, birth=2.0), {})
    assert not utility.initial_measures(0.5, 0, notes)
    assert utility.initial_measures(1.0, 0, notes)
    notes = utility.learn(lesson([100.0], 1.0, birth=50.0), notes)
    # (3² + 4² + 2²) / 3 iterations, times 10.
    level, u = chosen(utility, notes, [offer(1.0)] * 5, numbers())
    assert (level, u) == (1, 1.0)
    low = replace(utility, threshold=100.0)
    assert chosen(low, notes, [offer(1.0)] * 5, numbers())[1] == pytest.approx(
        10 * np.sqrt(29 / 3) / 100
    )


def test_1_10_what_is_measured_now_and_then_stands_for_all_steps() -> None:
    utility = FisherUtility(effectiveness="literal", window=2, target=1e9, threshold=1e9)
    every = utility.learn(lesson([0.3, 0.3, 0.3, 0.3]), {})
    seldom = Lesson(
        1.0, (1.0, 0.0), {"fisher": 0.3, "fisher_squares": 0.09, "fisher_steps": 4.0}, lambda _: 1.0
    )
    found = utility.learn(seldom, {})
    assert found.keys() == every.keys()
    assert all(found[name] == pytest.approx(every[name]) for name in every)


def test_1_10_zero_fisher_is_the_smallest_network_and_no_training_leaves_the_window() -> None:
    utility = FisherUtility(target=1e9)
    notes = utility.learn(lesson([0.0, 0.0], birth=0.0), {})
    assert chosen(utility, notes, [offer(1.0)] * 5, numbers()) == (5, 0.0)
    assert utility.learn(lesson([float("nan")]), notes) is notes


def test_1_10_exactly_on_time_is_not_late_and_no_link_is_of_no_use() -> None:
    utility = FisherUtility(effectiveness="constant", target=10.0)
    notes = utility.learn(lesson([1.0]), {})
    assert chosen(utility, notes, [offer(10.0)] * 5, numbers()) == (1, 1.0)
    assert chosen(utility, notes, [offer(10.1)] * 5, numbers())[1] < 1
    menu = [replace(offer(1.0), bits=MessageBits(0.0, 1.0))] * 5
    cut_off = choice(utility, notes, menu, numbers(), conditions(bit_rate_up=0.0))
    assert (cut_off.entry[0], cut_off.utility[0]) == (4, 0.0)


def test_1_10_the_time_of_the_last_choice_as_an_option() -> None:
    menu = [offer(40.0, 1.0), offer(20.0, 0.5), offer(8.0, 0.25)]
    for reference, expected in (("unit", 1.0), ("last_choice", 0.25)):
        utility = FisherUtility(
            levels=3,
            effectiveness="constant",
            target=10.0,
            reference=reference,  # type: ignore[arg-type]
        )
        notes = utility.learn(lesson([1.0], share=0.5), {})
        assert chosen(utility, notes, menu, numbers())[1] == pytest.approx(expected)


def test_a_menu_with_more_entries_than_levels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FisherUtility\.levels is 2"):
        choice(FisherUtility(levels=2, target=1.0), {}, [offer(1.0)] * 3, numbers())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("levels", 0),
        ("window", 0),
        ("threshold", 0.0),
        ("penalty", -1.0),
        ("target", 0.0),
        ("first_level", 6),
        ("fisher", "exact"),
        ("reference", "best"),
    ],
)
def test_the_chooser_refuses(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"FisherUtility\.{field}"):
        replace(FisherUtility(), **{field: value})  # type: ignore[arg-type]


# --- in a run ---------------------------------------------------------------------------------

FLEET = levels(speeds=(1e9, 5e8, 2e8, 1e8))
FOUR = (1.0, 0.5, 0.25, 0.125)


def run(method: Method, count: int = 3) -> list[Round]:
    return small.steps(method, small.task(), count, fleet=FLEET)


def shares(step: Round) -> list[float]:
    return [row.width for row in small.rows(step)]


def test_constant_utility_is_heterofl_bit_for_bit() -> None:
    constant = FisherUtility(levels=4, effectiveness="constant", penalty=0.0)
    method = whale(widths=FOUR, utility=constant, lr=0.1, batch_size=8)
    static = replace(heterofl(widths=FOUR, lr=0.1, batch_size=8), select=Everyone())
    one, two = run(method, 4)[-1], run(static, 4)[-1]
    assert small.identical(one.params, two.params)
    assert shares(one) == shares(two)
    assert len(set(shares(one))) == 4


def test_the_target_is_the_median_time_of_the_smallest_network_in_round_0() -> None:
    method = whale(widths=FOUR, lr=0.1, batch_size=8)
    task = small.task()
    # Everybody trains the smallest network and is timed by the clock; in the second round, as the
    # first has the measurement of the initial model, too.
    small_only = FisherUtility(levels=1, penalty=0.0)
    unit = replace(method, plan=WidthMenu((0.125,)), choose=small_only)
    taken = [
        r.download_seconds + r.compute_seconds + r.upload_seconds
        for r in small.rows(run(unit, 2)[1])
    ]
    server = Server(method, task, Simulated(task, small.world(task, FLEET)), 0)
    target = _planned(method, server.view(), server.states["plan"])
    assert target == pytest.approx(np.median(taken), rel=0.01)


def _planned(method: Method, view: View, state: object) -> float:
    devices = np.arange(8)
    given = method.train.hyperparameters(0, view.devices.samples[devices])
    plans = method.plan(Plans.whole_model(devices, given), view, state, rng.root(0, "plan"))
    return float(plans.hyperparameters.target_seconds[0])


def test_slow_devices_shrink_and_nobody_exceeds_its_level() -> None:
    method = whale(widths=FOUR, lr=0.1, batch_size=8)
    world = small.world(small.task(), FLEET)
    for step in run(method, 4):
        for row in small.rows(step):
            assert row.width <= FOUR[world.declared.level[row.device]]
    last = small.rows(run(method, 4)[-1])
    by_level = {world.declared.level[r.device]: r.utility for r in last}
    assert by_level[0] > by_level[3]


def test_training_only_does_not_look_at_time() -> None:
    slow = levels(speeds=(1e9, 1e3))
    method = whale(
        widths=(1.0, 0.5), utility=FisherUtility(levels=2, penalty=0.0), lr=0.1, batch_size=8
    )
    fast = levels(speeds=(1e9, 1e9))
    one, two = (small.steps(method, small.task(), 3, fleet=f)[-1] for f in (slow, fast))
    assert [r.utility for r in small.rows(one)] == [r.utility for r in small.rows(two)]


# --- Algorithm 2 ------------------------------------------------------------------------------


def view() -> View:
    task = small.task()
    return Server(whale(), task, Simulated(task, small.world(task)), 0).view()


def test_1_11_channels_divide_into_equal_blocks() -> None:
    assert regions_of(8, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert regions_of(6, 16).tolist() == [0, 2, 5, 8, 10, 13]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.1])
def test_1_11_a_share_has_as_many_channels_as_a_prefix_of_it(share: float) -> None:
    seen, blocks = view(), FisherBlocks(8)
    fisher = np.array([0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.4, 0.6])
    state = blocks.init(seen)._replace(
        fisher=WhaleRegionFisher(fisher, np.full(8, 0.1), np.full(8, 0.9)), counts={}
    )
    cut = blocks(SubModelSize(width=share), seen, state, rng.root(0, "x"), 3)
    prefix = seen.blueprint.prefix(share)
    assert cut.shape(seen.blueprint) == prefix.shape(seen.blueprint)
    if share == 1.0:
        assert cut == Slice()
    if share == 0.5:
        axis = next(a for a, n in seen.blueprint.sizes.items() if n == 16)
        assert cut.kept(axis) == (2, 3, 6, 7, 10, 11, 14, 15)


def told(seen: View, cut: Slice, by_region: Floats, blocks: FisherBlocks) -> tuple[float, ...]:
    """A report in which every coordinate of a region has the same squared gradient."""
    local = seen.blueprint.local(cut)
    values: list[float] = []
    for axis, each in coordinates_of(local, cut.sent(seen.blueprint)).items():
        region = regions_of(seen.blueprint.axes[axis].size, blocks.regions)
        kept = cut.kept(axis)
        region = region if kept is None else region[list(kept)]
        values += (by_region[region] * each).tolist()
    return tuple(values)


def test_1_11_the_worked_example_through_the_extraction() -> None:
    counts = np.array([3, 3, 1, 0, 2, 0, 1, 3])
    fisher = np.array([0.9, 0.2, 0.8, 0.1, 0.5, 0.7, 0.3, 0.4])
    seen = view()
    bounds = WhaleRegionFisher(fisher, np.full(8, 0.1), np.full(8, 0.9))
    axis = next(a for a, n in seen.blueprint.sizes.items() if n == 8)
    for score, expected in (("recommended", (0, 2, 4, 5)), ("literal", (0, 2, 4, 7))):
        blocks = FisherBlocks(8, score=score)  # type: ignore[arg-type]
        state = blocks.init(seen)._replace(fisher=bounds, counts={5: counts, 2: counts[::-1]})
        cut = blocks(SubModelSize(width=0.5), seen, state, rng.root(0, "x"), 5)
        assert cut.kept(axis) == expected


def test_1_11_what_devices_report_becomes_the_fisher_information_of_regions() -> None:
    seen, blocks = view(), FisherBlocks(4)
    values = np.array([0.4, 0.3, 0.2, 0.1])
    whole, state = Slice(), blocks.init(seen)
    found, known = blocks._told(told(seen, whole, values, blocks), whole, seen.blueprint)
    np.testing.assert_allclose(found, values)
    assert known.all()
    cut = blocks(SubModelSize(width=0.5), seen, state, rng.root(0, "x"), 0)
    found, known = blocks._told(told(seen, cut, values, blocks), cut, seen.blueprint)
    np.testing.assert_allclose(found[known], values[known])
    assert known.tolist() == [True, True, False, False]
    # A report of another length tells nothing.
    assert not blocks._told((1.0,), cut, seen.blueprint)[1].any()


def test_1_11_in_a_run_all_regions_get_their_turn() -> None:
    method = whale(
        widths=(1.0, 0.25),
        regions=4,
        lr=0.1,
        batch_size=8,
    )
    only = FisherUtility(levels=1, effectiveness="constant", penalty=0.0)
    method = replace(method, plan=WidthMenu((0.25,)), choose=only)
    steps = run(method, 5)
    counts = steps[-1].snapshot.states["extract"].counts
    assert set(counts) == set(range(8))
    # One region a round, and what was trained before gives way to the others.
    for device in counts.values():
        assert device.sum() == 5
        assert (device > 0).sum() >= 3
    assert not np.allclose(steps[-1].snapshot.states["extract"].fisher.mean, 0)


@pytest.mark.parametrize(("field", "value"), [("regions", 0), ("score", "best"), ("epsilon", 0.0)])
def test_the_extraction_refuses(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"FisherBlocks\.{field}"):
        replace(FisherBlocks(), **{field: value})  # type: ignore[arg-type]


def test_whale_has_as_many_levels_as_widths() -> None:
    method = whale(widths=(1.0, 0.5), utility=FisherUtility(threshold=5.0))
    assert method.choose == FisherUtility(levels=2, threshold=5.0)


def test_paced_gives_what_the_chooser_needs() -> None:
    assert TargetSeconds.provides == {TargetTime()}
    assert FisherUtility().requires == {TargetTime(), Menu(5)}
    assert FisherUtility(penalty=0.0).requires == {Menu(5)}


def test_1_10_equal_devices_are_all_on_time() -> None:
    slow = levels(speeds=(1e9,), bit_rate_up=1e6, bit_rate_down=1e6)
    constant = FisherUtility(effectiveness="constant")
    method = whale(widths=SHARES, utility=constant, lr=0.1, batch_size=8)
    step = small.steps(method, small.task(), 2, fleet=slow)[-1]
    assert {row.utility for row in small.rows(step)} == {1.0}


def test_1_10_over_depths_as_over_widths() -> None:
    """Hardly trained, a model stays as informative as it was, at every depth."""
    base = whale(lr=1e-9, batch_size=8)
    plan = TargetSeconds(TrainedLayersMenu(4))
    method = replace(base, plan=plan, choose=FisherUtility(levels=4, penalty=0.0))
    rows = [small.rows(step) for step in small.steps(method, small.task(norm=False), 4)]
    for step in rows[1:]:
        assert np.mean([row.utility for row in step]) == pytest.approx(0.5, abs=0.1)
    view_ = Server(method, small.task(), Simulated(small.task(), small.world(small.task())), 0)
    shallow = _planned(method, view_.view(), view_.states["plan"])
    deep = replace(method, plan=TargetSeconds(WidthMenu((1.0,))), choose=FisherUtility(levels=1))
    whole = Server(deep, small.task(), Simulated(small.task(), small.world(small.task())), 0)
    assert shallow < _planned(deep, whole.view(), whole.states["plan"])
