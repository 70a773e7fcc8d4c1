"""Where the batch lies: padded rows reach nothing, or there are none."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from anyfleet import rng
from anyfleet.elastic import Mode, Slice, apply, cut, mixed_rows, require_faithful, trace, verify
from anyfleet.elastic.batch_rows import Place, outside, places, row_mask
from anyfleet.elastic.program import BATCH
from tests.helpers.nets import Traced, of
from tests.helpers.row_nets import APART, PIXELS, TOGETHER, Layers, _dropped

MOVING = Mode(dropout=False, statistics="batch", update="module")
TRAINING = Mode(dropout=True, statistics="batch", update="module")
REAL, PADDED = 5, 7  # unlike any size of the networks
Tree = dict[str, Tensor]


@cache
def net(name: str) -> Traced:
    torch.manual_seed(2)
    make = APART[name] if name in APART else TOGETHER[name][0]
    return of(make(), torch.randn(REAL, 1, PIXELS, PIXELS))


def pictures(count: int) -> Tensor:
    drawn = torch.randn(
        REAL, 1, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1)
    ).double()
    return torch.cat([drawn, torch.full((count - REAL, 1, PIXELS, PIXELS), 40.0).double()])


def weighed(out: Tensor) -> Tensor:
    return (out[:REAL] * torch.linspace(-1, 2, out[:REAL].numel()).reshape(REAL, -1)).sum()


def gradients(loss: Tensor, at: Tree) -> Tree:
    found = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
    return dict(zip(at, found, strict=True))


def leaves(tree: Tree) -> Tree:
    return {name: value.clone().requires_grad_() for name, value in tree.items()}


def of_module(each: Traced) -> tuple[Tensor, Tree, Tree]:
    """What the module itself does with the samples alone."""
    params, buffers = leaves(each.params), {n: b.clone() for n, b in each.buffers.items()}
    out = functional_call(each.module.train(), {**params, **buffers}, (pictures(REAL),))
    return out.detach(), gradients(weighed(out), params), buffers


def of_program(each: Traced, count: int, slice: Slice | None = None) -> tuple[Tensor, Tree, Tree]:
    """What the program does with them among other rows, whole or cut."""
    part = Slice() if slice is None else slice
    params = leaves(cut(each.params, part, each.blueprint))
    buffers = cut(each.buffers, part, each.blueprint)
    valid = torch.arange(count) < REAL
    blueprint = each.blueprint.local(part)
    out, moved = apply(blueprint, params, buffers, pictures(count), MOVING, valid=valid)
    return out[:REAL].detach(), gradients(weighed(out), params), moved


def assert_same(got: tuple[Tensor, Tree, Tree], want: tuple[Tensor, Tree, Tree]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("count", [REAL, PADDED])
def test_padded_rows_reach_nothing(name: str, count: int) -> None:
    each = net(name)
    assert mixed_rows(each.blueprint) == ()
    want = of_module(each)
    assert any(float(value.abs().max()) > 1e-3 for value in want[1].values())
    assert_same(of_program(each, count), want)


@pytest.mark.parametrize("name", APART)
def test_padded_rows_reach_nothing_in_a_small_model(name: str) -> None:
    each = net(name)
    free = {n: a.size for n, a in each.blueprint.axes.items() if a.free}
    part = Slice.of({n: range(0, size, 2) for n, size in free.items()}, each.blueprint)
    assert_same(of_program(each, PADDED, part), of_program(each, REAL, part))


@pytest.mark.parametrize("name", ["standardised weights", "time first", "three views"])
def test_small_models_are_those_of_the_module(name: str) -> None:
    each = net(name)
    assert verify(each.module, each.inputs, each.blueprint).problems == ()


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_see_each_other_are_noticed_and_never_padded(name: str) -> None:
    each, how = net(name), TOGETHER[name][1]
    found = mixed_rows(each.blueprint)
    assert any(word in line for line in found for word in how.split("|")), found
    assert any(found[0] in note for note in each.blueprint.remarks)
    assert_same(of_program(each, REAL), of_module(each))
    with pytest.raises(ValueError, match="see each other"):
        of_program(each, PADDED)


@pytest.mark.parametrize("name", ["centred", "one less"])
def test_what_sees_each_other_runs_in_a_small_model(name: str) -> None:
    each = net(name)
    assert any(a.free for a in each.blueprint.axes.values())
    assert verify(each.module, each.inputs, each.blueprint).problems == ()


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_a_task_takes_them(name: str) -> None:
    each = net(name)
    require_faithful(each.module, (each.inputs[:2],), each.blueprint)


def test_standardised_weights_are_cut() -> None:
    axes = net("standardised weights").blueprint.axes
    assert {n: a.size for n, a in axes.items() if a.kind == "channels"} == {"one": 4, "two": 6}


def test_draws_of_a_sample_do_not_depend_on_padding() -> None:
    torch.manual_seed(2)
    each = of(Layers(_dropped), torch.randn(REAL, 1, PIXELS, PIXELS))
    key = rng.root(0, "draws")
    alone, padded = (
        apply(each.blueprint, each.params, each.buffers, pictures(n), TRAINING, key=key)[0]
        for n in (REAL, PADDED)
    )
    torch.testing.assert_close(padded[:REAL], alone)


def test_what_is_not_used_may_mix() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.inner(x)
            return out, out.mean()

    assert mixed_rows(trace(Two(), torch.zeros(2, 3))) == ()


SIZES = {BATCH: 1, "t": 3, "c": 4}


def test_places_of_the_batch() -> None:
    dims = ((("t",),), (("c", BATCH, "t"),))
    assert places(dims, SIZES) == (Place(1, 4, 3),)
    assert outside(dims, Place(1, 4, 3), SIZES) == 12
    assert places(((("t",),), (("c",),)), SIZES) == ()


def test_the_mask_lies_as_the_batch_lies() -> None:
    valid = torch.tensor([True, True, False])
    mask = row_mask(valid, ((("t", BATCH),), (("c",),), (("t",),)), SIZES)
    assert mask is not None
    assert mask.shape == (9, 1, 1)
    assert mask.flatten().tolist() == [True, True, False] * 3
    mask = row_mask(valid, (((),), (("c",),), ((BATCH, "t"),)), SIZES)
    assert mask is not None
    assert mask.shape == (1, 1, 9)
    assert mask.flatten().tolist() == [True] * 6 + [False] * 3
    assert row_mask(valid, (((),), ((BATCH, "c"),)), SIZES) is None
