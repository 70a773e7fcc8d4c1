"""Which part of the model a device trains: HeteroFL, FedPMT, FedDrop, FedRolex."""

from fractions import Fraction

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anyfleet import rng
from anyfleet.arrays import Flags
from anyfleet.formulas import fedrolex_window, kept_channels
from anyfleet.formulas.reference import (
    feddrop_channels,
    fedpmt_layer_mask,
    fedpmt_layer_weights,
    prefix_mask,
)
from drawing.canvas import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    SKY,
    bare,
    blocks,
    cell,
    lattice,
    legend,
    mosaic,
    panels,
)

WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8)


def heterofl() -> Figure:
    """Draw one weight matrix at four levels, and who averages what."""
    size = 16
    figure, places = panels(5, (10, 2.6))
    masks = []
    for axes, width in zip(places, WIDTHS, strict=False):
        count = kept_channels(width, size)
        bare(axes, f"width {Fraction(width)}")
        blocks(axes, [(size, size, PALE), (count, count, BLUE)], size)
        masks.append(prefix_mask((size, size), (count, count)))
    _overlap(places[-1], masks)
    legend(figure, {"what a device of this level trains": BLUE, "does not reach the device": PALE})
    return figure


def _overlap(axes: Axes, masks: list[Flags]) -> None:
    counts = np.sum(masks, axis=0)
    size = len(counts)
    bare(axes, "how many are averaged")
    lattice(axes, size, size)
    axes.imshow(
        counts, cmap="Blues", vmin=0, vmax=6, extent=(0, size, size, 0), interpolation="nearest"
    )
    lattice(axes, size, size)
    for place, number in ((12, 1), (6, 2), (3, 3), (1, 4)):
        axes.text(place, place, str(number), ha="center", va="center", fontsize=9, color=INK)


def fedpmt() -> Figure:
    """Draw layers by devices: what is trained, and each device's share in the mean of a layer."""
    layers = ("conv 1", "conv 2", "linear 1", "output")
    masks = np.array([fedpmt_layer_mask(4, trained) for trained in (4, 3, 2, 1)])
    shares = fedpmt_layer_weights(masks)
    figure, (axes,) = panels(1, (7, 3.9))
    bare(axes)
    for device in range(4):
        words = f"device {'ABCD'[device]}\nlevel {device}"
        axes.text(2 * device + 0.5, -0.15, words, ha="center", va="bottom", fontsize=10)
        for layer in range(4):
            trained = masks[device, layer]
            share = str(Fraction(shares[device, layer]).limit_denominator(9))
            cell(axes, (2 * device, layer), BLUE if trained else GREY, share if trained else "0")
        _passes(axes, 2 * device, int(masks[device].argmax()))
    for layer, name in enumerate(layers):
        axes.text(-0.3, layer + 0.5, name, ha="right", va="center", fontsize=10)
    lattice(axes, 7.6, 4.6)
    axes.set_xlim(-2, 7.8)
    axes.set_ylim(4.6, -0.9)
    legend(
        figure,
        {"trained, with its share in the mean": BLUE, "runs forward, is not trained": GREY},
    )
    return figure


def _passes(axes: Axes, column: float, first: int) -> None:
    """Draw the forward pass from top to bottom, the backward pass up to the first trained layer."""
    style = {"arrowstyle": "-|>", "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
    for x, start, end, colour in ((1.2, 0, 4, INK), (1.5, 4, first, ORANGE)):
        axes.annotate(
            "",
            xy=(column + x, end),
            xytext=(column + x, start),
            arrowprops={**style, "color": colour},
        )
    axes.text(column + 1.3, 4.15, "forward", ha="right", va="top", fontsize=9)
    axes.text(column + 1.42, 4.15, "back", ha="left", va="top", fontsize=9, color=ORANGE)


def feddrop() -> Figure:
    """Draw the units that four devices draw in two rounds."""
    size = 12
    figure, places = panels(2, (10, 2.6))
    for number, axes in enumerate(places):
        bare(axes, f"round {number}")
        lattice(axes, size, 5.3)
        counts, rows = np.zeros(size, dtype=int), []
        for device, share in enumerate((1 / 2, 1 / 2, 1 / 4, 1 / 4)):
            key = rng.fold(rng.root(1, "feddrop"), 10 * number + device)
            kept = feddrop_channels(
                size, kept_channels(share, size), rng.uniform(key, size).numpy()
            )
            counts[kept] += 1
            rows.append([BLUE if unit in kept else PALE for unit in range(size)])
            axes.text(
                -0.3,
                device + 0.5,
                f"{'ABCD'[device]} (keeps {Fraction(share)})",
                ha="right",
                va="center",
                fontsize=9,
            )
        mosaic(axes, rows)
        for unit, count in enumerate(counts):
            cell(axes, (unit, 4.3), SKY if count else GREY, str(count))
        axes.text(-0.3, 4.8, "mean over", ha="right", va="center", fontsize=9)
        axes.set_xlim(-4, size + 0.1)
    legend(
        figure,
        {
            "unit in the device's network": BLUE,
            "left out": PALE,
            "nobody drew it: keeps its value": GREY,
        },
    )
    return figure


def fedrolex() -> Figure:
    """Draw the windows of two widths over the rounds, and how often each channel was trained."""
    size, rounds = 8, 8
    figure, places = panels(3, (10, 3.6), (1, 1, 1))
    totals = np.zeros((2, size))
    for axes, share, row in zip(places, (1 / 2, 1 / 4), (0, 1), strict=False):
        bare(axes, f"a device of width {Fraction(share)}")
        lattice(axes, size, rounds)
        rows = []
        for number in range(rounds):
            kept = fedrolex_window(size, kept_channels(share, size), number)
            totals[row, kept] += 1
            rows.append([BLUE if channel in kept else PALE for channel in range(size)])
            rows[-1][int(kept[0])] = ORANGE
            axes.text(-0.3, number + 0.5, f"round {number}", ha="right", va="center", fontsize=9)
        mosaic(axes, rows)
        axes.set_xlim(-2.6, size + 0.1)
    _often(places[2], totals.sum(axis=0), rounds)
    legend(figure, {"trained": BLUE, "where the window starts": ORANGE, "not trained": PALE})
    return figure


def _often(axes: Axes, rolled: np.ndarray, rounds: int) -> None:
    size = len(rolled)
    nested = np.where(np.arange(size) < size // 2, rounds, 0) + np.where(
        np.arange(size) < size // 4, rounds, 0
    )
    axes.bar(np.arange(size) - 0.2, nested, 0.4, color=GREY, label="HeteroFL")
    axes.bar(np.arange(size) + 0.2, rolled, 0.4, color=BLUE, label="FedRolex")
    axes.set_title("both devices, after 8 rounds", fontsize=10, color=INK)
    axes.set_xlabel("channel")
    axes.set_ylabel("times trained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
