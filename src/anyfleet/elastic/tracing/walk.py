"""One pass over an exported graph: axis rules, functional calls, arguments as plain data."""

import operator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from anyfleet.elastic.program import CREATIONS, Held, Named, Value
from anyfleet.elastic.tracing.axes import Atom, Dims, fresh
from anyfleet.elastic.tracing.export import CUMULATIVE, Exported
from anyfleet.elastic.tracing.randomness import KEYED, check_repeatable
from anyfleet.elastic.tracing.rules import rule
from anyfleet.elastic.tracing.scope import (
    Count,
    Scope,
    bound,
    line_of,
    op_name,
    place_of,
    schema,
    where,
)
from anyfleet.errors import TraceError

# Calls that only check or annotate.
_SKIPPED = frozenset(
    {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range"}
)
# A device decides for itself where things live.
_DROPPED_OPTIONS = frozenset({"device", "pin_memory", "layout"})


@dataclass
class Draft:
    """A node whose sizes are still products of atoms."""

    name: str
    op: str
    args: list[Any]
    options: dict[str, Any]
    dims: Dims | None
    where: str
    site: int
    source: fx.Node
    always: bool = False


@dataclass
class Walk:
    """The findings of one pass over the graph."""

    exported: Exported
    scope: Scope
    drafts: list[Draft] = field(default_factory=list)
    latest: dict[fx.Node, fx.Node] = field(default_factory=dict)
    family: dict[fx.Node, fx.Node] = field(default_factory=dict)
    placeholders: dict[str, fx.Node] = field(default_factory=dict)
    held: dict[fx.Node, str] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def walk(exported: Exported, aliases: dict[str, str], beside: Walk | None = None) -> Walk:
    """Visit every call; `aliases` maps the other names of a tied tensor to its first.

    `beside` is an earlier walk over the same module in another mode: both share their axes.
    """
    scope = Scope(Atom(exported.batch, "batch")) if beside is None else beside.scope
    found = Walk(exported, scope, aliases=aliases)
    found.order = {node: i for i, node in enumerate(exported.graph.nodes)}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            _placeholder(found, node, beside)
        elif node.op == "call_function":
            _call(found, node)
        elif node.op != "output":
            raise TraceError(
                f"{node.op} {node.target} in forward() is no call of an operator.{line_of(node)}\n"
                "Use plain torch operators."
            )
    _check_output(found)
    return found


def _check_output(found: Walk) -> None:
    names = {node.name for node in found.scope.values}
    outputs = found.exported.outputs
    if not outputs or outputs[0] not in names:
        given = f"{outputs[0]} comes first" if outputs else "it returns nothing"
        raise TraceError(
            f"forward() must return a tensor, or several of which the first is the output; {given}."
            " Return tensors, or wrap the module in one that does."
        )


def _placeholder(found: Walk, node: fx.Node, beside: Walk | None) -> None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return
    exported, scope = found.exported, found.scope
    name = {**exported.params, **exported.buffers, **exported.constants}.get(node.name)
    if name is None:
        scope.values[node] = _known_input(found, node, beside) or tuple(
            (scope.batch,) if i == 0 else fresh(int(n), "input") for i, n in enumerate(value.shape)
        )
        return
    name = found.aliases.get(name, name)
    found.held[node] = name
    if name in found.placeholders:
        scope.values[node] = scope.values[found.placeholders[name]]
        return
    found.placeholders[name] = node
    shared = beside.placeholders.get(name) if beside and name not in _constants(found) else None
    scope.values[node] = (
        tuple(fresh(int(n)) for n in value.shape) if shared is None else scope.values[shared]
    )


def _constants(found: Walk) -> frozenset[str]:
    """Return the names that mean another tensor in another graph."""
    return frozenset(found.exported.constants.values())


def _known_input(found: Walk, node: fx.Node, beside: Walk | None) -> Dims | None:
    if beside is None or node.name not in found.exported.inputs:
        return None
    name = beside.exported.inputs[found.exported.inputs.index(node.name)]
    return next(found.scope.dims(n) for n in beside.exported.graph.nodes if n.name == name)


def _check_shape(node: fx.Node) -> None:
    """Raise TraceError if a size or a Python number was computed from the values of a tensor.

    Every other size in the graph is a number.
    """
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    sizes = [n for t in results if isinstance(t, Tensor) for n in t.shape]
    if any(isinstance(each, torch.SymFloat | torch.SymBool) for each in results):
        raise TraceError(
            f"{node.target} makes a Python number of the values of a tensor, so the network has no "
            f"fixed graph.{line_of(node)}\nLeave it a tensor: write h.max() instead of "
            "h.max().item()."
        )
    if any(isinstance(n, torch.SymInt) for n in (*sizes, *results)):
        raise TraceError(
            f"{node.target} gives a result whose size depends on the values of a tensor, so the "
            f"network has no fixed graph.{line_of(node)}\n"
            "Keep the size and blank out what is not wanted: torch.where or a multiplication by a "
            "mask instead of boolean indexing, nonzero or unique."
        )


def _call(found: Walk, node: fx.Node) -> None:
    _check_shape(node)
    scope = found.scope
    if node.target is operator.getitem:
        source, at = cast(tuple[fx.Node, int], node.args)
        scope.values[node] = cast(list[Dims], scope.values[source])[at]
        _draft(found, node, "getitem")
        return
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        raise TraceError(
            f"{node.target} is not an ATen operator.{line_of(node)}\nWrite this part with plain "
            "torch operators; higher-order and custom ones cannot travel to a device."
        )
    if op_name(node) in _SKIPPED or _is_counter(found, node):
        return
    check_repeatable(node)
    base = op_name(node)
    changes = _own(found, _changed(node))
    result = rule(base.removesuffix("_") if changes is not None else base)(scope, node)
    scope.values[node] = result
    _draft(found, node, _functional(node) if changes is not None else str(node.target))
    if changes is not None:
        _supersede(found, node, changes)
    elif any(a.alias_info is not None for a in schema(node).returns):
        found.family[node] = _root(found, node.all_input_nodes[0])


def _is_counter(found: Walk, node: fx.Node) -> bool:
    """Return whether a call counts the batches of a batch norm: `apply` does that itself."""
    target = node.args[0] if node.args else None
    name = found.held.get(target, "") if isinstance(target, fx.Node) else ""
    if op_name(node) != "add_" or not name.endswith("num_batches_tracked"):
        return False
    # A module called again counts on from here.
    found.held[node] = name
    return True


def _changed(node: fx.Node) -> fx.Node | None:
    """Return the value an in-place call writes to, or None."""
    for argument, given in zip(schema(node).arguments, node.args, strict=False):
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(given, fx.Node)
        ):
            return given
    return None


def _functional(node: fx.Node) -> str:
    packet = getattr(torch.ops.aten, op_name(node).removesuffix("_"), None)
    overload = str(node.target).rpartition(".")[2]
    if not op_name(node).endswith("_") or packet is None or overload not in packet.overloads():
        raise TraceError(
            f"{node.target} changes a tensor in place and has no other form ({place_of(node)}). "
            "Use an operator that returns a new tensor."
        )
    return f"aten.{op_name(node).removesuffix('_')}.{overload}"


def _own(found: Walk, node: fx.Node | None) -> fx.Node | None:
    """Return the placeholder that stands for a tensor, whichever of its names was meant."""
    return node if node is None else found.placeholders.get(found.held.get(node, ""), node)


def _root(found: Walk, node: fx.Node) -> fx.Node:
    return found.family.get(node, node)


def _supersede(found: Walk, node: fx.Node, changed: fx.Node) -> None:
    """Let the changed value mean the new one from here on; refuse a view of it that is used."""
    root = _root(found, changed)
    relatives = {n for n, r in found.family.items() if r is root} | {root}
    for other in relatives - {changed}:
        if any(found.order[user] > found.order[node] for user in other.users):
            raise TraceError(
                f"{node.target} changes a view in place while {other.name} is still used "
                f"({place_of(node)}). Use the form of the operator that returns a new tensor."
            )
    found.latest[changed] = node
    found.family[node] = node


def current(found: Walk, node: fx.Node) -> fx.Node:
    """Return the node that now holds this value."""
    node = _own(found, node) or node
    while node in found.latest:
        node = found.latest[node]
    return node


def _draft(found: Walk, node: fx.Node, op: str) -> None:
    base = op.split(".")[1] if "." in op else op
    args, options = _arguments(found, node, base)
    if node in found.scope.instead:
        op, given = found.scope.instead[node]
        args, options = [_plain(found, arg, node) for arg in given], {}
    if base == "batch_norm" and args[6] == CUMULATIVE:
        args[6] = None
    if op == "aten.to.device":
        op, args = "aten.to.dtype", [args[0], args[2]]
    site = 0
    if base in KEYED:
        site = 1 + max((draft.site for draft in found.drafts), default=0)
    result = found.scope.values[node]
    dims = None if isinstance(result, list) else result
    found.drafts.append(Draft(node.name, op, args, options, dims, where(node), site, node))


def _arguments(found: Walk, node: fx.Node, base: str) -> tuple[list[Any], dict[str, Any]]:
    if base == "getitem":
        return [_plain(found, arg, node) for arg in node.args], {}
    sizes = found.scope.sizes.get(node, {})
    given = {
        name: sizes[name] if name in sizes else _plain(found, value, node)
        for name, value in bound(node).items()
    }
    names = list(given)
    # What `apply` runs itself has all its arguments in their places.
    count = (
        len(names) if base in KEYED or base in ("batch_norm", "instance_norm") else len(node.args)
    )
    options = {name: given[name] for name in node.kwargs if name in names[count:]}
    if base in CREATIONS and node.meta["val"].is_floating_point():
        # Unless the user chose, it is the precision of the model, not torch's default.
        options.setdefault("dtype", Named("model"))
    return [given[name] for name in names[:count]], {
        name: value for name, value in options.items() if name not in _DROPPED_OPTIONS
    }


def _plain(found: Walk, arg: object, node: fx.Node) -> Any:
    """Return plain data for an argument; literal sizes that hold the batch become products."""
    if isinstance(arg, fx.Node):
        arg = current(found, arg)
        return Held(found.held[arg]) if arg in found.held else Value(arg.name)
    if isinstance(arg, list | tuple):
        return [_plain(found, item, node) for item in arg]
    if isinstance(arg, bool) or arg is None or isinstance(arg, float | str):
        return arg
    if isinstance(arg, int):
        # The batch of the trace is a prime that nobody would write; larger numbers mean "to the
        # end".
        is_batch = 0 < arg < 1 << 31 and arg % found.exported.batch == 0
        return Count(found.scope.literal(arg, "literal")) if is_batch else arg
    if isinstance(arg, torch.dtype):
        return Named(dtype_name(found, arg))
    if isinstance(arg, torch.memory_format | torch.layout):
        return Named(str(arg).removeprefix("torch."))
    if isinstance(arg, torch.device):
        return None
    raise TraceError(
        f"{node.target} takes {arg!r}, and an argument of type {type(arg).__name__} cannot travel "
        f"to a device.{line_of(node)}\nPass numbers, texts, dtypes or tensors to operators."
    )


def dtype_name(found: Walk, dtype: torch.dtype) -> str:
    """Return the name of a dtype; that of the parameters is "model".

    So the program also runs in another precision.
    """
    own = next(
        (t.dtype for t in found.exported.tensors.values() if t.is_floating_point()), torch.float32
    )
    return "model" if dtype == own else str(dtype).removeprefix("torch.")
