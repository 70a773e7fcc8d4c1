"""The function of a network in evaluation, where it is another than in training.

Dropout that passes its input on and batch norm by running statistics are matters of a `Mode`; all
other differences make a program of its own.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from anyfleet.elastic.program import Constant, Held, Value
from anyfleet.elastic.tracing.export import Exported
from anyfleet.elastic.tracing.randomness import draws, is_drop
from anyfleet.elastic.tracing.retracing import repeated
from anyfleet.elastic.tracing.scope import Count, bound, full_size
from anyfleet.elastic.tracing.walk import Draft, Walk, current, walk
from anyfleet.errors import TraceError

# Arguments that tell an operator its mode, and one that only matters while something is dropped.
_MODE = frozenset({"train", "training", "use_input_stats", "dropout_p"})
# Where batch norm and instance norm have their running mean and their mode.
_MEAN, _TRAINING = 3, 5


def in_evaluation(
    module: nn.Module, inputs: tuple[Tensor, ...], trained: Exported
) -> Exported | None:
    """Return the graph in evaluation; None where it cannot differ from that of training."""
    nodes = [node for node in trained.graph.nodes if node.op == "call_function"]
    kinds = {type(part) for part in module.modules()}
    own = any(k.train is not nn.Module.train or k.eval is not nn.Module.eval for k in kinds)
    if not (trained.asks or own or any(draws(node) for node in nodes)):
        return None
    try:
        return repeated(module, inputs, training=False)
    except TraceError as error:
        raise TraceError(f"In evaluation, after module.eval(): {error}") from error


def own_walk(trained: Walk, evaluated: Exported | None) -> Walk | None:
    """Return the walk over the graph of evaluation, if it is another function.

    Its axes are those of training: a cut means the same in both.
    """
    if evaluated is None:
        return None
    alone = walk(evaluated, trained.aliases)
    for draft in alone.drafts:
        draft.always = draws(draft.source)
    alike = _Alike()
    if alike.output(trained) == alike.output(alone):
        return None
    found = walk(evaluated, trained.aliases, beside=trained)
    by_batch = {_mean(d) for d in trained.drafts if _is_norm(d) and d.args[_TRAINING]}
    for draft in found.drafts:
        draft.always = draws(draft.source)
        # Evaluation by the statistics of the batch is for what takes them in training.
        if _is_norm(draft) and _mean(draft) in by_batch:
            draft.args[_TRAINING] = True
    return found


def _is_norm(draft: Draft) -> bool:
    return draft.op.startswith(("aten.batch_norm.", "aten.instance_norm."))


def _mean(draft: Draft) -> str | None:
    mean = draft.args[_MEAN]
    return mean.name if isinstance(mean, Held) else None


@dataclass
class _Alike:
    """A number for every value: equal numbers are computed alike."""

    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def output(self, found: Walk) -> int:
        """Return the number of the network's output."""
        values = {
            name: self._number(("input", place)) for place, name in enumerate(found.exported.inputs)
        }
        for draft in found.drafts:
            values[draft.name] = self._call(found, draft, values)
        nodes = {node.name: node for node in found.exported.graph.nodes}
        node = current(found, nodes[found.exported.outputs[0]])
        held = found.held.get(node)
        return values[node.name] if held is None else self._held(found, held)

    def _call(self, found: Walk, draft: Draft, values: dict[str, int]) -> int:
        args = [self._arg(found, arg, values) for arg in draft.args]
        if is_drop(draft.source) and not draft.always:
            passed: int = args[0][1]
            return passed
        if draft.op != "getitem":
            for place, name in enumerate(list(bound(draft.source))[: len(args)]):
                given = not _is_norm(draft) or _mean(draft) is not None
                if name in _MODE and given and not draft.always:
                    args[place] = "mode"
        options = {k: self._arg(found, v, values) for k, v in draft.options.items()}
        # A draw that stops in evaluation, and one that does not, are two things.
        before = [other for other in found.drafts if other.site < draft.site and other.always]
        drawn = (draft.always, len(before)) if draft.site else ()
        return self._number((draft.op, *args, *sorted(options.items()), drawn))

    def _arg(self, found: Walk, arg: Any, values: dict[str, int]) -> Any:
        if isinstance(arg, list):
            return tuple(self._arg(found, item, values) for item in arg)
        if isinstance(arg, Value):
            return ("value", values[arg.name])
        if isinstance(arg, Held):
            return ("value", self._held(found, arg.name))
        if isinstance(arg, Count):
            return ("size", full_size(arg.product))
        return (type(arg).__name__, repr(arg))

    def _held(self, found: Walk, name: str) -> int:
        if name not in found.exported.constants.values():
            return self._number(("held", name))
        constant = Constant.of(found.exported.tensors[name], ())
        return self._number(("constant", constant.dtype, constant.shape, constant.data))

    def _number(self, key: tuple[Any, ...]) -> int:
        return self.numbers.setdefault(key, len(self.numbers))
