"""Paper and pens: figures, colours and the few shapes that all pictures share."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from anyfleet.arrays import Floats

# Distinguishable without colour vision (Okabe and Ito).
BLUE, ORANGE, GREEN, PINK, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"
INK, GREY, PALE = "#222222", "#c9c9c9", "#f1f1f1"


def panels(
    count: int, size: tuple[float, float], ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a white figure with so many panels beside each other."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    places = figure.subplots(1, count, squeeze=False, width_ratios=ratios)
    return figure, list(places.ravel())


def bare(axes: Axes, title: str = "") -> Axes:
    """Remove axes and frame, and set a title."""
    axes.set_axis_off()
    axes.set_title(title, fontsize=10, color=INK)
    return axes


def plain(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Draw a diagram with two axes and no frame."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def cell(axes: Axes, place: tuple[float, float], colour: str, text: str = "") -> None:
    """Draw a unit square of a grid, with its upper left corner at column and row."""
    column, row = place
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", lw=1.2))
    if text:
        ink = "white" if colour in (BLUE, ORANGE, GREEN) else INK
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, color=ink)


def mosaic(axes: Axes, colours: Sequence[Sequence[str]]) -> None:
    """Draw a grid of coloured cells from the top left corner on, a row for each sequence."""
    rows, columns = len(colours), len(colours[0])
    axes.add_patch(Rectangle((0, 0), columns, rows, facecolor=PALE, lw=0))
    for row, line in enumerate(colours):
        column = 0
        for colour, run in groupby(line):
            width = len(list(run))
            if colour != PALE:
                axes.add_patch(Rectangle((column, row), width, 1, facecolor=colour, lw=0))
            column += width
    # One broken line for all: a shape for every cell would make large files.
    across = [v for row in range(rows + 1) for v in ((0, row), (columns, row), (np.nan, np.nan))]
    down = [v for k in range(columns + 1) for v in ((k, 0), (k, rows), (np.nan, np.nan))]
    axes.plot(*zip(*across, *down, strict=True), color="white", lw=1.2)


def lattice(axes: Axes, columns: float, rows: float) -> None:
    """Set the view of a grid of cells, with row 0 on top."""
    axes.set_xlim(-0.1, columns + 0.1)
    axes.set_ylim(rows + 0.1, -0.1)
    axes.set_aspect("equal")


def blocks(axes: Axes, colours: Sequence[tuple[int, int, str]], size: int) -> None:
    """Draw leading blocks of a square matrix, each over the one before: rows, columns, colour."""
    lattice(axes, size, size)
    for rows, columns, colour in colours:
        axes.add_patch(Rectangle((0, 0), columns, rows, facecolor=colour, edgecolor="white", lw=1))
    axes.add_patch(Rectangle((0, 0), size, size, facecolor="none", edgecolor=INK, lw=1))


def trail(axes: Axes, points: Floats, colour: str) -> None:
    """Draw a line through the points, each of them a dot."""
    axes.plot(*points.T, color=colour, lw=1.6)
    # Strokes of no length with round ends: markers would make large files.
    strokes = [v for x, y in points for v in ((x, y), (x + 1e-3, y), (np.nan, np.nan))]
    axes.plot(*zip(*strokes, strict=True), color=colour, lw=4.5, solid_capstyle="round")


def arrow(axes: Axes, start: Floats, end: Floats, colour: str, style: str = "-") -> None:
    """Draw an arrow from one point to another."""
    axes.annotate(
        "",
        xy=tuple(np.asarray(end, dtype=float)),
        xytext=tuple(np.asarray(start, dtype=float)),
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "lw": 2,
            "ls": style,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def legend(figure: Figure, entries: dict[str, str], columns: int | None = None) -> None:
    """Draw what the colours mean, below everything."""
    patches = [
        Patch(facecolor=colour, edgecolor=INK, lw=0.5, label=label)
        for label, colour in entries.items()
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=columns or len(patches),
        frameon=False,
        fontsize=9,
    )
