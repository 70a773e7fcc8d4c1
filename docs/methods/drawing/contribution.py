"""Whose updates count: FedAdp, Optimal Aggregation, FedPNS."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.formulas import (
    alignment_without_each,
    fedadp_angles,
    fedadp_contribution,
    fedadp_weights,
    fedpns_lowered,
    optimal_subset,
    update_alignment,
    weighted_draw,
)
from anyfleet.formulas.reference import fedavg_mean
from drawing.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    arrow,
    bare,
    legend,
    panels,
    plain,
)

ORIGIN = np.zeros(2)


def fedadp() -> Figure:
    """Draw updates of three devices, the map from angle to weight, and the weights."""
    figure, (left, middle, right) = panels(3, (10, 3.5), (1.05, 1, 0.85))
    updates = np.array([[1.0, 0.0], [1.0, 1.0], [-0.2, 1.0]])
    mean = fedavg_mean(ORIGIN, updates, np.ones(3))
    found = fedadp_angles(
        updates @ mean, np.linalg.norm(updates, axis=1), float(np.linalg.norm(mean))
    )
    _arrows(left, updates, (BLUE, GREEN, ORANGE), found)
    arrow(left, ORIGIN, mean, INK, "--")
    left.text(mean[0] + 0.05, mean[1] - 0.12, "mean", fontsize=9)
    left.set_xlim(-0.55, 1.35)
    left.set_ylim(-0.3, 1.3)

    plain(middle, "the map of the angle", "angle to the mean [rad]", "exponent of the weight")
    theta = np.linspace(0, np.pi, 120)
    for sharpness, colour, style in ((2.0, SKY, "--"), (5.0, INK, "-"), (8.0, PINK, ":")):
        label = f"sharpness {sharpness:g}"
        middle.plot(
            theta, fedadp_contribution(theta, sharpness), style, color=colour, lw=2, label=label
        )
    for angle, colour in zip(found, (BLUE, GREEN, ORANGE), strict=True):
        middle.plot(angle, fedadp_contribution(np.array(angle)), "o", color=colour, ms=8)
    middle.legend(frameon=False, fontsize=9)

    plain(right, "weights of equal data", "", "")
    weights = fedadp_weights(np.ones(3), found)
    place = np.arange(3)
    right.bar(place - 0.2, np.full(3, 1 / 3), 0.38, color=GREY, label="FedAvg")
    right.bar(place + 0.2, weights, 0.38, color=(BLUE, GREEN, ORANGE), label="FedAdp")
    for x, weight in zip(place, weights, strict=True):
        right.text(x + 0.2, weight + 0.01, f"{weight:.2f}", ha="center", fontsize=9)
    right.text(-0.2, 1 / 3 + 0.01, "FedAvg", ha="center", fontsize=8)
    right.set_xticks(place, ["A", "B", "C"])
    right.set_yticks([])
    right.margins(y=0.12)
    return figure


def _arrows(axes: Axes, updates: Floats, colours: tuple[str, ...], found: Floats) -> None:
    bare(axes, "updates, and their angles")
    axes.set_aspect("equal")
    for name, update, colour, angle in zip("ABC", updates, colours, found, strict=True):
        arrow(axes, ORIGIN, update, colour)
        side = "left" if update[0] > 0 else "center"
        x, y = update * 1.06
        axes.text(x, y, f"{name}: {angle:.2f}", fontsize=9, color=colour, ha=side)


def optimal_aggregation() -> Figure:
    """Draw four updates, one against the others; what each removal would do."""
    updates = np.array([[1.0, 0.0], [0.8, 0.2], [0.9, -0.1], [-1.0, 0.3]])
    gram, sizes = updates @ updates.T, np.ones(4)
    found = optimal_subset(gram, sizes, lambda rows, without: False, share=0.7)
    figure, (left, right) = panels(2, (9.5, 3.5), (1.25, 1))
    bare(left, "four updates and their means")
    left.set_aspect("equal")
    for row, (name, update) in enumerate(zip("ABCD", updates, strict=True)):
        out = row in found.excluded
        arrow(left, ORIGIN, update, ORANGE if out else BLUE, "--" if out else "-")
        x, y = update * 1.08
        left.text(x, y, name, fontsize=10, ha="center", va="center")
    for rows, colour, label, low in (
        (np.arange(4), GREY, "mean of all", -0.35),
        (found.kept, GREEN, "mean without D", -0.6),
    ):
        mean = fedavg_mean(ORIGIN, updates[rows], sizes[rows])
        arrow(left, np.array([0, low]), mean + np.array([0, low]), colour)
        left.text(-0.06, low, label, ha="right", va="center", fontsize=9)
    left.set_xlim(-1.3, 1.3)
    left.set_ylim(-0.75, 0.5)

    plain(right, "how far they go together", "without device", "n · ‖mean‖²")
    values = alignment_without_each(gram, sizes)
    right.bar(range(4), values, color=(BLUE, BLUE, BLUE, ORANGE))
    for x, value in enumerate(values):
        right.text(x, value + 0.04, f"{value:.2f}", ha="center", fontsize=9)
    right.axhline(update_alignment(gram, sizes), color=INK, ls=":", lw=1.5)
    right.text(-0.4, update_alignment(gram, sizes) + 0.05, "with all four", fontsize=9)
    right.set_xticks(range(4), list("ABCD"))
    right.margins(y=0.12)
    return figure


def fedpns() -> Figure:
    """Draw twenty devices of which four are often labelled: their probabilities over the rounds."""
    devices, rounds, odd = 20, 40, np.arange(4)
    history, counts = _simulated(devices, rounds, odd)
    figure, (left, right) = panels(2, (9.5, 3.6), (1.5, 1))
    plain(left, "probability of being drawn next", "round", "")
    for device in range(devices - 1, -1, -1):
        colour, width = (ORANGE, 1.8) if device in odd else (BLUE, 0.8)
        left.plot(*_bends(history[:, device]), color=colour, lw=width)
    left.axhline(1 / devices, color=INK, ls=":", lw=1)
    left.set_ylim(0)
    plain(right, "times drawn in 40 rounds", "device", "")
    right.bar(range(devices), counts, color=[ORANGE] * 4 + [BLUE] * (devices - 4))
    right.set_xticks([0, 5, 10, 15])
    legend(figure, {"labelled in 70 % of its visits": ORANGE, "labelled in 2 %": BLUE})
    return figure


def _bends(values: Floats) -> tuple[Ints, Floats]:
    """Return the ends of a curve and where it changes direction: enough to draw it."""
    turns = np.flatnonzero(np.abs(np.diff(values, 2)) > 1e-9) + 1
    rounds = np.concatenate([[0], turns, [len(values) - 1]])
    return rounds, values[rounds]


def _simulated(devices: int, rounds: int, odd: Ints) -> tuple[Floats, Ints]:
    """Return FedPNS with labels by chance: 0.7 for odd devices and 0.02 for others."""
    key = rng.root(4, "fedpns")
    chance = np.where(np.isin(np.arange(devices), odd), 0.7, 0.02)
    probability = np.full(devices, 1 / devices)
    selected, labelled = np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    history = [probability]
    for number in range(rounds):
        draws = rng.uniform(rng.fold(key, number), 2 * devices).numpy()
        cohort = weighted_draw(probability, 5, draws[:devices])
        caught = cohort[draws[devices:][cohort] < chance[cohort]]
        selected[cohort] += 1
        labelled[caught] += 1
        probability = fedpns_lowered(probability, caught, labelled, selected)
        history.append(probability)
    return np.array(history), selected
