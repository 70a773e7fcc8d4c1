"""The masked batch norm against its formula written out, and what it saves."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from anyfleet import rng
from anyfleet.elastic import STATIC, apply
from anyfleet.elastic.execution.masked_norm import masked_batch_norm, statistics
from tests.elastic.cost.test_training_cost import saved
from tests.helpers.nets import traced

EPS = 1e-5
Tree = dict[str, Tensor]


def written_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, eps: float
) -> Tensor:
    mean, variance, _ = statistics(x, rows)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    out: Tensor = (x - mean.reshape(shape)) * scale.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool = True) -> Tree:
    torch.manual_seed(0)
    found = {"x": torch.randn(shape, dtype=dtype) + 0.5}
    if affine:
        found |= {"w": torch.randn(shape[1], dtype=dtype), "b": torch.randn(shape[1], dtype=dtype)}
    return found


def rows(shape: tuple[int, ...], *, padded: int) -> Tensor:
    valid = torch.arange(shape[0]) < shape[0] - padded
    return valid.reshape(-1, *(1,) * (len(shape) - 1))


def loss(tree: Tree, mask: Tensor, *, by_hand: bool, everywhere: bool = False) -> Tensor:
    norm = written_out if by_hand else masked_batch_norm
    out = norm(tree["x"], tree.get("w"), tree.get("b"), mask, EPS)
    out = out if everywhere else torch.where(mask, out, 0.0)
    return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


SHAPES = [(6, 3), (5, 4, 3), (4, 3, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradient_are_those_of_the_formula(
    shape: tuple[int, ...], padded: int, affine: bool, dtype: torch.dtype
) -> None:
    tree, mask = tensors(shape, dtype, affine=affine), rows(shape, padded=padded)
    own = masked_batch_norm(tree["x"], tree.get("w"), tree.get("b"), mask, EPS)
    assert own.dtype == dtype
    want = written_out(tree["x"], tree.get("w"), tree.get("b"), mask, EPS)
    torch.testing.assert_close(own, want)
    for everywhere in (False, True):
        got, wanted = (
            grad(lambda t, h=h, e=everywhere: loss(t, mask, by_hand=h, everywhere=e))(tree)
            for h in (False, True)
        )
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_stacked_gradients_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    tree = tensors(shape, torch.float64)
    stacked = {n: torch.stack([t, 2 * t + 1, -t]) for n, t in tree.items()}
    masks = torch.stack([rows(shape, padded=n) for n in (0, 1, 2)])
    got, want = (
        vmap(grad(lambda t, m, h=h: loss(t, m, by_hand=h)))(stacked, masks) for h in (False, True)
    )
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor)
    shared = vmap(grad(lambda t, m: loss(t, m, by_hand=False)), (None, 0))(tree, masks)
    one = grad(lambda t: loss(t, masks[1], by_hand=False))(tree)
    torch.testing.assert_close(shared["x"][1], one["x"])


def test_padding_moves_nothing() -> None:
    tree = tensors((6, 3, 2), torch.float64)
    mask = rows((6, 3, 2), padded=2)
    other = {**tree, "x": torch.where(mask, tree["x"], 1e6)}
    one, two = (grad(lambda t: loss(t, mask, by_hand=False))(t) for t in (tree, other))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert float(one["x"][4:].abs().max()) == 0.0
    nothing = torch.zeros_like(mask)
    gone = grad(lambda t: loss(t, nothing, by_hand=False))(tree)
    assert all(bool(torch.isfinite(t).all()) for t in gone.values())


def test_first_and_second_derivatives() -> None:
    tree = tensors((4, 2, 2), torch.float64)
    mask = rows((4, 2, 2), padded=1)
    leaves = [t.requires_grad_() for t in tree.values()]

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return masked_batch_norm(x, w, b, mask, EPS)

    assert gradcheck(norm, leaves)
    assert gradgradcheck(norm, leaves)


@pytest.mark.parametrize("name", ["vgg_batch", "resnet_basic", "mobilenet"])
def test_a_mask_hardly_adds_to_what_is_saved(name: str) -> None:
    net = traced(name)
    params = {n: p.detach().clone().requires_grad_() for n, p in net.params.items()}
    valid = torch.ones(len(net.inputs), dtype=torch.bool)
    held = (*params.values(), *net.buffers.values())

    def bytes_with(mask: Tensor | None) -> int:
        key = rng.root(0, "saved")
        return saved(
            lambda: apply(
                net.blueprint, params, net.buffers, net.inputs, STATIC, valid=mask, key=key
            )[0],
            held,
        )

    assert bytes_with(valid) <= 1.01 * bytes_with(None)
