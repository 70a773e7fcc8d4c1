"""Graphs within a graph, such as blocks without gradients, written out in their place."""

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from anyfleet.elastic.tracing.scope import line_of, schema
from anyfleet.errors import TraceError

_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_DECIDES = (
    "decides by the values of a tensor, so the network has no fixed graph. Compute both sides and "
    "choose with torch.where, or decide outside forward()."
)
_REPEATS = "repeats a part of the network. Write the steps out with a plain Python loop."
_CAUSES = {
    "cond": _DECIDES,
    "while_loop": _DECIDES,
    "map": _REPEATS,
    "map_impl": _REPEATS,
    "scan": _REPEATS,
    "associative_scan": _REPEATS,
    _AUTOCAST: (
        "(a torch.autocast block) computes part of the network in another precision. Leave it "
        "out: a task is given another precision as a whole, by task.to(dtype)."
    ),
}

Copied = dict[fx.Node, Any]


def written_out(module: fx.GraphModule, buffers: set[str]) -> tuple[fx.Graph, dict[str, str]]:
    """Return a graph without nested ones, and the new names of its nodes by the old ones.

    `buffers` are the placeholders that hold buffers. A block under torch.no_grad() may change
    those in place; what it returns is detached.
    """
    if not any(node.op == "get_attr" for node in module.graph.nodes):
        return module.graph, {}
    graph = fx.Graph()
    copied = _copy(module, graph, {}, buffers)
    output = next(node for node in module.graph.nodes if node.op == "output")
    graph.node_copy(output, copied.__getitem__)
    return graph, {n.name: c.name for n, c in copied.items() if isinstance(c, fx.Node)}


def _copy(module: fx.GraphModule, graph: fx.Graph, known: Copied, buffers: set[str]) -> Copied:
    """Copy every call; `known` are those that stand for the placeholders of a nested graph."""
    copied = dict(known)
    for node in module.graph.nodes:
        if node in copied or node.op in ("get_attr", "output"):
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001
            copied[node] = _inlined(module, graph, node, copied, buffers)
        elif node.target is operator.getitem and isinstance(copied.get(node.args[0]), tuple):
            copied[node] = copied[node.args[0]][node.args[1]]
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    return copied


def _inlined(
    module: fx.GraphModule, graph: fx.Graph, node: fx.Node, copied: Copied, buffers: set[str]
) -> tuple[Any, ...]:
    name = cast(Any, node.target).name()
    position = {_GRAD: 1, _AUTOCAST: 4}.get(name)
    if position is None or (name == _AUTOCAST and node.args[2]):
        why = _CAUSES.get(name, "is a graph of its own. Use plain torch operators.")
        raise TraceError(f"{name} in forward() {why}{_line(module, node)}")
    inner = module.get_submodule(str(cast(fx.Node, node.args[position]).target))
    block = cast(fx.GraphModule, inner)
    places = [n for n in block.graph.nodes if n.op == "placeholder"]
    given = [copied[cast(fx.Node, arg)] for arg in node.args[position + 1 :]]
    known = dict(zip(places, given, strict=True))
    silent = name == _GRAD and not node.args[0]
    if silent:
        _check_changes(block, known, buffers)
    inside = _copy(block, graph, known, buffers)
    results = next(n for n in block.graph.nodes if n.op == "output").args[0]
    found = [inside[n] if isinstance(n, fx.Node) else n for n in cast(tuple[Any, ...], results)]
    return tuple(_detached(graph, n) if silent else n for n in found)


def _check_changes(block: fx.GraphModule, known: Mapping[fx.Node, Any], buffers: set[str]) -> None:
    """Refuse a block without gradients that changes a tensor whose gradient is wanted.

    Such a change has no functional form.
    """
    for node in block.graph.nodes:
        target = _changed(node)
        while target is not None and _changed(target) is not None:
            target = _changed(target)
        outer = None if target is None else known.get(target)
        if outer is not None and outer.name not in buffers:
            raise TraceError(
                f"{node.target} changes a tensor in place under torch.no_grad() although its "
                f"gradient is still wanted.{line_of(node)}\nUse an operator that returns a new "
                "tensor; only buffers may be changed there."
            )


def _changed(node: fx.Node) -> fx.Node | None:
    """Return the value an in-place call writes to, or None."""
    if not isinstance(node.target, OpOverload):
        return None
    for argument, given in zip(schema(node).arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return given if isinstance(given, fx.Node) else None
    return None


def _detached(graph: fx.Graph, node: Any) -> Any:
    if not isinstance(node, fx.Node):
        return node
    new = graph.call_function(torch.ops.aten.detach.default, (node,))
    new.meta = dict(node.meta)
    return new


def _line(module: fx.GraphModule, node: fx.Node) -> str:
    """Return where the block stands: torch notes the lines of the calls inside it."""
    if node.meta.get("stack_trace"):
        return line_of(node)
    blocks = [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    for block in blocks:
        inner = cast(fx.GraphModule, module.get_submodule(str(block.target)))
        for own in inner.graph.nodes:
            if own.meta.get("stack_trace"):
                return line_of(own)
    return line_of(node)
