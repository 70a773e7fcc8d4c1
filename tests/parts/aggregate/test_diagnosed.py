"""What the record of a round tells of coverage and agreement, by the specification's numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from anyfleet.arrays import Floats
from anyfleet.core.method import Method
from anyfleet.core.signals import Diagnostic
from anyfleet.core.updates import Updates
from anyfleet.formulas import fedadp_dissimilarity
from anyfleet.formulas.reference import (
    fedadp_mean_divergence,
    whale_fewest_trainers,
    whale_omega_squared,
)
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.aggregate import AngleWeighted, Diagnosed, ServerOptimised, ServerSgd, Subset
from anyfleet.parts.schedule import Buffered
from anyfleet.parts.select import Everyone
from anyfleet.world import levels
from tests.core.test_updates import BLUEPRINT, MATRIX, dense, rows_and_columns, several, updates_of
from tests.helpers import small
from tests.helpers.vectors import ADP, numbers, step, vectors


def test_f_2_who_trained_what() -> None:
    parts = [rows_and_columns(kept) for kept in ((0,), (0, 1), (0, 1))]
    model = {n: torch.ones(BLUEPRINT.shape(n)) for n in BLUEPRINT.params}
    changes = [{MATRIX: torch.ones(n, n)} for n in (1, 2, 2)]
    found = updates_of(changes, slices=parts)
    notes = step(Diagnosed(), found, model=model).diagnostics
    whole = sum(value.numel() for value in model.values())
    assert notes["coverage"] == pytest.approx(4 / whole)
    assert notes["regions"] == 2
    assert notes["fewest"] == 2
    assert notes["omega_squared"] == pytest.approx(1 - 1 / whole)
    everything = step(Diagnosed(), updates_of([model, model]), model=model).diagnostics
    assert everything["coverage"] == 1
    assert (everything["regions"], everything["fewest"]) == (1, 2)
    assert everything["omega_squared"] == pytest.approx(0.0, abs=1e-12)


@given(several())
def test_f_2_agrees_with_the_formulas_on_dense_masks(found: Updates) -> None:
    noise = torch.Generator().manual_seed(3)
    model = {n: torch.randn(BLUEPRINT.shape(n), generator=noise) for n in BLUEPRINT.params}
    notes = step(Diagnosed(), found, model=model).diagnostics
    _, masks = dense(found)
    flags = masks.numpy() > 0
    theta = torch.cat([model[name].flatten() for name in BLUEPRINT.params]).numpy()
    assert notes["fewest"] == whale_fewest_trainers(flags[None])
    assert notes["coverage"] == pytest.approx(flags.any(0).mean())
    assert notes["omega_squared"] == pytest.approx(
        whale_omega_squared(theta.astype(np.float64), flags), abs=1e-6
    )
    assert notes["regions"] == len({tuple(column) for column in flags.T.tolist() if any(column)})


def test_f_4_how_far_updates_agree() -> None:
    notes = step(Diagnosed(), vectors(ADP, samples=[100, 100, 200])).diagnostics
    sizes, rows = np.array([0.25, 0.25, 0.5]), np.array(ADP)
    mean = sizes @ rows
    lengths: Floats = np.linalg.norm(rows, axis=1)
    assert numbers(notes["norms"]) == pytest.approx(lengths.tolist())
    assert notes["divergence"] == pytest.approx(fedadp_mean_divergence(rows, mean))
    bounds = fedadp_dissimilarity(lengths, float(np.linalg.norm(mean)))
    assert notes["dissimilarity_least"] == pytest.approx(bounds.least)
    assert notes["dissimilarity_most"] == pytest.approx(bounds.most)
    expected = [1.080839, 0.295441, 0.687353]
    assert numbers(notes["angles"]) == pytest.approx(expected, abs=1e-6)
    assert notes["expected_decrease"] == pytest.approx(sizes @ np.cos(expected), abs=1e-6)
    opposed = step(Diagnosed(), vectors([(1.0, 0.0), (-1.0, 0.0)])).diagnostics
    assert opposed["dissimilarity_most"] == math.inf
    assert opposed["divergence"] == pytest.approx(1.0)
    broken = step(Diagnosed(), vectors([(1.0, 0.0), (math.nan, 0.0)])).diagnostics
    assert broken["divergence"] == pytest.approx(0.0)
    assert math.isnan(broken["norms"][1])


@pytest.mark.parametrize(
    "method",
    [
        replace(heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=8), select=Everyone()),
        replace(fedavg(lr=0.1), aggregate=ServerOptimised(AngleWeighted(), ServerSgd(0.5, 0.9))),
        replace(fedavg(lr=0.1), schedule=Buffered(4, 3), aggregate=Subset(AngleWeighted())),
    ],
    ids=["sub-models", "server step", "stale"],
)
def test_a_diagnosis_changes_no_bit_of_the_model(method: Method) -> None:
    watched = replace(method, aggregate=Diagnosed(method.aggregate))
    fleet = levels(speeds=(1e9, 2e7))
    one, two = (small.steps(each, small.task(), 3, fleet=fleet) for each in (method, watched))
    assert small.identical(one[-1].params, two[-1].params)
    assert one[-1].time == two[-1].time
    assert (
        one[-1].diagnostics.keys()
        | {each.name for each in Diagnosed.provides if isinstance(each, Diagnostic)}
        <= two[-1].diagnostics.keys()
    )
    assert 0 < two[-1].diagnostics["coverage"] <= 1
