"""Axes while they are being found: atoms in a union-find, dimensions as products of atoms."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# How the reason ends when an operator reads positions along an axis.
ALONG = "runs along it"


@dataclass(eq=False)
class Atom:
    """A candidate axis: merged into another, split into an outer and an inner part, or itself.

    `why` is set once it may not be cut. `mark` is what the operators it went through say about
    its kind.
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
    """A new dimension of one atom; fixed if a reason is given."""
    return (Atom(size, why),) if size != 1 else ()


def atoms(product: Iterable[Atom]) -> Product:
    """The product in terms of what its atoms have become."""
    found: list[Atom] = []
    for member in product:
        atom = member
        while atom.merged is not None:
            atom = atom.merged
        found.extend(atoms(atom.parts) if atom.parts else (atom,))
    return tuple(found)


def size(product: Product) -> int:
    return math.prod(atom.size for atom in product)


def freeze(product: Product, why: str) -> None:
    """Never cut these; the first reason stays."""
    for atom in atoms(product):
        atom.why = atom.why or why


def mark(product: Product, kind: str) -> None:
    """Say what the atoms are; the first mark stays."""
    for atom in atoms(product):
        atom.mark = atom.mark or kind


def unify(one: Product, other: Product) -> bool:
    """Make two products of equal size the same axes; False if their factors cannot be aligned."""
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
