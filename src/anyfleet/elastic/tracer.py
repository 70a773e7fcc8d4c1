"""`trace`: the blueprint of an unedited module."""

from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload

from anyfleet.elastic.axes import freeze, fresh
from anyfleet.elastic.blueprint import BatchNormSite, Blueprint, Layer
from anyfleet.elastic.errors import TraceError
from anyfleet.elastic.flops import uncounted
from anyfleet.elastic.mixed_rows import mixed_rows
from anyfleet.elastic.names import Names, output_atoms, owner_of
from anyfleet.elastic.operators import rule
from anyfleet.elastic.program import (
    Arg,
    Constant,
    Dim,
    Held,
    Input,
    Items,
    Node,
    Program,
    Size,
)
from anyfleet.elastic.randomness import drawn_in_evaluation
from anyfleet.elastic.repeated import check_batches, repeated
from anyfleet.elastic.rules_shapes import unknown
from anyfleet.elastic.scope import Count, op_name
from anyfleet.elastic.walk import Draft, Walk, current, dtype_name, walk

_NORMS = frozenset({"batch_norm", "group_norm", "layer_norm", "rms_norm", "instance_norm"})
# Reasons that need no note, or have one of their own.
_OBVIOUS = frozenset(
    {"batch", "input", "kernel", "not used", "output", "space", "tied", "vocabulary"}
)
_SCALABLE = frozenset({"linear", "conv1d", "conv2d", "conv3d"})


def trace(module: nn.Module, example_inputs: Tensor | tuple[Tensor, ...]) -> Blueprint:
    """What the module is made of.

    The first dimension of every input is the batch; its size in the example does not matter. The
    module is not changed. Raises TraceError if the forward pass has no fixed graph.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if not inputs or not all(x.ndim for x in inputs):
        raise TraceError(
            "example_inputs must be one or more tensors whose first dimension is the batch"
        )
    aliases = _aliases(module)
    found = walk(repeated(module, inputs), aliases)
    check_batches(found, module, inputs)
    notes = _finish_axes(found, module) + _find_draws(found, module, inputs)
    names, order = _name_axes(found)
    program = _program(found, names, module)
    params = [n for n, _ in module.named_parameters()]
    buffers = [n for n in _persistent(module) if n not in set(params)]
    blueprint = Blueprint(
        axes=names.axes,
        params={n: _table(found, names, n, module) for n in _by_use(params, order)},
        buffers={n: _table(found, names, n, module) for n in _by_use(buffers, order)},
        layers=_layers(found, order, params, buffers),
        frozen=tuple(n for n, p in module.named_parameters() if not p.requires_grad),
        program=program,
        norms=_norm_sites(found, buffers),
        scaled=_scaled(found),
        notes=(*notes, *_remarks(found, names)),
    )
    return replace(blueprint, notes=(*blueprint.notes, *_uncounted(blueprint), *_mixed(blueprint)))


def _uncounted(blueprint: Blueprint) -> list[str]:
    calls = (f"{n.op} ({n.where or 'the outermost module'})" for n in uncounted(blueprint))
    return [f"{call}: its work is not counted" for call in dict.fromkeys(calls)]


def _mixed(blueprint: Blueprint) -> list[str]:
    return [
        f"{call}: minibatches are not padded, devices not stacked" for call in mixed_rows(blueprint)
    ]


def _find_draws(found: Walk, module: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    """Mark what draws in evaluation too; what there is to say about it."""
    sites = [draft for draft in found.drafts if draft.site]
    always, notes = drawn_in_evaluation([draft.source for draft in sites], module, inputs)
    for draft in sites:
        draft.always = draft.source in always
    return notes


def _aliases(module: nn.Module) -> dict[str, str]:
    """Every other name of a tied parameter, and its first."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            out[name] = first[id(param)]
    return out


def _persistent(module: nn.Module) -> list[str]:
    kept = module.state_dict().keys()
    return [name for name, _ in module.named_buffers() if name in kept]


def _finish_axes(found: Walk, module: nn.Module) -> list[str]:
    """Freeze what may never be cut; what there is to say about it."""
    notes = []
    scope, exported = found.scope, found.exported
    nodes = {node.name: node for node in exported.graph.nodes}
    for product in scope.dims(nodes[exported.outputs[0]]):
        freeze(product, "output")
    if len(exported.outputs) > 1:
        notes.append(f"forward() returns {len(exported.outputs)} tensors; the first is the output")
    for tied, first in found.aliases.items():
        notes.append(f"{tied} is tied to {first}: its axes are fixed")
        _freeze_held(found, first, "tied")
    used = {name for draft in found.drafts for name in _held_in(draft)}
    for name in (name for name, _ in module.named_parameters() if name not in used):
        notes.append(f"{name} is not used in the forward pass")
        _freeze_held(found, name, "not used")
    return notes


def _freeze_held(found: Walk, name: str, why: str) -> None:
    node = found.placeholders.get(name)
    for product in found.scope.dims(node) if node is not None else ():
        freeze(product, why)


def _held_in(draft: Draft) -> list[str]:
    return [item.name for arg in draft.args for item in _flat(arg) if isinstance(item, Held)]


def _flat(arg: object) -> list[object]:
    return [leaf for item in arg for leaf in _flat(item)] if isinstance(arg, list) else [arg]


def _name_axes(found: Walk) -> tuple[Names, list[str]]:
    """Names in the order of first use, and that order."""
    scope, exported = found.scope, found.exported
    nodes = {node.name: node for node in exported.graph.nodes}
    output = output_atoms(scope.dims(nodes[exported.outputs[0]]), scope.batch)
    names = Names(scope.batch, output)
    order = list(dict.fromkeys(name for draft in found.drafts for name in _held_in(draft)))
    for name in order:
        names.learn(owner_of(name), scope.dims(found.placeholders[name]))
    return names, order


def _by_use(names: list[str], order: list[str]) -> list[str]:
    rank = {name: i for i, name in enumerate(order)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def _table(found: Walk, names: Names, name: str, module: nn.Module) -> tuple[Dim, ...]:
    node = found.placeholders.get(name)
    if node is not None:
        return names.dims(found.scope.dims(node))
    # Export leaves out what the graph does not touch (counters of batch norms, for one).
    return names.dims(tuple(fresh(int(n), "not used") for n in module.state_dict()[name].shape))


def _layers(
    found: Walk, order: list[str], params: list[str], buffers: list[str]
) -> tuple[Layer, ...]:
    home: dict[str, str] = {}
    last = ""
    for draft in found.drafts:
        norm = _is_norm(draft.source)
        for name in _held_in(draft):
            owner = owner_of(name)
            if owner not in home:
                home[owner] = last if norm and last else owner
                last = home[owner]
    tensors: dict[str, tuple[list[str], list[str]]] = {
        owner: ([], []) for owner in _unused(home, params)
    }
    tensors |= {layer: ([], []) for layer in home.values()}
    for position, group in enumerate((params, buffers)):
        for name in _by_use(group, order):
            layer = home.get(owner_of(name), owner_of(name))
            tensors.setdefault(layer, ([], []))[position].append(name)
    return tuple(
        Layer(name, tuple(held), tuple(kept))
        for name, (held, kept) in tensors.items()
        if held or kept
    )


def _unused(home: dict[str, str], params: list[str]) -> list[str]:
    return [owner_of(name) for name in params if owner_of(name) not in home]


def _norm_sites(found: Walk, buffers: list[str]) -> tuple[BatchNormSite, ...]:
    sites = []
    for draft in found.drafts:
        if draft.op.startswith("aten.batch_norm."):
            weight, bias, mean, variance = (
                a.name if isinstance(a, Held) else None for a in draft.args[1:5]
            )
            count = f"{owner_of(mean)}.num_batches_tracked" if mean else None
            sites.append(
                BatchNormSite(weight, bias, mean, variance, count if count in buffers else None)
            )
    return tuple(dict.fromkeys(sites))


def _scaled(found: Walk) -> tuple[str, ...]:
    """Weights and biases whose result goes straight into a normalisation."""
    out: list[str] = []
    for draft in found.drafts:
        if draft.op == "getitem" or op_name(draft.source) not in _SCALABLE:
            continue
        users = list(draft.source.users)
        if users and all(_is_norm(user) for user in users):
            out += [a.name for a in draft.args[1:3] if isinstance(a, Held)]
    return tuple(dict.fromkeys(out))


def _is_norm(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and op_name(node) in _NORMS


def _remarks(found: Walk, names: Names) -> list[str]:
    """One line per operator and axis, and one for every axis that is fixed by what it met."""
    out: list[str] = []
    said: set[tuple[str, str]] = set()
    for remark in found.scope.remarks:
        cut = [name for name in names.cut(remark.dims) if (remark.op, name) not in said]
        said.update((remark.op, name) for name in cut)
        if cut:
            out.append(f"{remark.text}: fixed {', '.join(cut)}")
        elif rule(remark.op) is unknown:
            out.append(remark.text)
    explained, told = {name for _, name in said}, "\n".join(out)
    reasons = {name: names.axes[name].why for name in names.fixed() if name not in explained}
    out += [
        f"{name} is fixed: {why}"
        for name, why in reasons.items()
        if why not in _OBVIOUS and why not in told
    ]
    return list(dict.fromkeys(out))


def _program(found: Walk, names: Names, module: nn.Module) -> Program:
    scope, exported = found.scope, found.exported
    nodes = {node.name: node for node in exported.graph.nodes}
    inputs = tuple(
        Input(
            name,
            names.dims(scope.dims(nodes[name])),
            dtype_name(found, nodes[name].meta["val"].dtype),
        )
        for name in exported.inputs
    )
    persistent = {*(n for n, _ in module.named_parameters()), *_persistent(module)}
    constants = {
        name: Constant.of(exported.tensors[name], names.dims(scope.dims(node)))
        for name, node in found.placeholders.items()
        if name not in persistent
    }
    updates = tuple(
        (name, current(found, node).name)
        for name, node in found.placeholders.items()
        if node in found.latest and name in persistent
    )
    calls = tuple(_node(draft, names) for draft in found.drafts)
    output = current(found, nodes[exported.outputs[0]]).name
    return Program(inputs, calls, constants, output, updates)


def _node(draft: Draft, names: Names) -> Node:
    args = tuple(_arg(arg, names) for arg in draft.args)
    options = {key: _arg(value, names) for key, value in draft.options.items()}
    dims = None if draft.dims is None else names.dims(draft.dims)
    return Node(draft.name, draft.op, args, options, dims, draft.where, draft.site, draft.always)


def _arg(arg: Any, names: Names) -> Arg:
    """A drafted argument as plain data."""
    if isinstance(arg, list):
        return Items(tuple(_arg(item, names) for item in arg))
    if isinstance(arg, Count):
        return Size(names.dim(arg.product))
    plain: Arg = arg
    return plain
