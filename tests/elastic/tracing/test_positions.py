"""Operators that combine positions fix their axis with a note; ranks do not depend on sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from anyfleet.elastic import EVALUATE, apply, cut, trace
from tests.helpers.plain import agrees, every_other, held, narrowest

# [B, T, C]: what a linear layer gives has its features last.
X = torch.linspace(-2, 2, 5 * 6 * 4).reshape(5, 6, 4).sin()


class Last(nn.Module):
    """Features last, then something, then a linear layer over all of it."""

    def __init__(self, between: Callable[[Tensor], Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.between, self.part = nn.Linear(4, 8), between, part or nn.Identity()
        with torch.no_grad():
            width = self.between(self.part(self.a(X))).flatten(1).shape[1]
        self.b = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self.part(self.a(x))).flatten(1))
        return out


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive_avg_pool1d": lambda h: functional.adaptive_avg_pool1d(h, 4),
    "adaptive_max_pool1d": lambda h: functional.adaptive_max_pool1d(h, 4),
    "avg_pool1d": lambda h: functional.avg_pool1d(h, 2),
    "max_pool1d": lambda h: functional.max_pool1d(h, 2),
    "avg_pool2d": lambda h: functional.avg_pool2d(h.unsqueeze(1), 2),
    "max_pool2d": lambda h: functional.max_pool2d(h.unsqueeze(1), 2),
    "avg_pool3d": lambda h: functional.avg_pool3d(h[:, None, None], (1, 2, 2)),
    "max_pool3d": lambda h: functional.max_pool3d(h[:, None, None], (1, 2, 2)),
    "upsample_nearest1d": lambda h: functional.interpolate(h, scale_factor=2),
    "upsample_linear1d": lambda h: functional.interpolate(h, size=5, mode="linear"),
    "upsample_nearest2d": lambda h: functional.interpolate(h.unsqueeze(1), scale_factor=2),
    "upsample_bicubic2d": lambda h: functional.interpolate(
        h.unsqueeze(1), scale_factor=2, mode="bicubic"
    ),
    "im2col": lambda h: functional.unfold(h.unsqueeze(1), (2, 2)),
    "padded": lambda h: functional.pad(h, (1, 1), mode="reflect"),
    # As long as before, but every feature is where its neighbour was.
    "padded here": lambda h: functional.pad(h, (1, -1)),
}


@pytest.mark.parametrize("name", ALONG)
def test_what_runs_along_features_fixes_them_with_a_note(name: str) -> None:
    blueprint = agrees(Last(ALONG[name]), X)
    assert blueprint.axes["a"].kind == "fixed"
    (note,) = [note for note in blueprint.remarks if "fixed a" in note]
    assert name.split(maxsplit=1)[0] in note


@pytest.mark.parametrize("make", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_convolution_along_features_fixes_them(make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    module = Last(torch.relu, make(6, 5, 3))
    blueprint = agrees(module, X)
    assert blueprint.axes["a"].kind == "fixed"
    assert any("conv" in note and "fixed a" in note for note in blueprint.remarks)
    # Its own channels are still cut.
    assert blueprint.axes["part"].kind == "channels"
    agrees(module, X, every_other(blueprint))


PASSING: dict[str, Callable[[Tensor], Tensor]] = {
    "a window of one feature": lambda h: functional.max_pool2d(h.unsqueeze(1), (2, 1)),
    "a norm over positions": lambda h: functional.local_response_norm(h, 3),
    "padded positions": lambda h: functional.pad(h, (0, 0, 1, 1)),
    "narrow": lambda h: h.narrow(2, 0, 8),
    "type_as": lambda h: h.type_as(h.mean(1)),
    "squeeze": lambda h: torch.relu(h.mean(1, keepdim=True).squeeze()),
    "squeeze.dim": lambda h: torch.relu(h.squeeze(2)),
    "squeeze.dims": lambda h: torch.relu(h.mean(1, keepdim=True).squeeze((1, 2))),
    "squeeze_": lambda h: (h.mean(1, keepdim=True) * 2).squeeze_(),
    "view": lambda h: h.reshape(h.shape[0], -1, 1).squeeze(-1),
    "expand": lambda h: h.mean(1, keepdim=True).expand(-1, 6, -1) * h,
}


@pytest.mark.parametrize("name", PASSING)
def test_what_leaves_features_alone_is_cut_down_to_one(name: str) -> None:
    module = Last(PASSING[name])
    blueprint = agrees(module, X)
    assert blueprint.axes["a"].kind == "channels"
    assert blueprint.remarks == ()
    if name != "a norm over positions":  # zero divided by a constant: the masked model is no other
        agrees(module, X, every_other(blueprint))
    agrees(module, X, narrowest(blueprint))


@pytest.mark.parametrize("name", ["squeeze", "squeeze.dim", "squeeze.dims", "squeeze_"])
def test_a_batch_of_one_row_and_one_channel_keep_their_rank(name: str) -> None:
    module = Last(PASSING[name])
    blueprint = trace(module, X)
    params, _ = held(module, blueprint)
    for slice_ in (blueprint.prefix(1.0), narrowest(blueprint)):
        small, own = blueprint.local(slice_), cut(params, slice_, blueprint)
        whole, _ = apply(small, own, {}, X, EVALUATE)
        row, _ = apply(small, own, {}, X[:1], EVALUATE)
        torch.testing.assert_close(row, whole[:1])
        stacked = vmap(lambda x: apply(small, own, {}, x, EVALUATE)[0])(X.unsqueeze(1))  # noqa: B023
        torch.testing.assert_close(stacked.squeeze(1), whole)
        grad(lambda p: apply(small, p, {}, X, EVALUATE)[0].sum())(own)  # noqa: B023


def test_a_norm_of_single_channels_is_cut_by_a_share() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv1d(6, 8, 1), nn.GroupNorm(8, 8), nn.Flatten(), nn.Linear(32, 3))
    module, x = nn.Sequential(*parts), torch.randn(5, 6, 4)
    blueprint = agrees(module, x)
    assert {n: a.kind for n, a in blueprint.axes.items() if a.free} == {"0": "channels"}
    agrees(module, x, blueprint.prefix(0.5))
    assert blueprint.local(blueprint.prefix(0.5)).shape("1.weight") == (4,)


class Mixer(nn.Module):
    """A layer over positions, whose outputs are positions again."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.head = nn.Linear(6, 6), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((x + self.over(x.transpose(1, 2)).transpose(1, 2)).mean(1))
        return out


def test_outputs_that_are_no_channels_are_named() -> None:
    (note,) = trace(Mixer(), X).remarks
    assert note == "over.weight: its outputs are fixed: joined to the network's input"


class Weaving(nn.Module):
    """A layer whose outputs are the weights of another: one dimension is cut, the other is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8 * 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.a(x.mean(1)).view(-1, 8, 4)
        out: Tensor = self.b((weights @ x.mean(1).unsqueeze(-1)).squeeze(-1))
        return out


def test_outputs_of_which_only_a_part_is_cut_are_named() -> None:
    module = Weaving()
    blueprint = agrees(module, X)
    assert blueprint.remarks == (
        "a.weight: part of its outputs is fixed: joined to the network's input",
    )
    agrees(module, X, blueprint.prefix(0.5))
