"""AnycostFL's choice: the best of all that fits, nothing that does not, and who takes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from anyfleet.analysis.anycost_theory import anycost_theory
from anyfleet.arrays import Floats, join
from anyfleet.core.check_in import CheckIn, CheckIns, Choices, MenuEntry, MessageBits
from anyfleet.core.choosing import menu_entries
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.loop import Round
from anyfleet.core.message_size import NUMBER_BITS, expected_bits
from anyfleet.core.messages import Conditions, Hyperparameters
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, uplink
from anyfleet.core.time_and_energy import (
    Counts,
    Demand,
    TrainingAmounts,
    effort_of,
    transfer_seconds,
)
from anyfleet.elastic import width
from anyfleet.formulas.anycost import anycost_alpha
from anyfleet.methods import anycost, fedavg
from anyfleet.parts.aggregate import Aio, Mean
from anyfleet.parts.choose import MostGain
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Raw, Stc, TopK, Uveq
from anyfleet.parts.extract import Leading
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import Assigned, TrainedLayersMenu, WidthMenu
from anyfleet.parts.schedule import Buffered, Deadline, HoldAndFetch, Synchronous
from anyfleet.parts.select import Everyone
from anyfleet.parts.train import Fjord, Gradient, Slim
from anyfleet.runtime import Limits, Simulated, Threads
from anyfleet.runtime.simulated.engines import Assignment, Executed, Executor, PackedReply
from anyfleet.world import Fleet, Group, Redrawn, Shannon, Steady, Uniform, cell
from tests.core.test_local_training import orders
from tests.helpers import small

TRAINING: dict[str, Any] = {"lr": 0.1, "batch_size": 8}
ANYCOST = anycost(count=8, **TRAINING)
# Work and links are those of the small task: about half of what a device has goes to either.
CELL = cell(
    devices=8,
    flops_per_cycle=4e-4,
    budget=Redrawn(Uniform(3.0, 9.0)),
    link=Shannon(band=1e3, station_band=1e5, receive_power=0.05),
)


# --- one device against all that it could do --------------------------------------------------


@cache
def asked(method: Method = ANYCOST) -> Cohort:
    """An order with a menu, as it comes to a device of the small task."""
    return orders(method, small.task(), [3])


def offers(order: Cohort) -> tuple[MenuEntry, ...]:
    """What its device finds on the menu."""
    amounts = TrainingAmounts.of(order.hyperparameters, np.array([small.task().size(3)]))
    (menu,) = menu_entries(order, amounts, small.task(), "flops")
    return menu


def own(**known: float) -> Conditions:
    """Those of a device that is plain but for this."""
    plain = {f.name: 0.0 for f in fields(Conditions)} | {
        "speed": 1e6,
        "bit_rate_up": 1e4,
        "bit_rate_down": 1e6,
        "memory": 1e9,
        "battery": np.inf,
        "budget": np.inf,
        "load": 1.0,
        "bandwidth": np.inf,
        "exponent": np.nan,
        "slowest": 1e8,
        "fastest": 1e9,
        "coefficient": 1e-27,
        "send_power": 0.1,
    }
    columns = {name: np.array([value]) for name, value in (plain | known).items()}
    return Conditions(**columns)


def alpha(entry: MenuEntry) -> float:
    return anycost_alpha(entry.channel_share, entry.trained_share)


def check_in(
    menu: Sequence[MenuEntry], known: Conditions, given: Hyperparameters | None = None
) -> CheckIn:
    """A device that knows this of itself, with its menu."""
    given = given or asked().hyperparameters
    return CheckIn(3, tuple(menu), known, small.task().size(3), given, {})


def drawn(seed: int) -> tuple[Conditions, MostGain]:
    """A device and what it may spend: often enough for some sizes and too little for others."""
    draw = np.random.default_rng(seed)

    def powers(low: float, high: float) -> float:
        return float(10 ** draw.uniform(low, high))

    def either(*values: float) -> float:
        return float(draw.choice(values))

    fastest = powers(8.5, 9.5)
    slowest = either(1.0, draw.uniform(0.05, 1), 0.1) * fastest
    load, seconds = either(1.0, draw.uniform(1, 4)), powers(-0.5, 1.5)
    # The whole model takes about 2 MFLOP, and compressed to a fifteenth 6 kbit; 90 kbit come down.
    speed = 2e6 * load / seconds * powers(-0.3, 1)
    joules = powers(-1, 0.8)
    one = own(
        speed=speed / load,
        bit_rate_up=either(0.0, *[6e3 / seconds * powers(-0.5, 1.5)] * 9),
        bit_rate_down=either(0.0, *[9e4 / seconds * powers(-0.3, 2)] * 9),
        load=load,
        slowest=slowest,
        fastest=fastest,
        # At the highest frequency, all joules for about all the work.
        coefficient=joules / (2e6 / speed * fastest) / fastest**2 * powers(-1, 1),
        send_power=joules / seconds * powers(-1.5, 0.5),
        receive_power=either(0.0, joules / seconds * powers(-1.5, 0.5)),
        budget=either(np.inf, joules),
        battery=either(np.inf, joules, joules / 3),
        overhead=either(0.0, 1e-3 * seconds),
        fixed=either(0.0, 0.2),
        exponent=either(np.nan, 1.7),
    )
    least, most = either(0.0, 1e-3, 0.02), either(1 / 15, 1.0)
    return one, MostGain(seconds, either(np.inf, joules), least, most)


@dataclass(frozen=True)
class Spent:
    """What entries cost at rates and frequencies, by the law that the simulator charges by."""

    seconds: Floats
    joules: Floats

    @classmethod
    def of(cls, offer: MenuEntry, who: Conditions, rates: Floats, frequencies: Floats) -> "Spent":
        known, effort, load = who, offer.demand.effort, offer.bits
        down = transfer_seconds(offer.bits_down, known.bit_rate_down)
        sent = load.aside + offer.choice_bits + rates * load.update
        up = transfer_seconds(sent, known.bit_rate_up)
        compute = effort.seconds(known, frequencies)[:, None]
        energy = effort.joules(known, frequencies)[:, None]
        with np.errstate(invalid="ignore"):  # of links that carry nothing nothing fits
            return cls(
                down + up + compute, known.receive_power * down + known.send_power * up + energy
            )


def allowed(part: MostGain, who: Conditions) -> float:
    return min(part.joules, float(who.budget[0]), float(who.battery[0]))


def most_gained(part: MostGain, menu: Sequence[MenuEntry], who: Conditions) -> float:
    """By trying everything; not a number where nothing fits."""
    slowest, fastest = float(who.slowest[0]), float(who.fastest[0])
    frequencies = np.geomspace(slowest, fastest, 40)
    rates = np.geomspace(max(part.least_fraction, 1e-5), part.most_fraction, 60)
    found = []
    for offer in menu:
        spent = Spent.of(offer, who, rates, frequencies)
        fits = (spent.seconds <= part.seconds) & (spent.joules <= allowed(part, who))
        best = np.where(fits, rates, np.nan)
        found.append(alpha(offer) ** 4 * np.nanmax(best) if fits.any() else np.nan)
    return float(np.nanmax(found)) if not np.isnan(found).all() else np.nan


def decided(part: MostGain, menu: Sequence[MenuEntry], who: Conditions) -> Choices:
    return part(CheckIns.of([check_in(menu, who)]))


def unlimited(offer: MenuEntry) -> MenuEntry:
    return replace(offer, bits=offer.bits._replace(least_fraction=0.0, most_fraction=1.0))


def test_3_nothing_that_fits_gains_more_and_nothing_is_overspent() -> None:
    # As of a codec that can send anything, from nothing to all.
    menu, taken = [unlimited(offer) for offer in offers(asked())], []
    for seed in range(200):
        who, part = drawn(seed)
        choice, best = decided(part, menu, who), most_gained(part, menu, who)
        if choice.declined[0]:
            assert np.isnan(best), seed
            assert np.isnan(choice.utility[0])
            continue
        rate, frequency = choice.hyperparameters.sent_fraction, choice.hyperparameters.frequency
        offer, known = menu[int(choice.entry[0])], who
        assert part.least_fraction <= rate[0] <= part.most_fraction, seed
        assert known.slowest[0] <= frequency[0] <= known.fastest[0], seed
        gain = alpha(offer) ** 4 * rate[0]
        assert choice.utility[0] == pytest.approx(gain, rel=1e-12)
        assert not gain < best * (1 - 1e-5), seed
        spent = Spent.of(offer, who, rate, frequency)
        assert spent.seconds.item() <= part.seconds * (1 + 1e-9), seed
        assert spent.joules.item() <= allowed(part, who) * (1 + 1e-9), seed
        taken.append(int(choice.entry[0]))
    # All sizes are somebody's best, and some devices can do nothing at all.
    assert set(taken) >= {0, 1, 4, 8}
    assert 30 < len(taken) < 180


def worked(size: float, cycles: float) -> MenuEntry:
    """A part of the model of METHODS' examples: 111.7 Mbit, and so many cycles as a whole."""
    work = size * cycles
    counts = Counts(work, work, cycles)
    demand = Demand(effort_of(counts, size**0.5, local_steps=1, calls=0, moved=0), np.zeros(1))
    update = size * 111.7e6
    traffic = MessageBits(
        down=0.0, up=update / 15, update=update, sent_fraction=1 / 15, follows=True
    )
    # Alpha is the squared share of all channels, and that of the parameters that are trained.
    return MenuEntry(demand, traffic, trained_share=size)


@pytest.mark.parametrize(
    ("cycles", "most", "size", "rate", "frequency"),
    [
        (4.5e6, 1.0, 0.8722927320665629, 0.263191014, 481240981.413),
        (4.5e6, 1 / 15, 1.0, 1 / 15, 413323532.114),
        (7.3e6, 1 / 15, 0.676156899, 1 / 15, 438780636.15),
    ],
    ids=["tight", "saturated", "at the cap"],
)
def test_3_examples(cycles: float, most: float, size: float, rate: float, frequency: float) -> None:
    """The best size of all is taken where it is on the menu, and no other is better."""
    own_facts = {"slowest": 1e8, "fastest": 3e9, "speed": 3e9, "coefficient": 7.5e-27}
    who = own(**own_facts, bit_rate_up=8e6, send_power=0.1, budget=6.0)
    sizes = [each for each in (1.0, 1.02 * size, size, 0.98 * size, 0.25) if each <= 1]
    menu = [worked(each, 833 * cycles) for each in dict.fromkeys(sizes)]
    choice = decided(MostGain(10.0, most_fraction=most), menu, who)
    assert alpha(menu[int(choice.entry[0])]) == size
    assert choice.hyperparameters.sent_fraction[0] == pytest.approx(rate, rel=1e-7)
    assert choice.hyperparameters.frequency[0] == pytest.approx(frequency, rel=1e-7)
    poor = own(**own_facts, bit_rate_up=8e6, send_power=0.1, budget=0.01)
    told = decided(MostGain(10.0), menu, poor).declined[0]
    assert told == "over budget: no size fits 10 s and 0.01 J"


def test_of_equal_gains_the_slowest_frequency_that_is_in_time_is_taken() -> None:
    part, menu = MostGain(20.0), offers(asked())
    choice = decided(part, menu, own())
    assert int(choice.entry[0]) == 0
    assert choice.hyperparameters.sent_fraction[0] == part.most_fraction
    spent = Spent.of(
        menu[0], own(), choice.hyperparameters.sent_fraction, choice.hyperparameters.frequency
    )
    assert spent.seconds.item() == pytest.approx(20.0)
    plenty = decided(MostGain(1e6), menu, own())
    assert plenty.hyperparameters.frequency[0] == own().slowest[0]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"load": 2.0, "speed": 5e5}, {}),
        ({"bit_rate_down": 1e4}, {}),
        ({"receive_power": 20.0}, {}),
        ({"battery": 0.3}, {"budget": 0.8}),
        ({"fastest": 2e8, "speed": 2e5}, {}),
    ],
    ids=["other work", "slow download", "watts of receiving", "little battery", "slow processor"],
)
def test_what_is_spent_elsewhere_leaves_less(
    less: dict[str, float], more: dict[str, float]
) -> None:
    """Everything that a device has to do, or has, counts: with less, less is gained."""
    part, menu = MostGain(3.0, 2.0), offers(asked())
    rich, poor = (decided(part, menu, own(**known)) for known in ({**more}, {**more, **less}))
    assert not rich.declined[0]
    assert poor.declined[0] or poor.utility[0] < rich.utility[0]


@pytest.mark.parametrize("known", [{"bit_rate_up": 0.0}, {"bit_rate_down": 0.0}, {"battery": 0.0}])
def test_who_can_send_or_receive_nothing_declines(known: dict[str, float]) -> None:
    choice = decided(MostGain(10.0), offers(asked()), own(**known))
    assert choice.declined[0].startswith("over budget: no size fits 10 s")
    assert np.isnan(choice.utility[0])
    assert 0 <= choice.entry[0] < 9


def test_a_codec_that_cannot_go_low_is_not_planned_lower() -> None:
    codec = TopK(0.15, Uveq())
    menu = offers(asked(replace(ANYCOST, uplink=codec)))
    lowest = min(offer.bits.least_fraction for offer in menu)  # positions alone take that much
    assert lowest > 1 / 60
    found = [decided(MostGain(s), menu, own()) for s in np.geomspace(0.3, 30, 60)]
    rates = [float(each.hyperparameters.sent_fraction[0]) for each in found if not each.declined[0]]
    assert min(rates) >= lowest
    assert len(rates) > 20
    high = decided(MostGain(30.0, most_fraction=lowest / 2), menu, own())
    assert high.hyperparameters.sent_fraction[0] == menu[int(high.entry[0])].bits.least_fraction


def test_a_cohort_decides_as_each_of_its_devices_alone() -> None:
    whole, part = offers(asked()), MostGain(3.0)
    # Menus of different lengths: not everybody can hold every size.
    cohort = [check_in(whole[seed % 4 :], drawn(seed)[0]) for seed in range(60)]
    together = part(CheckIns.of(cohort))
    alone = join([part(CheckIns.of([each])) for each in cohort])
    assert together.declined == alone.declined
    assert 5 < sum(map(bool, together.declined)) < 55
    assert together.entry.tolist() == alone.entry.tolist()
    assert len(set(together.entry.tolist())) > 3
    for name in ("sent_fraction", "frequency"):
        np.testing.assert_array_equal(
            getattr(together.hyperparameters, name), getattr(alone.hyperparameters, name)
        )
    np.testing.assert_array_equal(together.utility, alone.utility)


def own_rate(offer: MenuEntry) -> Floats:
    return np.array([offer.bits.sent_fraction])


@pytest.mark.parametrize("codec", [Raw(), Stc(0.05), ErrorFeedback(Stc(0.05))])
def test_a_codec_with_one_rate_is_taken_with_that(codec: Any) -> None:
    method = replace(ANYCOST, uplink=codec)
    menu = offers(asked(method))
    who = own(bit_rate_up=4e4, coefficient=0.0)  # so that only seconds matter
    before = asked(method).hyperparameters
    sizes = set()
    for seconds in np.geomspace(0.3, 30, 25):
        part = MostGain(float(seconds), least_fraction=1e-3, most_fraction=1 / 15)
        choice = part(CheckIns.of([check_in(menu, who, before)]))
        fits = [
            entry
            for entry, offer in enumerate(menu)
            if Spent.of(offer, who, own_rate(offer), np.array([1e9])).seconds.item() <= seconds
        ]
        if choice.declined[0]:
            assert not fits
            continue
        # The largest alpha, and of two with the same the first.
        entry = max(fits, key=lambda e: (alpha(menu[e]), -e))
        assert int(choice.entry[0]) == entry
        # Nothing is asked of it, as before: it would not follow.
        assert np.isnan([choice.hyperparameters.sent_fraction, before.sent_fraction]).all()
        assert choice.utility[0] == pytest.approx(
            alpha(menu[entry]) ** 4 * own_rate(menu[entry])[0]
        )
        sizes.add(entry)
    assert len(sizes) > 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"seconds": 0.0}, r"MostGain\.seconds must be positive, got 0"),
        ({"seconds": float("nan")}, r"MostGain\.seconds must be positive, got nan"),
        ({"joules": -1.0}, r"MostGain\.joules must be positive, got -1"),
        ({"least_fraction": 0.2}, r"MostGain\.least_fraction and \.most_fraction must"),
        ({"least_fraction": 0.0, "most_fraction": 0.0}, "most > 0"),
        ({"most_fraction": 1.5}, "got 0.001 and 1.5"),
        ({"least_fraction": float("nan")}, "MostGain.least_fraction and .most_fraction"),
    ],
)
def test_parameters_without_sense_are_refused(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MostGain(**wrong)


def test_a_choice_needs_a_menu() -> None:
    with pytest.raises(ValueError, match=r"needs a menu.*plan=WidthMenu.*docs/mixing\.md"):
        replace(fedavg(), choose=MostGain())


# --- whole runs -------------------------------------------------------------------------------


def played(method: Method, fleet: Fleet = CELL, count: int = 3) -> list[Round]:
    return small.steps(method, small.task(), count, fleet=fleet)


def within(steps: Sequence[Round], method: Method, fleet: Fleet) -> list[float]:
    """Checks that no order overspent; the shares of the model that were trained."""
    task, found = small.task(), []
    runtime = Simulated(task, small.world(task, fleet))
    for step in steps:
        runtime.begin_round(step.index)  # what devices are willing to spend may change
        budgets = runtime.conditions(np.arange(task.devices)).budget
        for row in small.rows(step):
            if row.failure:
                assert row.failure.startswith("over budget")
                continue
            seconds = row.download_seconds + row.compute_seconds + row.upload_seconds
            spent = row.download_joules + row.compute_joules + row.upload_joules
            assert seconds <= method.choose.seconds * (1 + 1e-9)  # type: ignore[attr-defined]
            assert spent <= budgets[row.device] * (1 + 1e-9)
            found.append(row.width)
    return found


VARIANTS: dict[str, Method] = {
    "anycost": ANYCOST,
    "leading, equal": replace(ANYCOST, extract=Leading(), aggregate=Aio(Mean("equal"))),
    "hq": replace(ANYCOST, uplink=Hq()),
    "fed back": replace(ANYCOST, uplink=ErrorFeedback(Fgc())),
    "statistics travel": replace(ANYCOST, norm=Tracked()),
    "depths": replace(ANYCOST, plan=TrainedLayersMenu()),
    "summed widths": replace(ANYCOST, train=Fjord(Gradient(batch_size=8), (0.5, 0.75, 1.0))),
    "drawn widths": replace(
        ANYCOST, train=Slim(Gradient(batch_size=8), (0.5, 0.75, 1.0), samples=1)
    ),
    "phases": replace(ANYCOST, schedule=HoldAndFetch()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_order_takes_more_time_or_energy_than_there_is(name: str) -> None:
    method = VARIANTS[name]
    steps = played(method, count=3 if name in ("anycost", "depths") else 1)
    shares = within(steps, method, CELL)
    assert len(shares) > 4
    assert len({(row.width, row.first_trained_layer) for s in steps for row in small.rows(s)}) > 1


def test_no_order_overspends_where_receiving_and_other_work_cost() -> None:
    group = Group(
        speed=3e6,
        frequency=(1e8, 1e9),
        energy=3e-27,
        load=2.5,
        link=Steady(bit_rate_up=6e3, bit_rate_down=1e5, send_power=0.5, receive_power=0.3),
    )
    tight = [replace(group, budget=amount, battery=2 * amount) for amount in (0.1, 0.5, 0.8, 2.4)]
    # A message of this small net cannot be shorter than some hundred bits.
    method = replace(ANYCOST, choose=MostGain(5.0, least_fraction=0.025))
    fleet = Fleet(tuple(tight))
    steps = played(method, fleet)
    shares = within(steps, method, fleet)
    assert len(set(shares)) > 1
    assert any(row.failure for row in small.rows(steps[0]))


@dataclass(frozen=True)
class Asked:
    """An executor whose orders are noted, with the states of their devices."""

    inner: Executor
    asked: list[tuple[Cohort, DeviceState]]

    def execute(self, given: Assignment, memories: DeviceStates) -> Executed:
        for order in given.orders.rows():
            self.asked.append((order, memories.state(int(order.device[0]))))
        return self.inner.execute(given, memories)


@dataclass(frozen=True)
class Weighing(Threads):
    """Bytes really travel, and are kept with what they answer."""

    asked: list[tuple[Cohort, DeviceState]] = field(default_factory=list, compare=False)
    replies: list[PackedReply] = field(default_factory=list, compare=False)

    def start(self, task: Task, limits: Limits) -> Executor:
        return Asked(super().start(task, limits), self.asked)

    def transmit(self, replies: list[PackedReply]) -> list[PackedReply]:
        self.replies.extend(replies)
        return replies


def test_1_12_2_messages_are_within_their_budget_in_bytes() -> None:
    task, engine = small.task(), Weighing()
    steps = small.steps(ANYCOST, task, 2, fleet=CELL, engine=engine)
    rows = {row.order: row for step in steps for row in small.rows(step)}
    assert len(engine.replies) == len(engine.asked) > 12
    for (order, memory), reply in zip(engine.asked, engine.replies, strict=True):
        row, slice_, job = rows[int(order.id[0])], order.slice_of(0), order.job
        planned = expected_bits(slice_, job, task.blueprint, row.sent_fraction)
        assert planned.sent_fraction == row.sent_fraction < 0.07
        assert row.bits_up <= row.sent_fraction * planned.update + planned.aside + NUMBER_BITS
        update = work(order, (memory,), task).replies
        around = uplink(order, task.blueprint, tuple(update.trees_of(0)["delta"]), torch.float32)
        symbols = update.symbols_of(0)
        assert symbols is not None
        (packed,) = job.uplink.pack(symbols, around)
        assert packed in reply.data
        sent = 8 * len(packed)
        assert sent <= row.sent_fraction * planned.update
        # Nearly all of it is used: a rate is not a bound that nobody comes near.
        assert sent >= 0.6 * row.sent_fraction * planned.update


# --- the same on the server -------------------------------------------------------------------


def test_the_server_decides_as_the_device_would_with_the_same_offers() -> None:
    """The menu does not travel then, nor what was chosen: that is all the difference."""
    task, choose = small.task(), MostGain(10.0)
    base = replace(ANYCOST, select=Everyone(), extract=Leading())
    assigned = replace(base, plan=Assigned(base.plan, choose), choose=fedavg().choose)
    told = small.rows(played(assigned, count=1)[0])
    there = Simulated(task, small.world(task, CELL)).conditions(np.arange(8)).rows()
    order, sizes = orders(base, task, [3]), set()
    for row in told:
        samples = task.size(row.device)
        amounts = TrainingAmounts.of(order.hyperparameters, np.array([samples]))
        (menu,) = menu_entries(order, amounts, task, "flops")
        bare = [entry.without_menu for entry in menu]
        device = CheckIn(
            row.device, tuple(bare), there[row.device], samples, order.hyperparameters, {}
        )
        mine = choose(CheckIns.of([device]))
        slice_ = order.menu_of(0)[int(mine.entry[0])]
        assert row.slice_width == width(slice_, task.blueprint)
        assert (row.sent_fraction, row.frequency) == (
            mine.hyperparameters.sent_fraction[0],
            mine.hyperparameters.frequency[0],
        )
        sizes.add(row.width)
    assert len(sizes) > 1


def test_the_server_and_the_devices_choose_the_same_widths() -> None:
    base = replace(ANYCOST, select=Everyone(), choose=MostGain(10.0, least_fraction=0.0))
    assigned = replace(base, plan=Assigned(base.plan, base.choose), choose=fedavg().choose)
    for one, two in zip(played(base, count=2), played(assigned, count=2), strict=True):
        assert one.ledger.width.tolist() == two.ledger.width.tolist()
        assert one.ledger.sent_fraction == pytest.approx(two.ledger.sent_fraction, rel=0.1)
        assert one.ledger.frequency == pytest.approx(two.ledger.frequency, rel=0.01)
        # What was chosen need not be said.
        assert (two.ledger.bits_down < one.ledger.bits_down).all()


# --- who takes nothing ------------------------------------------------------------------------


def fleet_of(*speeds: float) -> Fleet:
    return Fleet(tuple(Group(speed=speed, frequency=(1e8, 1e9)) for speed in speeds))


@pytest.mark.parametrize("server", [False, True], ids=["on the device", "on the server"])
def test_who_cannot_do_anything_is_in_the_books_and_the_round_goes_on(server: bool) -> None:
    method = replace(anycost(seconds=1.0, **TRAINING), select=Everyone())
    if server:
        plan = Assigned(method.plan, method.choose)
        method = replace(method, plan=plan, choose=fedavg().choose)
    (step,) = played(method, fleet_of(1e8, 1e4), 1)
    assert {row.level for row in small.rows(step)} == {0, 1}
    for row in small.rows(step):
        if row.level == 0:
            assert not row.failure
            continue
        assert row.failure == "over budget: no size fits 1 s"
        spent = (
            row.bits_down,
            row.bits_up,
            row.flops,
            row.download_seconds,
            row.compute_seconds,
            row.upload_seconds,
        )
        assert spent == (0.0,) * 6
        assert row.choice == -1
        assert np.isnan([row.channel_share, row.measured_sent_fraction, row.loss]).all()
    assert step.time < 1.0  # nobody waits for those who were never asked
    assert not small.identical(step.params, small.task().params)


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        (Synchronous(patience=7.0), 7.0),
        (Deadline(4.0), 4.0),
        (Buffered(concurrency=4, buffer_size=2, patience=9.0), 9.0),
        (HoldAndFetch(patience=8.0), 8.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_round_in_which_all_decline_ends_empty(schedule: Any, seconds: float) -> None:
    method = replace(anycost(seconds=1.0, count=4, **TRAINING), schedule=schedule)
    first, second = played(method, fleet_of(1e4), 2)
    assert (first.time, second.time) == (seconds, 2 * seconds)
    for step in (first, second):
        assert small.identical(step.params, small.task().params)
        assert len(step.ledger) == 4
        assert all(reason.startswith("over budget") for reason in step.ledger.failure)
        assert np.isnan(anycost_theory(step.ledger).contraction).all()


@pytest.mark.parametrize(
    "schedule",
    [Deadline(4.0), Buffered(concurrency=3, buffer_size=2, patience=30.0), HoldAndFetch()],
    ids=lambda value: type(value).__name__,
)
def test_other_schedules_go_on_with_those_who_can(schedule: Any) -> None:
    method = replace(anycost(seconds=1.0, count=8, **TRAINING), schedule=schedule)
    steps = played(method, fleet_of(1e8, 1e4))
    reasons = {(row.level, row.failure[:11]) for step in steps for row in small.rows(step)}
    assert (0, "") in reasons
    assert (1, "over budget") in reasons
    assert (0, "over budget") not in reasons
    assert not small.identical(steps[0].params, steps[-1].params)


def test_a_menu_of_one_size_is_that_or_nothing() -> None:
    method = replace(ANYCOST, plan=WidthMenu((1.0,)))
    steps = played(method)
    shares = within(steps, method, CELL)
    assert set(shares) == {1.0}
    rates = [row.sent_fraction for step in steps for row in small.rows(step) if not row.failure]
    assert min(rates) < max(rates) <= 1 / 15
