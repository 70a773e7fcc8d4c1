"""Max-pooling of stacks on a CUDA device, against torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from anyfleet.elastic.execution import stacked_pooling
from anyfleet.elastic.execution.stacked_convolution import has_kernels

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_kernels()), reason="needs CUDA and Triton"
)

# Channels, rows, columns, window.
SHAPES = [(32, 28, 28, [2, 2]), (5, 7, 9, [2, 3]), (1, 4, 4, [4, 4]), (16, 5, 5, [3, 2])]


def pooled(x: Tensor, kernel: list[int], own: bool) -> Tensor:
    return stacked_pooling.max_pool(x, kernel) if own else torch.max_pool2d(x, kernel)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_maxima_and_gradients_are_those_of_torch(
    shape: tuple[int, int, int, list[int]], dtype: torch.dtype
) -> None:
    channels, rows, columns, kernel = shape
    # Few different numbers: many are equal, and one is none.
    x = torch.randint(-3, 3, (3, 4, channels, rows, columns), device="cuda").to(dtype)
    x[0, 0, 0, 0, 0] = float("nan")

    def passes(own: bool) -> tuple[Tensor, Tensor]:
        def one(x: Tensor) -> tuple[Tensor, Tensor]:
            passed: tuple[Any, ...] = vjp(lambda value: pooled(value, kernel, own), x)
            out, back = passed
            return out, back(out.nan_to_num().cos())[0]

        found: tuple[Tensor, Tensor] = vmap(one)(x)
        return found

    for mine, theirs in zip(passes(True), passes(False), strict=True):
        assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))


def test_gradients_of_samples_and_second_gradients_are_those_of_torch() -> None:
    x = torch.randn(3, 4, 8, 6, 6, device="cuda")

    def of_samples(own: bool, x: Tensor) -> Tensor:
        def slope(sample: Tensor) -> Tensor:
            found: Tensor = grad(lambda v: pooled(v[None], [2, 2], own).sin().sum())(sample)
            return found

        found: Tensor = vmap(slope)(x)
        return found

    def twice(own: bool, x: Tensor) -> Tensor:
        found: Tensor = grad(lambda v: of_samples(own, v).square().sum())(x)
        return found

    for run in (of_samples, twice):
        mine, theirs = (vmap(lambda v, own=own, run=run: run(own, v))(x) for own in (True, False))
        torch.testing.assert_close(mine, theirs)
