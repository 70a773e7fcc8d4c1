"""The scope of a walk: what the axis rules see and change."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from anyfleet.elastic.tracing.axes import Atom, Dims, Product, atoms, freeze, fresh, size, unify

# What a rule returns: the dimensions of the result, or of each result.
Result = Dims | list[Dims]


@dataclass(frozen=True)
class Count:
    """A number in the program: the size of a product of atoms."""

    product: Product


@dataclass(frozen=True)
class Remark:
    """An operator after which some dimensions are never cut, and why."""

    op: str
    text: str
    dims: Dims


@dataclass
class Scope:
    """The dimensions of every value so far, and what was found on the way.

    `batch` is an atom whose size is a prime that divides no other size, so that it can be
    recognised in literals.
    """

    batch: Atom
    values: dict[fx.Node, Result] = field(default_factory=dict)
    sizes: dict[fx.Node, dict[str, "Count | list[Count]"]] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    instead: dict[fx.Node, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)

    def dims(self, node: fx.Node) -> Dims:
        """Return the dimensions of a value that is one tensor."""
        found = self.values[node]
        if isinstance(found, list):
            raise TypeError(f"{node.name} is a list of tensors")
        return found

    def match(self, one: Product, other: Product, node: fx.Node) -> None:
        """Make two dimensions the same axes; fix both where that cannot be expressed."""
        if not unify(one, other):
            self.fix((one, other), node, f"{op_name(node)} joins sizes that do not align")

    def fix(self, dims: Dims, node: fx.Node, why: str) -> None:
        """Freeze and remark, so that the user can see what cannot be cut and where it happened."""
        if any(not atom.why for product in dims for atom in atoms(product)):
            self.remark(dims, node, why)
        for product in dims:
            freeze(product, why)

    def remark(self, dims: Dims, node: fx.Node, why: str) -> None:
        """Record why these dimensions are not cut, and at which call."""
        named = why if op_name(node) in why else f"{op_name(node)}: {why}"
        self.remarks.append(Remark(op_name(node), f"{named} ({place_of(node)})", dims))

    def literal(self, count: int, why: str) -> Product:
        """Return the dimension of a literal size; multiples of the batch are recognised."""
        if count % self.batch.size == 0 and count > 0:
            return (self.batch, *self.literal(count // self.batch.size, why))
        return fresh(count, why)

    def parted(self, product: Product) -> tuple[int, Product] | None:
        """Return how many entries lie around the batch in a dimension, and the axes inside it.

        None where the batch is no factor of the dimension, or twice.
        """
        found = atoms(product)
        at = [i for i, atom in enumerate(found) if self.is_batch(atom)]
        return (size(found[: at[0]]), found[at[0] + 1 :]) if len(at) == 1 else None

    def views(self, count: int, product: Product, why: str) -> Product | None:
        """Return `count` entries of a dimension as whole rounds over the batch, or None.

        Two views of a batch joined end to end are 2 · B entries, the batch running faster.
        """
        parts = self.parted(product)
        if parts is None:
            return None
        inner = parts[1]
        once = self.batch.size * size(inner)
        return None if count % once else (*fresh(count // once, why), self.batch, *inner)

    def is_batch(self, atom: Atom) -> bool:
        """Return whether an atom is the batch."""
        return atom is atoms((self.batch,))[0]

    def resize(self, node: fx.Node, argument: str, product: Product) -> None:
        """Let an argument of the call follow the axes instead of being a literal."""
        self.sizes.setdefault(node, {})[argument] = Count(product)

    def reshape(self, node: fx.Node, argument: str, dims: Dims) -> None:
        """Let a list of sizes follow the axes instead of being literals."""
        self.sizes.setdefault(node, {})[argument] = [Count(product) for product in dims]

    def replace(self, node: fx.Node, op: str, *args: Any) -> None:
        """Call another operator in its place: one that does the same at every size."""
        self.instead[node] = (op, args)


def op_name(node: fx.Node) -> str:
    """Return the operator without namespace and overload, as in "conv2d"."""
    return str(schema(node).name).split("::")[1]


def schema(node: fx.Node) -> Any:
    """Return the operator's schema (torch has no public type for it)."""
    return cast(OpOverload, node.target)._schema  # noqa: SLF001


def bound(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments of a call by name, defaults filled in."""
    given: dict[str, Any] = {}
    for position, argument in enumerate(schema(node).arguments):
        if position < len(node.args):
            given[argument.name] = node.args[position]
        else:
            given[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return given


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a call's result in the trace."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{node.name} is not a tensor")
    return tuple(int(n) for n in value.shape)


def where(node: fx.Node) -> str:
    """Return the path of the module that made the call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def place_of(node: fx.Node) -> str:
    """Return where the user finds the call."""
    return where(node) or "the outermost module"


def line_of(node: fx.Node) -> str:
    """Return the module and the line of the user's code that made the call."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("File ")]
    foreign = (f'File "{Path(torch.__file__).parent}{os.sep}', 'File "<eval_with_key>')
    own = [i for i in starts if not lines[i].startswith(foreign)] or starts
    if not own:
        return f"\nAt {place_of(node)}"
    return f"\nAt {place_of(node)}: {' '.join(lines[own[-1] : own[-1] + 2])}"


def full_size(product: Product) -> int:
    """Return the size of a product in terms of what its atoms have become."""
    return size(atoms(product))
