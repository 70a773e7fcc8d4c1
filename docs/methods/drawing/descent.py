"""Local steps and where they lead: FedAvg and FedProx."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from anyfleet.arrays import Floats
from anyfleet.formulas.reference import fedavg_mean, fedprox_step
from drawing.canvas import BLUE, GREEN, INK, ORANGE, bare, panels, trail

RATE = 0.2
ROUNDS = 40
START = np.array([0.0, 0.0])


class Bowl(NamedTuple):
    """The loss of a device: a quadratic around its own best model."""

    name: str
    best: Floats
    curvature: Floats
    colour: str
    samples: int


BOWLS = (
    Bowl("A", np.array([3.0, 2.6]), np.array([1.0, 0.35]), BLUE, 20),
    Bowl("B", np.array([4.0, -1.8]), np.array([0.35, 1.0]), ORANGE, 20),
)


def path(bowl: Bowl, start: Floats, steps: int, mu: float) -> Floats:
    """Return the models of a device, from the one it received on."""
    models = [start]
    for _ in range(steps):
        slope = bowl.curvature * (models[-1] - bowl.best)
        models.append(fedprox_step(models[-1], start, slope, rate=RATE, mu=mu))
    return np.array(models)


def shared_models(steps: Sequence[int], mu: float) -> Floats:
    """Return the server's model, round after round."""
    models = [START]
    for _ in range(ROUNDS):
        pairs = zip(BOWLS, steps, strict=True)
        ends = np.array([path(bowl, models[-1], count, mu)[-1] for bowl, count in pairs])
        models.append(fedavg_mean(models[-1], ends, np.array([bowl.samples for bowl in BOWLS])))
    return np.array(models)


def shared_best() -> Floats:
    """Return where the sum of both losses is smallest."""
    curvature = np.array([bowl.curvature for bowl in BOWLS])
    best = np.array([bowl.best for bowl in BOWLS])
    found: Floats = (curvature * best).sum(axis=0) / curvature.sum(axis=0)
    return found


def _panel(axes: Axes, title: str, steps: Sequence[int], mu: float = 0.0) -> None:
    bare(axes, title)
    for bowl, count in zip(BOWLS, steps, strict=True):
        trail(axes, path(bowl, START, count, mu), bowl.colour)
        _target(axes, bowl, named=not mu)
    models = shared_models(steps, mu)
    axes.plot(*models.T, "-", color=GREEN, lw=1.5)
    axes.plot(*models[1], "*", color=GREEN, ms=9, zorder=5)
    axes.plot(*models[-1], "*", color=GREEN, ms=15, zorder=5)
    axes.plot(*shared_best(), "x", color=INK, ms=8, mew=2, zorder=6)
    axes.annotate(
        "best for both", (*shared_best(),), (9, -5), textcoords="offset points", fontsize=9
    )
    axes.plot(*START, "s", color=INK, ms=7)
    axes.text(-0.25, 0, "first\nmodel", ha="right", va="center", fontsize=9)
    axes.set_xlim(-1.4, 6.2)
    axes.set_ylim(-3.4, 4.8)
    axes.set_aspect("equal")


def _target(axes: Axes, bowl: Bowl, named: bool) -> None:
    for diameter in (1.0, 2.2):
        size = diameter / bowl.curvature**0.5
        ring = Ellipse((*bowl.best,), *size, fill=False, edgecolor=bowl.colour, alpha=0.5)
        axes.add_patch(ring)
    axes.plot(*bowl.best, "+", color=bowl.colour, ms=9, mew=1.8)
    words = f"best for {bowl.name}" if named else bowl.name
    axes.annotate(words, (*bowl.best,), (6, 4), textcoords="offset points", fontsize=9)


def _marks(figure: Figure) -> None:
    words = "dots: steps of round 1 · small ★: its mean · large ★: after 40 rounds"
    figure.supxlabel(words, fontsize=9)


def fedavg() -> Figure:
    """Draw few and many local steps of two devices, and where their means lead."""
    figure, (few, many) = panels(2, (8, 4))
    _panel(few, "3 local steps in a round", (3, 3))
    _panel(many, "20 local steps: each walks to its own best", (20, 20))
    _marks(figure)
    return figure


def fedprox() -> Figure:
    """Draw the same devices without and with the pull, and with partial work."""
    figure, places = panels(3, (10, 4.3))
    _panel(places[0], "μ = 0 (FedAvg), 20 steps", (20, 20))
    _panel(places[1], "μ = 1, 20 steps", (20, 20), mu=1.0)
    _panel(places[2], "μ = 1, B has time for 3 only", (20, 3), mu=1.0)
    _marks(figure)
    return figure
