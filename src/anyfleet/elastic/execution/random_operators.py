"""Operators that draw at random, by key: the same key and place give the same numbers."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.elastic.batch_rows import batch_first, outside, places
from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.execution.kept_units import kept
from anyfleet.elastic.execution.modes import Run, Special
from anyfleet.elastic.program import Node

# scale * alpha of SELU.
_SELU_LIMIT = 1.7580993408473766


def drawing(run: Run, node: Node) -> bool:
    """Return whether this call draws in this run: while training, or because it always does."""
    return run.mode.dropout or node.always


def _key(run: Run, node: Node) -> Tensor:
    """Return the key of a call in this run."""
    key = run.key
    if key is None and run.mode.dropout:
        where = node.where or node.name
        raise ValueError(f"{where} draws at random: pass a key, or a Mode without dropout")
    if key is None:
        # What draws in evaluation too takes the same draw every time.
        key = rng.root(0, "evaluation").to(run.device)
    return rng.fold(key, node.site)


def _uniform(run: Run, node: Node, shape: tuple[int, ...]) -> Tensor:
    """Draw sample by sample, so that padding at the end of the batch changes nothing."""
    drawn = rng.uniform(_key(run, node), math.prod(shape))
    return batch_first(drawn, _around(run, node, shape), run.batch).reshape(shape)


def _kept(run: Run, node: Node, shape: tuple[int, ...], rate: float) -> Tensor:
    """Return where `_uniform` draws at least `rate`, without a float64 for each entry."""
    drawn = kept(_key(run, node), math.prod(shape), rate)
    return batch_first(drawn, _around(run, node, shape), run.batch).reshape(shape)


def _around(run: Run, node: Node, shape: tuple[int, ...]) -> int:
    """Return how many entries lie around the batch in what is drawn.

    It is 1 where the batch comes first, or does not occur.
    """
    dims = node.dims or ()
    found = places(dims, run.sizes)
    # Dropout by channel draws one number for all entries of a dimension, perhaps that of the batch.
    if len(found) != 1 or shape[found[0].dim] == 1:
        return 1
    return outside(dims, found[0], run.sizes)


def dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Set units to zero at random."""
    return dropped(run, args[0], args[1] if args[2] else 0.0, node)


def feature_dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Set whole channels to zero at random."""
    return dropped(run, args[0], args[1] if args[2] else 0.0, node, by_channel=True)


def alpha_dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Set units to the limit of SELU at random; mean and variance stay."""
    return dropped(run, args[0], args[1] if args[2] else 0.0, node, limit=_SELU_LIMIT)


def feature_alpha_dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Set whole channels to the limit of SELU at random; mean and variance stay."""
    rate = args[1] if args[2] else 0.0
    return dropped(run, args[0], rate, node, by_channel=True, limit=_SELU_LIMIT)


def dropped(
    run: Run, x: Tensor, rate: float, node: Node, *, by_channel: bool = False, limit: float = 0.0
) -> Tensor:
    """Return a tensor with entries dropped, as torch writes it on a CPU.

    It is a product with a mask, which alone is kept for backward.
    """
    if rate == 0.0 or not drawing(run, node):
        return x
    if rate >= 1.0:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if by_channel else tuple(x.shape)
    mask = _kept(run, node, shape, rate).to(x.dtype)
    if not limit:
        return torch.mul(x, mask * (1.0 / (1.0 - rate)))
    scale = ((limit * limit * rate + 1.0) * (1.0 - rate)) ** -0.5
    shift = (mask - 1.0) * (limit * scale) + limit * scale * rate
    return torch.add(torch.mul(x, mask * scale), shift)


def rand(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw uniform numbers in [0, 1)."""
    return _new(run, node, tuple(args[0]), args[1])


def randn(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw standard normal numbers."""
    return _new(run, node, tuple(args[0]), args[1], normal=True)


def rand_like(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw uniform numbers in [0, 1), in the shape of a tensor."""
    return _new(run, node, tuple(args[0].shape), args[1] or args[0].dtype)


def randn_like(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw standard normal numbers, in the shape of a tensor."""
    return _new(run, node, tuple(args[0].shape), args[1] or args[0].dtype, normal=True)


def _new(
    run: Run,
    node: Node,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    *,
    normal: bool = False,
) -> Tensor:
    """Draw a new tensor; its mean where this run does not draw."""
    own = dtype or run.dtype
    if not drawing(run, node):
        return torch.full(shape, 0.0 if normal else 0.5, dtype=own, device=run.device)
    drawn = _uniform(run, node, shape)
    if normal:
        # Shifted by half a step: the inverse error function is infinite at the ends.
        drawn = torch.erfinv(2 * (drawn + 2.0**-54) - 1) * 2**0.5
    return drawn.to(own)


def bernoulli(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw ones with the probabilities in the tensor, or with one probability for all."""
    x: Tensor = args[0].detach()
    chance = torch.full_like(x, args[1]) if isinstance(args[1], float) else x
    if not drawing(run, node):
        return chance
    return (_uniform(run, node, tuple(x.shape)) < chance).to(x.dtype)


def uniform(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw uniform numbers in [low, high), in the shape of a tensor."""
    x, low, high = args[:3]
    drawn = _new(run, node, tuple(x.shape), x.dtype)
    return torch.add(drawn * (high - low), low)


def exponential(run: Run, args: list[Any], node: Node) -> Tensor:
    """Draw exponential numbers with a rate, in the shape of a tensor."""
    x, rate = args[:2]
    if not drawing(run, node):
        return torch.full_like(x, 1.0 / rate)
    drawn = torch.log(_uniform(run, node, tuple(x.shape)) + 2.0**-54).div(-rate)
    return drawn.to(x.dtype)


RANDOM: dict[str, Special] = {
    "aten.alpha_dropout.default": alpha_dropout,
    "aten.bernoulli.default": bernoulli,
    "aten.bernoulli.p": bernoulli,
    "aten.dropout.default": dropout,
    "aten.exponential.default": exponential,
    "aten.feature_alpha_dropout.default": feature_alpha_dropout,
    "aten.feature_dropout.default": feature_dropout,
    "aten.rand.default": rand,
    "aten.rand_like.default": rand_like,
    "aten.randn.default": randn,
    "aten.randn_like.default": randn_like,
    "aten.uniform.default": uniform,
}


@lru_cache(maxsize=256)
def is_random(blueprint: Blueprint) -> bool:
    """Return whether training may draw: only then `apply` has a use for a key."""
    attention = "aten.scaled_dot_product_attention.default"
    return any(node.op in RANDOM or node.op == attention for node in blueprint.program.nodes)
