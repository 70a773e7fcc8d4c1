"""FedPMT's counting rules: every number of its table."""

import math
from itertools import pairwise

import pytest
import torch

from anyfleet.elastic import Slice, trace
from anyfleet.elastic.cost.operations import operations
from anyfleet.formulas.fedpmt import (
    CNN_CIFAR,
    CNN_MNIST,
    FCNN,
    Dense,
    Rule,
    feddrop_layers,
    fedpmt_complexity,
)
from anyfleet.formulas.reference.fedpmt_table import (
    fedpmt_complexity_shares,
    fedpmt_deadline_seconds,
)
from anyfleet.tasks import zoo
from tests.elastic.cost.test_operations import HALVES, Layers, traced

RULES: tuple[Rule, ...] = ("paper", "declared", "per_batch")
NETS: dict[str, tuple[Layers, int]] = {
    "fcnn": (FCNN, 12),
    "cnn_mnist": (CNN_MNIST, 12),
    "cnn_cifar": (CNN_CIFAR, 20),
}
# Rows from the fewest trained layers to the full net.
TABLE: dict[tuple[str, Rule], tuple[int, ...]] = {
    ("fcnn", "paper"): (6_473_760, 7_496_160, 9_779_760, 15_305_968),
    ("fcnn", "declared"): (6_473_760, 7_496_160, 9_779_760, 15_301_360),
    ("fcnn", "per_batch"): (6_473_760, 7_496_160, 9_779_760, 15_301_360),
    ("cnn_mnist", "paper"): (745_456, 1_188_336, 1_597_936, 1_828_336),
    ("cnn_mnist", "declared"): (747_112, 1_189_992, 1_599_592, 1_829_992),
    ("cnn_mnist", "per_batch"): (4_267_112, 4_709_992, 9_625_192, 12_389_992),
    ("cnn_cifar", "paper"): (12_864_200, 16_077_200, 24_587_200, 26_187_200, 28_068_800),
    ("cnn_cifar", "declared"): (13_360_400, 16_576_400, 27_986_400, 30_546_400, 32_428_000),
    ("cnn_cifar", "per_batch"): (55_555_600, 58_771_600, 70_181_600, 121_381_600, 159_013_600),
}
# Last layer to first.
BACKWARD: dict[tuple[str, Rule], tuple[int, ...]] = {
    ("fcnn", "paper"): (13_240, 273_200, 1_022_400, 2_283_600, 5_526_208),
    ("fcnn", "declared"): (13_240, 273_200, 1_022_400, 2_283_600, 5_521_600),
    ("cnn_mnist", "paper"): (16_880, 442_880, 409_600, 230_400),
    ("cnn_mnist", "declared"): (16_880, 442_880, 409_600, 230_400),
    ("cnn_cifar", "paper"): (63_400, 3_213_000, 8_510_000, 1_600_000, 1_881_600),
    ("cnn_cifar", "declared"): (63_400, 3_216_000, 11_410_000, 2_560_000, 1_881_600),
}
FORWARD: dict[tuple[str, Rule], int] = {
    ("fcnn", "paper"): 6_187_320,
    ("cnn_mnist", "paper"): 115_200 + 204_800 + 408_576,
    ("cnn_cifar", "paper"): 940_800 + 800_000 + 11_060_000,
    ("cnn_cifar", "declared"): 940_800 + 1_280_000 + 11_060_000 + 16_200,
}
FEDDROP = [
    ("fcnn", 0.54, 6_431_556),
    ("fcnn", 0.61, 7_579_990),
    ("fcnn", 0.73, 9_717_454),
    ("cnn_mnist", 0.1, 1_047_049),
    ("cnn_mnist", 0.26, 1_185_944),
    ("cnn_mnist", 0.73, 1_593_950),
    ("cnn_cifar", 0.40, 12_885_200),
    ("cnn_cifar", 0.54, 16_031_980),
    ("cnn_cifar", 0.88, 24_677_840),
    ("cnn_cifar", 0.93, 26_069_215),
]


def by_depth(name: str, rule: Rule) -> list[float]:
    """From the last layer alone to the full net."""
    layers, batch = NETS[name]
    depths = reversed(range(len(layers)))
    return [fedpmt_complexity(layers, batch, rule, first=first) for first in depths]


@pytest.mark.parametrize(("name", "rule"), TABLE)
def test_table_of_fedpmt(name: str, rule: Rule) -> None:
    rows = TABLE[name, rule]
    assert tuple(by_depth(name, rule)[-len(rows) :]) == rows


@pytest.mark.parametrize(("name", "rule"), BACKWARD)
def test_backward_of_every_layer(name: str, rule: Rule) -> None:
    found = by_depth(name, rule)
    expected = BACKWARD[name, rule]
    assert tuple(more - less for less, more in pairwise(found)) == expected[1:]
    if (name, rule) in FORWARD:
        assert found[0] == FORWARD[name, rule] + expected[0]


@pytest.mark.parametrize(("name", "share", "printed"), FEDDROP)
def test_table_of_feddrop(name: str, share: float, printed: int) -> None:
    layers, batch = NETS[name]
    assert fedpmt_complexity(feddrop_layers(layers, share), batch, "paper", whole=layers) == printed


@pytest.mark.parametrize(("share", "missing"), [(0.54, 6816), (0.61, 6480), (0.73, 5904)])
def test_declared_feddrop_lacks_the_slip_of_fc1(share: float, missing: int) -> None:
    small = feddrop_layers(FCNN, share)
    printed = fedpmt_complexity(small, 12, "paper", whole=FCNN)
    assert fedpmt_complexity(small, 12, "declared") == pytest.approx(printed - missing, abs=1e-6)


@pytest.mark.parametrize(
    ("share", "exact"), [(0.1, 1_047_049.6), (0.26, 1_185_944.96), (0.73, 1_593_950.08)]
)
def test_feddrop_counts_fractions_of_neurons(share: float, exact: float) -> None:
    found = fedpmt_complexity(feddrop_layers(CNN_MNIST, share), 12, "declared")
    activations = 12 * (128 * share + 10)
    assert found - activations == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "rule", "percent"),
    [
        ("cnn_cifar", "per_batch", (34.94, 36.96, 44.14, 76.33, 100)),
        ("cnn_mnist", "per_batch", (34.44, 38.01, 77.69, 100)),
        ("cnn_cifar", "declared", (41.20, 51.12, 86.30, 94.20, 100)),
        ("cnn_cifar", "paper", (45.83, 57.28, 87.60, 93.30, 100)),
        ("fcnn", "paper", (42.30, 48.98, 63.90, 100)),
    ],
)
def test_percentages(name: str, rule: Rule, percent: tuple[float, ...]) -> None:
    found = [round(100 * share, 2) for share in fedpmt_complexity_shares(*NETS[name], rule)]
    assert tuple(found[: len(percent)][::-1]) == percent


def test_printed_percentages_are_truncated() -> None:
    found = [
        math.floor(10_000 * share) / 100
        for share in fedpmt_complexity_shares(CNN_CIFAR, 20, "paper")
    ]
    assert found == [100, 93.29, 87.59, 57.27, 45.83]


LEVELS = (0.2, 0.25, 1 / 3, 0.5, 1)


def test_deadline_times() -> None:
    shares = fedpmt_complexity_shares(CNN_CIFAR, 20, "paper")[::-1]
    rounded = fedpmt_deadline_seconds(shares, LEVELS, 10, digits=2)
    assert rounded == pytest.approx((23.0, 23.2, 26.4, 18.8, 10.0), abs=1e-9)
    exact = fedpmt_deadline_seconds(shares, LEVELS, 10)
    assert exact == pytest.approx((22.92, 22.91, 26.28, 18.66, 10), abs=0.005)


def test_a_third_is_not_thirty_three_hundredths() -> None:
    levels = (0.2, 0.25, 0.33, 0.5, 1)
    shares = fedpmt_complexity_shares(CNN_CIFAR, 20, "paper")[::-1]
    found = fedpmt_deadline_seconds(shares, levels, 10, digits=2)
    assert found[2] == pytest.approx(26.67, abs=0.005)
    assert [seconds > 26.5 for seconds in found] == [False, False, True, False, False]


def test_full_models_within_the_deadline() -> None:
    found = fedpmt_deadline_seconds((1,) * 5, LEVELS, 10)
    assert found == pytest.approx((50, 40, 30, 20, 10))


def test_shares_with_two_digits_are_not_rounded_up() -> None:
    hundredths = [n / 100 for n in range(1, 101)]
    assert fedpmt_deadline_seconds(hundredths, (1,) * 100, 1, digits=2) == tuple(hundredths)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("rule", RULES)
def test_a_suffix_spends_exactly_its_share(name: str, rule: Rule) -> None:
    layers, batch = NETS[name]
    blueprint = traced(name)
    full = operations(blueprint, Slice(), batch, rule)
    for first, share in enumerate(fedpmt_complexity_shares(layers, batch, rule)):
        suffix = blueprint.prefix(1.0, first)
        assert operations(blueprint, suffix, batch, rule) / full == share


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NETS)
def test_operations_of_a_narrow_suffix(name: str, rule: Rule) -> None:
    layers, batch = NETS[name]
    blueprint = traced(name)
    found = operations(blueprint, blueprint.prefix(0.5, first_trained_layer=1), batch, rule)
    assert found == fedpmt_complexity(HALVES[name], batch, rule, first=1, whole=layers)
    assert found < operations(blueprint, blueprint.prefix(0.5), batch, rule)


def test_half_the_width_is_about_a_quarter_of_the_work() -> None:
    blueprint = trace(zoo.perceptron(20, hidden=(600,) * 4), torch.zeros(2, 20))
    full = operations(blueprint, Slice(), 16, "declared")
    half = operations(blueprint, blueprint.prefix(0.5), 16, "declared")
    assert half / full == pytest.approx(0.25, abs=0.01)


def test_paper_knows_three_nets() -> None:
    other = (Dense(784, 400), Dense(400, 10))
    with pytest.raises(ValueError, match=r'C\.1 FCNN.*Use "declared" or "per_batch"'):
        fedpmt_complexity(other, 12, "paper")
    with pytest.raises(ValueError, match="three nets"):
        fedpmt_complexity(feddrop_layers(FCNN, 0.5), 12, "paper")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="batch of at least one"):
        fedpmt_complexity(FCNN, 0, "declared")
    for first in (-1, 5):
        with pytest.raises(ValueError, match=f"layers 0 to 4; {first} cannot"):
            fedpmt_complexity(FCNN, 12, "declared", first=first)
    with pytest.raises(ValueError, match="Unknown rule 'flops'"):
        fedpmt_complexity(FCNN, 12, "flops")  # type: ignore[arg-type]
    for share in (0, 1.1):
        with pytest.raises(ValueError, match=r"share in \(0, 1\]"):
            feddrop_layers(FCNN, share)
    for levels in ((1.0,), (1.0, 0.0)):
        with pytest.raises(ValueError, match="one positive level for each of 2 shares"):
            fedpmt_deadline_seconds((0.5, 1), levels, 10)
