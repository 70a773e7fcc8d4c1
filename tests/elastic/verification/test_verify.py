"""The self-check passes where it should, and catches tables that are wrong."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import Axis, Blueprint, VerifyError, trace, verify
from anyfleet.elastic.program import Items, Node
from tests.helpers.nets import NETS, traced


@pytest.mark.parametrize("name", NETS)
def test_every_net_passes(name: str) -> None:
    net = traced(name)
    report = verify(net.module, net.inputs, trials=1)
    assert report.problems == ()
    assert report.ok
    report.require()
    assert {check.name for check in report.checks} >= {"tables", "training", "slice 0"}


def test_a_batch_of_one_is_enough() -> None:
    net = traced("resnet_basic")
    assert verify(net.module, net.inputs[:1], trials=1).ok


def test_verify_does_not_change_the_module() -> None:
    net = traced("vgg_batch")
    before = {n: t.clone() for n, t in net.module.state_dict().items()}
    net.module.eval()
    verify(net.module, net.inputs, trials=1)
    assert not net.module.training
    assert all(torch.equal(before[n], t) for n, t in net.module.state_dict().items())


def with_dim(blueprint: Blueprint, name: str, at: int, product: tuple[str, ...]) -> Blueprint:
    dims = list(blueprint.params[name])
    dims[at] = (product,)
    return replace(blueprint, params={**blueprint.params, name: tuple(dims)})


def other_axis(blueprint: Blueprint) -> Blueprint:
    """A second axis of the same size where the first one belongs."""
    return with_dim(blueprint, "blocks.1.c2.weight", 1, ("blocks.1.c2",))


def own_axis(blueprint: Blueprint) -> Blueprint:
    """A consumer that follows an axis of its own."""
    axes = {**blueprint.axes, "stray": Axis(8, 8, "channels")}
    return with_dim(replace(blueprint, axes=axes), "blocks.0.c1.weight", 1, ("stray",))


def freed(blueprint: Blueprint) -> Blueprint:
    """Classes that may be cut."""
    return replace(blueprint, axes={**blueprint.axes, "head": Axis(5, 5, "channels")})


def wrong_size(blueprint: Blueprint) -> Blueprint:
    return replace(blueprint, axes={**blueprint.axes, "stem": Axis(7, 7, "channels")})


def wrong_buffer(blueprint: Blueprint) -> Blueprint:
    buffers = {**blueprint.buffers, "blocks.1.b1.running_mean": ((("blocks.1.c2",),),)}
    return replace(blueprint, buffers=buffers)


def missing(blueprint: Blueprint) -> Blueprint:
    params = {n: d for n, d in blueprint.params.items() if n != "head.bias"}
    return replace(blueprint, params=params)


def unlayered(blueprint: Blueprint) -> Blueprint:
    return replace(blueprint, layers=blueprint.layers[1:])


def wrong_momentum(blueprint: Blueprint) -> Blueprint:
    def changed(node: Node) -> Node:
        if not node.op.startswith("aten.batch_norm"):
            return node
        return replace(node, args=(*node.args[:6], 0.3, *node.args[7:]))

    nodes = tuple(changed(node) for node in blueprint.program.nodes)
    return replace(blueprint, program=replace(blueprint.program, nodes=nodes))


def wrong_call(blueprint: Blueprint) -> Blueprint:
    nodes = tuple(
        replace(n, op="aten.sigmoid.default") if n.op == "aten.relu.default" else n
        for n in blueprint.program.nodes
    )
    return replace(blueprint, program=replace(blueprint.program, nodes=nodes))


Corruption = Callable[[Blueprint], Blueprint]


@pytest.mark.parametrize(
    "corrupt",
    [
        other_axis,
        own_axis,
        freed,
        wrong_size,
        wrong_buffer,
        missing,
        unlayered,
        wrong_momentum,
        wrong_call,
    ],
)
def test_a_corrupted_table_is_caught(corrupt: Corruption) -> None:
    net = traced("resnet_basic")
    report = verify(net.module, net.inputs, corrupt(net.blueprint))
    assert not report.ok
    with pytest.raises(VerifyError, match="does not describe the module"):
        report.require()


def test_wrong_order_of_a_flattened_map_is_caught() -> None:
    net = traced("lenet")
    swapped = with_dim(net.blueprint, "f1.weight", 1, ("space:2", "c2", "space:2"))
    assert not verify(net.module, net.inputs, swapped).ok


@pytest.mark.parametrize("part", ["q", "v", "out"])
def test_swapped_heads_are_caught(part: str) -> None:
    net = traced("language_fused")
    heads, width = (
        "blocks.0.attention.q.heads",
        f"blocks.0.attention.{'q' if part == 'q' else 'v'}.head_dim",
    )
    name, at = f"blocks.0.attention.{part}.weight", 1 if part == "out" else 0
    assert net.blueprint.params[name][at] == ((heads, width),)
    assert not verify(net.module, net.inputs, with_dim(net.blueprint, name, at, (width, heads))).ok


def test_wrong_table_of_a_normalised_axis_is_caught_by_permutation() -> None:
    """Axes inside layer norm cannot be masked; reordering them finds the error."""
    net = traced("perceptron")
    axes = {**net.blueprint.axes, "stray": Axis(8, 8, "channels")}
    wrong = with_dim(replace(net.blueprint, axes=axes), "1.weight", 0, ("stray",))
    names = [line.split(":")[0] for line in verify(net.module, net.inputs, wrong).problems]
    assert any(name.startswith("permutation") for name in names)


class Fickle(nn.Module):
    """Another function when evaluating than when training."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out * 2 if self.training else out


def test_a_module_that_branches_on_training_is_reported() -> None:
    module, x = Fickle(), torch.randn(4, 3)
    blueprint = trace(module, x)
    assert verify(module, x, blueprint).ok
    report = verify(module, x, replace(blueprint, evaluation=None))
    assert report.problems[0].startswith("evaluating")


def test_literal_batch_is_caught() -> None:
    net = traced("lenet")
    nodes = tuple(
        replace(n, op="aten.view.default", args=(n.args[0], Items((4, 24))))
        if n.op.startswith("aten.flatten")
        else n
        for n in net.blueprint.program.nodes
    )
    wrong = replace(net.blueprint, program=replace(net.blueprint.program, nodes=nodes))
    assert not verify(net.module, net.inputs, wrong).ok
