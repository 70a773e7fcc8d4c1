"""Numbers that change: constant within a slot, the same whoever asks, and true to their law."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import config, rng
from anyfleet.arrays import Floats
from anyfleet.errors import ConfigError
from anyfleet.world.distributions import Categorical, Disc, LogNormal, Normal, Uniform
from anyfleet.world.processes import Redrawn, Replayed, Wandering, changes_by_round
from anyfleet.world.quantities import Moments, Number, Quantity, When, slot, slot_end


def keys(count: int, seed: int = 0) -> Tensor:
    return rng.fold(rng.root(seed, "processes"), torch.arange(count))


def step(number: int) -> When:
    return When(now=0.0, round_index=number)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("second, rate,loss\n0,4.5,0\n1,2,0.5\n\n2,1e1,0\n3,0,1\n")
    return file


PROCESSES: tuple[Quantity, ...] = (
    Redrawn(Disc(550.0)),
    Redrawn(LogNormal(1.0, 0.2, high=3.0), every=7.0),
    Wandering(8e7),
    Wandering(Uniform(1.0, 2.0), persistence=0.5, every=0.3),
    Wandering(Redrawn(Categorical((1.0, 2.0)), every=2.0), every=5.0),
)


# -- slots ------------------------------------------------------------------------------------


@given(st.floats(0, 1e7), st.floats(1e-3, 1e5))
def test_a_slot_contains_the_moment_and_ends_after_it(now: float, every: float) -> None:
    count = slot(When(now, 0), every)
    assert count * every <= now < slot_end(When(now, 0), every)


@given(st.integers(0, 10_000), st.floats(1e-3, 1e5))
@example(1844, 374.38034368205786)  # (1845 * every) / every is rounded to less than 1845
def test_a_slot_begins_where_the_last_one_ended(count: int, every: float) -> None:
    start = float(slot_end(When(count * every, 0), every))
    assert slot(When(start, 0), every) == count + 1
    assert slot(When(math.nextafter(start, 0), 0), every) == count


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@given(now=st.floats(0, 1e5), share=st.floats(0, 1, exclude_max=True), number=st.integers(0, 99))
@settings(max_examples=20)
def test_nothing_changes_before_until(
    process: Quantity, now: float, share: float, number: int
) -> None:
    when = When(now, number)
    end = float(process.until(when))
    assert end > now
    later = now + share * (min(end, 1e9) - now)
    if later < end:  # It may have been rounded up.
        before, after = process.at(keys(20), when), process.at(keys(20), When(later, number))
        assert np.array_equal(before, after)


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_it_does_change_at_until(process: Quantity) -> None:
    when = When(3.0, 4)
    end = float(process.until(when))
    after = When(3.0, 5) if math.isinf(end) else When(end, 4)
    assert not np.array_equal(process.at(keys(100), when), process.at(keys(100), after))


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@given(picked=st.lists(st.integers(0, 99), max_size=30), moments=st.permutations(range(6)))
@settings(max_examples=10)
def test_any_devices_at_any_moments_in_any_order(
    process: Quantity, picked: list[int], moments: list[int]
) -> None:
    """The very same bits: nothing depends on who is asked with whom, or on what came before."""
    whole = {moment: process.at(keys(100), When(moment * 2.5, moment)) for moment in range(6)}
    for moment in moments:
        some = process.at(keys(100)[picked], When(moment * 2.5, moment))
        assert some.tolist() == whole[moment][picked].tolist()


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_numbers_lie_within_the_bounds(process: Quantity) -> None:
    low, high = process.bounds()
    seen = np.stack([process.at(keys(2000), When(7.0 * n, n)) for n in range(5)])
    assert seen.dtype == np.float64
    assert low <= seen.min()
    assert seen.max() <= high < math.inf


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
@pytest.mark.parametrize("complete", [False, True])
def test_a_process_survives_its_file(process: Quantity, complete: bool) -> None:
    kind: Any = Quantity
    assert config.load(config.dump(process, complete=complete), kind) == process


# -- redrawn ----------------------------------------------------------------------------------


def test_a_redraw_is_a_draw_of_the_law_each_time_another() -> None:
    process = Redrawn(Disc(550.0, floor=0.0))
    seen = np.stack([process.at(keys(500), step(number)) for number in range(40)])
    assert len(np.unique(seen)) == seen.size
    assert seen.mean() == pytest.approx(550 * 2 / 3, abs=4 * 550 / math.sqrt(18 * seen.size))
    # Neither do devices resemble themselves a step later.
    assert abs(np.corrcoef(seen[:-1].ravel(), seen[1:].ravel())[0, 1]) < 4 / math.sqrt(seen.size)


def test_seconds_or_steps_decide_when_to_redraw() -> None:
    by_step, by_time = Redrawn(Uniform(0.0, 1.0)), Redrawn(Uniform(0.0, 1.0), every=10.0)
    one = keys(3)
    assert np.array_equal(by_step.at(one, When(0.0, 2)), by_step.at(one, When(99.0, 2)))
    assert np.array_equal(by_time.at(one, When(20.0, 0)), by_time.at(one, When(29.9, 7)))
    assert np.array_equal(by_step.at(one, When(0.0, 2)), by_time.at(one, When(25.0, 0)))
    assert by_step.until(When(5.0, 0)) == math.inf
    assert by_time.until(When(25.0, 0)) == 30.0


# -- wandering --------------------------------------------------------------------------------


def logs(process: Wandering, devices: int, steps: int) -> Floats:
    """The standard normal process behind a wandering number of mean 1: [steps, devices]."""
    seen = np.stack([process.at(keys(devices), step(number)) for number in range(steps)])
    return (np.log(seen) + process.spread**2 / 2) / process.spread


@pytest.mark.parametrize("persistence", [0.0, 0.3, 0.8, 0.97])
def test_wandering_equals_the_plain_recurrence(persistence: float) -> None:
    devices, past, steps = 6, 800, 12
    z = np.zeros(devices)
    plain = []
    for number in range(-past, steps):
        fresh = rng.normal(rng.fold(keys(devices), number), 1)[:, 0].numpy()
        z = persistence * z + math.sqrt(1 - persistence**2) * fresh
        plain.append(z)
    process = Wandering(1.0, persistence=persistence, spread=0.4, floor=0.0)
    assert np.abs(logs(process, devices, steps) - np.stack(plain[past:])).max() < 1e-5


@pytest.mark.parametrize(("persistence", "spread"), [(0.8, 0.4), (0.5, 1.0), (0.0, 0.2)])
def test_wandering_is_stationary_with_the_mean_and_memory_of_its_law(
    persistence: float, spread: float
) -> None:
    process = Wandering(1.0, persistence=persistence, spread=spread, floor=0.0)
    z = logs(process, 4000, 8)
    # Devices are independent, so each step alone is an honest sample of 4000.
    slack = 4 / math.sqrt(4000)
    assert np.abs(z.mean(axis=1)).max() < slack
    assert np.abs(z.var(axis=1) - 1).max() < slack * math.sqrt(2)
    for lag in (1, 3):
        found = (z[lag:] * z[:-lag]).mean(axis=1)
        assert np.abs(found - persistence**lag).max() < slack * math.sqrt(1 + persistence**2)
    rates = np.exp(spread * z - spread**2 / 2)
    deviation = math.sqrt(math.expm1(spread**2))
    assert np.abs(rates.mean(axis=1) - 1).max() < slack * deviation


def test_the_mean_is_preserved_also_at_the_widest_spread() -> None:
    """By integration over the clipped z, as no sample is large enough to see it."""
    z = np.linspace(-16, 16, 200_001)
    weight = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    process = Wandering(1.0, spread=4.0, floor=0.0)
    clipped = process._factor(np.clip(z, -8, 8))
    assert (weight * clipped).sum() == pytest.approx(1, abs=1e-4)
    assert process.bounds()[1] == pytest.approx(math.exp(4 * 8 - 8))


@pytest.mark.parametrize(("extreme", "end"), [(9.0, 1), (math.inf, 1), (-9.0, 0)])
def test_no_draw_is_too_extreme_for_the_bounds(
    monkeypatch: pytest.MonkeyPatch, extreme: float, end: int
) -> None:
    process = Wandering(3.0, spread=1.0, floor=0.0)
    drawn = torch.tensor(extreme, dtype=torch.float64)
    monkeypatch.setattr(rng, "normal", lambda key, count: drawn.expand(*key.shape, count))
    assert process.at(keys(2), step(0)).tolist() == [process.bounds()[end]] * 2


def test_the_floor_lifts_the_slow_and_leaves_the_others() -> None:
    free, floored = Wandering(10.0, spread=1.0, floor=0.0), Wandering(10.0, spread=1.0, floor=0.3)
    slow, lifted = free.at(keys(2000), step(3)), floored.at(keys(2000), step(3))
    assert (slow < 3.0).mean() > 0.1
    assert np.array_equal(lifted, np.maximum(slow, 3.0))
    assert floored.bounds()[0] == pytest.approx(3.0)


def test_each_device_wanders_about_its_own_mean() -> None:
    own = Uniform(1.0, 100.0)
    process = Wandering(own, spread=0.1, persistence=0.0, floor=0.0)
    average = np.mean([process.at(keys(50), step(number)) for number in range(400)], axis=0)
    means = own.draw(rng.fold(keys(50), "mean"))
    assert np.abs(average / means - 1).max() < 4.5 * 0.1 / math.sqrt(400)


def test_without_spread_a_number_stands_still() -> None:
    process = Wandering(5.0, spread=0.0)
    assert process.at(keys(3), step(9)).tolist() == [5.0, 5.0, 5.0]
    assert process.bounds() == (5.0, 5.0)


def test_wandering_ends_with_its_mean_or_its_slot() -> None:
    process = Wandering(Redrawn(Uniform(1.0, 2.0), every=2.0), every=5.0)
    assert process.until(When(1.0, 0)) == 2.0
    assert process.until(When(4.5, 0)) == 5.0


def test_many_devices_are_summed_like_few() -> None:
    """Above some number of devices the innovations come in several blocks."""
    process = Wandering(1.0, persistence=0.9)
    many = process.at(keys(20_000), step(5))
    assert many[-3:].tolist() == process.at(keys(20_000)[-3:], step(5)).tolist()


# -- replayed ---------------------------------------------------------------------------------


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), min_size=1, max_size=12)


@pytest.mark.parametrize("persistence", [0.0, 0.3, 0.8])
@given(rows=ROWS, in_order=st.booleans())
def test_neighbours_in_time_are_summed_as_if_alone(
    persistence: float, rows: list[tuple[int, int]], in_order: bool
) -> None:
    """The same device in later slots, close or far, in the same, or in earlier ones."""
    process = Wandering(1.0, persistence=persistence)
    pairs = np.array(sorted(rows) if in_order else rows)
    many = Moments(np.zeros(len(pairs)), pairs[:, 1])
    found = process.at(keys(3)[torch.from_numpy(pairs[:, 0])], many)
    for (device, number), one in zip(pairs.tolist(), found.tolist(), strict=True):
        assert process.at(keys(3)[[device]], step(number)).tolist() == [one]


BY_ROUND = Redrawn(Uniform(1.0, 2.0))
BY_TIME = Redrawn(Uniform(1.0, 2.0), every=3.0)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (5.0, False),
        (Uniform(1.0, 2.0), False),
        (BY_TIME, False),
        (BY_ROUND, True),
        (Wandering(5.0, every=1.0), False),
        (Wandering(5.0), True),
        (Wandering(BY_TIME, every=1.0), False),
        (Wandering(BY_ROUND, every=1.0), True),
    ],
)
def test_it_is_known_what_waits_for_a_new_round(number: Number, expected: bool) -> None:
    assert changes_by_round(number) == expected


def test_a_trace_is_replayed_row_by_row_and_again(trace: Path) -> None:
    process = Replayed(trace, "rate", shift=False, scale=2.0)
    seen = [process.at(keys(2), step(number)).tolist() for number in range(6)]
    assert seen == [[each] * 2 for each in (9.0, 4.0, 20.0, 0.0, 9.0, 4.0)]
    assert process.bounds() == (0.0, 20.0)


def test_devices_start_at_rows_of_their_own(trace: Path) -> None:
    process = Replayed(trace, "rate", every=10.0)
    first = process.at(keys(4000), When(0.0, 0))
    follows = {4.5: 2.0, 2.0: 10.0, 10.0: 0.0, 0.0: 4.5}
    for rate in follows:
        assert (first == rate).mean() == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / 4000))
    second = process.at(keys(4000), When(10.0, 0))
    assert second.tolist() == [follows[rate] for rate in first.tolist()]
    assert process.at(keys(4000)[7:9], When(39.0, 5)).tolist() == [
        follows[follows[rate]] for rate in second[7:9].tolist()
    ]
    assert process.until(When(39.0, 0)) == 40.0
    assert Replayed(trace, "rate").until(When(39.0, 0)) == math.inf


def test_a_trace_is_read_once(trace: Path) -> None:
    process = Replayed(trace, "loss", shift=False)
    trace.unlink()
    assert process.at(keys(1), step(1)).tolist() == [0.5]


def test_the_numbers_of_a_trace_cannot_be_changed_from_outside(trace: Path) -> None:
    process = Replayed(trace, "rate", shift=False)
    process.at(keys(1), step(0))[0] = 99.0
    assert process.at(keys(1), step(0)).tolist() == [4.5]


def test_a_path_and_its_text_are_one_part(trace: Path) -> None:
    assert Replayed(str(trace), "rate") == Replayed(trace, "rate")
    kind: Any = Quantity
    for part in (Replayed(str(trace), "rate", every=3.0), Replayed(trace, "loss", shift=False)):
        assert config.load(config.dump(part), kind) == part


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    file = tmp_path / "marked.csv"
    file.write_bytes(b"\xef\xbb\xbfrate\r\n3\r\n")
    assert Replayed(file, "rate").at(keys(1), step(0)).tolist() == [3.0]


FILES = {
    "rate\n1\nfast\n": ", line 3: 'fast' is not a number.",
    "rate\n1\n\n-2\n": ", line 4: '-2' must be finite and not negative.",
    "rate\nnan\n": ", line 2: 'nan' must be finite and not negative.",
    "rate\n1\ninf\n": ", line 3: 'inf' must be finite and not negative.",
    "second,rate\n1,2\n3\n": ", line 3: '' is not a number.",
    "rate\n": " has no rows below its header.",
    "": " has no 'rate', only [].",
    "rates,x\n1,2\n": " has no 'rate', only ['rates', 'x'], did you mean \"rates\"?",
}


@pytest.mark.parametrize("text", FILES)
def test_a_bad_trace_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{file}{FILES[text]}") + "$"):
        Replayed(file, "rate")


def test_a_trace_that_is_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Replayed.file .*none.csv cannot be read: No such file"):
        Replayed(tmp_path / "none.csv", "rate")
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory"):
        Replayed(tmp_path, "rate")
    (tmp_path / "binary.csv").write_bytes(b"rate\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"binary.csv is not a CSV file"):
        Replayed(tmp_path / "binary.csv", "rate")


# -- refusals ---------------------------------------------------------------------------------

BAD: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: Redrawn(Disc(5.0), every=0.0), "Redrawn.every must be a positive number of seconds"),
    (lambda: Redrawn(Disc(5.0), every=math.inf), "Redrawn.every must be a positive number"),
    (lambda: Wandering(1.0, every=-1.0), "Wandering.every must be a positive number"),
    (lambda: Wandering(-1.0), "Wandering.mean must be finite and not negative, got -1.0."),
    (lambda: Wandering(math.inf), "Wandering.mean must be finite and not negative, got inf."),
    (lambda: Wandering(Normal(1.0, 1.0)), "Wandering.mean must be finite and not negative"),
    (lambda: Wandering(1.0, persistence=0.995), "Wandering.persistence must lie in [0, 0.99]"),
    (lambda: Wandering(1.0, persistence=-0.1), "Wandering.persistence must lie in [0, 0.99]"),
    (lambda: Wandering(1.0, spread=-0.1), "Wandering.spread must lie in [0, 4], got -0.1."),
    (lambda: Wandering(1.0, spread=4.1), "Wandering.spread must lie in [0, 4], got 4.1."),
    (lambda: Wandering(1.0, floor=1.5), "Wandering.floor must lie in [0, 1], got 1.5."),
    (lambda: Wandering(1.0, floor=math.nan), "Wandering.floor must lie in [0, 1], got nan."),
    (lambda: Replayed("x", "y", every=-1.0), "Replayed.every must be a positive number"),
    (lambda: Replayed("x", "y", scale=0.0), "Replayed.scale must be positive and finite"),
)


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_an_impossible_process_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_file_reports_every_mistake_with_its_path() -> None:
    rate = {"use": "anyfleet.world.processes:Wandering", "mean": 1, "spread": 9, "floor": 2}
    place = {"use": "anyfleet.world.processes:Redrawn", "of": {"use": rate["use"], "mean": 1}}
    kind: Any = dict[str, Quantity]
    with pytest.raises(ConfigError) as caught:
        config.load({"rate": rate, "place": place}, kind)
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"rate.spread", "rate.floor", "place.of.use"}
    assert "Wandering is no Distribution: it lacks draw." in str(caught.value)
