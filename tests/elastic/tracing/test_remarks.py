"""What a trace says about what it could not do: remarks and errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from anyfleet.elastic import TraceError, trace, verify


class Two(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(8, 16), nn.Linear(16, 3), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self.a(x)))
        return out


FREEZING: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda h: torch.cumsum(h, -1),
    "softmax": lambda h: h.softmax(-1),
    "flip": lambda h: h.flip(1),
    "slice": lambda h: torch.cat([h[:, :8], h[:, :8]], 1),
    "select": lambda h: h * h[:, 3].unsqueeze(1),
    "arange": lambda h: h * torch.arange(16.0),
}


@pytest.mark.parametrize("op", FREEZING)
def test_every_frozen_axis_is_noted_once(op: str) -> None:
    between = FREEZING[op]
    blueprint = trace(Two(lambda h: between(between(h))), torch.zeros(2, 8))
    assert blueprint.axes["a"].kind == "fixed"
    about = [note for note in blueprint.remarks if note.startswith("a is") or "fixed a" in note]
    assert len(about) == 1
    assert op in about[0]


def test_what_is_fixed_by_nature_needs_no_note() -> None:
    assert trace(Two(torch.relu), torch.zeros(2, 8)).remarks == ()
    ending = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3), nn.LogSoftmax(-1))
    blueprint = trace(ending, torch.zeros(2, 8))
    assert blueprint.remarks == ()
    # A softmax over the classes leaves them the classes.
    assert blueprint.axes["1"].kind == "output"
    assert blueprint.output_rows == (("1.weight", 0), ("1.bias", 0))


class Masked(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h[h[:, 0] > 0])
        return out


class Counted(Two):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) + torch.nonzero(x).sum()
        return out


class Distinct(Two):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) + torch.unique(x).shape[0]
        return out


@pytest.mark.parametrize("make", [Masked, Counted, Distinct])
def test_sizes_that_depend_on_values_are_explained(make: type[Two]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(make(torch.relu), torch.zeros(4, 8))
    text = str(caught.value)
    assert "depends on the values" in text
    assert Path(__file__).name in text
    assert "torch.where" in text


class Attending(nn.Module):
    def __init__(self, *, with_weights: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.with_weights = with_weights

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.into(x))
        out: Tensor = self.out(self.mha(x, x, x, need_weights=self.with_weights)[0])
        return out


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_share_cuts_heads_of_torch_attention_but_not_their_width(with_weights: bool) -> None:
    module, x = Attending(with_weights=with_weights), torch.randn(2, 5, 6)
    blueprint = trace(module, x)
    assert blueprint.axes["mha.heads"].kind == "heads"
    assert blueprint.axes["mha.head_dim"].kind == "head_dim"
    assert set(blueprint.counts(0.5)) == {"into", "mha.heads", "mha.out_proj"}
    verify(module, x, blueprint).require()


class Counting(nn.Module):
    """Changes a buffer itself, and has a hook on a gradient."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        weight: Any = self.layer.weight
        weight.register_hook(lambda gradient: 3 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1.0)
        out: Tensor = self.layer(x)
        return out


def test_what_devices_do_not_do_while_they_train_is_noted() -> None:
    notes = trace(Counting(), torch.randn(4, 4)).remarks
    assert "forward() itself changes seen: between rounds it stays as it is" in notes
    assert "layer.weight has a hook on its gradient, which devices do not run" in notes
    assert not any(
        "itself changes" in note for note in trace(nn.BatchNorm1d(3), torch.randn(4, 3)).remarks
    )
