"""The axis rule of every ATen operator: what a call says about the axes of its operands.

A rule returns the dimensions of the result. It unifies dimensions that are indexed alike, and
fixes those that must never be cut. Operators without a rule are `unknown`: they fix everything.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from anyfleet.elastic.tracing.axes import ALONG, Dims, Product, atoms, freeze, fresh, mark, unify
from anyfleet.elastic.tracing.scope import Result, Scope, bound, full_size, op_name, shape_of

Rule = Callable[[Scope, fx.Node], Result]

# --- operators that hold parameters, and attention ------------------------------------------------


def linear(scope: Scope, node: fx.Node) -> Result:
    """Match inputs, weight and bias of a linear layer."""
    given = bound(node)
    x, weight = scope.dims(given["input"]), scope.dims(given["weight"])
    scope.match(x[-1], weight[1], node)
    if given["bias"] is not None:
        scope.match(scope.dims(given["bias"])[0], weight[0], node)
    return (*x[:-1], weight[0])


def convolution(scope: Scope, node: fx.Node) -> Result:
    """Match channels, weight and bias of a convolution; fix the map and the kernel."""
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
    """Match a grouped convolution: in = groups x i, out = groups x o, weight = [groups x o, i, …].

    Depthwise is i = 1.
    """
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
    """Match channels, weight and bias of a transposed convolution; fix the map and the kernel."""
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
    """Return the dimensions of a map, which are never cut."""
    return tuple(fresh(n, "space") for n in sizes)


def channel_norm(scope: Scope, node: fx.Node) -> Result:
    """Match batch norm, instance norm or PReLU: one parameter per channel."""
    given = bound(node)
    x = scope.dims(given["input"] if "input" in given else given["self"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        held = given.get(name)
        if held is not None and full_size(scope.dims(held)[0]) > 1:
            scope.match(x[1], scope.dims(held)[0], node)
    return x


def group_norm(scope: Scope, node: fx.Node) -> Result:
    """Match the channels of a group norm, whose groups are cut as a whole."""
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
    """Match the normalised dimensions with weight and bias."""
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
    """Return the dimensions of the indices and of a row; fix the vocabulary."""
    given = bound(node)
    weight = scope.dims(given["weight"])
    freeze(weight[0], "vocabulary")
    return (*scope.dims(given["indices"]), weight[1])


def matmul(scope: Scope, node: fx.Node) -> Result:
    """Match the summed dimensions of a product; mark heads where there are four dimensions."""
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
    """Match queries, keys and values; mark heads and fix the lengths."""
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
    """Return the dimensions of an elementwise result; equal sizes are the same axes."""
    rank = max(len(one), len(other))
    one = (*((),) * (rank - len(one)), *one)
    other = (*((),) * (rank - len(other)), *other)
    out = []
    for a, b in zip(one, other, strict=True):
        if full_size(a) == full_size(b):
            scope.match(a, b, node)
        out.append(b if full_size(a) == 1 else a)
    return tuple(out)


# --- operators that move, broadcast, reduce or select ---------------------------------------------


def elementwise(scope: Scope, node: fx.Node) -> Result:
    """Return the dimensions of all operands, broadcast."""
    out: Dims = ()
    for operand in node.all_input_nodes:
        out = broadcast(scope, node, out, scope.dims(operand))
    return out


def same(scope: Scope, node: fx.Node) -> Result:
    """Return the dimensions of the first operand."""
    return scope.dims(node.all_input_nodes[0])


def reshape(scope: Scope, node: fx.Node) -> Result:
    """Divide the product of all dimensions into the new ones, from the left."""
    out = refactor(scope, node, node.all_input_nodes[0])
    given = bound(node)
    for name in ("size", "shape"):
        if name in given:
            scope.reshape(node, name, out)
    return out


def reshape_like(scope: Scope, node: fx.Node) -> Result:
    """Take the shape of another tensor, and with it its axes."""
    given = bound(node)
    out = refactor(scope, node, given["self"])
    for one, other in zip(out, scope.dims(given["other"]), strict=True):
        scope.match(one, other, node)
    return out


def unflatten(scope: Scope, node: fx.Node) -> Result:
    """Divide one dimension into several."""
    given = bound(node)
    out = refactor(scope, node, given["self"])
    start = given["dim"] % len(scope.dims(given["self"]))
    scope.reshape(node, "sizes", out[start : start + len(given["sizes"])])
    return out


def refactor(scope: Scope, node: fx.Node, source: fx.Node) -> Dims:
    """Return new dimensions for the same atoms; fix all of them where they do not align."""
    old = tuple(atom for product in scope.dims(source) for atom in product)
    new = tuple(fresh(n) for n in shape_of(node))
    if unify(old, tuple(atom for product in new for atom in product)):
        return new
    scope.fix(scope.dims(source), node, f"{op_name(node)} mixes axes")
    return tuple(scope.literal(n, f"{op_name(node)} mixes axes") for n in shape_of(node))


def expand(scope: Scope, node: fx.Node) -> Result:
    """Return the dimensions of an expanded tensor."""
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
    """Return the dimensions in the order given."""
    given = bound(node)
    source = scope.dims(given["self"])
    return tuple(source[i] for i in given["dims"])


def transpose(scope: Scope, node: fx.Node) -> Result:
    """Return the dimensions with two of them swapped."""
    out = list(scope.dims(node.all_input_nodes[0]))
    one, other = [a for a in node.args if isinstance(a, int)]
    out[one], out[other] = out[other], out[one]
    return tuple(out)


def reverse(scope: Scope, node: fx.Node) -> Result:
    """Return the dimensions in reverse order."""
    return scope.dims(node.all_input_nodes[0])[::-1]


def pool(scope: Scope, node: fx.Node) -> Result:
    """Pass leading dimensions on; fix those of the map, as neighbours are combined."""
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
    """Return along which dimensions of the map every window is a single element, in its place."""
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
    """Drop the averaged dimensions; they may still be cut.

    Means and variances do not depend on how many entries are averaged.
    """
    return _reduced(scope, node, freezing=False)


def reduction(scope: Scope, node: fx.Node) -> Result:
    """Drop the reduced dimensions and fix them."""
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
    """Keep the shape, and fix the dimension that softmax, a cumulative sum or a flip runs along."""
    source = scope.dims(node.all_input_nodes[0])
    over = tuple(source[i] for i in _dimensions(node, len(source)))
    scope.fix(over, node, f"{op_name(node)} {ALONG}")
    return source


def triangle(scope: Scope, node: fx.Node) -> Result:
    """Fix the two dimensions of a triangle."""
    given = node.all_input_nodes[0]
    source = scope.dims(given)
    if given.op == "placeholder":
        scope.fix(source[-2:], node, f"{op_name(node)} {ALONG}")
    for product in source[-2:]:
        freeze(product, "length")
    return source


def _dimensions(node: fx.Node, rank: int) -> tuple[int, ...]:
    """Return the dimensions that a call names; all of them by default."""
    given = bound(node)
    chosen = given.get("dim", given.get("dims"))
    if chosen is None or chosen == []:
        return tuple(range(rank))
    return (
        tuple(i % rank for i in ([chosen] if isinstance(chosen, int) else chosen)) if rank else ()
    )


def select(scope: Scope, node: fx.Node) -> Result:
    """Drop the dimension from which one position is selected, and fix it."""
    given = bound(node)
    source = scope.dims(given["self"])
    at = given["dim"] % len(source)
    scope.fix((source[at],), node, "one position is selected")
    return (*source[:at], *source[at + 1 :])


def narrow(scope: Scope, node: fx.Node) -> Result:
    """Pass a slice of a whole dimension on; fix the dimension of any other slice."""
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
    """Return whole views of the batch that a slice takes from several joined ones, or None."""
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
    """Insert a dimension of size 1."""
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
    """Return the dimensions of a tensor of one value: any of them may turn out to be an axis."""
    out = tuple(scope.literal(n, "") for n in shape_of(node))
    if "size" in bound(node):
        scope.reshape(node, "size", out)
    return out


def positions(scope: Scope, node: fx.Node) -> Result:
    """Fix every dimension of a count: every element differs from the others."""
    return tuple(scope.literal(n, f"{op_name(node)} counts along it") for n in shape_of(node))


def pad(scope: Scope, node: fx.Node) -> Result:
    """Fix what is padded (or shifted: padded here and cropped there), and pass the rest on."""
    source, shape = scope.dims(node.all_input_nodes[0]), shape_of(node)
    amounts = list(bound(node)["pad"])
    out = list(source)
    for i, at in enumerate(range(len(source) - 1, len(source) - 1 - len(amounts) // 2, -1)):
        if any(amounts[2 * i : 2 * i + 2]):
            scope.fix((source[at],), node, "padded")
            out[at] = fresh(shape[at], "space")
    return tuple(out)


def stack(scope: Scope, node: fx.Node) -> Result:
    """Add a new dimension, never cut; the others are the same axes in all parts."""
    given = bound(node)
    parts = [scope.dims(n) for n in given["tensors"]]
    for part in parts[1:]:
        broadcast(scope, node, parts[0], part)
    at = given["dim"] % (len(parts[0]) + 1)
    return (*parts[0][:at], fresh(len(parts), "stacked"), *parts[0][at:])


def join(scope: Scope, node: fx.Node) -> Result:
    """Fix the dimension that a concatenation joins; the others are the same axes in all parts."""
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
    """Return the dimension of joined parts; views of the batch run over it several times."""
    inner = [found[1] for found in map(scope.parted, parts) if found is not None]
    if len(inner) == len(parts) and len({full_size(product) for product in inner}) == 1:
        for other in inner[1:]:
            scope.match(inner[0], other, node)
        if (found := scope.views(count, parts[0], "concatenated")) is not None:
            return found
    return scope.literal(count, "concatenated")


def divide(scope: Scope, node: fx.Node) -> Result:
    """Fix the dimension that a split or a chunk divides."""
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
    """Fix everything that goes through an operator of which nothing is known."""
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


# --- the rule of each operator --------------------------------------------------------------------

_ELEMENTWISE = """
abs add alias bitwise_and bitwise_not bitwise_or celu clamp clamp_max clamp_min clone contiguous
copy cos detach div dropout elu eq erf exp expm1 feature_dropout fill floor ge gelu gt hardsigmoid
hardswish hardtanh le leaky_relu lift_fresh_copy log log1p log_sigmoid logical_and logical_not
bernoulli empty_like exponential rand_like randn_like uniform
logical_or logit lt masked_fill maximum minimum mish mul ne neg ones_like pow reciprocal relu
relu6 rsqrt rsub selu sigmoid sign silu sin softplus softsign sqrt square sub tanh tanhshrink
threshold where zero zeros_like full_like _to_copy alpha_dropout feature_alpha_dropout
"""

_POOLS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d
max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d
"""

_REDUCTIONS = "all amax amin any argmax argmin linalg_vector_norm logsumexp max min norm prod sum"

_OTHERS: Mapping[str, Rule] = {
    "linear": linear,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv_transpose1d": transposed_convolution,
    "conv_transpose2d": transposed_convolution,
    "batch_norm": channel_norm,
    "instance_norm": channel_norm,
    "to": same,
    "type_as": same,
    "prelu": channel_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "embedding": embedding,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "scaled_dot_product_attention": attention,
    "view": reshape,
    "reshape": reshape,
    "_unsafe_view": reshape,
    "flatten": reshape,
    "reshape_as": reshape_like,
    "view_as": reshape_like,
    "unflatten": unflatten,
    "expand": expand,
    "expand_as": elementwise,
    "permute": permute,
    "transpose": transpose,
    "swapaxes": transpose,
    "t": reverse,
    "numpy_T": reverse,
    "mean": average,
    "var": average,
    "std": average,
    "softmax": along,
    "log_softmax": along,
    "cumsum": along,
    "flip": along,
    "tril": triangle,
    "triu": triangle,
    "select": select,
    "slice": narrow,
    "narrow": narrow,
    "unsqueeze": insert,
    "squeeze": squeeze,
    "zeros": create,
    "ones": create,
    "full": create,
    "empty": create,
    "rand": create,
    "randn": create,
    "new_zeros": create,
    "new_ones": create,
    "new_full": create,
    "arange": positions,
    "eye": positions,
    "linspace": positions,
    "pad": pad,
    "constant_pad_nd": pad,
    "stack": stack,
    "cat": join,
    "concat": join,
    "split": divide,
    "split_with_sizes": divide,
    "chunk": divide,
    "unbind": divide,
}

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(_POOLS.split(), pool),
    **dict.fromkeys(_REDUCTIONS.split(), reduction),
    **_OTHERS,
}


def rule(name: str) -> Rule:
    """Return the rule of an operator without namespace and overload ("conv2d")."""
    return RULES.get(name, unknown)
