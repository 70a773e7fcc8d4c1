"""Sums over the devices of a stack on a CUDA device, against torch in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.core.ordered_stacks import weighted_sum
from anyfleet.core.stacks import in_one_pass, row_lengths
from anyfleet.elastic.execution.stacked_convolution import has_kernels

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_kernels()), reason="needs CUDA and Triton"
)

# Devices, and entries of each; each is large enough for a kernel.
SIZES = [(1, 1_100_000), (3, 400_001), (50, 66_560), (1001, 65_537)]


def updates(devices: int, entries: int) -> Tensor:
    made = torch.Generator("cuda").manual_seed(1)
    return torch.randn(devices, entries, generator=made, device="cuda")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lengths_are_those_of_double_precision(size: tuple[int, int]) -> None:
    rows = updates(*size)
    assert in_one_pass([rows])
    expected = torch.linalg.vector_norm(rows.double(), dim=1)
    np.testing.assert_allclose(row_lengths(rows).cpu(), expected.cpu(), rtol=1e-13)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_weighted_sum_does_not_depend_on_its_parts(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    rows = updates(*size)
    weights = torch.rand(len(rows)).to("cuda", dtype)
    found = weighted_sum([rows], weights)
    expected = (rows.double() * weights.double()[:, None]).sum(0)
    assert found.dtype == dtype
    allowed = 1e-7 if dtype == torch.float32 else 1e-13
    assert float((found - expected).norm() / expected.norm()) < allowed
    parts = [part.clone() for part in (rows[:1], rows[1:3], rows[3:]) if len(part)]
    assert torch.equal(weighted_sum(parts, weights), found)


def test_what_is_no_number_is_seen() -> None:
    rows = updates(3, 400_001)
    rows[1, 400_000] = float("nan")
    rows[2, 7] = float("inf")
    lengths = row_lengths(rows).cpu()
    assert torch.isfinite(lengths).tolist() == [True, False, False]
