"""Further traces of one module, with other batch sizes: what may differ between them, and how.

A trace turns what Python computes into literals. A number that follows from the batch size is
right for other batches only if the program can say how it follows: in a straight line.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from anyfleet.elastic.program import Linear
from anyfleet.elastic.tracing.axes import Product, atoms
from anyfleet.elastic.tracing.export import Exported, export
from anyfleet.elastic.tracing.scope import Count, Scope, bound, line_of
from anyfleet.elastic.tracing.walk import Draft, Walk
from anyfleet.errors import TraceError

# How often a forward pass that draws from a generator of Python is traced again.
_AGAIN = 4
_END = 1 << 31  # larger literals mean "to the end"
# The second batch, and how much larger a third is: even, so that what is halved shows.
_SMALL, _STEP = 3, 9
# A batch that most numbers divide: what asks for a remainder shows.
_DIVISIBLE = 192
_CLOSE = 1e-9  # relative: how far rounding takes a number from its line

Path = tuple[int, ...]  # where a literal lies in nested lists
Point = tuple[int, Any]  # a batch size, and the literal that belongs to it


def repeated(module: nn.Module, inputs: tuple[Tensor, ...], *, training: bool = True) -> Exported:
    """Trace once; raise TraceError if forward() draws numbers that decide what it does."""
    before = _generators()
    first = export(module, inputs, training=training)
    if _generators() != before:
        for _ in range(_AGAIN):
            _require_alike(first, export(module, inputs, training=training))
    return first


def check_batches(
    found: Walk, module: nn.Module, inputs: tuple[Tensor, ...], *, training: bool = True
) -> None:
    """Trace with another batch size; raise TraceError unless the walked program says the same.

    Numbers that follow the batch in a straight line, but are no multiples of it, become `Linear`.
    """
    first = found.exported
    again = partial(export, module, inputs, training=training)
    try:
        other = again(batch=_SMALL)
    except TraceError:
        # It may need more samples than that, to choose the best ten of them, say.
        other = again(batch=first.batch + _STEP)
    try:
        _require_same_calls(first, other)
        _require_constants(first, other)
        lines = _lines(found, other)
        _require_divisible(found, lines, again(batch=_DIVISIBLE))
        if lines:
            third = again(batch=other.batch + _STEP)
            _require_same_calls(first, third)
            _require_on_lines(lines, first, third)
    except TraceError:
        # What differs with the same batch too is not the batch's doing.
        _require_alike(first, again())
        raise
    for line in lines:
        line.write()


def _generators() -> tuple[object, ...]:
    """Return the states of the generators outside torch, only to see whether they moved."""
    python = sys.modules.get("random")
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    own = (name, np.asarray(keys).tobytes(), *rest)
    return (None if python is None else python.getstate(), own)


def _calls(exported: Exported) -> list[fx.Node]:
    return [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]


def _require_alike(first: Exported, again: Exported) -> None:
    """Refuse two traces with the same batch that are not the same in every literal."""
    for one, other in zip_longest(_calls(first), _calls(again)):
        if _text(one) != _text(other):
            raise TraceError(_changing(line_of(one or other)))
    for name in _lifted(first, again):
        if not _equal(first.tensors.get(name), again.tensors.get(name)):
            raise TraceError(_changing(f"\n{name} differs from one trace to the next."))


def _changing(place: str) -> str:
    return (
        "forward() is not the same twice: it draws from Python's or NumPy's random numbers, or "
        f"depends on something else outside its inputs and tensors.{place}\n"
        "Draw with dropout, torch.rand or torch.bernoulli instead and choose with torch.where, or "
        "decide outside forward()."
    )


def _text(node: fx.Node | None) -> str:
    return "" if node is None else f"{node.target} {node.args} {node.kwargs}"


def _require_same_calls(first: Exported, other: Exported) -> None:
    for one, two in zip_longest(_calls(first), _calls(other)):
        if one is None or two is None or one.target != two.target:
            raise TraceError(
                "forward() does something else for another batch size, so it has no fixed graph."
                f"{line_of(one or two)}\nDecide by something that is the same for every batch."
            )


@dataclass(frozen=True)
class _Line:
    """Literals of one argument that are no multiples of the batch, by where they lie in it."""

    draft: Draft
    argument: str
    numbers: Mapping[Path, Linear]

    def write(self) -> None:
        """Put the numbers in the place of the literals."""
        at = list(bound(self.draft.source)).index(self.argument)
        if at < len(self.draft.args):
            self.draft.args[at] = self._with(self.draft.args[at], ())
        else:
            self.draft.options[self.argument] = self._with(self.draft.options[self.argument], ())

    def _with(self, arg: Any, path: Path) -> Any:
        if isinstance(arg, list):
            return [self._with(item, (*path, i)) for i, item in enumerate(arg)]
        number = self.numbers.get(path)
        if number is None:
            return arg
        # Without a slope it is the user's own: the batch of the trace happens to divide it.
        return number if number.times else number.plus


def _lines(found: Walk, other: Exported) -> list[_Line]:
    """Compare every literal of the second trace with what the program says for its batch."""
    drafts = {draft.source: draft for draft in found.drafts}
    out: list[_Line] = []
    for node, second in zip(_calls(found.exported), _calls(other), strict=True):
        draft = drafts.get(node)
        if draft is not None and draft.op != "getitem":
            out += _lines_of(found.scope, draft, second, other.batch)
    return out


def _lines_of(scope: Scope, draft: Draft, second: fx.Node, batch: int) -> Iterator[_Line]:
    node, sizes, own = draft.source, scope.sizes.get(draft.source, {}), scope.batch.size
    wanted = bound(second)
    for name, value in bound(node).items():
        numbers: dict[Path, Linear] = {}
        for path, one, two in _pairs(sizes.get(name, value), wanted[name], ()):
            if _said(scope, one, batch) == two or _open(two, one):
                continue
            points = (own, _said(scope, one, own)), (batch, two)
            line = _through(*points)
            if line is None:
                raise TraceError(_unsaid(node, *points))
            numbers[path] = line
        if numbers:
            yield _Line(draft, name, numbers)


def _through(one: Point, other: Point) -> Linear | None:
    """Return the straight line through two numbers; None if whole numbers would lie beside it."""
    (x1, y1), (x2, y2) = one, other
    if any(isinstance(y, bool) or not isinstance(y, int | float) for y in (y1, y2)):
        return None
    if isinstance(y1, int) and isinstance(y2, int):
        times, rest = divmod(y2 - y1, x2 - x1)
        return None if rest else Linear(times, y1 - times * x1)
    slope = (y2 - y1) / (x2 - x1)
    offset = y1 - slope * x1
    # Rounding leaves something where the line goes through the origin.
    return Linear(slope, 0.0 if abs(offset) < _CLOSE * abs(y1) else offset)


def _require_on_lines(lines: list[_Line], first: Exported, third: Exported) -> None:
    same = dict(zip(_calls(first), _calls(third), strict=True))
    for line in lines:
        node = line.draft.source
        values = _at_paths(bound(same[node])[line.argument], ())
        for path, number in line.numbers.items():
            got, want = (number.plus + number.times * e.batch for e in (first, third))
            found = values[path]
            if abs(want - found) > _CLOSE * abs(found):
                raise TraceError(_unsaid(node, (first.batch, got), (third.batch, found)))


def _require_divisible(found: Walk, lines: list[_Line], third: Exported) -> None:
    """Refuse a literal that is the same for odd batches only, or calls that are."""
    first = found.exported
    _require_same_calls(first, third)
    _require_constants(first, third)
    known = {(line.draft.name, line.argument, path) for line in lines for path in line.numbers}
    for line in _lines(found, third):
        for path in line.numbers:
            if (line.draft.name, line.argument, path) not in known:
                node = line.draft.source
                same = dict(zip(_calls(first), _calls(third), strict=True))
                ours = _at_paths(bound(node)[line.argument], ())[path]
                theirs = _at_paths(bound(same[node])[line.argument], ())[path]
                raise TraceError(_unsaid(node, (first.batch, ours), (third.batch, theirs)))
    _require_on_lines(lines, first, third)


def _at_paths(arg: Any, path: Path) -> dict[Path, Any]:
    if not isinstance(arg, list | tuple):
        return {path: arg}
    return {k: v for i, item in enumerate(arg) for k, v in _at_paths(item, (*path, i)).items()}


def _said(scope: Scope, literal: Any, batch: int) -> Any:
    """Return what the program says for such a batch in the place of a literal."""
    if isinstance(literal, Count):
        return _size(scope, literal.product, batch)
    if isinstance(literal, int) and not isinstance(literal, bool):
        own = scope.batch.size
        return _size(scope, scope.literal(literal, ""), batch) if _whole(literal, own) else literal
    return literal


def _whole(literal: int, batch: int) -> bool:
    return 0 < literal < _END and literal % batch == 0


def _size(scope: Scope, product: Product, batch: int) -> int:
    return math.prod(batch if scope.is_batch(atom) else atom.size for atom in atoms(product))


def _open(literal: Any, ours: Any) -> bool:
    """Return whether a literal leaves its size to torch: -1, or the end of a dimension."""
    return isinstance(ours, Count) and isinstance(literal, int) and not 0 <= literal < _END


def _pairs(one: Any, other: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """Yield the literals of two arguments side by side, without tensors."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for i, (a, b) in enumerate(zip_longest(one, other)):
            yield from _pairs(a, b, (*path, i))
    elif not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        yield path, one, other


def _unsaid(node: fx.Node, one: Point, other: Point) -> str:
    return (
        f"{node.target} gets {one[1]} for a batch of {one[0]} and {other[1]} for one of "
        f"{other[0]}: Python computes it from the batch size, and a program can follow that only "
        f"in a straight line.{line_of(node)}\n"
        "Compute it from a tensor, make it an input, or choose a number that is the same for "
        "every batch."
    )


def _lifted(first: Exported, other: Exported) -> list[str]:
    return sorted({*first.constants.values(), *other.constants.values()})


def _require_constants(first: Exported, other: Exported) -> None:
    for name in _lifted(first, other):
        if not _equal(first.tensors.get(name), other.tensors.get(name)):
            raise TraceError(
                f"forward() makes a tensor ({name}) whose values follow from the batch size, and "
                "they would stay as they were in the trace. Make it with torch.arange, torch.full "
                "or other operators from the inputs, or outside forward()."
            )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) if one.numel() else True
