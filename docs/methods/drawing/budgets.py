"""What devices can afford: AnycostFL."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anyfleet.formulas import AnycostBudgets, anycost_best_sending, anycost_gain
from drawing.canvas import BLUE, GREEN, INK, ORANGE, PINK, SKY, legend, panels, plain
from drawing.measured import curve, dots, measured

SHOWN = 30  # of sixty devices: more would make a large file
CHOICES = {"40 dB": BLUE, "0 dB": ORANGE}
COMPARED = {
    "AnycostFL": BLUE,
    "HeteroFL": GREEN,
    "FedHQ": PINK,
    "STC": SKY,
    "STC just in time": ORANGE,
    "STC at full speed": INK,
}


def anycost() -> Figure:
    """Draw the gain over the width, and what devices chose."""
    figure, (gain, *chosen) = panels(4, (10.5, 3.3))
    _gains(gain)
    for axes, column, title, unit, top in zip(
        chosen,
        ("width", "sent_fraction", "frequency"),
        ("chosen width", "sent fraction", "frequency [GHz]"),
        (1.0, 1.0, 1e9),
        (1.05, 0.07, 0.63),
        strict=True,
    ):
        plain(axes, title, "link [Mbit/s]", "")
        axes.set_xscale("log")
        for loss, colour in CHOICES.items():
            told = measured()["choices"][loss]
            x, y = (np.array(told[name])[:SHOWN] for name in ("link", column))
            dots(axes, x / 1e6, y / unit, colour)
        axes.set_xticks([0.2, 2, 20], ["0.2", "2", "20"])
        axes.minorticks_off()
        axes.set_ylim(0, top)
        axes.locator_params(axis="y", nbins=3)
    legend(figure, {f"{loss} loss": colour for loss, colour in CHOICES.items()})
    return figure


def _gains(axes: Axes) -> None:
    """Draw three devices of the recipe's cell, as the formulas have them."""
    plain(axes, "gain of a width", "width", "")
    widths = np.linspace(0.4, 1, 41)
    for link, joules, colour, label, lift in (
        (6e6, 0.12, BLUE, "near", 0.0),
        (6e6, 0.05, GREEN, "near,\nfew joules", 0.004),
        (5e5, 0.12, PINK, "far", -0.008),
    ):
        alpha = widths**2
        budgets = AnycostBudgets(
            joules, 0.25, 0.1, link, alpha * 1.2e6, 7.5e-27, alpha * 1e8, 1e8, 3e9
        )
        gains = anycost_gain(alpha, anycost_best_sending(budgets).beta)
        axes.plot(widths, gains, color=colour, lw=2)
        best = int(np.nanargmax(gains))
        axes.plot(widths[best], gains[best], "o", color=colour, ms=7)
        place = widths[best] - 0.02, gains[best] + lift
        axes.text(*place, label, ha="right", fontsize=9, color=colour)
    axes.set_ylim(0)
    axes.set_xlim(0.4, 1.02)
    axes.locator_params(nbins=4)


def anycost_runs() -> Figure:
    """Draw what runs learned for time and for energy, at both path losses."""
    figure, places = panels(4, (10.5, 3.4))
    for place, (loss, column) in enumerate(
        (loss, column) for loss in (40, 0) for column in ("seconds", "joules")
    ):
        axes = plain(places[place], f"{loss} dB", f"simulated {column}", "")
        for name, colour in reversed(COMPARED.items()):
            x = curve(f"cell at {loss} dB", name, column)
            axes.plot(x, curve(f"cell at {loss} dB", name, "accuracy"), color=colour, lw=1.6)
        axes.set_yticks(np.arange(4) / 5)
        axes.set_ylim(0, 0.79)
        if column == "joules":
            axes.set_xscale("log")
            axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
            axes.minorticks_off()
    places[0].set_ylabel("accuracy")
    legend(figure, COMPARED)
    return figure
