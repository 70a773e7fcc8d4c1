"""The place of a minibatch's samples in a tensor: [B, …], [B·T, …], [T, B, …], [2·B, …]."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from anyfleet.elastic.program import BATCH, Dim


class Place(NamedTuple):
    """A factor of one dimension that counts the samples.

    `outer` entries of that dimension lie around the samples and `inner` entries inside each, so
    that the dimension has outer · B · inner entries, the last factor running fastest.
    """

    dim: int
    outer: int
    inner: int


def places(dims: Sequence[Dim], sizes: Mapping[str, int]) -> tuple[Place, ...]:
    """Return every place of the batch in a tensor of these dimensions; none for a weight."""
    return tuple(
        Place(position, _product(product[:at], sizes), _product(product[at + 1 :], sizes))
        for position, dim in enumerate(dims)
        for product in dim
        for at, name in enumerate(product)
        if name == BATCH
    )


def _product(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(1 if name == BATCH else sizes[name] for name in names)


def outside(dims: Sequence[Dim], place: Place, sizes: Mapping[str, int]) -> int:
    """Return how many entries lie around the samples when the whole tensor is read in order."""
    before = (_product(product, sizes) for dim in dims[: place.dim] for product in dim)
    return math.prod(before) * place.outer


def row_mask(valid: Tensor, dims: Sequence[Dim], sizes: Mapping[str, int]) -> Tensor | None:
    """Spread `valid` [B] over a tensor [N, C, …] whose channels are normalised by the batch.

    The mask has size 1 wherever the batch does not lie. None where nothing is to be masked: no
    sample lies outside the channels, as in a weight, or in images that are joined into one.
    """
    found = [place for place in places(dims, sizes) if place.dim != 1]
    if not found:
        return None
    (place,) = found
    spread = valid.reshape(1, -1, 1).expand(place.outer, -1, place.inner).reshape(-1)
    shape = [1] * len(dims)
    shape[place.dim] = -1
    return spread.reshape(shape)


def batch_first(drawn: Tensor, around: int, batch: int) -> Tensor:
    """Reorder numbers drawn sample by sample for a tensor with `around` entries around them.

    So padding at the end of the batch changes no number of another sample, wherever the batch lies.
    """
    if around == 1:
        return drawn
    return drawn.reshape(batch, around, -1).transpose(0, 1).reshape(-1)
