"""Channels in another order: the same function, with its weights elsewhere."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.slicing import Params, cut
from anyfleet.errors import SliceError


def permute(
    tree: Params, orders: Mapping[str, Sequence[int]], blueprint: Blueprint
) -> dict[str, Tensor]:
    """The tree with the indices of some axes in a new order, wherever an axis occurs.

    Place i of an axis holds what index `order[i]` held before. Any subset of parameters and
    buffers; a model of which all are permuted alike is the same function. For export: a run never
    needs it, as a slice says which indices it has.
    """
    for axis, order in orders.items():
        known = blueprint.axes.get(axis)
        if known is not None and known.free and len(order) != known.size:
            raise SliceError(
                f"axis {axis!r} has {known.size} indices, and an order names each of them once; "
                f"got {len(order)}"
            )
    slice_ = Slice.of(orders, blueprint)
    _refuse_constants(slice_, blueprint)
    return cut(tree, slice_, blueprint)


def _refuse_constants(slice_: Slice, blueprint: Blueprint) -> None:
    """What a module holds besides its parameters and buffers would keep the old order."""
    for axis, kept in slice_.keep:
        alone = blueprint.local(Slice(((axis, kept),)))
        pairs = zip(blueprint.programs, alone.programs, strict=True)
        moved = [
            name
            for before, after in pairs
            for name, constant in after.constants.items()
            if constant != before.constants[name]
        ]
        if moved:
            raise SliceError(
                f"axis {axis!r} cannot be reordered: constants of the network run along it "
                f"({', '.join(moved)}), and no tree holds them. Leave the axis out, or make them "
                "persistent buffers"
            )
