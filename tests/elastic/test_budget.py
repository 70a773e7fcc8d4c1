"""The inverse of cost is exact: the next larger step does not fit."""

import math
from collections.abc import Callable, Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from anyfleet.elastic import Blueprint, Budget, Cost, Slice, cost, largest
from tests.helpers.nets import traced

MEASURES: dict[str, Callable[[Cost], int]] = {
    "flops": lambda c: c.flops,
    "nbytes": lambda c: c.nbytes,
    "memory": lambda c: c.memory,
}


def slices_by_width(blueprint: Blueprint, widths: Mapping[str, float]) -> list[Slice]:
    """Every slice along the width, smallest first, found without bisection."""
    scales = sorted(
        {
            k / (blueprint.axes[n].size * width)
            for n, width in widths.items()
            for k in range(1, blueprint.axes[n].size + 1)
        }
    )
    found = [
        blueprint.prefix({n: min(1.0, scale * w) for n, w in widths.items()}) for scale in scales
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", ["resnet_basic", "language_fused"])
def test_widest_slice_within_a_budget(name: str, measure: str) -> None:
    blueprint = traced(name).blueprint
    sizes = [
        MEASURES[measure](cost(blueprint, s, 2))
        for s in slices_by_width(blueprint, equal(blueprint))
    ]
    slices = slices_by_width(blueprint, equal(blueprint))

    @given(st.integers(int(0.9 * sizes[0]), int(1.1 * sizes[-1])))
    @settings(max_examples=20)
    def check(limit: int) -> None:
        found = largest(blueprint, Budget(**{measure: limit}, batch=2))
        fitting = [s for s, size in zip(slices, sizes, strict=True) if size <= limit]
        assert found == (fitting[-1] if fitting else None)

    check()


def equal(blueprint: Blueprint) -> dict[str, float]:
    return {n: 1.0 for n, a in blueprint.axes.items() if a.kind in ("channels", "heads")}


def test_widths_may_differ_per_layer() -> None:
    blueprint = traced("lenet").blueprint
    widths = {"c1": 1.0, "c2": 0.5, "f1": 0.25}
    slices = slices_by_width(blueprint, widths)
    costs = [cost(blueprint, s).flops for s in slices]
    for at, limit in enumerate(costs):
        assert largest(blueprint, Budget(flops=limit), widths=widths) == slices[at]
        smaller = largest(blueprint, Budget(flops=limit - 1), widths=widths)
        assert smaller == (slices[at - 1] if at else None)
    counts = slices[3].shape(blueprint)[0]
    assert len({count / blueprint.axes[axis].size for axis, count in counts}) > 1


def test_named_axes_only() -> None:
    blueprint = traced("language_fused").blueprint
    heads = {n: 1.0 for n, a in blueprint.axes.items() if a.kind == "heads"}
    whole = cost(blueprint).flops
    found = largest(blueprint, Budget(flops=whole - 1), widths=heads)
    assert found is not None
    assert {axis for axis, _ in found.keep} == set(heads)


@pytest.mark.parametrize("measure", ["flops", "memory"])
def test_most_trained_layers_within_a_budget(measure: str) -> None:
    blueprint = traced("vgg_batch").blueprint
    start = blueprint.prefix(0.5)
    slices = [Slice(start.keep, first) for first in range(len(blueprint.layers))]
    sizes = [MEASURES[measure](cost(blueprint, s, 4)) for s in slices]
    assert sizes == sorted(sizes, reverse=True)
    for first, size in enumerate(sizes):
        exact = Budget(**{measure: size}, batch=4)
        less = Budget(**{measure: size - 1}, batch=4)
        assert largest(blueprint, exact, "trained_layers", start=start) == slices[first]
        smaller = slices[first + 1] if first + 1 < len(slices) else None
        assert largest(blueprint, less, "trained_layers", start=start) == smaller


def test_seconds_are_flops_by_speed_and_all_limits_hold() -> None:
    blueprint = traced("lenet").blueprint
    work = cost(blueprint).flops
    by_work = largest(blueprint, Budget(flops=work / 3))
    assert by_work is not None
    assert largest(blueprint, Budget(seconds=work / 3e6, speed=1e6)) == by_work
    tight = cost(blueprint, by_work).nbytes - 1
    both = largest(blueprint, Budget(flops=work / 3, nbytes=tight))
    assert both is not None
    assert cost(blueprint, both).nbytes <= tight
    assert largest(blueprint, Budget(flops=math.inf)) == Slice()


def test_extraction_chooses_the_indices() -> None:
    blueprint = traced("lenet").blueprint
    limit = cost(blueprint).flops / 2

    def trailing(counts: Mapping[str, int]) -> Slice:
        sizes = blueprint.sizes
        return Slice.of({n: range(sizes[n] - c, sizes[n]) for n, c in counts.items()}, blueprint)

    leading = largest(blueprint, Budget(flops=limit))
    found = largest(blueprint, Budget(flops=limit), extract=trailing)
    assert leading is not None
    assert found is not None
    assert found.shape(blueprint) == leading.shape(blueprint)
    assert found != leading


def test_width_keeps_the_first_layer_that_was_given() -> None:
    blueprint = traced("lenet").blueprint
    start = Slice((), 2)
    limit = cost(blueprint, start).flops - 1
    found = largest(blueprint, Budget(flops=limit), start=start)
    assert found is not None
    assert found.first_trained_layer == 2


@pytest.mark.parametrize(
    ("wrong", "because"),
    [
        ({"seconds": 1.0}, "needs a speed"),
        ({"speed": 1.0}, "needs a speed"),
        ({"flops": -1.0}, "positive"),
        ({"nbytes": 0.0}, "positive"),
        ({"memory": math.nan}, "positive"),
        ({"seconds": 1.0, "speed": math.nan}, "positive"),
        ({"flops": 1.0, "batch": 0}, "at least 1"),
        ({}, "needs a limit"),
    ],
)
def test_budget_refuses(wrong: dict[str, float], because: str) -> None:
    with pytest.raises(ValueError, match=because):
        Budget(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [0.0, math.nan])
def test_widths_must_be_positive(width: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        largest(traced("lenet").blueprint, Budget(flops=1e9), widths={"c1": width})
