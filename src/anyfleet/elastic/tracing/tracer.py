"""`trace`: the blueprint of an unedited module."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload

from anyfleet.elastic.blueprint import BatchNormSite, Blueprint, Layer
from anyfleet.elastic.cost.flops import uncounted
from anyfleet.elastic.program import Arg, Constant, Dim, Held, Input, Items, Node, Program, Size
from anyfleet.elastic.tracing.aliases import aliases
from anyfleet.elastic.tracing.axes import Dims, Names, atoms, freeze, fresh, output_atoms, owner_of
from anyfleet.elastic.tracing.evaluation_mode import in_evaluation, own_walk
from anyfleet.elastic.tracing.example_inputs import checked
from anyfleet.elastic.tracing.export import Exported
from anyfleet.elastic.tracing.mixed_rows import mixed_rows
from anyfleet.elastic.tracing.randomness import drawn_in_evaluation
from anyfleet.elastic.tracing.retracing import check_batches, repeated
from anyfleet.elastic.tracing.rules import rule, unknown
from anyfleet.elastic.tracing.scope import Count, op_name
from anyfleet.elastic.tracing.walk import Draft, Walk, current, dtype_name, walk
from anyfleet.elastic.verification.module_content import hooked

_NORMS = frozenset({"batch_norm", "group_norm", "layer_norm", "rms_norm", "instance_norm"})
# Reasons that need no note, or have one of their own.
_OBVIOUS = frozenset(
    {"batch", "input", "kernel", "not used", "output", "space", "tied", "vocabulary"}
)
_SCALABLE = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
# Which dimension of a layer's weight is its output, and what may fix it without any operator
# saying so.
_OUTPUTS = {**dict.fromkeys(_SCALABLE, 0), "conv_transpose1d": 1, "conv_transpose2d": 1}
_MET = {
    "input": "the network's input",
    "kernel": "the positions of a kernel",
    "length": "the positions of a sequence",
    "literal": "a size that forward() writes out",
    "space": "the positions of a map",
}


def trace(module: nn.Module, example_inputs: Tensor | tuple[Tensor, ...]) -> Blueprint:
    """Return the blueprint of a module; raise TraceError if forward() has no fixed graph.

    The first dimension of every input is the batch; its size in the example does not matter. The
    module is not changed.
    """
    inputs = checked(module, example_inputs)
    shared = aliases(module)
    found = walk(repeated(module, inputs), shared)
    evaluated = in_evaluation(module, inputs, found.exported)
    drawn = _find_draws(found, evaluated)
    other = own_walk(found, evaluated)
    check_batches(found, module, inputs)
    if other is not None:
        check_batches(other, module, inputs, training=False)
    notes = _finish_axes(found, other, module) + drawn
    names, order = _name_axes(found, other)
    program = _program(found, names, module)
    params = [n for n, _ in module.named_parameters()]
    buffers = [n for n in _persistent(module, shared) if n not in set(params)]
    blueprint = Blueprint(
        axes=names.axes,
        params={n: _table(found, other, names, n, module) for n in _by_use(params, order)},
        buffers={n: _table(found, other, names, n, module) for n in _by_use(buffers, order)},
        layers=_layers(found, order, params, buffers),
        frozen=tuple(n for n, p in module.named_parameters() if not p.requires_grad),
        program=program,
        norms=_norm_sites([*found.drafts, *(other.drafts if other else ())], buffers),
        scaled=_scaled(found),
        remarks=(*notes, *_remarks(found, names)),
        aliases={n: first for n, first in shared.items() if n in module.state_dict()},
        evaluation=None if other is None else replace(_program(other, names, module), updates=()),
    )
    more = (*_uncounted(blueprint), *_mixed(blueprint), *left_behind(module, blueprint))
    return replace(blueprint, remarks=(*blueprint.remarks, *more))


def left_behind(module: nn.Module, blueprint: Blueprint) -> list[str]:
    """Return what the module does while it trains and devices do not, a sentence each."""
    by_hand = [name for name, _ in blueprint.program.updates if name in blueprint.buffers]
    with_hooks = [name for name, each in module.named_parameters() if hooked(each)]
    return [
        *(f"forward() itself changes {name}: between rounds it stays as it is" for name in by_hand),
        *(f"{name} has a hook on its gradient, which devices do not run" for name in with_hooks),
    ]


def _uncounted(blueprint: Blueprint) -> list[str]:
    calls = (f"{n.op} ({n.where or 'the outermost module'})" for n in uncounted(blueprint))
    return [f"{call}: its work is not counted" for call in dict.fromkeys(calls)]


def _mixed(blueprint: Blueprint) -> list[str]:
    return [
        f"{call}: minibatches are not padded, devices not stacked" for call in mixed_rows(blueprint)
    ]


def _find_draws(found: Walk, evaluated: Exported | None) -> list[str]:
    """Mark what draws in evaluation too; return the notes about it."""
    if evaluated is None:
        return []
    sites = [draft for draft in found.drafts if draft.site]
    always, notes = drawn_in_evaluation([draft.source for draft in sites], evaluated.graph)
    for draft in sites:
        draft.always = draft.source in always
    return notes


def _persistent(module: nn.Module, shared: Mapping[str, str]) -> list[str]:
    kept = module.state_dict().keys() - shared.keys()
    return [name for name, _ in module.named_buffers(remove_duplicate=False) if name in kept]


def _finish_axes(found: Walk, other: Walk | None, module: nn.Module) -> list[str]:
    """Freeze what may never be cut; return the notes about it."""
    notes = []
    exported = found.exported
    for product in (*_output(found), *(_output(other) if other else ())):
        freeze(product, "output")
    if other is not None:
        notes.append("forward() is another function in evaluation: both are kept")
    if len(exported.outputs) > 1:
        notes.append(f"forward() returns {len(exported.outputs)} tensors; the first is the output")
    params = dict(module.named_parameters())
    for tied, first in found.aliases.items():
        if first not in params:
            continue
        notes.append(f"{tied} is tied to {first}: its axes are fixed")
        _freeze_held(found, first, "tied")
    used = {name for draft in found.drafts for name in _held_in(draft)}
    tested = {name for draft in other.drafts for name in _held_in(draft)} if other else set()
    for name in (name for name, _ in module.named_parameters() if name not in used):
        if name in tested:
            notes.append(f"{name} is used in evaluation only: nothing trains it")
            continue
        notes.append(f"{name} is not used in the forward pass")
        _freeze_held(found, name, "not used")
    return notes


def _output(found: Walk) -> Dims:
    nodes = {node.name: node for node in found.exported.graph.nodes}
    return found.scope.dims(nodes[found.exported.outputs[0]])


def _freeze_held(found: Walk, name: str, why: str) -> None:
    node = found.placeholders.get(name)
    for product in found.scope.dims(node) if node is not None else ():
        freeze(product, why)


def _held_in(draft: Draft) -> list[str]:
    return [item.name for arg in draft.args for item in _flat(arg) if isinstance(item, Held)]


def _flat(arg: object) -> list[object]:
    return [leaf for item in arg for leaf in _flat(item)] if isinstance(arg, list) else [arg]


def _name_axes(found: Walk, other: Walk | None) -> tuple[Names, list[str]]:
    """Return the names of axes in the order of first use, and that order."""
    scope, walks = found.scope, [found] if other is None else [found, other]
    output = [output_atoms(_output(each), scope.batch) for each in walks]
    names = Names(scope.batch, output[0].union(*output))
    order: dict[str, None] = {}
    for each in walks:
        held = dict.fromkeys(name for draft in each.drafts for name in _held_in(draft))
        for name in held:
            names.learn(owner_of(name), scope.dims(each.placeholders[name]))
        order |= held
    return names, list(order)


def _by_use(names: list[str], order: list[str]) -> list[str]:
    rank = {name: i for i, name in enumerate(order)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def _table(
    found: Walk, other: Walk | None, names: Names, name: str, module: nn.Module
) -> tuple[Dim, ...]:
    node = found.placeholders.get(name, other.placeholders.get(name) if other else None)
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


def _norm_sites(drafts: list[Draft], buffers: list[str]) -> tuple[BatchNormSite, ...]:
    sites = []
    for draft in drafts:
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
    """Return the weights and biases whose result goes straight into a normalisation."""
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
    """Return a line per operator and axis, and one for every axis that is fixed by what it met."""
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
    return list(dict.fromkeys([*out, *_joined(found)]))


def _joined(found: Walk) -> list[str]:
    """Return a line per layer whose outputs are no channels: they met something fixed."""
    out = []
    for draft in found.drafts:
        at = None if draft.op == "getitem" else _OUTPUTS.get(op_name(draft.source))
        weight = None if at is None else draft.args[1]
        if at is None or not isinstance(weight, Held):
            continue
        product = atoms(found.scope.dims(found.placeholders[weight.name])[at])
        all_of = all(atom.why for atom in product)
        which = "its outputs are fixed:" if all_of else "part of its outputs is fixed:"
        met = [_MET[atom.why] for atom in product if atom.why in _MET]
        out += [f"{weight.name}: {which} joined to {m}" for m in met]
    return out


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
    params = [n for n, _ in module.named_parameters()]
    persistent = {*params, *_persistent(module, found.aliases)}
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
    """Return a drafted argument as plain data."""
    if isinstance(arg, list):
        return Items(tuple(_arg(item, names) for item in arg))
    if isinstance(arg, Count):
        return Size(names.dim(arg.product))
    plain: Arg = arg
    return plain
