"""FedPMT: operations of a local step by its counting rules, its index psi and its learning rate.

A step is the forward pass of the whole network and the backward pass of the layers it trains. The
rules of specification §2 count it:

- `declared`: the rule as its authors state it, convolutions for one sample whatever the batch;
- `per_batch`: the same with convolutions charged for every sample, as a device has to;
- `paper`: what the authors' table shows. It follows from the rule and a few slips, which belong to
  the three networks of the table: there is no such number for another network.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from anyfleet.arrays import Floats

Rule = Literal["paper", "declared", "per_batch"]


# --- counted layers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """A fully connected layer. FedDrop's widths are shares of neurons, hence fractions."""

    inputs: float
    outputs: float

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class Convolution:
    """A convolution: `window` weights for each pair of channels, at `positions` of its output.

    In the terms of specification §2 `window` is s² and `positions` is m²; windows and maps that are
    not square, or not of two dimensions, are as welcome.
    """

    inputs: float
    outputs: float
    window: int
    positions: int

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(layer: "CountedLayer") -> None:
    for each in fields(layer):
        value = getattr(layer, each.name)
        if not 0 < value < math.inf:
            raise ValueError(
                f"{type(layer).__name__}.{each.name} must be a positive number, got {value}."
            )


CountedLayer = Dense | Convolution


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


def feddrop_layers(layers: Sequence[CountedLayer], share: float) -> tuple[CountedLayer, ...]:
    """Return the layers of FedDrop's network: hidden linear layers narrowed (specification §2).

    They keep a share of their neurons; convolutions stay complete. Widths are not rounded, as in
    FedPMT's table.
    """
    if not 0 < share <= 1:
        raise ValueError(f"feddrop_layers() keeps a share in (0, 1] of the neurons, got {share}.")
    return tuple(_dropped(layers, i, share) for i in range(len(layers)))


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


# --- operations -----------------------------------------------------------------------------------


def fedpmt_complexity(
    layers: Sequence[CountedLayer],
    batch: int,
    rule: Rule,
    *,
    first: int = 0,
    whole: Sequence[CountedLayer] | None = None,
) -> float:
    """Return the operations of one mini-batch on a network (FedPMT, specification §2).

    All layers run forward, those from `first` on backward. `whole` is the network that `layers`
    were cut from, by which `paper` knows its slips; `layers` themselves by default. `paper` gives
    whole numbers: the table leaves the fraction out.
    """
    if batch < 1:
        raise ValueError(f"fedpmt_complexity() needs a batch of at least one sample, got {batch}.")
    if not 0 <= first < len(layers):
        raise ValueError(
            f"fedpmt_complexity() has layers 0 to {len(layers) - 1}; {first} cannot be the first "
            "trained one."
        )
    book = _book(rule, batch, tuple(layers if whole is None else whole))
    forward = sum(_forward(layers, i, batch, book) for i in range(len(layers)))
    backward = sum(_backward(layers, i, batch, book) for i in range(first, len(layers)))
    total = forward + backward
    # Shares of neurons are seldom binary fractions: what misses a whole number by rounding is one.
    return float(math.floor(total + 1e-6)) if rule == "paper" else float(total)


def fedpmt_forward_complexity(
    layers: Sequence[CountedLayer],
    batch: int,
    rule: Rule,
    *,
    whole: Sequence[CountedLayer] | None = None,
) -> float:
    """Return the operations of one mini-batch that runs forward only (specification §2)."""
    book = _book(rule, batch, tuple(layers if whole is None else whole))
    return float(sum(_forward(layers, i, batch, book) for i in range(len(layers))))


@dataclass(frozen=True)
class _Slip:
    """The numbers that the table puts in the terms of one layer; None: the layer's own."""

    # The element-wise error of a hidden layer is its neurons times the batch,
    neurons: float | None = None
    batch: float | None = None
    # its other error term its neurons times those of the next layer times the batch.
    following: float | None = None
    # How much of a convolution is counted.
    part: float = 1.0


@dataclass(frozen=True)
class _Book:
    """The way a rule counts: samples charged for a convolution, activations, slips by layer."""

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


# --- theory ---------------------------------------------------------------------------------------


def fedpmt_psi(shares: Floats) -> float:
    """Return FedPMT's index of how often layers are left out (specification §F.1).

    `shares` of the cohort at each number of trained layers, fewest first: the sum of one over the
    share that trains at least so many. Infinite if nobody trains everything.
    """
    reached = np.cumsum(np.asarray(shares, dtype=np.float64)[::-1])
    return float((1 / reached).sum()) if (reached > 0).all() else math.inf


def fedpmt_learning_rate(step: int, *, convexity: float, ratio: float, offset: float) -> float:
    """Return the learning rate of FedPMT's bound (specification §F.1).

    It is `2 / (mu eps (t + lambda))`.
    """
    return 2 / (convexity * ratio * (step + offset))
