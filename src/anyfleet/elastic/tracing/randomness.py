"""Random draws in a graph: by key, refused, or in evaluation too."""

from collections import defaultdict

import torch
from torch import fx
from torch._ops import OpOverload

from anyfleet.elastic.execution.random_operators import RANDOM
from anyfleet.elastic.tracing.scope import bound, line_of, op_name, place_of, where
from anyfleet.errors import TraceError

# What `apply` draws by key.
KEYED = frozenset({*(op.split(".")[1] for op in RANDOM), "scaled_dot_product_attention"})
_DROPPING = frozenset(name for name in KEYED if "dropout" in name)
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

Sites = dict[tuple[str, str], list[fx.Node]]


def check_repeatable(node: fx.Node) -> None:
    """Refuse a call whose draws have no key: the same seed would not give the same run."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return
    if str(target).replace("_.", ".") in RANDOM or _base(node) == "scaled_dot_product_attention":
        return
    if _base(node) in _RECURRENT:
        if not bound(node)["train"] or not bound(node)["dropout"]:
            return
        advice = "Use one module per layer, with nn.Dropout between them."
    else:
        advice = (
            "Draw with dropout, torch.rand, torch.randn or torch.bernoulli instead, or outside "
            "forward() and pass the numbers as an input."
        )
    raise TraceError(
        f"{target} draws numbers that have no key, so that a run could not be repeated."
        f"{line_of(node)}\n{advice}"
    )


def drawn_in_evaluation(nodes: list[fx.Node], graph: fx.Graph) -> tuple[set[fx.Node], list[str]]:
    """Return which of these calls of the training graph draw in evaluation too, and notes.

    `graph` is that of evaluation.
    """
    training = [node for node in nodes if _draws(node)]
    evaluating = _sites([n for n in graph.nodes if n.op == "call_function" and _keyed(n)])
    always: set[fx.Node] = set()
    notes: list[str] = []
    for place, calls in _sites(training).items():
        others = evaluating.get(place, [])
        pairs = zip(calls, others, strict=True) if len(calls) == len(others) else ()
        found = {node for node, other in pairs if _draws(other)}
        always |= found
        notes += [_note(node, in_both=node in found) for node in calls]
    for place, calls in evaluating.items():
        only = [node for node in calls if _draws(node) and place not in _sites(training)]
        notes += [f"{_base(n)} ({place_of(n)}) draws only in evaluation" for n in only]
    return always, [note for note in dict.fromkeys(notes) if note]


def _note(node: fx.Node, *, in_both: bool) -> str:
    call = f"{_base(node)} ({place_of(node)})"
    if in_both:
        return f"{call} draws in evaluation too: without a key, the same draw every time"
    if _base(node) in _DROPPING or _base(node) == "scaled_dot_product_attention":
        return ""
    return f"{call} draws only in training"


def _sites(nodes: list[fx.Node]) -> Sites:
    found: Sites = defaultdict(list)
    for node in nodes:
        found[where(node), _base(node)].append(node)
    return found


def draws(node: fx.Node) -> bool:
    """Return whether this call draws at random, in the mode in which it was traced."""
    return _keyed(node) and _draws(node)


def is_drop(node: fx.Node) -> bool:
    """Return whether this call is a dropout: without a draw it passes its input on."""
    return _keyed(node) and _base(node) in _DROPPING


def _keyed(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and _base(node) in KEYED


def _draws(node: fx.Node) -> bool:
    given = bound(node)
    if _base(node) in _DROPPING:
        return bool(given["train"] and given["p"])
    return bool(given["dropout_p"]) if "dropout_p" in given else True


def _base(node: fx.Node) -> str:
    return op_name(node).removesuffix("_")
