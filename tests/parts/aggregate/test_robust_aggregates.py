"""Clipped mean, trimmed mean and coordinate median, beside plain loops over coordinates."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.core import stacks
from anyfleet.core.ordered_stacks import base
from anyfleet.core.slots import Aggregate
from anyfleet.core.updates import Updates
from anyfleet.elastic import Slice, cut, place
from anyfleet.methods import heterofl
from anyfleet.parts.aggregate import Clipped, CoordinateMedian, Mean, ServerOptimised, TrimmedMean
from anyfleet.parts.norm import PerWidth
from anyfleet.world import levels
from tests.core.test_updates import BLUEPRINT, MATRIX, rows_and_columns, updates_of
from tests.helpers import small
from tests.helpers.vectors import PLACE, step, vectors

Reduction = Callable[[Sequence[float]], float]


def trimmed(share: float) -> Reduction:
    def mean(values: Sequence[float]) -> float:
        out = int(share * len(values) + 1e-9)
        return statistics.fmean(sorted(values)[out : len(values) - out])

    return mean


def plain(
    changes: Sequence[Mapping[str, Tensor]],
    slices: Sequence[Slice],
    masks: Sequence[Mapping[str, Tensor]],
    reduce: Reduction,
) -> dict[str, Tensor]:
    """Coordinate by coordinate, one number at a time."""
    found = {}
    for name in dict.fromkeys(name for change in changes for name in change):
        shape = BLUEPRINT.shape(base(name))
        new = torch.zeros(shape, dtype=torch.float64)
        values: dict[tuple[int, ...], list[float]] = {}
        for change, slice_, mask in zip(changes, slices, masks, strict=True):
            if name not in change:
                continue
            where = torch.arange(math.prod(shape)).reshape(shape)
            where = where[place(base(name), slice_, BLUEPRINT)].flatten()
            trained = mask.get(base(name), torch.ones(())).expand_as(change[name]).flatten()
            for at, value, counts in zip(
                where.tolist(), change[name].flatten().tolist(), trained.tolist(), strict=True
            ):
                if counts:
                    values.setdefault((at,), []).append(value)
        for (at,), each in values.items():
            new.view(-1)[at] = reduce(each)
        found[name] = new
    return found


def some(
    count: int, seed: int
) -> tuple[list[dict[str, Tensor]], list[Slice], list[dict[str, Tensor]]]:
    """Updates of unequal slices, some of them masked, some with names per width."""
    noise = torch.Generator().manual_seed(seed)
    parts = [Slice(), rows_and_columns((0, 1)), rows_and_columns((0, 2)), rows_and_columns((1,))]
    changes, slices, masks = [], [], []
    for row in range(count):
        part = parts[row % len(parts)]
        whole = {
            name: torch.randint(-4, 5, BLUEPRINT.shape(name), generator=noise).double() / 4
            for name in BLUEPRINT.params
        }
        own = cut(whole, part, BLUEPRINT)
        if row % 3 == 2:
            own["2.bias@0.5"] = own.pop("2.bias")
        if row % 4 == 3:
            del own["0.weight"]
        changes.append(own)
        slices.append(part)
        flags = torch.randint(0, 2, own[MATRIX].shape[:1], generator=noise)
        masks.append({MATRIX: flags[:, None].float()} if row % 2 else {})
    return changes, slices, masks


@pytest.mark.parametrize("block", [1, 4, 1 << 16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 11])
def test_every_coordinate_is_decided_by_those_who_trained_it(
    count: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values repeat, so that there are ties; some coordinates have an even number of values."""
    monkeypatch.setattr(stacks, "_CACHED", block)
    changes, slices, masks = some(count, count)
    found = updates_of(changes, slices=slices, masks=masks)
    for part, reduce in (
        (CoordinateMedian(), statistics.median),
        (TrimmedMean(0.1), trimmed(0.1)),
        (TrimmedMean(0.3), trimmed(0.3)),
        (TrimmedMean(0.0), statistics.fmean),
    ):
        expected = plain(changes, slices, masks, reduce)
        start = {name: torch.full_like(value, 7.0) for name, value in expected.items()}
        new = step(part, found, model=start).model
        assert new.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(new[name], 7.0 + value, rtol=0, atol=1e-12)


def test_a_coordinate_of_three_has_a_median_of_three_and_one_of_nobody_stays() -> None:
    half = rows_and_columns((0, 1))
    changes = [{MATRIX: torch.full((3, 3), value)} for value in (1.0, 9.0)]
    narrow = {MATRIX: torch.full((2, 2), 2.0)}
    found = updates_of([*changes, narrow], slices=[Slice(), Slice(), half])
    median = step(CoordinateMedian(), found, model={MATRIX: torch.zeros(3, 3)}).model[MATRIX]
    assert median.tolist() == [[2, 2, 5], [2, 2, 5], [5, 5, 5]]
    alone = updates_of([narrow], slices=[half])
    for part in (CoordinateMedian(), TrimmedMean(0.4), Clipped()):
        stayed = step(part, alone, model={MATRIX: torch.ones(3, 3)}).model[MATRIX]
        assert stayed.tolist() == [[3, 3, 1], [3, 3, 1], [1, 1, 1]]


def test_a_share_is_of_those_who_trained_a_coordinate() -> None:
    values = [[float(number), 0.0] for number in (1, 2, 3, 4, 1000)]
    new = step(TrimmedMean(0.2), vectors(values)).model[PLACE]
    assert new.tolist() == [3.0, 0.0]
    # One of four is no fifth of them: nothing is left out.
    assert step(TrimmedMean(0.2), vectors(values[1:])).model[PLACE][0] == 1009 / 4


@pytest.mark.parametrize(
    "part", [CoordinateMedian(), TrimmedMean(0.4), Clipped(), Clipped(length=2.0)], ids=repr
)
def test_who_comes_first_does_not_matter_and_who_has_no_samples_has_no_vote(
    part: Aggregate,
) -> None:
    values = [[1.0, 0.0], [1.0, 2.0], [0.0, 1.0], [900.0, -900.0]]
    ends = {
        tuple(step(part, vectors([values[i] for i in order])).model[PLACE].tolist())
        for order in itertools.permutations(range(3))
    }
    assert len({tuple(round(x, 12) for x in end) for end in ends}) == 1
    silent = step(part, vectors(values, samples=[3, 3, 3, 0])).model[PLACE]
    if not isinstance(part, Clipped):  # whose median all updates enter
        assert silent.tolist() == list(next(iter(ends)))
    nobody = step(part, vectors(values, samples=[0] * 4)).model[PLACE]
    assert nobody.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("part", [CoordinateMedian(), TrimmedMean(0.25), Clipped()], ids=repr)
@pytest.mark.parametrize("bad", [3.4e38, -3.4e38, math.nan, math.inf])
def test_one_of_five_cannot_ruin_the_model(part: Aggregate, bad: float) -> None:
    honest = [[1.0, 2.0], [1.1, 2.1], [0.9, 1.9], [1.0, 2.0]]
    found = vectors([*honest, [bad, bad]])
    new = step(part, found).model[PLACE]
    assert bool(torch.isfinite(new).all())
    assert float((new - torch.tensor([1.0, 2.0])).abs().max()) < 1.2


def test_numbers_whose_sum_is_too_large_have_a_mean_and_a_median() -> None:
    large = {MATRIX: torch.full((3, 3), 3e38)}
    found = updates_of([large] * 4)
    for part in (TrimmedMean(0.0), CoordinateMedian()):
        new = step(part, found, model={MATRIX: torch.zeros(3, 3)}).model[MATRIX]
        assert bool((new == 3e38).all())


# --- clipping ---------------------------------------------------------------------------------


def test_an_update_that_is_too_long_is_shortened_in_its_direction() -> None:
    found = vectors([[3.0, 4.0], [0.0, 1.0], [0.6, 0.8]])
    stepped = step(Clipped(length=1.0), found)
    assert stepped.model[PLACE].tolist() == pytest.approx([1.2 / 3, 2.6 / 3])
    assert stepped.diagnostics == {"clipped": (0,), "clipped_count": 1}
    median = step(Clipped(times=2.0), found).model[PLACE]
    assert median.tolist() == pytest.approx([1.8 / 3, 3.4 / 3])
    assert step(Clipped(times=9.0), found).model[PLACE].tolist() == pytest.approx([1.2, 5.8 / 3])


def test_clipping_compares_slices_by_coordinate_and_by_mask() -> None:
    """The narrow one is as large as the wide ones wherever it trained, and longer nowhere."""
    half = rows_and_columns((0, 1))
    mask = {MATRIX: torch.tensor([[1.0], [0.0], [0.0]])}
    wide, masked = ({MATRIX: torch.full((3, 3), 1.0)} for _ in range(2))
    narrow = {MATRIX: torch.full((2, 2), 1.0)}
    found = updates_of(
        [wide, narrow, masked, {MATRIX: torch.full((2, 2), 4.0)}],
        slices=[Slice(), half, Slice(), half],
        masks=[{}, {}, mask, {}],
    )
    assert found.root_mean_squares().tolist() == [1.0, 1.0, 1.0, 4.0]
    stepped = step(Clipped(), found, model={MATRIX: torch.zeros(3, 3)})
    assert stepped.diagnostics["clipped"] == (3,)
    torch.testing.assert_close(stepped.model[MATRIX], torch.ones(3, 3))


def test_updates_that_change_nothing_have_no_say_in_the_median() -> None:
    found = vectors([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    assert step(Clipped(), found).model[PLACE].tolist() == [0.25, 0.25]
    assert step(Clipped(), vectors([[0.0, 0.0]] * 2)).model[PLACE].tolist() == [0.0, 0.0]


def test_nothing_to_clip_is_the_inner_aggregator_bit_for_bit() -> None:
    changes, slices, masks = some(6, 1)
    found = updates_of(changes, slices=slices, masks=masks, samples=[1, 2, 3, 4, 5, 6])
    start = {n: torch.zeros_like(v) for n, v in plain(changes, slices, masks, max).items()}
    one, two = (step(p, found, model=start).model for p in (Clipped(length=1e9), Mean()))
    assert small.identical(one, two)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TrimmedMean(0.5), "CoordinateMedian"),
        (lambda: TrimmedMean(-0.1), "TrimmedMean.share"),
        (lambda: Clipped(times=0.0), "Clipped.times"),
        (lambda: Clipped(length=-1.0), "Clipped.length"),
        (lambda: Clipped(times=math.nan), "Clipped.times"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make: Callable[[], Aggregate], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


# --- in a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        CoordinateMedian(),
        TrimmedMean(),
        Clipped(),
        ServerOptimised(CoordinateMedian()),
        Clipped(TrimmedMean(0.3), times=2.0),
    ],
    ids=repr,
)
def test_they_run_over_unequal_slices_and_names_per_width(part: Aggregate) -> None:
    method = replace(
        heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=8), norm=PerWidth(), aggregate=part
    )
    fleet = levels(speeds=(1e9, 1e8))
    played = small.steps(method, small.task(), 2, fleet=fleet)
    assert any("@" in name for name in played[-1].params)
    before = small.task().params
    assert any(not torch.equal(played[-1].params[name], before[name]) for name in before)
    assert all(bool(torch.isfinite(value).all()) for value in played[-1].params.values())


def test_sizes_of_updates() -> None:
    changes, slices, masks = some(8, 5)
    found: Updates = updates_of(changes, slices=slices, masks=masks)
    for row, size in enumerate(found.root_mean_squares().tolist()):
        entries = []
        for name, value in changes[row].items():
            mask = masks[row].get(base(name), torch.ones(())).expand_as(value).flatten()
            entries += value.flatten()[mask > 0].tolist()
        assert size == pytest.approx(float(np.sqrt(np.mean(np.square(entries)))))
    nothing = updates_of([{MATRIX: torch.ones(3, 3)}], masks=[{MATRIX: torch.zeros(3, 3)}])
    assert nothing.root_mean_squares().tolist() == [0.0]


def test_sizes_of_numbers_whose_squares_are_infinite() -> None:
    large = torch.full((3, 3), 1e200, dtype=torch.float64)
    found = updates_of([{MATRIX: large}, {MATRIX: large / 1e200}])
    assert found.root_mean_squares()[0] >= 1e199  # torch may well say that it is infinite
    assert found.root_mean_squares()[1] == pytest.approx(1.0)
    assert found.tree_norms({MATRIX: large}).tolist() == [np.inf, np.inf]
