"""AnycostFL, STC, QSGD, UVeQFed, FedHQ: what equals FedAvg, and what each part changes."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from anyfleet.analysis.anycost_theory import anycost_theory
from anyfleet.core.message_size import typical_sent_fraction
from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.formulas.reference.compression import qsgd_error_bound
from anyfleet.methods import anycost, fedavg, fedhq, qsgd, stc, uveqfed
from anyfleet.parts.aggregate import Aio, ErrorWeighted, Mean
from anyfleet.parts.choose import MostGain
from anyfleet.parts.codec import ErrorFeedback, Hq, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.extract import Leading, Strongest
from anyfleet.parts.plan import SentFractionByLink, WidthMenu
from anyfleet.world import Shannon, Uniform, cell, levels
from tests.helpers import small

SETTINGS: dict[str, Any] = {"count": 5, "lr": 0.1, "batch_size": 8}
TASK = small.task(equal=False, dtype=torch.float64)
FEDAVG = fedavg(**SETTINGS)
# Work and links of the small task: widths differ, and not all rates are the largest.
CELL = cell(
    devices=8,
    flops_per_cycle=4e-4,
    budget=Uniform(3.0, 9.0),
    link=Shannon(band=1e3, station_band=1e5),
)
ANYCOST = anycost(**SETTINGS)


def end(method: Method, rounds: int = 3, **world: Any) -> Params:
    return small.steps(method, TASK, rounds, **world)[-1].params


def change(method: Method, **world: Any) -> dict[str, torch.Tensor]:
    """What a round makes of the initial model."""
    return {n: v - TASK.params[n] for n, v in end(method, 1, **world).items()}


# --- identities -------------------------------------------------------------------------------


@pytest.mark.parametrize("extract", [Strongest(), Leading()])
def test_e_complete_updates_make_anycost_fedavg(extract: Any) -> None:
    method = anycost(widths=(1.0,), sent_fraction=1.0, seconds=1e9, **SETTINGS)
    method = replace(method, uplink=Raw(), extract=extract)
    steps = small.steps(method, TASK, 4)
    assert small.distance(steps[-1].params, end(FEDAVG, 4)) < 1e-12
    assert steps[0].ledger.measured_sent_fraction.tolist() == [1.0] * 5
    theory = anycost_theory(steps[0].ledger)
    assert theory.gain.tolist() == [1.0] * 5
    assert theory.divergence.tolist() == [0.0] * 5
    assert theory.contraction.tolist() == [0.0] * 5


def test_e_aio_takes_samples_for_weights_as_fedavg_does() -> None:
    """Or else the identity would hold for equal sizes only."""
    assert len({TASK.size(device) for device in range(8)}) > 3
    method = anycost(widths=(1.0,), sent_fraction=1.0, seconds=1e9, **SETTINGS)
    equal = replace(method, uplink=Raw(), aggregate=Aio(Mean("equal")))
    assert small.distance(end(equal), end(FEDAVG)) > 1e-4
    plain = replace(FEDAVG, aggregate=Mean("equal"))
    assert small.distance(end(equal), end(plain)) < 1e-12


@pytest.mark.parametrize("codec", [ErrorFeedback(Raw()), TopK(1.0), ErrorFeedback(TopK(1.0))])
def test_1_13_nothing_left_out_is_fedavg_bit_for_bit(codec: Any) -> None:
    task = small.task(equal=False)
    one, two = (small.steps(m, task, 3)[-1] for m in (FEDAVG, replace(FEDAVG, uplink=codec)))
    assert small.identical(one.params, two.params)


def test_1_14_many_levels_of_everything_are_fedavg() -> None:
    fine = change(qsgd(quantisation_levels=1 << 20, keep=1.0, **SETTINGS))
    assert small.distance(change(FEDAVG), fine) < 1e-4
    coarse = change(qsgd(quantisation_levels=4, keep=1.0, **SETTINGS))
    assert small.distance(change(FEDAVG), coarse) > 0.01


def test_1_15_many_bits_for_everything_are_fedavg() -> None:
    fine, coarse = (change(uveqfed(bits_each=bits, keep=1.0, **SETTINGS)) for bits in (12.0, 2.0))
    assert small.distance(change(FEDAVG), fine) < 2e-2
    assert small.distance(change(FEDAVG), coarse) > 5e-2


def test_1_16_links_that_carry_everything_leave_the_error_of_the_quantiser() -> None:
    method = fedhq(sent_fraction=1.0, keep=1.0, **SETTINGS)
    assert isinstance(method.uplink, Hq)
    (step,) = small.steps(method, TASK, 1)
    assert step.ledger.sent_fraction.tolist() == [1.0] * len(step.ledger)
    bound = float(qsgd_error_bound(method.uplink.bucket, method.uplink.quantisation_levels[-1]))
    assert 0 < step.ledger.distortion.max() <= bound
    # Errors of devices are independent, and the weights next to those by samples.
    assert small.distance(change(FEDAVG), change(method)) < np.sqrt(bound)


def test_1_16_equal_links_have_equal_weights() -> None:
    method = replace(fedhq(sent_fraction=0.1, **SETTINGS), aggregate=ErrorWeighted(Mean("equal")))
    (step,) = small.steps(method, TASK, 1, fleet=levels(speeds=(1e9, 1e8)))
    assert np.ptp(step.ledger.sent_fraction) == 0
    assert list(step.diagnostics["weights"].values()) == pytest.approx([0.2] * 5, rel=0.1)
    # Where links differ, weights do: the coarser a message the less.
    (step,) = small.steps(method, TASK, 1, fleet=CELL)
    assert np.ptp(step.ledger.sent_fraction) > 0.05
    weights = [step.diagnostics["weights"][device] for device in step.ledger.device]
    assert np.argsort(weights).tolist() == np.argsort(-step.ledger.distortion).tolist()


# --- the parts --------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[Method, str]] = {
    "without EMS": (replace(ANYCOST, plan=WidthMenu((1.0,))), "plan"),
    "without FGC": (replace(ANYCOST, uplink=Hq()), "uplink"),
    "without AIO": (replace(ANYCOST, aggregate=Mean("equal")), "aggregate"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_anycost_differ_in_one_part_and_in_what_is_learned(name: str) -> None:
    method, part = VARIANTS[name]
    changed = [
        f.name for f in fields(Method) if getattr(method, f.name) != getattr(ANYCOST, f.name)
    ]
    assert changed == [part]
    whole, without = (small.steps(each, TASK, 2, fleet=CELL) for each in (ANYCOST, method))
    assert small.distance(whole[-1].params, without[-1].params) > 1e-4
    same = [list(steps[0].ledger.width) for steps in (whole, without)]
    assert (same[0] == same[1]) == (part != "plan")
    if part == "plan":
        trained = [r for r in small.rows(without[0]) if not r.failure]
        assert {row.slice_width for row in trained} == {1.0}
    if part == "aggregate":
        # The first round is that of the same messages.
        bits = [steps[0].ledger.bits_up.tolist() for steps in (whole, without)]
        assert bits[0] == bits[1]


def test_the_strongest_channels_are_those_that_anycost_trains() -> None:
    whole, leading = (
        small.steps(method, TASK, 2, fleet=CELL)
        for method in (ANYCOST, replace(ANYCOST, extract=Leading()))
    )
    assert {row.width for row in small.rows(whole[0])} - {1.0}
    assert small.distance(whole[-1].params, leading[-1].params) > 1e-4


def test_parts_are_those_of_the_table() -> None:
    """specification §E, row by row."""
    assert isinstance(ANYCOST.choose, MostGain)
    assert (ANYCOST.extract, ANYCOST.aggregate) == (Strongest(), Aio())
    assert stc(keep=0.1).uplink == ErrorFeedback(Stc(0.1))
    assert qsgd(quantisation_levels=8, keep=0.2).uplink == TopK(0.2, Qsgd(8))
    assert uveqfed(bits_each=3.0, dimension=1, keep=0.3).uplink == TopK(0.3, Uveq(3.0, 1))
    assert fedhq(sent_fraction=0.1).plan == SentFractionByLink(0.1)
    assert fedhq().aggregate == ErrorWeighted()
    uplinked = {"uplink"}
    for method in (stc(**SETTINGS), qsgd(**SETTINGS), uveqfed(**SETTINGS)):
        changed = {
            f.name for f in fields(Method) if getattr(method, f.name) != getattr(FEDAVG, f.name)
        }
        assert changed == uplinked


@pytest.mark.parametrize("method", [qsgd(), uveqfed(), stc(keep=0.15)])
def test_messages_have_the_rates_of_the_comparison(method: Method) -> None:
    """Those of AnycostFL's table: 1/40 to 1/37."""
    assert 1 / 43 < typical_sent_fraction(method.uplink) < 1 / 35
