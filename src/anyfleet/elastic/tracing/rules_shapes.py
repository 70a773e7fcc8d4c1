"""Axis rules of the operators that move, broadcast, reduce or select."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from anyfleet.elastic.tracing.axes import ALONG, Dims, Product, freeze, fresh, unify
from anyfleet.elastic.tracing.rules_layers import broadcast, spatial
from anyfleet.elastic.tracing.scope import Result, Scope, bound, full_size, op_name, shape_of


def elementwise(scope: Scope, node: fx.Node) -> Result:
    out: Dims = ()
    for operand in node.all_input_nodes:
        out = broadcast(scope, node, out, scope.dims(operand))
    return out


def same(scope: Scope, node: fx.Node) -> Result:
    return scope.dims(node.all_input_nodes[0])


def reshape(scope: Scope, node: fx.Node) -> Result:
    """Refactor the product of all dimensions into the new ones, from the left."""
    out = refactor(scope, node, node.all_input_nodes[0])
    given = bound(node)
    for name in ("size", "shape"):
        if name in given:
            scope.reshape(node, name, out)
    return out


def reshape_like(scope: Scope, node: fx.Node) -> Result:
    """The shape of another tensor, and with it its axes."""
    given = bound(node)
    out = refactor(scope, node, given["self"])
    for one, other in zip(out, scope.dims(given["other"]), strict=True):
        scope.match(one, other, node)
    return out


def unflatten(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    out = refactor(scope, node, given["self"])
    start = given["dim"] % len(scope.dims(given["self"]))
    scope.reshape(node, "sizes", out[start : start + len(given["sizes"])])
    return out


def refactor(scope: Scope, node: fx.Node, source: fx.Node) -> Dims:
    old = tuple(atom for product in scope.dims(source) for atom in product)
    new = tuple(fresh(n) for n in shape_of(node))
    if unify(old, tuple(atom for product in new for atom in product)):
        return new
    scope.fix(scope.dims(source), node, f"{op_name(node)} mixes axes")
    return tuple(scope.literal(n, f"{op_name(node)} mixes axes") for n in shape_of(node))


def expand(scope: Scope, node: fx.Node) -> Result:
    source = scope.dims(node.all_input_nodes[0])
    shape = shape_of(node)
    source = (*((),) * (len(shape) - len(source)), *source)
    out = tuple(
        product if full_size(product) == n else scope.literal(n, "")
        for product, n in zip(source, shape, strict=True)
    )
    scope.reshape(node, "size", out)
    return out


def permute(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    source = scope.dims(given["self"])
    return tuple(source[i] for i in given["dims"])


def transpose(scope: Scope, node: fx.Node) -> Result:
    out = list(scope.dims(node.all_input_nodes[0]))
    one, other = [a for a in node.args if isinstance(a, int)]
    out[one], out[other] = out[other], out[one]
    return tuple(out)


def reverse(scope: Scope, node: fx.Node) -> Result:
    return scope.dims(node.all_input_nodes[0])[::-1]


def pool(scope: Scope, node: fx.Node) -> Result:
    """Leading dimensions pass; those of the map are never cut, as neighbours are combined."""
    source = scope.dims(node.all_input_nodes[0])
    value = node.meta["val"]
    shape = tuple(value.shape if isinstance(value, torch.Tensor) else value[0].shape)
    changed = 3 if "3d" in op_name(node) else 2 if "2d" in op_name(node) else 1
    lead, over = source[: len(source) - changed], source[len(source) - changed :]
    mixed = [not single for single in _single(bound(node), changed)]
    scope.fix(
        tuple(p for p, mixes in zip(over, mixed, strict=True) if mixes),
        node,
        f"{op_name(node)} {ALONG}",
    )
    sizes = spatial(shape[len(shape) - changed :])
    out = (*lead, *(n if mixes else p for p, n, mixes in zip(over, sizes, mixed, strict=True)))
    return out if isinstance(value, torch.Tensor) else [out] * len(value)


def _single(given: Mapping[str, Any], count: int) -> list[bool]:
    """Along which dimensions of the map every window is a single element, in its own place."""
    if "kernel_size" not in given:
        return [False] * count
    kernel = _each(given["kernel_size"], count)
    stride = _each(given["stride"] or kernel, count)
    padding = _each(given["padding"], count)
    return [k == s == 1 and not p for k, s, p in zip(kernel, stride, padding, strict=True)]


def _each(value: int | list[int], count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def average(scope: Scope, node: fx.Node) -> Result:
    """Means and variances do not depend on how many are averaged: the axis may still be cut."""
    return _reduced(scope, node, freezing=False)


def reduction(scope: Scope, node: fx.Node) -> Result:
    if "other" in bound(node):
        return elementwise(scope, node)
    return _reduced(scope, node, freezing=True)


def _reduced(scope: Scope, node: fx.Node, *, freezing: bool) -> Result:
    source = scope.dims(node.all_input_nodes[0])
    over = _dimensions(node, len(source))
    if freezing:
        scope.fix(tuple(source[i] for i in over), node, f"reduced by {op_name(node)}")
    keep = bool(bound(node).get("keepdim", False))
    out = tuple(() if i in over else p for i, p in enumerate(source) if keep or i not in over)
    value = node.meta["val"]
    return out if isinstance(value, torch.Tensor) else [out] * len(value)


def along(scope: Scope, node: fx.Node) -> Result:
    """Softmax, cumulative sums, flips: the shape stays, but one dimension may not be cut."""
    source = scope.dims(node.all_input_nodes[0])
    over = tuple(source[i] for i in _dimensions(node, len(source)))
    scope.fix(over, node, f"{op_name(node)} {ALONG}")
    return source


def triangle(scope: Scope, node: fx.Node) -> Result:
    given = node.all_input_nodes[0]
    source = scope.dims(given)
    if given.op == "placeholder":
        scope.fix(source[-2:], node, f"{op_name(node)} {ALONG}")
    for product in source[-2:]:
        freeze(product, "length")
    return source


def _dimensions(node: fx.Node, rank: int) -> tuple[int, ...]:
    given = bound(node)
    chosen = given.get("dim", given.get("dims"))
    if chosen is None or chosen == []:
        return tuple(range(rank))
    return (
        tuple(i % rank for i in ([chosen] if isinstance(chosen, int) else chosen)) if rank else ()
    )


def select(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    source = scope.dims(given["self"])
    at = given["dim"] % len(source)
    scope.fix((source[at],), node, "one position is selected")
    return (*source[:at], *source[at + 1 :])


def narrow(scope: Scope, node: fx.Node) -> Result:
    """A slice: whole, or the dimension is fixed."""
    given = bound(node)
    source = scope.dims(given["self"])
    at = given["dim"] % len(source)
    count = shape_of(node)[at]
    if count == full_size(source[at]):
        if any(scope.is_batch(a) for a in source[at]) and "end" in given:
            scope.resize(node, "end", source[at])
        if "length" in given:
            scope.resize(node, "length", source[at])
        return source
    scope.fix((source[at],), node, "a range is taken")
    taken = _rounds(scope, node, source[at], count) or fresh(count, "a range is taken")
    return (*source[:at], taken, *source[at + 1 :])


def _rounds(scope: Scope, node: fx.Node, product: Product, count: int) -> Product | None:
    """Whole views of the batch that a slice takes from several joined ones."""
    given = bound(node)
    total, start = full_size(product), int(given["start"] or 0)
    start = max(0, start + total if start < 0 else start)
    first = scope.views(start, product, "a range is taken")
    if first is None or given.get("step", 1) != 1:
        return None
    if start:
        scope.resize(node, "start", first)
    taken = scope.views(count, product, "a range is taken")
    if taken is not None and "end" in given:
        scope.resize(node, "end", scope.literal(start + count, "a range is taken"))
    return taken


def insert(scope: Scope, node: fx.Node) -> Result:
    given = bound(node)
    source = scope.dims(given["self"])
    at = given["dim"] % (len(source) + 1)
    return (*source[:at], (), *source[at:])


def squeeze(scope: Scope, node: fx.Node) -> Result:
    """Remove what has size 1 in the whole model, and nothing that a cut or a batch makes 1."""
    given = bound(node)
    source = scope.dims(given["self"])
    over = _dimensions(node, len(source))
    gone = [i for i in over if full_size(source[i]) == 1]
    if not gone:
        scope.replace(node, "aten.alias.default", given["self"])
    elif "dim" not in given or len(gone) < len(over):
        scope.replace(node, "aten.squeeze.dims", given["self"], gone)
    return tuple(p for i, p in enumerate(source) if i not in gone)


def create(scope: Scope, node: fx.Node) -> Result:
    """A tensor of one repeated value: any of its dimensions may turn out to be an axis."""
    out = tuple(scope.literal(n, "") for n in shape_of(node))
    if "size" in bound(node):
        scope.reshape(node, "size", out)
    return out


def positions(scope: Scope, node: fx.Node) -> Result:
    """Counting: every element differs from the others, so nothing may be cut."""
    return tuple(scope.literal(n, f"{op_name(node)} counts along it") for n in shape_of(node))


def pad(scope: Scope, node: fx.Node) -> Result:
    """What is padded (or shifted: padded here and cropped there) is fixed, the rest passes."""
    source, shape = scope.dims(node.all_input_nodes[0]), shape_of(node)
    amounts = list(bound(node)["pad"])
    out = list(source)
    for i, at in enumerate(range(len(source) - 1, len(source) - 1 - len(amounts) // 2, -1)):
        if any(amounts[2 * i : 2 * i + 2]):
            scope.fix((source[at],), node, "padded")
            out[at] = fresh(shape[at], "space")
    return tuple(out)


def stack(scope: Scope, node: fx.Node) -> Result:
    """A new dimension, never cut; the others are the same axes in all parts."""
    given = bound(node)
    parts = [scope.dims(n) for n in given["tensors"]]
    for part in parts[1:]:
        broadcast(scope, node, parts[0], part)
    at = given["dim"] % (len(parts[0]) + 1)
    return (*parts[0][:at], fresh(len(parts), "stacked"), *parts[0][at:])


def join(scope: Scope, node: fx.Node) -> Result:
    """Concatenation: what is joined is never cut (for now)."""
    given = bound(node)
    parts = [scope.dims(n) for n in given["tensors"]]
    at = given["dim"] % len(parts[0])
    for part in parts:
        scope.fix((part[at],), node, "concatenated")
    out: Dims = parts[0]
    for part in parts[1:]:
        for i, (a, b) in enumerate(zip(out, part, strict=True)):
            if i != at:
                scope.match(a, b, node)
    joined = _end_to_end(scope, node, [part[at] for part in parts], shape_of(node)[at])
    return (*out[:at], joined, *out[at + 1 :])


def _end_to_end(scope: Scope, node: fx.Node, parts: list[Product], count: int) -> Product:
    """Views of the batch behind one another run over it several times."""
    inner = [found[1] for found in map(scope.parted, parts) if found is not None]
    if len(inner) == len(parts) and len({full_size(product) for product in inner}) == 1:
        for other in inner[1:]:
            scope.match(inner[0], other, node)
        if (found := scope.views(count, parts[0], "concatenated")) is not None:
            return found
    return scope.literal(count, "concatenated")


def divide(scope: Scope, node: fx.Node) -> Result:
    """Split and chunk: what is divided is never cut (for now)."""
    given = bound(node)
    source = scope.dims(given["self"])
    at = given["dim"] % len(source)
    scope.fix((source[at],), node, "divided into parts")
    shapes = [tuple(t.shape) for t in node.meta["val"]]
    if op_name(node) == "unbind":
        return [(*source[:at], *source[at + 1 :])] * len(shapes)
    why = "divided into parts"
    parts = [scope.views(s[at], source[at], why) or scope.literal(s[at], why) for s in shapes]
    return [(*source[:at], part, *source[at + 1 :]) for part in parts]


def unknown(scope: Scope, node: fx.Node) -> Result:
    """Nothing is known about the operator: nothing that goes through it is cut."""
    why = f"unknown operator {op_name(node)}"
    touched = tuple(p for n in node.all_input_nodes for p in _all(scope.values[n]))
    scope.remark(touched, node, why)
    for product in touched:
        freeze(product, why)
    value = node.meta["val"]
    tensors = [value] if isinstance(value, torch.Tensor) else list(value)
    out = [tuple(scope.literal(int(n), why) for n in t.shape) for t in tensors]
    return out[0] if isinstance(value, torch.Tensor) else out


def _all(result: Result) -> Dims:
    return tuple(p for dims in result for p in dims) if isinstance(result, list) else result
