"""Work of operators beyond linear layers and convolutions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import Slice, cost, trace
from tests.elastic.cost.test_training_cost import counted


class Between(nn.Module):
    def __init__(self, product: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.i, self.o, self.product = nn.Linear(8, 16), nn.Linear(16, 3), product
        self.w, self.shift = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.product(self, self.i(x)))
        return out


def einsum(own: nn.Module, h: Tensor) -> Tensor:
    weights = torch.einsum("bti,bsi->bts", h, h).softmax(-1)
    mixed: Tensor = torch.einsum("bts,bsi->bti", weights, h)
    return torch.einsum("bti,ij->btj", mixed, own.get_parameter("w"))


def addmm(own: nn.Module, h: Tensor) -> Tensor:
    shift, weight = own.get_parameter("shift"), own.get_parameter("w")
    return torch.addmm(shift, h.flatten(0, 1), weight).view(h.shape)


def baddbmm(own: nn.Module, h: Tensor) -> Tensor:
    return torch.baddbmm(own.get_parameter("shift"), h @ h.transpose(1, 2), h)


def tensordot(own: nn.Module, h: Tensor) -> Tensor:
    out: Tensor = torch.tensordot(h, own.get_parameter("w"), dims=1)
    return out


PRODUCTS = [einsum, addmm, baddbmm, tensordot]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_products_cost_what_torch_counts(
    product: Callable[[nn.Module, Tensor], Tensor], first: int
) -> None:
    module, x = Between(product), torch.randn(3, 5, 8)
    blueprint = trace(module, x)
    first = min(first, len(blueprint.layers) - 1)
    trained = set(blueprint.trained(first))
    for name, param in module.named_parameters():
        param.requires_grad_(name in trained)
    found = cost(blueprint, Slice((), first), batch=3)
    assert (found.forward_flops, found.backward_flops) == counted(lambda: module(x))
    assert not any("not counted" in note for note in blueprint.remarks)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.o = kind(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.rnn(x)[0][:, -1])
        return out


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_apply_every_matrix_once_a_step(
    kind: Callable[..., nn.Module], gates: int
) -> None:
    found = cost(trace(Recurrent(kind), torch.zeros(2, 5, 8)), batch=2)
    assert found.forward_flops == 2 * 2 * 5 * gates * 16 * (8 + 16) + 2 * 2 * 16 * 3


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.o = nn.GRUCell(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.cell(x[:, 1], self.cell(x[:, 0])))
        return out


def test_a_call_without_a_rule_is_counted_from_its_parts() -> None:
    module, x = Cell(), torch.randn(4, 2, 8)
    found = cost(trace(module, x), batch=4)
    assert found.forward_flops == counted(lambda: module(x))[0]
    assert found.forward_flops == 2 * 4 * (2 * 48 * (8 + 16) + 16 * 3)


def test_bilinear_layers_meet_both_operands() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 6), nn.Bilinear(6, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            out: Tensor = self.b(h, h[:, :5])
            return out

    found = cost(trace(Pair(), torch.zeros(2, 8)), batch=2)
    assert found.forward_flops == 2 * 2 * 8 * 6 + 2 * 2 * 3 * (6 + 1) * 5


def test_work_that_nobody_can_count_is_noted() -> None:
    blueprint = trace(
        Between(lambda own, h: h @ torch.linalg.inv(own.get_parameter("w"))), torch.zeros(2, 5, 8)
    )
    assert any("linalg_inv" in n and "work is not counted" in n for n in blueprint.remarks)
    moved = trace(Between(lambda _, h: h.roll(1, -1)), torch.zeros(2, 5, 8))
    assert not any("work is not counted" in note for note in moved.remarks)
