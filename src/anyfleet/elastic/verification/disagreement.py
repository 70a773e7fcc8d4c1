"""The place where two runs of a network part: the first layer or call whose result differs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.execution.interpret import apply
from anyfleet.elastic.execution.modes import Mode
from anyfleet.elastic.indexing import index, take
from anyfleet.elastic.program import BATCH, Node
from anyfleet.elastic.tracing.axes import owner_of
from anyfleet.elastic.verification.witnesses import MOVING, Inputs, Params, Twin

# A sentence if two tensors differ: got, want, what they are.
Differs = Callable[[Tensor, Tensor, str], str]

_RESTING = Mode(dropout=False, statistics="running", update="module", forward="evaluation")


def of_outputs(
    twin: Twin,
    blueprint: Blueprint,
    given: tuple[Params, Params, Inputs],
    *,
    training: bool,
    differs: Differs,
) -> str:
    """Return the first inner module whose output the program never computes."""
    ours = list(_values(blueprint, given, training=training).values())

    def known(tensors: list[Tensor]) -> bool:
        return all(any(not differs(own, t, "") for own in (*ours, *given[2])) for t in tensors)

    before = ""
    for path, inputs, outputs in twin.outputs(*given, training=training):
        if known(outputs):
            before = path
        elif known(inputs):
            return f"inside {path}"
        else:
            return f"in forward() between {before or 'the input'} and {path}"
    return f"in forward() after {before}" if before else ""


def of_gradients(blueprint: Blueprint, got: Params, want: Params, differs: Differs) -> str:
    """Return the last layer whose gradient is wrong: from there on backwards it was lost."""
    wrong = [n for n in blueprint.params if n in want and differs(got[n], want[n], "")]
    return f"between {owner_of(wrong[-1]) or wrong[-1]} and what follows it" if wrong else ""


def of_padding(
    blueprint: Blueprint,
    given: tuple[Params, Params, Inputs],
    padded: Inputs,
    valid: Tensor,
    *,
    training: bool,
    differs: Differs,
) -> str:
    """Return the first call whose result on the real rows depends on the padded ones."""
    alone = _values(blueprint, given, training=training)
    among = _values(blueprint, (*given[:2], padded), training=training, valid=valid)
    for node in _calls(blueprint, training=training):
        got, want = among[node.name], alone[node.name]
        if got.shape != want.shape and got.ndim and len(got) == len(valid):
            got = got[: len(want)]
        if got.shape == want.shape and differs(got, want, ""):
            return _call(node)
    return ""


def of_slice(
    blueprint: Blueprint,
    slice: Slice,
    masked: tuple[Params, Params, Inputs],
    small: tuple[Params, Params, Inputs],
    *,
    training: bool,
    differs: Differs,
) -> str:
    """Return the first call whose result in the small model is no part of that in the large one."""
    large = _values(blueprint, masked, training=training)
    cut = _values(blueprint.local(slice), small, training=training)
    kept, sizes = dict(slice.keep), {**blueprint.sizes, BATCH: len(masked[2][0])}
    for node in _calls(blueprint, training=training):
        dims = node.dims or ()
        want = take(large[node.name], tuple(index(dim, kept, sizes) for dim in dims))
        if differs(cut[node.name], want, ""):
            return _call(node)
    return ""


def _calls(blueprint: Blueprint, *, training: bool) -> Iterator[Node]:
    program = blueprint.program if training else blueprint.evaluated
    return (node for node in program.nodes if node.dims is not None)


def _call(node: Node) -> str:
    return f"at {node.op.removeprefix('aten.')} in {node.where or 'forward() of the module'}"


def _values(
    blueprint: Blueprint,
    given: tuple[Params, Params, Inputs],
    *,
    training: bool,
    valid: Tensor | None = None,
) -> Mapping[str, Tensor]:
    """Return the result of every call: the program with all of them for updates."""
    updates = tuple((n.name, n.name) for n in _calls(blueprint, training=training))
    telling = (
        replace(blueprint, program=replace(blueprint.program, updates=updates))
        if training or blueprint.evaluation is None
        else replace(blueprint, evaluation=replace(blueprint.evaluation, updates=updates))
    )
    return apply(telling, *given, MOVING if training else _RESTING, valid=valid)[1]
