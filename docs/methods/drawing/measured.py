"""What runs have shown: curves that `measure.py` has kept, and how they are drawn."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from anyfleet.arrays import Floats
from drawing.canvas import INK, plain

FILE = Path(__file__).resolve().parent / "measured.json"


@cache
def measured() -> Mapping[str, Any]:
    """Return all measurements, by study."""
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def curve(study: str, name: str, column: str) -> Floats:
    """Return one quantity of one row of a study, round by round."""
    return np.array(measured()[study][name][column])


def learned(axes: Axes, x: Floats, accuracy: Floats, *, colour: str, label: str) -> None:
    """Draw accuracy over what was used, with a label at its end."""
    axes.plot(x, accuracy, color=colour, lw=2)
    axes.annotate(
        label,
        (x[-1], accuracy[-1]),
        (4, 0),
        textcoords="offset points",
        fontsize=9,
        color=colour,
        va="center",
    )


def uploads(axes: Axes, name: str, label: str, colour: str) -> None:
    """Draw a codec beside FedAvg: accuracy over the bytes that devices sent."""
    plain(axes, "twelve rounds", "MB uploaded", "accuracy")
    axes.set_xscale("log")
    for method, ink, told in (("fedavg", INK, "FedAvg"), (name, colour, label)):
        x = curve("codecs", method, "up") / 1e6
        learned(axes, x, curve("codecs", method, "accuracy"), colour=ink, label=told)
    axes.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axes.minorticks_off()
    axes.set_xlim(0.007, 90)
    axes.set_yticks(np.arange(5) / 5)
    axes.set_ylim(0, 0.9)


def dots(axes: Axes, x: Floats, y: Floats, colour: str, size: float = 4.5) -> None:
    """Draw points as short strokes with round ends: markers would make large files."""
    end = 1e-3 * np.abs(x).max()
    pairs = zip(x, y, strict=True)
    strokes = [v for a, b in pairs for v in ((a, b), (a + end, b), (np.nan, np.nan))]
    (line,) = axes.plot(*zip(*strokes, strict=True), color=colour, lw=size, snap=False)
    line.set_solid_capstyle("round")
    line.get_path().should_simplify = False
