"""Axes for which a small model is no masked large one: they enter statistics or a scale."""

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.program import BATCH, Dim, Held, Node, Program, Size, Value

_AVERAGES = frozenset({"mean", "var", "std"})


def statistical_axes(blueprint: Blueprint) -> frozenset[str]:
    """Axes that a norm or a mean averages over, or that scale attention."""
    found = [_in_program(program, blueprint) for program in blueprint.programs]
    return frozenset[str]().union(*found)


def _in_program(program: Program, blueprint: Blueprint) -> set[str]:
    dims = {given.name: given.dims for given in program.inputs}
    dims |= {node.name: node.dims for node in program.nodes if node.dims is not None}
    found: set[str] = set()
    for node in program.nodes:
        first = node.args[0] if node.args else None
        if isinstance(first, Value) and first.name in dims:
            found |= _averaged(node, dims[first.name])
        elif isinstance(first, Held):
            found |= _averaged(node, _held(program, first.name, blueprint))
    return found


def _held(program: Program, name: str, blueprint: Blueprint) -> tuple[Dim, ...]:
    constant = program.constants.get(name)
    return blueprint.dims(name) if constant is None else constant.dims


def _averaged(node: Node, source: tuple[Dim, ...]) -> set[str]:
    op = node.op.split(".")[1] if "." in node.op else node.op
    if op in ("layer_norm", "rms_norm"):
        shape = node.args[1]
        count = len(getattr(shape, "items", ()))
        return _axes(source[len(source) - count :])
    if op == "group_norm":
        groups = node.args[1]
        return _axes(source[1:2]) - (_axes((groups.dim,)) if isinstance(groups, Size) else set())
    if op == "scaled_dot_product_attention":
        return _axes(source[-1:])
    if op in ("batch_norm", "instance_norm"):
        # Of weights, say: their input channels are what is averaged.
        return _axes(source[:1] + source[2:]) - {BATCH}
    if op in _AVERAGES:
        return _axes(source) - _axes(node.dims or ())
    return set()


def _axes(dims: tuple[Dim, ...]) -> set[str]:
    return {axis for dim in dims for product in dim for axis in product}
