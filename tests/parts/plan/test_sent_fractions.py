"""Rates by link and by level: how far each device compresses, decided on the server."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Conditions
from anyfleet.core.method import Method
from anyfleet.core.planning import PlanningState, _plans
from anyfleet.core.plans import Plans
from anyfleet.core.server import Server
from anyfleet.elastic import WHOLE
from anyfleet.experiment import Experiment, play
from anyfleet.formulas.fedhq import fedhq_upload_seconds
from anyfleet.methods import fedavg, fedhq
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.plan import (
    Assigned,
    SentFractionByLevel,
    SentFractionByLink,
    WidthByLevel,
    WidthMenu,
)
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Simulated
from anyfleet.store import Recording, Terms, reopen
from anyfleet.world import Fleet, Group, Steady, cell, levels
from tests.helpers import runs, small

BASE = replace(fedavg(lr=0.1, batch_size=16), select=Everyone(), uplink=Hq())


class Fading(Simulated):
    """Devices whose links are down when they carry next to nothing."""

    def conditions(self, devices: Ints) -> Conditions:
        told = super().conditions(devices)
        return replace(told, bit_rate_up=np.where(told.bit_rate_up < 1, 0.0, told.bit_rate_up))


def served(plan: Any, *ups: float, fleet: Fleet | None = None) -> Server:
    """A server whose devices have these links, one after the other."""
    method, task = replace(BASE, plan=plan), small.task()
    links = tuple(Group(count=1, link=Steady(bit_rate_up=up, bit_rate_down=1e6)) for up in ups)
    return Server(method, task, Fading(task, small.world(task, fleet or Fleet(links))), 0)


def planned(server: Server) -> Plans:
    """What all devices shall do."""
    devices = np.arange(small.task().devices)
    state = PlanningState(0, 0, server.visits, server.acknowledged, server.states)
    return _plans(devices, server.method, server.view(), state)


def rates(plan: Any, *ups: float) -> list[float]:
    """By device, whichever it became; sorted as the links are."""
    server = served(plan, *ups)
    links = server.view().conditions(np.arange(8)).bit_rate_up
    found = planned(server).hyperparameters.sent_fraction[np.argsort(links, kind="stable")]
    return list(found)


# --- how long an upload takes -----------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 9), st.floats(0.01, 1.0))
def test_1_16_the_mean_rate_in_that_time_is_the_one_wanted(
    seed: int, count: int, rate: float
) -> None:
    draw = np.random.default_rng(seed)
    links = 10 ** draw.uniform(3, 8, count) * (draw.uniform(size=count) > 0.2)
    seconds, alive = fedhq_upload_seconds(links, 1e6, rate), (links > 0).mean()
    if rate > alive * (1 + 1e-9):
        assert seconds == np.inf
        return

    def mean(after: float) -> float:
        return float(np.minimum(links * after / 1e6, 1.0).mean())

    assert mean(seconds) == pytest.approx(rate, rel=1e-9)
    # By halving, without knowing who is through first.
    low, high = 0.0, float(1e6 / links[links > 0].min())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < rate else (low, middle)
    assert seconds == pytest.approx(high, rel=1e-6)


# --- by link ----------------------------------------------------------------------------------


def test_1_16_rates_go_by_links_and_their_mean_is_the_one_wanted() -> None:
    ups = [1e4 * (1 + k) for k in range(8)]
    found = rates(SentFractionByLink(1 / 33), *ups)
    assert np.mean(found) == pytest.approx(1 / 33)
    assert np.array(found) / found[0] == pytest.approx(np.arange(1, 9))


def test_1_16_nobody_sends_more_than_all_and_the_mean_stays() -> None:
    found = rates(SentFractionByLink(0.5), *[1e4] * 5, 1e7, 1e8, 1e9)
    assert found[5:] == [1.0] * 3
    assert np.mean(found) == pytest.approx(0.5)


def test_1_16_equal_links_have_equal_rates() -> None:
    assert rates(SentFractionByLink(0.1), *[5e5] * 8) == pytest.approx([0.1] * 8)


def test_1_16_seconds_that_are_given_are_kept_to() -> None:
    bits = served(SentFractionByLink(), *[1e5] * 8).view().message_bits(WHOLE, 1.0).update
    found = rates(SentFractionByLink(seconds=0.5), *[1e3 * 4**k for k in range(8)])
    assert found == pytest.approx([min(1.0, 0.5 * 1e3 * 4**k / bits) for k in range(8)])
    assert 1.0 in found


def test_the_better_link_never_sends_the_coarser_update() -> None:
    """Where a link carries everything, that is asked for; a codec's own rate would be less."""
    task, errors = small.task(), []
    for seconds in (0.001, 0.005, 50.0):
        method = replace(fedavg(count=8), plan=SentFractionByLink(seconds=seconds), uplink=Uveq())
        (step,) = small.steps(method, task, 1)
        errors.append(float(step.ledger.distortion.max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 < errors[0]


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_1_16_a_link_that_is_down_gets_an_order_all_the_same(rate: float) -> None:
    """Even if no time at all were enough for the wanted mean."""
    found = rates(SentFractionByLink(rate), 0.5, *[1e5] * 7)
    assert found[0] == 1e-6
    assert found[1:] == pytest.approx([min(1.0, rate * 8 / 7)] * 7)


def test_smaller_models_have_larger_rates_in_the_same_time() -> None:
    fleet = levels(speeds=(1e9, 1e8), bit_rate_up=1e5)
    server = served(SentFractionByLink(0.05, inner=WidthByLevel((1.0, 0.5))), fleet=fleet)
    plans, view = planned(server), server.view()
    sizes = [
        view.message_bits(plans.size_of(row).prefix(view.blueprint), 1.0).update
        for row in range(len(plans))
    ]
    assert len(set(sizes)) == 2
    # The time is that in which whole models have the wanted rate.
    whole = view.message_bits(WHOLE, 1.0).update
    assert plans.hyperparameters.sent_fraction * sizes == pytest.approx([0.05 * whole] * 8)


def test_the_largest_entry_of_a_menu_is_in_time() -> None:
    one = rates(SentFractionByLink(0.05, inner=WidthMenu((1.0, 0.5, 0.25))), *[1e5] * 8)
    assert one == pytest.approx([0.05] * 8)
    half = rates(SentFractionByLink(0.05, inner=WidthMenu((0.5, 0.25))), *[1e5] * 8)
    assert half == pytest.approx(
        rates(SentFractionByLink(0.05, inner=WidthByLevel((0.5,))), *[1e5] * 8)
    )
    # What a server assigns is known when rates are given.
    given_half = Assigned(WidthMenu((0.5, 0.25)), LargestInTime(1e9))
    assert rates(SentFractionByLink(0.05, inner=given_half), *[1e5] * 8) == pytest.approx(half)


def test_uploads_take_that_long() -> None:
    task, fleet = small.task(), cell(devices=8)
    (step,) = small.steps(replace(BASE, plan=SentFractionByLink(0.1)), task, 1, fleet=fleet)
    seconds = step.diagnostics["upload_seconds"]
    bits = served(SentFractionByLink(), *[1e5] * 8).view().message_bits(WHOLE, 1.0).update
    links = step.ledger.bits_up / step.ledger.upload_seconds
    assert np.minimum(seconds * links / bits, 1.0) == pytest.approx(step.ledger.sent_fraction)
    assert np.ptp(step.ledger.sent_fraction) > 0.05
    assert (step.ledger.upload_seconds <= seconds * (1 + 1e-9)).all()


def experiment() -> Experiment:
    method = fedhq(sent_fraction=0.2, count=3, lr=0.1)
    return Experiment(runs.TASK, method, cell(devices=6), rounds=3)


def test_the_time_is_found_once_and_survives(tmp_path: Path) -> None:
    """Devices move: the time of the first round is not that of the others."""
    moments = list(play(experiment()))
    times = [moment.round.diagnostics["upload_seconds"] for moment in moments]
    assert times == times[:1] * 3
    assert len({tuple(moment.round.ledger.sent_fraction) for moment in moments}) == 3
    recording = Recording(tmp_path, experiment(), every=1)
    recording.append(moments[0])
    recording._lock.release()  # as if the process had been killed
    opened = reopen(tmp_path, Terms())
    saved = opened.past.state
    assert saved is not None
    rest = list(play(opened.experiment, opened.task, resume=saved))
    opened.past.lock.release()
    for again, before in zip(rest, moments[1:], strict=True):
        assert (
            again.round.ledger.sent_fraction.tolist() == before.round.ledger.sent_fraction.tolist()
        )
        assert small.identical(again.round.params, before.round.params)
    # It is what was kept that counts, not what would be found now.
    kept = saved.snapshot.states["plan"]
    states = {**saved.snapshot.states, "plan": kept._replace(seconds=kept.seconds / 10)}
    slower = replace(saved, snapshot=replace(saved.snapshot, states=states))
    tenth = next(
        iter(play(opened.experiment, opened.task, resume=slower))
    ).round.ledger.sent_fraction
    whole = moments[1].round.ledger.sent_fraction
    assert (tenth < whole).all()
    assert (10 * tenth)[whole < 1] == pytest.approx(whole[whole < 1])


# --- by level ---------------------------------------------------------------------------------


def test_levels_have_their_rates_and_the_last_is_for_all_below() -> None:
    fleet = levels(speeds=(1e9, 5e8, 2e8, 1e8))
    plans = planned(served(SentFractionByLevel((0.4, 0.1), WidthByLevel((1.0, 0.5))), fleet=fleet))
    level = served(SentFractionByLevel((0.4,)), fleet=fleet).devices.level
    assert plans.hyperparameters.sent_fraction.tolist() == [
        0.4 if each == 0 else 0.1 for each in level
    ]
    assert [plans.size_of(row).width for row in range(len(plans))] == [
        1.0 if each == 0 else 0.5 for each in level
    ]
    assert set(level) == {0, 1, 2, 3}


def test_messages_are_as_long_as_their_levels_allow() -> None:
    method = replace(BASE, plan=SentFractionByLevel((0.3, 0.05)), uplink=Fgc())
    fleet = levels(speeds=(1e9, 1e8))
    (step,) = small.steps(method, small.task(), 1, fleet=fleet)
    for row in small.rows(step):
        assert row.sent_fraction == (0.3, 0.05)[row.level]
        assert 0.5 * row.sent_fraction < row.measured_sent_fraction <= row.sent_fraction


# --- what does not go together ----------------------------------------------------------------


@pytest.mark.parametrize("plan", [SentFractionByLink(), SentFractionByLevel((0.1,))])
@pytest.mark.parametrize("codec", [Raw(), Stc(0.1), TopK(0.1, Qsgd()), ErrorFeedback(Stc())])
def test_e_an_uplink_that_does_not_follow_is_refused(plan: Any, codec: Any) -> None:
    with pytest.raises(
        ValueError, match=r"plan=.*needs an uplink codec that follows.*\(docs/codecs\.md\)"
    ):
        replace(fedavg(), plan=plan, uplink=codec)
    with pytest.raises(ValueError, match=r"docs/codecs\.md"):
        replace(fedavg(), plan=Assigned(plan, LargestInTime(1.0)), uplink=codec)


@pytest.mark.parametrize("codec", [Hq(), Fgc(), Uveq(), TopK(0.5, Uveq()), ErrorFeedback(Fgc())])
def test_e_an_uplink_that_follows_is_taken(codec: Any) -> None:
    assert replace(fedavg(), plan=SentFractionByLink(), uplink=codec).uplink == codec


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: SentFractionByLink(0.0),
            r"SentFractionByLink\.sent_fraction must lie in \(0, 1\]",
        ),
        (
            lambda: SentFractionByLink(1.5),
            r"SentFractionByLink\.sent_fraction must lie in \(0, 1\]",
        ),
        (
            lambda: SentFractionByLink(seconds=0.0),
            r"SentFractionByLink\.seconds must be positive, got 0",
        ),
        (
            lambda: SentFractionByLink(0.1, -2.0),
            r"SentFractionByLink\.seconds must be positive, got -2",
        ),
        (
            lambda: SentFractionByLevel(()),
            r"SentFractionByLevel\.sent_fractions must lie in \(0, 1\], got \(\)",
        ),
        (
            lambda: SentFractionByLevel((0.5, 0.0)),
            r"SentFractionByLevel\.sent_fractions must lie in",
        ),
    ],
)
def test_parameters_without_sense_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_plans_are_the_same_for_the_same_key() -> None:
    server = served(SentFractionByLink(0.1), *[1e5] * 8)
    plan: Any = server.method.plan
    drafts = planned(server)
    one, two = (
        plan(drafts, server.view(), server.states["plan"], rng.root(seed, "plan"))
        for seed in (0, 1)
    )
    assert one.hyperparameters.sent_fraction.tolist() == two.hyperparameters.sent_fraction.tolist()


def test_the_method_has_these_parts() -> None:
    method: Method = fedhq(sent_fraction=0.05, seconds=2.0, keep=0.3)
    assert method.plan == SentFractionByLink(0.05, 2.0)
    assert method.uplink == Hq(keep=0.3)
    assert method.job().report == ("distortion",)
