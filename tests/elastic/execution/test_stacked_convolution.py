"""Convolutions of a stack on a CPU, against those that torch maps; tests/gpu has the kernels."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.nn.grad import conv2d_weight
from torch.profiler import ProfilerActivity, profile

from anyfleet.elastic.execution.stacked_convolution import (
    _stacked,
    _stacked_weight_gradient,
    convolution,
    fits,
)

# Inputs, outputs, size of the filter, padding, stride, pixels.
SHAPES = [(3, 4, 3, 0, 1, 7), (1, 5, 5, 2, 1, 6), (3, 2, 3, 1, 2, 7), (2, 3, 1, 0, 3, 7)]
Convolution = Callable[..., Tensor]


def values(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs, size, _, _, pixels = shape
    made = torch.Generator().manual_seed(1)
    sizes = (3, 4, inputs, pixels, pixels), (3, outputs, inputs, size, size), (3, outputs)
    x, weight, bias = (torch.randn(s, generator=made, dtype=torch.float64) for s in sizes)
    return x, weight, bias


def passes(run: Convolution, shift: tuple[int, int], *given: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients of one device, and second derivatives."""
    x, weight, _ = given
    passed: tuple[Any, ...] = vjp(lambda *values: run(*values, *shift), *given)
    out, back = passed

    def steepness(w: Tensor, x: Tensor) -> Tensor:
        found: tuple[Tensor, Tensor] = grad(
            lambda w, x: run(x, w, None, *shift).sin().sum(), argnums=(0, 1)
        )(w, x)
        return found[0].square().sum() + found[1].square().sum()

    return out, *back(out.cos()), *grad(steepness, argnums=(0, 1))(weight, x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stacked_convolution_is_that_which_torch_maps(shape: tuple[int, ...]) -> None:
    shift = shape[4], shape[3]
    given = values(shape)
    found = vmap(lambda *one: passes(convolution, shift, *one))(*given)
    exact = vmap(lambda *one: passes(torch.conv2d, shift, *one))(*given)
    for own, other in zip(found, exact, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-11)


def test_what_devices_share_is_repeated() -> None:
    x, weight, bias = values(SHAPES[0])
    found = vmap(convolution, in_dims=(None, 0, None, None, None))(x[0], weight, bias[0], 1, 0)
    for row, own in enumerate(found):
        torch.testing.assert_close(own, torch.conv2d(x[0], weight[row], bias[0]))


def test_samples_that_nobody_differentiates_get_no_gradient() -> None:
    x, weight, bias = values(SHAPES[0])

    def backward_passes(*differentiated: int) -> int:
        def loss(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
            return convolution(x, w, b, 1, 0).sum()

        with profile(activities=[ProfilerActivity.CPU]) as seen:
            vmap(grad(loss, argnums=differentiated))(weight, x, bias)
        names = [event.name for event in seen.events() or ()]
        return names.count("aten::convolution_backward")

    assert backward_passes(0) == len(x)
    assert backward_passes(0, 1) == 2 * len(x)


@pytest.mark.parametrize(
    ("inputs", "size", "stride", "padding", "further", "expected"),
    [
        (3, (3, 3), [1, 1], [0, 0], False, True),
        (8, (3, 3), [1, 1], [0, 0], False, False),
        (3, (3, 5), [1, 1], [0, 0], False, False),
        (3, (3, 3), [1, 2], [0, 0], False, False),
        (3, (3, 3), [1, 1], [0, 1], False, False),
        (3, (3, 3), [1, 1], [3, 3], False, False),
        (3, (3, 3), [1, 1], [0, 0], True, False),
    ],
)
def test_only_simple_convolutions_of_few_channels_have_a_form_of_their_own(
    inputs: int,
    size: tuple[int, int],
    stride: list[int],
    padding: list[int],
    further: bool,
    expected: bool,
) -> None:
    x, weight = torch.zeros(2, inputs, 9, 9), torch.zeros(4, inputs, *size)
    assert fits(x, weight, stride, padding, further) is expected


# -- the kernels' rules for a map inside a map, with stand-ins for the kernels


def _plain_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: int, padding: int, stride: int
) -> Tensor:
    """Return what the kernel does, device by device: channels last, weights by taps."""
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = []
    for row, samples in enumerate(x):
        own = weight[row].reshape(size, size, *weight.shape[2:]).permute(3, 2, 0, 1)
        added = None if bias is None else bias[row]
        found = torch.conv2d(samples.permute(0, 3, 1, 2), own, added, stride, padding)
        out.append(found.permute(0, 2, 3, 1).contiguous())
    return torch.stack(out)


def _plain_weight_gradient(
    x: Tensor, gradient: Tensor, taps: int, columns: int, padding: int, stride: int
) -> Tensor:
    """Return what the kernel does, device by device."""
    assert x.is_contiguous()
    assert gradient.is_contiguous()
    out = []
    for row, samples in enumerate(x):
        shape = gradient.shape[-1], x.shape[-1], columns, taps // columns
        own, along = (each.permute(0, 3, 1, 2) for each in (samples, gradient[row]))
        found = conv2d_weight(own, shape, along, stride, padding)  # type: ignore[no-untyped-call]
        out.append(found.permute(2, 3, 1, 0).flatten(0, 1).float())
    return torch.stack(out)


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kernels")
    module.convolution = _plain_convolution  # type: ignore[attr-defined]
    module.weight_gradient = _plain_weight_gradient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "anyfleet.elastic.execution.kernels", module)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_stacks_inside_a_map_are_one_stack(shared: bool, biased: bool) -> None:
    made = torch.Generator().manual_seed(1)
    # Five samples of three devices, as where gradients of single samples are taken.
    x = torch.randn(5, 3, 1, 7, 7, 2, generator=made)
    weight = torch.randn(3, 9, 2, 4, generator=made)
    bias = [torch.randn(3, 4, generator=made)] if biased else []
    along = torch.randn(3, 5, 1, 7, 7, 4, generator=made)
    weights = weight if shared else torch.stack([weight * (1 + i) for i in range(5)], dim=1)
    own = None if shared else 1
    found = vmap(_stacked, in_dims=(0, own, None, None, None, None))(x, weights, bias, 3, 1, 1)
    slopes = vmap(_stacked_weight_gradient, in_dims=(0, 1, None, None, None))(x, along, 3, 1, 1)
    for i in range(5):
        mine = weight if shared else weights[:, i].contiguous()
        expected = _plain_convolution(x[i], mine, bias[0] if biased else None, 3, 1, 1)
        torch.testing.assert_close(found[i], expected)
        steep = _plain_weight_gradient(x[i], along[:, i].contiguous(), 9, 3, 1, 1)
        torch.testing.assert_close(slopes[i], steep)
