"""Who does how much, and when: WHALE-FL and BN2."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anyfleet.arrays import Floats
from anyfleet.formulas import (
    bn2_largest,
    whale_level,
    whale_relative_effectiveness,
    whale_threshold_utility,
    whale_utility,
)
from drawing.canvas import BLUE, GREEN, GREY, INK, ORANGE, PINK, legend, panels, plain

LEVELS = ("1", "1/2", "1/4", "1/8", "1/16")


def whale() -> Figure:
    """Draw from Fisher information and lateness to a level; and a story of two devices."""
    figure, (left, right) = panels(2, (10, 3.7))
    fisher = np.linspace(0, 3, 61)
    plain(left, "how a device decides", "Fisher information, initial model = 1", "width")
    for late, colour in ((1.0, BLUE), (1.5, ORANGE), (2.0, PINK)):
        left.step(
            fisher, -_level(fisher, late), where="post", color=colour, lw=2, label=_told(late)
        )
    left.set_xticks(range(4))
    _ladder(left)
    left.legend(frameon=False, fontsize=9, loc="upper left")
    _story(right)
    return figure


def _told(late: float) -> str:
    return "in time" if late == 1 else f"{late:g} × the target"


def _level(fisher: Floats, late: Floats | float) -> Floats:
    """Return the level for constant Fisher information and a time in units of the target."""
    one = np.ones((len(fisher), 1))
    useful = whale_utility(whale_relative_effectiveness((fisher**2)[:, None], one), late, 1.0)
    return whale_level(whale_threshold_utility(useful)).astype(np.float64)


def _ladder(axes: Axes) -> None:
    axes.set_yticks([-k for k in range(1, 6)], LEVELS)
    axes.set_ylim(-5.3, 0.7)


def _story(axes: Axes) -> None:
    """Draw Fisher information that rises and falls, and how the window follows it."""
    rounds = np.arange(40)
    fisher = 0.3 + 2.2 * np.exp(-(((rounds - 12) / 7.0) ** 2))
    slow = np.where((rounds >= 8) & (rounds < 20), 1.6, 1.0)  # a link that is bad for a while
    plain(axes, "forty rounds of two devices", "round", "width")
    for late, colour, label, lift in (
        (np.ones(40), BLUE, "good link", 0.0),
        (slow, ORANGE, "slow from round 8 to 19", -0.06),
    ):
        levels = np.array([_windowed(fisher[:r], float(late[r])) for r in rounds])
        axes.step(rounds, lift - levels, where="mid", color=colour, lw=2, label=label)
    axes.set_xticks(range(0, 41, 10))
    _ladder(axes)
    other = axes.twinx()
    other.plot(rounds, fisher, ":", color=INK, lw=1.5, label="Fisher information (right)")
    other.set_ylim(0, 5)
    other.set_yticks([0, 1, 2])
    other.spines["top"].set_visible(False)
    handles = [each for a in (axes, other) for each in a.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper right")


def _windowed(past: Floats, late: float) -> float:
    """Return the level after the last ten rounds; the first round trains everything."""
    if not len(past):
        return 1.0
    recent = past[-10:]
    useful = whale_utility(whale_relative_effectiveness(recent**2, np.ones(len(recent))), late, 1.0)
    return float(whale_level(whale_threshold_utility(useful)))


def bn2() -> Figure:
    """Draw two phases of a round of six devices, of which three upload."""
    norms = np.array([0.5, 2.0, 1.0, 3.0, 0.1, 1.4])
    training = np.array([2.0, 2.8, 1.4, 3.4, 2.4, 1.8])
    chosen = set(bn2_largest(norms, 3).tolist())
    figure, (axes,) = panels(1, (8.5, 3.5))
    plain(axes, "", "time", "")
    asked = training.max() + 1.4
    for device, (norm, seconds) in enumerate(zip(norms, training, strict=True)):
        axes.barh(device, 0.7, 0.6, color=GREY)
        axes.barh(device, seconds, 0.6, left=0.7, color=BLUE)
        axes.plot([seconds + 0.8] * 2, [device - 0.3, device + 0.3], color=PINK, lw=3)
        axes.text(seconds + 0.9, device, f"{norm:g}", va="center", fontsize=9)
        if device in chosen:
            axes.barh(device, 1.2, 0.6, left=asked, color=GREEN)
        else:
            axes.text(asked + 0.1, device, "result is dropped", va="center", fontsize=9, color=INK)
    axes.axvline(asked - 0.15, color=INK, ls=":", lw=1.2)
    axes.text(asked - 0.2, -0.75, "the server picks the 3 longest", ha="right", fontsize=9)
    axes.set_yticks(range(6), [f"device {'ABCDEF'[k]}" for k in range(6)])
    axes.set_xticks([])
    axes.set_ylim(5.5, -1.1)
    legend(
        figure,
        {
            "download": GREY,
            "training": BLUE,
            "one number: the length of the update": PINK,
            "upload": GREEN,
        },
    )
    return figure
