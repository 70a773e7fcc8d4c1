"""How trees pass through a codec: flattened to rows, compressed, checked, and shaped again."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.return_checks import Caller, compressed
from anyfleet.core.slots import Compressed
from anyfleet.tracebacks import during

# Entries of a stack that a codec sees at once: on the host as many as a cache holds; elsewhere so
# many that calls are few, and what is computed on the way is small beside a large stack.
_AT_ONCE, _AT_ONCE_ELSEWHERE = 1 << 20, 1 << 25


def compress(
    tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout, caller: Caller
) -> Compressed:
    """Return what the codec of `caller` makes of stacked tensors [devices, …].

    What is received, kept and remembered has the shapes of the tensors again. Raise BadReturn when
    the codec returns something else than is due.
    """
    devices, on_host = len(sent_fraction), layout.key.device.type == "cpu"
    at_once = (_AT_ONCE if on_host else _AT_ONCE_ELSEWHERE) // max(1, layout.entries)
    if devices <= max(1, at_once):
        return _compressed(tree, state, sent_fraction, layout, caller)
    # Results of one device do not depend on the others of its stack, so it may come in parts.
    room: dict[str, dict[str, Tensor]] = {}
    for begin in range(0, devices, max(1, at_once)):
        rows = slice(begin, min(devices, begin + max(1, at_once)))
        some, left = ({name: each[rows] for name, each in full.items()} for full in (tree, state))
        mine = replace(layout, key=layout.key[rows])
        found = _compressed(some, left, sent_fraction[rows], mine, caller)
        if not begin and _handed_on(found, some):
            # Nothing is made of the rows, so there is nothing to save memory on.
            return _compressed(tree, state, sent_fraction, layout, caller)
        for field, part in _trees(found).items():
            # What is not named was kept whole.
            whole = int(field.startswith("kept"))
            _put(part, room.setdefault(field, {}), rows, devices, empty=whole)
    return Compressed(
        received=room["received"],
        kept=room["kept"],
        symbols=Symbols(
            numbers=room["numbers"],
            quantisation_levels=room["quantisation_levels"],
            kept=room["kept units"],
            scales=room["scales"],
            columns=found.symbols.columns,
        ),
        state=room["state"],
        **room["sizes"],
    )


def _compressed(
    tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout, caller: Caller
) -> Compressed:
    rows = layout.flattened(tree)
    with during(caller.slot, caller.part):
        found = caller.part.compress(rows, sent_fraction, layout, layout.flattened(state))
    found = compressed(found, caller, rows)
    # Rows that come back as they were are the tensors themselves.
    same = {
        name: tree[name]
        for name, each in rows.items()
        if found.received.get(name) is each and tree[name].is_contiguous()
    }
    alike = len(same) == len(found.received)
    return Compressed(
        received=same if alike else layout.unflattened(found.received),
        kept=layout.unflattened(found.kept),
        symbols=found.symbols,
        bits=found.bits,
        state=layout.unflattened(found.state),
        distortion=found.distortion,
    )


def _handed_on(found: Compressed, tree: Params) -> bool:
    """Return whether a codec hands on what it was given, without a copy of anything."""
    made = {**found.symbols.quantisation_levels, **found.kept, **found.state}
    pairs = (
        (each.get(name), value)
        for name, value in tree.items()
        for each in (found.received, found.symbols.numbers)
    )
    return not made and all(one is not None and _same(one, two) for one, two in pairs)


def _same(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.numel() == two.numel()


def _trees(found: Compressed) -> dict[str, Params]:
    symbols = found.symbols
    return {
        "received": found.received,
        "kept": found.kept,
        "state": found.state,
        "numbers": symbols.numbers,
        "quantisation_levels": symbols.quantisation_levels,
        "kept units": symbols.kept,
        "scales": symbols.scales,
        "sizes": {"bits": found.bits, "distortion": found.distortion},
    }


def _put(part: Params, room: dict[str, Tensor], rows: slice, devices: int, *, empty: int) -> None:
    """Put rows of a stack where they belong, in place: there is no second copy of them."""
    for name in room.keys() - part.keys():
        room[name][rows] = empty
    for name, value in part.items():
        if name not in room:
            room[name] = value.new_empty((devices, *value.shape[1:]))
            room[name][: rows.start] = empty
        if value.ndim == 2 and value.shape[1] > room[name].shape[1]:
            # A device that keeps more entries has more scales.
            room[name] = pad(room[name], (0, value.shape[1] - room[name].shape[1]))
        target = room[name][rows]
        if value.ndim == 2 and value.shape[1] < target.shape[1]:
            target[:, value.shape[1] :] = empty
            target = target[:, : value.shape[1]]
        target.copy_(value)


def distortion(sent: Params, received: Params, layout: MessageLayout) -> Tensor:
    """Return squared error over squared norm of every device, [devices]; 0 where all is 0.

    `sent` and `received` are rows [devices, entries] (specification §F.7).
    """
    # Summed in memory order: the rounding must not depend on how many columns a link has.
    sent, received = layout.in_memory_order(sent), layout.in_memory_order(received)
    errors = sum(_squared_norm(received[name] - value) for name, value in sent.items())
    totals = sum(_squared_norm(value) for value in sent.values())
    if not isinstance(errors, Tensor) or not isinstance(totals, Tensor):
        return torch.zeros(1)
    return torch.where(totals > 0, errors / totals.clamp(min=1e-300), 0.0)


def _squared_norm(value: Tensor) -> Tensor:
    # Accumulated in double precision, without a copy in it.
    norms: Tensor = torch.linalg.vector_norm(value, dim=1, dtype=torch.float64)
    return norms.square()
