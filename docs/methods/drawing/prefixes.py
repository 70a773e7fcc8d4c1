"""What one minibatch does to a weight matrix: FjORD, FedSlim, FedResCuE, FedSeq, FedRush."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anyfleet.arrays import Flags
from anyfleet.formulas.reference import prefix_mask
from drawing.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    bare,
    lattice,
    legend,
    mosaic,
    panels,
)

SIZE = 8
RATIOS = (1 / 4, 1 / 2, 3 / 4, 1.0)  # drawn for this minibatch, and the whole last
LEARNS = {"labels": BLUE, "teacher": ORANGE, "labels + teacher": GREEN}
MEANING = {
    "moved, by labels": BLUE,
    "moved, by labels and teacher": GREEN,
    "used, not moved": GREY,
    "not in the pass": PALE,
}


class Pass(NamedTuple):
    """A gradient of a leading part of the matrix."""

    title: str
    ratio: float
    learns: str  # a key of LEARNS
    spared: float = 0.0  # the part that is used and does not move


def _mask(ratio: float) -> Flags:
    count = round(ratio * SIZE)
    return prefix_mask((SIZE, SIZE), (count, count))


def _matrix(axes: Axes, step: Pass) -> None:
    bare(axes, step.title)
    lattice(axes, SIZE, SIZE)
    used, still = _mask(step.ratio), _mask(step.spared)
    moved = np.where(used, np.where(still, GREY, LEARNS[step.learns]), PALE)
    mosaic(axes, moved.tolist())


def _sign(left: Axes, text: str) -> None:
    """Draw a sign between a panel and the next one."""
    left.text(
        1.1, 0.5, text, transform=left.transAxes, ha="center", va="center", fontsize=16, color=INK
    )


def _summed(learns: str, words: str, meaning: dict[str, str]) -> Figure:
    figure, places = panels(4, (10, 3.3))
    steps = (
        Pass("whole model\nlearns from labels", 1.0, "labels"),
        Pass(f"part ×1/4, drawn\nlearns from {words}", 1 / 4, learns),
        Pass(f"part ×3/4, drawn\nlearns from {words}", 3 / 4, learns),
    )
    for axes, step in zip(places, steps, strict=False):
        _matrix(axes, step)
    _sign(places[0], "+")
    _sign(places[1], "+")
    _sign(places[2], "=")
    _pile(places[3])
    legend(figure, meaning)
    return figure


def _pile(axes: Axes) -> None:
    """Draw how many gradients are summed in each coordinate."""
    bare(axes, "one step, with the sum\nof so many gradients")
    lattice(axes, SIZE, SIZE)
    counts = _mask(1.0).astype(int) + _mask(1 / 4) + _mask(3 / 4)
    mosaic(axes, np.array(["", "#dfe9f5", "#a9c6e3", "#6fa3d1"])[counts].tolist())
    for place, count in ((0.5, 3), (4.5, 2), (7.5, 1)):
        axes.text(place, place, str(count), ha="center", va="center", fontsize=11, color=INK)


def fjord() -> Figure:
    """Draw gradients of the whole and of two parts in one step; parts learn from both."""
    meaning = {
        "gradient of the labels' loss": BLUE,
        "gradient of both losses": GREEN,
        "not in the pass": PALE,
    }
    return _summed("labels + teacher", "labels and whole", meaning)


def fedslim() -> Figure:
    """Draw FjORD with parts that learn from the whole model only."""
    meaning = {
        "gradient of the labels' loss": BLUE,
        "gradient of the distance to the whole": ORANGE,
        "not in the pass": PALE,
    }
    return _summed("teacher", "the whole", meaning)


def _sequence(*, taught: bool, freezes: bool) -> Iterator[Pass]:
    before = 0.0
    for number, ratio in enumerate(RATIOS, 1):
        learns = "labels + teacher" if taught and ratio < 1 else "labels"
        told = "labels + whole" if learns == "labels + teacher" else "labels"
        title = f"step {number}: ×{ratio:g}\n{told}"
        yield Pass(title, ratio, learns, before if freezes else 0.0)
        before = ratio
    yield Pass("step 5: all\nlabels", 1.0, "labels")


def _progressive(meaning: dict[str, str], *, taught: bool, freezes: bool) -> Figure:
    figure, places = panels(5, (10, 2.9))
    for axes, step in zip(places, _sequence(taught=taught, freezes=freezes), strict=True):
        _matrix(axes, step)
    for axes in places[:-1]:
        _sign(axes, "›")
    legend(figure, meaning)
    return figure


def fedrescue() -> Figure:
    """Draw narrow before wide, only the new columns, then all."""
    return _progressive(MEANING, taught=True, freezes=True)


def fedseq() -> Figure:
    """Draw FedResCuE without the teacher."""
    meaning = {k: v for k, v in MEANING.items() if v != GREEN}
    return _progressive(meaning, taught=False, freezes=True)


def fedrush() -> Figure:
    """Draw FedResCuE without sparing what narrower parts learned."""
    meaning = {k: v for k, v in MEANING.items() if v != GREY}
    return _progressive(meaning, taught=True, freezes=False)
