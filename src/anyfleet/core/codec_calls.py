"""How trees pass through a codec: flattened to rows, compressed, checked, and shaped again."""

from dataclasses import replace

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout
from anyfleet.core.messages import Params
from anyfleet.core.return_checks import Caller, compressed
from anyfleet.core.slots import Compressed
from anyfleet.tracebacks import during


def compress(
    tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout, caller: Caller
) -> Compressed:
    """Return what the codec of `caller` makes of stacked tensors [devices, …].

    What is received, kept and remembered has the shapes of the tensors again. Raise BadReturn when
    the codec returns something else than is due.
    """
    rows = layout.flattened(tree)
    with during(caller.slot, caller.part):
        found = caller.part.compress(rows, sent_fraction, layout, layout.flattened(state))
    found = compressed(found, caller, rows)
    return replace(
        found,
        received=layout.unflattened(found.received),
        kept=layout.unflattened(found.kept),
        state=layout.unflattened(found.state),
    )


def distortion(sent: Params, received: Params, layout: MessageLayout) -> Tensor:
    """Return squared error over squared norm of every device, [devices]; 0 where all is 0.

    `sent` and `received` are rows [devices, entries] (specification §F.7).
    """
    # Summed in memory order: the rounding must not depend on how many columns a link has.
    sent, received = layout.unflattened(sent), layout.unflattened(received)
    errors = sum(_squared_norm(received[name] - value) for name, value in sent.items())
    totals = sum(_squared_norm(value) for value in sent.values())
    if not isinstance(errors, Tensor) or not isinstance(totals, Tensor):
        return torch.zeros(1)
    return torch.where(totals > 0, errors / totals.clamp(min=1e-300), 0.0)


def _squared_norm(value: Tensor) -> Tensor:
    # Accumulated in double precision, without a copy in it.
    norms: Tensor = torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64)
    return norms.square()
