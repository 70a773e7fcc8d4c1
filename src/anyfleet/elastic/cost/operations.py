"""Operations of one local step by the rules of FedPMT (specification §2).

A step is the forward pass of the whole net and the backward pass of the layers it trains:

- `declared`: the rule as its authors state it, convolutions for one sample whatever the batch;
- `per_batch`: the same with convolutions charged for every sample, as a device has to;
- `paper`: what the authors' table shows. It follows from the rule and a few slips, which belong to
  the three nets of the table: there is no such number for another net.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.cost.counted_layers import Convolution, CountedLayer, Dense, layers_of

Rule = Literal["paper", "declared", "per_batch"]
Counting = Literal["flops", "paper", "declared", "per_batch"]  # "flops": no rule of FedPMT

# C.1, C.2 and C.3 of the specification.
FCNN: tuple[CountedLayer, ...] = (
    Dense(784, 400),
    Dense(400, 300),
    Dense(300, 200),
    Dense(200, 100),
    Dense(100, 10),
)
CNN_MNIST: tuple[CountedLayer, ...] = (
    Convolution(1, 8, window=5**2, positions=24**2),
    Convolution(8, 16, window=5**2, positions=8**2),
    Dense(256, 128),
    Dense(128, 10),
)
CNN_CIFAR: tuple[CountedLayer, ...] = (
    Convolution(3, 16, window=5**2, positions=28**2),
    Convolution(16, 32, window=5**2, positions=10**2),
    Dense(800, 500),
    Dense(500, 300),
    Dense(300, 10),
)


@dataclass(frozen=True)
class _Slip:
    """What stands in the terms of one layer instead of its own numbers; None: its own."""

    # The element-wise error of a hidden layer is its neurons times the batch,
    neurons: float | None = None
    batch: float | None = None
    # its other error term its neurons times those of the next layer times the batch.
    following: float | None = None
    # How much of a convolution is counted.
    part: float = 1.0


@dataclass(frozen=True)
class _Book:
    """How a rule counts: samples a convolution is charged for, activations, slips by layer."""

    samples: int
    activations: bool
    slips: Mapping[int, _Slip] = field(default_factory=dict)


_TABLE: Mapping[tuple[CountedLayer, ...], _Book] = {
    # Fc1 takes the 784 inputs for its 400 neurons.
    FCNN: _Book(1, activations=True, slips={0: _Slip(neurons=784)}),
    # The activations of linear layers, though declared, are counted for the FCNN alone.
    CNN_MNIST: _Book(1, activations=False),
    CNN_CIFAR: _Book(
        1,
        activations=False,
        slips={
            # Conv2 as if it had 20 filters instead of 32 (or 10 input channels instead of 16).
            1: _Slip(part=20 / 32),
            # Fc1 as if the 10 classes came next instead of the 300 neurons of Fc2.
            2: _Slip(following=10),
            # Fc2 takes the 10 classes for the 20 samples of the batch.
            3: _Slip(batch=10),
        },
    ),
}


def complexity(
    layers: Sequence[CountedLayer],
    batch: int,
    rule: Rule,
    *,
    first: int = 0,
    whole: Sequence[CountedLayer] | None = None,
) -> float:
    """Operations of one mini-batch: all layers forward, those from `first` on backward.

    `whole` is the net that `layers` were cut from, by which `paper` knows its slips; `layers`
    themselves by default. `paper` gives whole numbers: the table leaves the fraction out.
    """
    if batch < 1:
        raise ValueError(f"complexity() needs a batch of at least one sample, got {batch}.")
    if not 0 <= first < len(layers):
        raise ValueError(
            f"complexity() has layers 0 to {len(layers) - 1}; {first} cannot be the first trained."
        )
    book = _book(rule, batch, tuple(layers if whole is None else whole))
    forward = sum(_forward(layers, i, batch, book) for i in range(len(layers)))
    backward = sum(_backward(layers, i, batch, book) for i in range(first, len(layers)))
    total = forward + backward
    # Shares of neurons are seldom binary fractions: what misses a whole number by rounding is one.
    return float(math.floor(total + 1e-6)) if rule == "paper" else float(total)


def operations(blueprint: Blueprint, slice: Slice, batch: int, rule: Rule) -> float:
    """Operations of one mini-batch on a slice: its own width, trained from its first layer on."""
    return _operations(blueprint, blueprint.local(slice), slice.first_trained_layer, batch, rule)


@lru_cache(maxsize=4096)
def forward_operations(blueprint: Blueprint, slice: Slice, batch: int, rule: Rule) -> float:
    """Operations of one mini-batch that is only looked at."""
    layers, whole = layers_of(blueprint, slice), layers_of(blueprint)
    book = _book(rule, batch, whole)
    return float(sum(_forward(layers, i, batch, book) for i in range(len(layers))))


@lru_cache(maxsize=4096)
def _operations(
    blueprint: Blueprint, small: Blueprint, first: int, batch: int, rule: Rule
) -> float:
    # Apart from the slice: slices of equal shape share one entry.
    whole = layers_of(blueprint)
    return complexity(layers_of(small), batch, rule, first=first, whole=whole)


def ratios(layers: Sequence[CountedLayer], batch: int, rule: Rule) -> tuple[float, ...]:
    """Share of the full complexity by first trained layer: 1 for layer 0, then ever less."""
    full = complexity(layers, batch, rule)
    return tuple(
        complexity(layers, batch, rule, first=first) / full for first in range(len(layers))
    )


def dropped(layers: Sequence[CountedLayer], share: float) -> tuple[CountedLayer, ...]:
    """FedDrop's net: a share of the neurons of hidden linear layers, convolutions complete.

    Widths are not rounded, as in FedPMT's table.
    """
    if not 0 < share <= 1:
        raise ValueError(f"dropped() keeps a share in (0, 1] of the neurons, got {share}.")
    return tuple(_dropped(layers, i, share) for i in range(len(layers)))


def deadline_seconds(
    shares: Sequence[float],
    levels: Sequence[float],
    full_seconds: float,
    *,
    digits: int | None = None,
) -> tuple[float, ...]:
    """How long each device takes for its share of the model, `full_seconds` being all of it at 1.

    `digits` rounds shares up to so many decimals first, as FedPMT does (2) to get its deadline.
    """
    if len(shares) != len(levels) or not all(level > 0 for level in levels):
        raise ValueError(
            f"deadline_seconds() needs one positive level for each of {len(shares)} shares, "
            f"got {tuple(levels)}."
        )
    rounded = shares if digits is None else [_rounded_up(share, digits) for share in shares]
    return tuple(share * full_seconds / level for share, level in zip(rounded, levels, strict=True))


def _dropped(layers: Sequence[CountedLayer], i: int, share: float) -> CountedLayer:
    layer = layers[i]
    if isinstance(layer, Convolution):
        return layer
    after_hidden = i > 0 and isinstance(layers[i - 1], Dense)
    is_output = i == len(layers) - 1
    return Dense(
        layer.inputs * (share if after_hidden else 1),
        layer.outputs * (1 if is_output else share),
    )


def _rounded_up(number: float, digits: int) -> float:
    # A number that has so many digits already, but for binary rounding, stays.
    scale = 10.0**digits
    return math.ceil(number * scale - 1e-9) / scale


def _book(rule: Rule, batch: int, whole: tuple[CountedLayer, ...]) -> _Book:
    match rule:
        case "declared":
            return _Book(samples=1, activations=True)
        case "per_batch":
            return _Book(samples=batch, activations=True)
        case "paper" if whole in _TABLE:
            return _TABLE[whole]
        case "paper":
            raise ValueError(
                'The rule "paper" knows the three nets of FedPMT\'s table (C.1 FCNN, C.2 '
                f"CNN-MNIST, C.3 CNN-CIFAR10), not one with the layers {whole}. "
                'Use "declared" or "per_batch".'
            )
    raise ValueError(f'Unknown rule {rule!r}: use "paper", "declared" or "per_batch".')


def _forward(layers: Sequence[CountedLayer], i: int, batch: int, book: _Book) -> float:
    layer = layers[i]
    if isinstance(layer, Convolution):
        one_sample = layer.inputs * layer.window * layer.outputs * layer.positions
        return one_sample * book.samples * book.slips.get(i, _Slip()).part
    return layer.outputs * batch * (layer.inputs + (1 if book.activations else 0))


def _backward(layers: Sequence[CountedLayer], i: int, batch: int, book: _Book) -> float:
    layer = layers[i]
    if isinstance(layer, Convolution):
        return 2 * _forward(layers, i, batch, book)
    # Gradient and update of the weights.
    weights = layer.outputs * layer.inputs * (batch + 1)
    if i == len(layers) - 1:
        return 2 * layer.outputs * batch + weights
    slip = book.slips.get(i, _Slip())
    following = layers[i + 1].outputs if slip.following is None else slip.following
    neurons = layer.outputs if slip.neurons is None else slip.neurons
    samples = batch if slip.batch is None else slip.batch
    return neurons * samples + layer.outputs * following * batch + weights
