"""Kernels for stacks on a CUDA device, against torch in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from anyfleet import rng
from anyfleet.elastic.execution.kept_units import kept
from anyfleet.elastic.execution.stacked_convolution import convolution, has_kernels

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_kernels()), reason="needs CUDA and Triton"
)

# Inputs, outputs, size of the filter, padding, stride, pixels.
SHAPES = [
    (3, 32, 3, 0, 1, 12),
    (3, 5, 5, 2, 1, 9),
    (1, 6, 3, 1, 1, 8),
    (20, 8, 3, 1, 1, 7),
    (32, 64, 3, 0, 1, 10),
    (64, 40, 3, 1, 2, 9),
    (16, 130, 1, 0, 2, 7),
    (128, 16, 3, 1, 1, 6),
]


def values(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs, size, _, _, pixels = shape
    made = torch.Generator("cuda").manual_seed(1)
    sizes = (3, 4, inputs, pixels, pixels), (3, outputs, inputs, size, size), (3, outputs)
    x, weight, bias = (torch.randn(s, generator=made, device="cuda") for s in sizes)
    return x, weight / (size * inputs**0.5), bias


def passes(given: Sequence[Tensor], shape: tuple[int, ...], *, own: bool) -> list[Tensor]:
    """Return output and gradients of samples, weights and bias, of all devices."""
    padding, stride = shape[3:5]

    def one(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            if own:
                return convolution(x, weight, bias, stride, padding)
            return torch.conv2d(x, weight, bias, stride, padding)

        passed: tuple[Any, ...] = vjp(run, x, weight, bias)
        out, back = passed
        return out, *back(out.cos())

    return list(vmap(one)(*given))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stacked_convolution_is_that_of_each_device(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = [value.to(dtype) for value in values(shape)]
    # Where there is no kernel cuDNN computes, which torch lets use tf32.
    with torch.backends.cudnn.flags(allow_tf32=False):
        found = passes(given, shape, own=True)
    exact = passes([value.double() for value in given], shape, own=False)
    allowed = 2e-6 if dtype == torch.float32 else 2e-2
    for own, other in zip(found, exact, strict=True):
        assert own.dtype == dtype
        assert float((own.double() - other).norm() / other.norm()) < allowed


def test_a_stacked_convolution_can_be_differentiated_twice() -> None:
    shape = (16, 8, 3, 1, 1, 6)
    x, weight, _ = values(shape)

    def penalty(own: bool, x: Tensor, weight: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            out = convolution(x, w, None, 1, 1) if own else torch.conv2d(x, w, None, 1, 1)
            return out.sin().sum()

        found: Tensor = grad(lambda w: grad(loss)(w).square().sum())(weight)
        return found

    found = vmap(lambda *given: penalty(True, *given))(x, weight)
    exact = vmap(lambda *given: penalty(False, *given))(x.double(), weight.double())
    assert float((found - exact).norm() / exact.norm()) < 1e-5


def test_a_stack_may_be_mapped_over_its_samples() -> None:
    shape = (16, 8, 3, 1, 1, 6)
    x, weight, bias = values(shape)

    def slopes(own: bool, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the gradient of every sample, as Fisher information needs it."""

        def loss(w: Tensor, sample: Tensor) -> Tensor:
            run = convolution if own else torch.conv2d
            return run(sample[None], w, bias, 1, 1).sin().sum()

        found: Tensor = vmap(grad(loss), in_dims=(None, 0))(weight, x)
        return found

    found = vmap(lambda *given: slopes(True, *given))(x, weight, bias)
    exact = vmap(lambda *given: slopes(False, *given))(x.double(), weight.double(), bias.double())
    assert float((found - exact).norm() / exact.norm()) < 2e-6


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 1 - 2.0**-53])
def test_the_kernel_keeps_the_units_that_the_host_keeps(rate: float) -> None:
    keys = rng.fold(rng.root(3, "units"), torch.arange(5))
    there = vmap(lambda key: kept(key, 4000, rate))(keys.cuda())
    assert torch.equal(there.cpu(), kept(keys, 4000, rate))
    assert torch.equal(kept(keys[1].cuda(), 4000, rate), there[1])
