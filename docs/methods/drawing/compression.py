"""What is left of an update: STC, QSGD, UVeQFed, FedHQ."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from anyfleet import rng
from anyfleet.arrays import Floats
from anyfleet.formulas import fedhq_weights
from anyfleet.formulas.reference import (
    qsgd_error_bound,
    stc_sparse_ternary,
    uveq_dither,
    uveq_lattice,
    uveq_lattice_indices,
)
from drawing.canvas import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, arrow, bare, panels, plain
from drawing.measured import dots, uploads

SIZE, RATIOS = (10, 3.6), (1.35, 1)


def stc() -> Figure:
    """Draw an update of thirty entries, what is sent of it, and what is kept for later."""
    figure, (left, right) = panels(2, SIZE, RATIOS)
    update = rng.normal(rng.root(3, "stc"), 30).numpy() ** 3
    told = stc_sparse_ternary(update, 0.2)
    bare(left, "an update, and the fifth of it that is sent")
    place, lane = np.arange(len(update)), 1.1 * float(np.ptp(update))
    for row, (values, colour, label) in enumerate(
        (
            (update, GREY, "update"),
            (told.sent, BLUE, "sent:\nsigns and\none magnitude"),
            (told.residual, ORANGE, "kept for the\nnext message"),
        )
    ):
        left.bar(place, values, 0.8, bottom=-row * lane, color=colour)
        left.axhline(-row * lane, 0.22, color=INK, lw=0.6)
        left.text(-1.5, -row * lane, label, fontsize=9, color=INK, ha="right", va="center")
    left.set_xlim(-9, 30)
    uploads(right, "stc", "STC", BLUE)
    return figure


def qsgd() -> Figure:
    """Draw where an entry goes and how likely, and what comes of it in the mean."""
    figure, (left, right) = panels(2, SIZE, RATIOS)
    levels, shown = 4, np.linspace(0, 1, 81)
    plain(left, "four levels", "entry, in units of its bucket's norm", "what is sent")
    below = np.floor(levels * shown) / levels
    above = np.minimum(below + 1 / levels, 1)
    left.fill_between(shown, below, above, step="post", color=SKY, alpha=0.35, lw=0)
    left.plot(shown, shown, color=INK, lw=1.5)
    left.text(0.1, 0.06, "the mean", fontsize=9, rotation=28, color=INK)
    for entry, colour in ((0.3, BLUE), (0.7, ORANGE)):
        low = np.floor(levels * entry) / levels
        chance = levels * (entry - low)
        left.axvline(entry, color=colour, lw=1, ls=":")
        shift, side = (0.025, "left") if entry < 0.5 else (-0.025, "right")
        for level, share in ((low, 1 - chance), (low + 1 / levels, chance)):
            left.plot(entry, level, "o", color=colour, ms=3 + 9 * share)
            left.text(entry + shift, level + 0.02, f"{share:.0%}", ha=side, color=colour)
    left.set_xticks(np.arange(5) / 4)
    left.set_yticks(np.arange(5) / 4)
    uploads(right, "qsgd", "QSGD", ORANGE)
    return figure


def uveqfed() -> Figure:
    """Draw a pair of entries on its way through a lattice; errors of many such pairs."""
    figure, (left, middle, right) = panels(3, (10, 3.6), (1.1, 0.9, 1.2))
    basis = uveq_lattice(1.0)
    bare(left, "one pair of entries")
    left.set_aspect("equal")
    for i in range(-2, 3):
        for j in range(-2, 3):
            centre = np.array([i, j]) @ basis
            if abs(centre[0]) < 2.2 and abs(centre[1]) < 1.4:
                _hexagon(left, centre)
    pair, noise = np.array([0.15, -0.1]), np.array([0.55, 0.35])
    point = (uveq_lattice_indices((pair + noise)[None], basis) @ basis)[0]
    for start, end, colour in (
        (pair, pair + noise, PINK),
        (pair + noise, point, INK),
        (point, point - noise, PINK),
    ):
        arrow(left, start, end, colour)
    for spot, colour, label in ((pair, GREEN, "pair"), (point - noise, ORANGE, "received")):
        left.plot(*spot, "o", color=colour, ms=7)
        left.text(spot[0] - 0.09, spot[1], label, color=colour, ha="right", va="center")
    (x, y), (back, up) = pair + noise / 2, point - noise / 2
    left.text(x + 0.08, y - 0.12, "+ noise", fontsize=9, color=PINK)
    left.text(back - 0.08, up + 0.08, "− noise", fontsize=9, color=PINK, ha="right")
    left.text(point[0] + 0.1, point[1], "sent", va="center")
    left.set_xlim(-0.95, 1.75)
    left.set_ylim(-1.15, 1.15)
    _errors(middle, pair, basis)
    uploads(right, "uveqfed", "UVeQFed", GREEN)
    return figure


def _hexagon(axes: Axes, centre: Floats) -> None:
    turns = np.pi / 3 * np.arange(6)
    corners = centre + 2 / 3 * np.stack([np.cos(turns), np.sin(turns)], 1)
    axes.add_patch(Polygon(corners, facecolor="none", edgecolor=GREY, lw=1))
    axes.plot(*centre, ".", color=GREY, ms=5)


def _errors(axes: Axes, pair: Floats, basis: Floats) -> None:
    """Return errors of one pair with other noise: spread evenly over one cell for any pair."""
    bare(axes, "its error, 300 times")
    axes.set_aspect("equal")
    noise = uveq_dither(rng.uniform(rng.root(5, "uveq"), 600).numpy().reshape(300, 2), basis)
    errors = uveq_lattice_indices(pair + noise, basis) @ basis - noise - pair
    _hexagon(axes, np.zeros(2))
    dots(axes, *errors.T, ORANGE, 2)
    axes.set_xlim(-0.75, 0.75)
    axes.set_ylim(-0.75, 0.75)


def fedhq() -> Figure:
    """Draw quantisation levels by link, weights by error, and a run."""
    figure, (left, middle, right) = panels(3, (10, 3.6), (0.9, 0.9, 1.2))
    levels = np.array([1, 2, 4, 8, 16])
    errors = qsgd_error_bound(512.0, levels)
    plain(left, "fewer levels, more error", "levels that the link carries", "bound of the error")
    left.plot(np.log2(levels), errors, color=INK, lw=1.5)
    dots(left, np.log2(levels), errors, PINK)
    left.set_xticks(np.log2(levels), [f"{level}" for level in levels])
    left.set_ylim(0)
    plain(middle, "five devices' weights", "levels of the device", "")
    middle.bar(np.log2(levels), fedhq_weights(errors), 0.7, color=PINK)
    middle.axhline(1 / len(levels), color=INK, ls=":", lw=1.2)
    middle.text(-0.4, 1 / len(levels) + 0.01, "all alike", fontsize=9)
    middle.set_xticks(np.log2(levels), [f"{level}" for level in levels])
    uploads(right, "fedhq", "FedHQ", PINK)
    return figure
