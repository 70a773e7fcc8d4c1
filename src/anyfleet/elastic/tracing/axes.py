"""The axes of a traced network: found as atoms in a union-find, then named for the blueprint.

While a graph is walked, a dimension is a product of atoms. Afterwards every atom gets a readable
name that stays the same from one trace to the next.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from anyfleet.elastic.blueprint import Axis
from anyfleet.elastic.program import BATCH, Dim

# How the reason ends when an operator reads positions along an axis.
ALONG = "runs along it"
# Sizes that never belong to a layer: named after the reason and the size, and shared.
_ANONYMOUS = frozenset({"kernel", "space", "input", "vocabulary", "length", "literal"})
_SUFFIX = {"heads": ".heads", "head_dim": ".head_dim", "groups": ".groups"}


@dataclass(eq=False)
class Atom:
    """A candidate axis: merged into another, split into an outer and an inner part, or itself.

    `why` is set once it may not be cut. `mark` is what the operators it went through say about its
    kind.
    """

    size: int
    why: str = ""
    mark: str = ""
    merged: "Atom | None" = None
    parts: tuple["Atom", "Atom"] | None = None


# A dimension is an ordered product of atoms, outermost first; () has size 1.
Product = tuple[Atom, ...]
Dims = tuple[Product, ...]


def fresh(size: int, why: str = "") -> Product:
    """Return a new dimension of one atom; fixed if a reason is given."""
    return (Atom(size, why),) if size != 1 else ()


def atoms(product: Iterable[Atom]) -> Product:
    """Return the product in terms of what its atoms have become."""
    found: list[Atom] = []
    for member in product:
        atom = member
        while atom.merged is not None:
            atom = atom.merged
        found.extend(atoms(atom.parts) if atom.parts else (atom,))
    return tuple(found)


def size(product: Product) -> int:
    """Return the size of a product."""
    return math.prod(atom.size for atom in product)


def freeze(product: Product, why: str) -> None:
    """Fix these atoms, so that they are never cut; the first reason stays."""
    for atom in atoms(product):
        atom.why = atom.why or why


def mark(product: Product, kind: str) -> None:
    """Mark what kind of axis the atoms are; the first mark stays."""
    for atom in atoms(product):
        atom.mark = atom.mark or kind


def unify(one: Product, other: Product) -> bool:
    """Make two products of equal size the same axes; return False if they cannot be aligned."""
    left, right = list(atoms(one)), list(atoms(other))
    while left and right:
        a, b = left[0], right[0]
        if a is b:
            left, right = left[1:], right[1:]
        elif a.size == b.size:
            _merge(a, b)
            left, right = list(atoms(left[1:])), list(atoms(right[1:]))
        else:
            large, small = (a, b) if a.size > b.size else (b, a)
            if large.size % small.size:
                return False
            _split(large, small.size)
            left, right = list(atoms(left)), list(atoms(right))
    return not left and not right


def _merge(keep: Atom, gone: Atom) -> None:
    keep.why = keep.why or gone.why
    keep.mark = keep.mark or gone.mark
    gone.merged = keep


def _split(atom: Atom, outer: int) -> None:
    inner = atom.size // outer
    atom.parts = (Atom(outer, atom.why, atom.mark), Atom(inner, atom.why, atom.mark))


@dataclass
class Names:
    """The name of every atom met so far, and the table of axes."""

    batch: Atom
    outputs: frozenset[Atom]
    axes: dict[str, Axis] = field(default_factory=dict)
    known: dict[Atom, str] = field(default_factory=dict)

    def learn(self, owner: str, dims: Dims) -> None:
        """Name what is new in a parameter of the module `owner`."""
        for product in dims:
            for atom in atoms(product):
                if atom not in self.known:
                    self._add(atom, owner)

    def dims(self, dims: Dims) -> tuple[Dim, ...]:
        """Return dimensions in terms of axis names."""
        return tuple(self.dim(product) for product in dims)

    def dim(self, product: Product) -> Dim:
        """Return a dimension in terms of axis names; what is new belongs to no parameter."""
        for atom in atoms(product):
            if atom not in self.known:
                atom.why = atom.why or "no parameter"
                self._add(atom, "")
        return (tuple(self.known[atom] for atom in atoms(product)),)

    def cut(self, dims: Dims) -> list[str]:
        """Return the names of fixed axes that belong to layers, for a remark."""
        found = (self.known.get(atom, "") for product in dims for atom in atoms(product))
        fixed = set(self.fixed())
        return [name for name in dict.fromkeys(found) if name in fixed]

    def fixed(self) -> list[str]:
        """Return the axes of layers that are fixed and might have been cut otherwise."""
        return [n for n, axis in self.axes.items() if ":" not in n and axis.kind == "fixed"]

    def _add(self, atom: Atom, owner: str) -> None:
        if atom is atoms((self.batch,))[0]:
            name, axis = BATCH, Axis(1, 1, "batch")
        elif atom.why and not self._is_output(atom) and (not owner or atom.why in _ANONYMOUS):
            tag = atom.why if atom.why in _ANONYMOUS else "fixed"
            name, axis = f"{tag}:{atom.size}", Axis(atom.size, atom.size, "fixed", atom.why)
        else:
            name = self._unused(owner + _SUFFIX.get(atom.mark, ""))
            axis = Axis(atom.size, atom.size, self._kind(atom), atom.why)
        self.known[atom] = name
        self.axes.setdefault(name, axis)

    def _kind(self, atom: Atom) -> str:
        if self._is_output(atom):
            return "output"
        return "fixed" if atom.why else atom.mark or "channels"

    def _is_output(self, atom: Atom) -> bool:
        # A length or a map that reaches the output was fixed before, for its own reason.
        own = atom.why in ("output", "vocabulary") or atom.why.endswith(ALONG)
        return atom in self.outputs and own

    def _unused(self, wish: str) -> str:
        candidates = (wish if i == 0 else f"{wish}.{i}" for i in range(len(self.axes) + 1))
        return next(name for name in candidates if name not in self.axes)


def owner_of(tensor: str) -> str:
    """Return the module that holds a tensor; one of the outermost module is its own owner."""
    return tensor.rpartition(".")[0] or tensor


def output_atoms(dims: Dims, batch: Atom) -> frozenset[Atom]:
    """Return the axes of the model's output."""
    own = atoms((batch,))[0]
    return frozenset(atom for atom in flatten(dims) if atom is not own)


def flatten(dims: Iterable[Product]) -> list[Atom]:
    """Return the atoms of all dimensions in one list."""
    return [atom for product in dims for atom in atoms(product)]
