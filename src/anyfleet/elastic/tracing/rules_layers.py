"""Axis rules of the operators that hold parameters, and of attention."""

from typing import cast

from torch import fx

from anyfleet.elastic.tracing.axes import ALONG, Dims, Product, atoms, freeze, fresh, mark
from anyfleet.elastic.tracing.scope import Result, Scope, bound, full_size, op_name, shape_of


def linear(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    x, weight = scope.dims(given["input"]), scope.dims(given["weight"])
    scope.match(x[-1], weight[1], node)
    if given["bias"] is not None:
        scope.match(scope.dims(given["bias"])[0], weight[0], node)
    return (*x[:-1], weight[0])


def convolution(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    x, weight = scope.dims(given["input"]), scope.dims(given["weight"])
    if given["bias"] is not None:
        scope.match(scope.dims(given["bias"])[0], weight[0], node)
    for kernel in weight[2:]:
        freeze(kernel, "kernel")
    channel = len(x) - len(weight) + 1
    scope.fix(x[channel + 1 :], node, f"{op_name(node)} {ALONG}")
    if given["groups"] == 1:
        scope.match(x[channel], weight[1], node)
    else:
        _grouped(scope, node, x[channel])
    return (*x[:channel], weight[0], *spatial(shape_of(node)[channel + 1 :]))


def _grouped(scope: Scope, node: fx.Node, channels: Product) -> None:
    """in = groups x i, out = groups x o, weight = [groups x o, i, …]; depthwise is i = 1."""
    given = bound(node)
    weight = scope.dims(given["weight"])
    count = int(given["groups"])
    groups = fresh(count)
    scope.match(channels, (*groups, *weight[1]), node)
    scope.match(weight[0], (*groups, *fresh(full_size(weight[0]) // count)), node)
    if full_size(weight[1]) > 1:
        mark(groups, "groups")
    scope.resize(node, "groups", groups)


def transposed_convolution(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    x, weight = scope.dims(given["input"]), scope.dims(given["weight"])
    channel = len(x) - len(weight) + 1
    for kernel in weight[2:]:
        freeze(kernel, "kernel")
    scope.fix(x[channel + 1 :], node, f"{op_name(node)} {ALONG}")
    scope.match(x[channel], weight[0], node)
    out = weight[1]
    if given["groups"] != 1:
        scope.fix((weight[0], weight[1]), node, "grouped transposed convolution")
        out = fresh(shape_of(node)[channel], "grouped transposed convolution")
    if given["bias"] is not None:
        scope.match(scope.dims(given["bias"])[0], out, node)
    return (*x[:channel], out, *spatial(shape_of(node)[channel + 1 :]))


def spatial(sizes: tuple[int, ...]) -> Dims:
    return tuple(fresh(n, "space") for n in sizes)


def channel_norm(scope: Scope, node: fx.Node) -> Result:
    """Batch and instance norm, PReLU: one parameter per channel."""
    given = bound(node)
    x = scope.dims(given["input"] if "input" in given else given["self"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        held = given.get(name)
        if held is not None and full_size(scope.dims(held)[0]) > 1:
            scope.match(x[1], scope.dims(held)[0], node)
    return x


def group_norm(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    x = scope.dims(given["input"])
    for name in ("weight", "bias"):
        if given[name] is not None:
            scope.match(x[1], scope.dims(given[name])[0], node)
    count = int(given["num_groups"])
    if count > 1:
        groups = fresh(count)
        scope.match(x[1], (*groups, *fresh(full_size(x[1]) // count)), node)
        # A norm of each channel on its own has no groups to keep together.
        if full_size(x[1]) > count:
            mark(groups, "groups")
        scope.resize(node, "num_groups", groups)
    return x


def layer_norm(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    x = scope.dims(given["input"])
    normal = x[len(x) - len(given["normalized_shape"]) :]
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            for one, other in zip(normal, scope.dims(given[name]), strict=True):
                scope.match(one, other, node)
    scope.reshape(node, "normalized_shape", normal)
    return x


def embedding(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    weight = scope.dims(given["weight"])
    freeze(weight[0], "vocabulary")
    return (*scope.dims(given["indices"]), weight[1])


def matmul(scope: Scope, node: fx.Node) -> Result:
    first, second = node.args
    left, right = scope.dims(cast(fx.Node, first)), scope.dims(cast(fx.Node, second))
    scope.match(left[-1], right[-2] if len(right) > 1 else right[0], node)
    out = (*left[-2:-1], right[-1]) if len(right) > 1 else left[-2:-1]
    # Heads are a dimension of their own, or share one with the batch.
    if len(left) == len(right) == 4 or (len(left) == len(right) == 3 and _shared(scope, left[0])):
        _mark_heads(scope, left[:-2], right[:-2])
        mark(left[-1], "head_dim")
        mark(right[-1], "head_dim")
    return (*broadcast(scope, node, left[:-2], right[:-2]), *out)


def attention(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    query, key, value = (scope.dims(given[name]) for name in ("query", "key", "value"))
    lengths = (query[-2], key[-2])
    for product in lengths:
        freeze(product, "length")
    scope.match(query[-1], key[-1], node)
    scope.match(key[-2], value[-2], node)
    for one, other in ((query[:-2], key[:-2]), (query[:-2], value[:-2])):
        for a, b in zip(one, other, strict=True):
            if full_size(a) == full_size(b):
                scope.match(a, b, node)
            else:
                scope.fix((a, b), node, "attention with shared key heads")
    if given["attn_mask"] is not None:
        broadcast(scope, node, (*query[:-2], *lengths), scope.dims(given["attn_mask"]))
    if len(query) == 4:
        _mark_heads(scope, query[:2])
        mark(query[-1], "head_dim")
        mark(value[-1], "head_dim")
    return (*query[:-1], value[-1])


def _shared(scope: Scope, product: Product) -> bool:
    found = [scope.is_batch(atom) for atom in atoms(product)]
    return any(found) and not all(found)


def _mark_heads(scope: Scope, *leading: Dims) -> None:
    for product in (p for dims in leading for p in dims):
        mark(tuple(a for a in atoms(product) if not scope.is_batch(a)), "heads")


def broadcast(scope: Scope, node: fx.Node, one: Dims, other: Dims) -> Dims:
    """The dimensions of an elementwise result; equal sizes are the same axes."""
    rank = max(len(one), len(other))
    one = (*((),) * (rank - len(one)), *one)
    other = (*((),) * (rank - len(other)), *other)
    out = []
    for a, b in zip(one, other, strict=True):
        if full_size(a) == full_size(b):
            scope.match(a, b, node)
        out.append(b if full_size(a) == 1 else a)
    return tuple(out)
