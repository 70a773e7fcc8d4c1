"""What the tracer finds in unedited modules."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from anyfleet.elastic import (
    EVALUATE,
    TRAIN,
    Blueprint,
    Slice,
    TraceError,
    apply,
    cut,
    trace,
    verify,
)
from anyfleet.elastic.program import Size
from tests.helpers.nets import NETS, Basic, Language, LeNet, Residual, of, traced, vgg


def kinds(blueprint: Blueprint, kind: str) -> dict[str, int]:
    return {name: axis.size for name, axis in blueprint.axes.items() if axis.kind == kind}


@pytest.mark.parametrize("name", NETS)
def test_program_equals_the_module(name: str) -> None:
    net = traced(name)
    net.module.eval()
    state = {**net.params, **net.buffers}
    for inputs in (net.inputs, net.inputs[:1], net.inputs.repeat_interleave(2, 0)):
        want = torch.func.functional_call(net.module, state, (inputs,))
        got, _ = apply(net.blueprint, net.params, net.buffers, inputs, EVALUATE)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETS)
def test_blueprint_travels_as_bytes(name: str) -> None:
    net = traced(name)
    again = Blueprint.from_bytes(net.blueprint.to_bytes())
    assert again == net.blueprint
    assert hash(again) == hash(net.blueprint)
    for field in ("axes", "params", "buffers", "layers", "program", "norms", "scaled", "remarks"):
        assert getattr(again, field) == getattr(net.blueprint, field)
    want, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, EVALUATE)
    got, _ = apply(again, net.params, net.buffers, net.inputs, EVALUATE)
    assert torch.equal(got, want)
    half = again.prefix(0.5)
    assert again.local(half) == net.blueprint.local(half)
    if half.keep:
        assert again.local(half) != net.blueprint


def test_axes_are_named_after_their_first_layer() -> None:
    blueprint = traced("lenet").blueprint
    assert kinds(blueprint, "channels") == {"c1": 4, "c2": 6, "f1": 12}
    assert kinds(blueprint, "output") == {"f2": 5}
    assert blueprint.params["f1.weight"] == ((("f1",),), (("c2", "space:2", "space:2"),))
    assert blueprint.params["c1.weight"][1] == ((),)


def test_residual_summands_share_an_axis() -> None:
    blueprint = traced("resnet_basic").blueprint
    assert kinds(blueprint, "channels") == {
        "stem": 8,
        "blocks.0.c1": 8,
        "blocks.1.c1": 12,
        "blocks.1.c2": 12,
    }
    assert blueprint.params["blocks.0.c2.weight"][0] == (("stem",),)
    assert blueprint.params["blocks.1.shortcut.0.weight"][0] == (("blocks.1.c2",),)


def test_depthwise_has_one_axis_and_new_groups() -> None:
    blueprint = traced("mobilenet").blueprint
    assert blueprint.params["blocks.0.deep.weight"][0] == (("blocks.0.grow",),)
    call = next(n for n in blueprint.program.nodes if n.where == "blocks.0.deep")
    assert call.args[6] == Size((("blocks.0.grow",),))


def test_grouped_convolution_has_groups_and_channels() -> None:
    blueprint = traced("grouped").blueprint
    assert kinds(blueprint, "groups") == {"c1.groups": 4}
    assert blueprint.params["c2.weight"][:2] == ((("c1.groups", "c2"),), (("c1",),))
    # The multiplier of the depthwise layer is an axis of its own.
    assert blueprint.params["c3.weight"][0] == (("c1.groups", "c2", "c3"),)


def test_group_norm_splits_channels_by_group() -> None:
    blueprint = traced("vgg_group").blueprint
    assert kinds(blueprint, "groups") == {"0.groups": 2, "4.groups": 2}
    assert blueprint.params["1.weight"] == ((("0.groups", "0"),),)
    assert kinds(blueprint, "channels") == {"0": 4, "4": 6, "9": 10}


@pytest.mark.parametrize("name", ["language_fused", "language_by_hand"])
def test_attention_has_heads_and_widths_of_heads(name: str) -> None:
    blueprint = traced(name).blueprint
    assert kinds(blueprint, "heads") == {
        "blocks.0.attention.q.heads": 2,
        "blocks.1.attention.q.heads": 2,
    }
    assert set(kinds(blueprint, "head_dim")) == {
        f"blocks.{i}.attention.{part}.head_dim" for i in (0, 1) for part in "qv"
    }
    assert blueprint.params["blocks.0.attention.k.weight"] == (
        (("blocks.0.attention.q.heads", "blocks.0.attention.q.head_dim"),),
        (("embed",),),
    )
    assert blueprint.params["embed.weight"] == ((("vocabulary:11",),), (("embed",),))
    assert kinds(blueprint, "output") == {"head": 11}


def test_output_rows_are_the_classifier() -> None:
    assert traced("lenet").blueprint.output_rows == (("f2.weight", 0), ("f2.bias", 0))
    assert traced("language_fused").blueprint.output_rows == (("head.weight", 0),)


def test_layers_are_in_forward_order_and_norms_join_the_layer_before() -> None:
    blueprint = traced("resnet_basic").blueprint
    assert [layer.name for layer in blueprint.layers] == [
        "stem",
        "blocks.0.c1",
        "blocks.0.c2",
        "blocks.1.c1",
        "blocks.1.c2",
        "blocks.1.shortcut.0",
        "head",
    ]
    assert blueprint.layers[0].params == ("stem.weight", "norm.weight", "norm.bias")
    assert "norm.num_batches_tracked" in blueprint.layers[0].buffers
    held = [p for layer in blueprint.layers for p in layer.params]
    assert sorted(held) == sorted(blueprint.params)
    buffers = [b for layer in blueprint.layers for b in layer.buffers]
    assert sorted(buffers) == sorted(blueprint.buffers)


def test_scaled_layers_are_those_before_a_norm() -> None:
    assert traced("lenet").blueprint.scaled == ()
    assert traced("vgg_batch").blueprint.scaled == ("0.weight", "0.bias", "4.weight", "4.bias")
    assert traced("perceptron").blueprint.scaled == ("0.weight", "0.bias")
    # In a transformer that normalises first, a sum goes into the norm, not a layer's result.
    assert traced("language_fused").blueprint.scaled == ()


def test_batch_norm_sites() -> None:
    site = traced("vgg_batch").blueprint.norms[0]
    assert (site.weight, site.mean, site.count) == (
        "1.weight",
        "1.running_mean",
        "1.num_batches_tracked",
    )
    untracked = trace(
        vgg(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), torch.zeros(2, 3, 8, 8)
    )
    assert untracked.norms[0].mean is None
    assert not untracked.buffers


def test_module_is_not_changed() -> None:
    module = vgg(nn.BatchNorm2d).eval()
    module[0].weight.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    blueprint = trace(module, torch.zeros(2, 3, 8, 8))
    assert not module.training
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert blueprint.frozen == ("0.weight",)
    assert "0.weight" not in blueprint.trained(0)
    assert [p.requires_grad for p in module[0].parameters()] == [False, True]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_batch_of_the_example_does_not_matter(batch: int) -> None:
    torch.manual_seed(0)
    module = Residual(Basic(8, 12, 2), width=8, out=12)
    reference = trace(module, torch.zeros(3, 3, 8, 8))
    assert trace(module, torch.zeros(batch, 3, 8, 8)) == reference
    assert trace(module.double(), torch.zeros(batch, 3, 8, 8, dtype=torch.float64)) == reference


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(functional.relu(self.b(torch.cummax(self.a(x), 1).values)))
        return out


def test_unknown_operator_freezes_its_axes_and_says_so() -> None:
    net = of(Unknown(), torch.randn(4, 6))
    (note,) = net.blueprint.remarks
    assert "cummax" in note
    assert "fixed a" in note
    assert net.blueprint.axes["a"].kind == "fixed"
    assert kinds(net.blueprint, "channels") == {"b": 7}
    with pytest.raises(ValueError, match="cummax"):
        Slice.of({"a": (0,)}, net.blueprint)


def test_harder_families_are_frozen_with_a_note() -> None:
    joined = traced("joined").blueprint
    assert {joined.axes[name].kind for name in ("a", "b", "both")} == {"fixed"}
    assert any("concatenated" in note for note in joined.remarks)
    assert any("divided" in note for note in joined.remarks)
    assert any("lstm" in note for note in traced("recurrent").blueprint.remarks)
    tied = traced("tied").blueprint
    assert "head.weight" not in tied.params
    assert any("tied" in note for note in tied.remarks)
    assert kinds(tied, "heads")
    ((rows,),), ((columns,),) = tied.params["embed.weight"]
    assert tied.axes[rows].kind == "output"
    assert (tied.axes[columns].kind, tied.axes[columns].why) == ("fixed", "tied")
    apart = traced("language_fused").blueprint
    _, ((columns,),) = apart.params["embed.weight"]
    assert apart.axes[columns].kind == "channels"


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.mean().item() > 0)


@pytest.mark.parametrize(("make", "line"), [(Branching, "if x.sum"), (Reading, "x.mean().item()")])
def test_control_flow_on_values_is_explained(
    make: type[nn.Module], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError) as caught:
        trace(make(), torch.zeros(2, 3))
    text = str(caught.value)
    assert line in text
    assert Path(__file__).name in text
    assert "torch.where" in text
    assert capfd.readouterr().err == ""


def test_forward_that_fails_is_explained() -> None:
    with pytest.raises(TraceError, match="could not be traced"):
        trace(LeNet(), torch.zeros(2, 1, 3, 3))
    with pytest.raises(TraceError, match="example_inputs"):
        trace(LeNet(), ())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = functional.relu(self.a(x + y))
        return self.b(hidden), hidden


def test_several_inputs_and_outputs_and_unused_parameters() -> None:
    module = Pair()
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    blueprint = trace(module, (x, y))
    params = dict(module.named_parameters())
    assert any("first is the output" in note for note in blueprint.remarks)
    assert any("spare.weight is not used" in note for note in blueprint.remarks)
    got, _ = apply(blueprint, params, {}, (x, y), EVALUATE)
    assert torch.equal(got, module(x, y)[0])
    assert blueprint.layers[0].name == "spare"
    assert kinds(blueprint, "channels") == {"a": 6}
    with pytest.raises(ValueError, match="takes 2 inputs"):
        apply(blueprint, params, {}, x, EVALUATE)


def test_constants_are_cut_with_the_model() -> None:
    net = traced("vision")
    assert "sinusoid" not in net.blueprint.buffers
    slice = Slice.of({"patch": (5, 2)}, net.blueprint)
    constant = net.blueprint.local(slice).program.constants["sinusoid"].tensor()
    assert torch.equal(constant, net.module.get_buffer("sinusoid")[:, [5, 2]].float())


class InPlace(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.seen.mul_(0.5).add_(x.detach().mean(0))
        x += 1
        return x.clamp_(min=0) * 2


def test_in_place_calls_become_functional() -> None:
    net = of(InPlace(), torch.randn(3, 4))
    before = {n: b.clone() for n, b in net.buffers.items()}
    want = torch.func.functional_call(net.module, {**net.params, **before}, (net.inputs,))
    got, after = apply(net.blueprint, net.params, net.buffers, net.inputs, TRAIN)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(after["seen"], before["seen"])
    assert float(net.buffers["seen"].abs().sum()) == 0.0


class StaleView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = 0
        return y


def test_change_of_a_view_is_refused() -> None:
    with pytest.raises(TraceError, match="view in place"):
        trace(StaleView(), torch.zeros(2, 3))


def test_language_model_runs_at_any_cut() -> None:
    net = of(Language(by_hand=False), torch.randint(0, 11, (2, 7)))
    names = {n: (0,) for n, a in net.blueprint.axes.items() if a.free}
    slice = Slice.of(names, net.blueprint)
    small = cut(net.params, slice, net.blueprint)
    out, _ = apply(net.blueprint.local(slice), small, {}, net.inputs, EVALUATE)
    assert out.shape == (2, 7, 11)


class Assorted(nn.Module):
    """Padding, stacking, positions by counting, a creation op and a batch norm used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 6, 3), nn.Conv1d(6, 6, 3)
        self.norm, self.place = nn.BatchNorm1d(6), nn.Embedding(9, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(functional.pad(x, (1, 1))))
        x = self.norm(self.b(functional.pad(x, (2, 0))))
        x = x + self.place(torch.arange(x.shape[2], device=x.device)).t()
        both = torch.stack([x, x + torch.ones(x.shape[0], x.shape[1], 1)], 1)
        out: Tensor = self.head(both.mean((1, 3)) / x.shape[0])
        return out


def test_assorted_operators() -> None:
    net = of(Assorted(), torch.randn(4, 3, 9))
    (note,) = net.blueprint.remarks
    assert note.startswith("div (the outermost module) computes with the number of samples")
    assert kinds(net.blueprint, "channels") == {"a": 6}
    verify(net.module, net.inputs, net.blueprint).require()


class Cased(nn.Module):
    """Ways of making heads other than view and transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 12, bias=False) for _ in range(3))
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (3, 4)).permute(0, 2, 1, 3)
        k = self.k(x).reshape(*x.shape[:-1], 3, 4).permute(0, 2, 3, 1)
        v = self.v(x).view(x.shape[0], x.shape[1], 3, 4).swapaxes(1, 2)
        mixed = torch.matmul(torch.matmul(q, k).div(2.0).softmax(dim=-1), v)
        out: Tensor = self.out(mixed.permute(0, 2, 1, 3).flatten(-2))
        return out


def test_heads_are_found_however_they_are_made() -> None:
    net = of(Cased(), torch.randn(2, 7, 6))
    assert kinds(net.blueprint, "heads") == {"q.heads": 3}
    assert kinds(net.blueprint, "head_dim") == {"q.head_dim": 4, "v.head_dim": 4}
    verify(net.module, net.inputs, net.blueprint).require()


class HandWrittenCell(nn.Module):
    """A loop over steps, with a state that the module makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 6)
        for step in range(x.shape[1]):
            state = torch.tanh(self.a(x[:, step]) + self.r(state))
        out: Tensor = self.head(state)
        return out


def test_created_tensors_follow_axes_batch_and_precision() -> None:
    net = of(HandWrittenCell(), torch.randn(4, 5, 4))
    assert kinds(net.blueprint, "channels") == {"a": 6}
    verify(net.module, net.inputs, net.blueprint).require()


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.a(x)
        out: Tensor = self.head(hidden)
        return out


def test_a_block_without_gradients_is_written_out() -> None:
    net = of(WithoutGradient(), torch.randn(2, 4))
    assert kinds(net.blueprint, "channels") == {"a": 6}
    verify(net.module, net.inputs, net.blueprint).require()


def test_torch_multihead_attention_is_cut_by_heads() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    net = of(nn.Sequential(layer, nn.Linear(8, 3)), torch.randn(2, 5, 8))
    assert kinds(net.blueprint, "heads") == {"0.self_attn.heads": 2}
    verify(net.module, net.inputs, net.blueprint).require()


class ByItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(hidden * hidden.max().item())
        return out


def test_a_number_made_of_a_tensor_is_refused_with_what_to_write() -> None:
    with pytest.raises(TraceError, match=r"(?s)a Python number of the values.*h\.max\(\) instead"):
        trace(ByItem(), torch.randn(2, 4))
