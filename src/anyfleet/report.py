"""Pictures of runs. Needs matplotlib, which comes with the extra `report`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anyfleet.columns import Floats
from anyfleet.queries import evaluated
from anyfleet.study import Point
from anyfleet.world import When, World

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinguishable without colour vision (Okabe and Ito), strongest contrast first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# Runs whose lengths differ by such a factor are drawn over a logarithmic axis.
_FAR_APART = (5.0, 500.0)

Runs = Mapping[str, Sequence[Sequence[Point]]]  # by name; one run for each seed


class NoPictures(ImportError):
    """Matplotlib is not installed; the message says how to get it."""

    def __init__(self) -> None:
        super().__init__("no picture: install matplotlib with pip install 'anyfleet[report]'")


@dataclass(frozen=True)
class Band:
    """A curve over several seeds: means, and one deviation to each side."""

    x: Floats
    mean: Floats
    deviation: Floats


def draw(file: Path, runs: Runs, *, world: World | None = None, title: str = "") -> Path:
    """Accuracy over simulated time and over traffic; with a world, also who the devices are."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise NoPictures from error
    panels = 2 if world is None else 3
    # A figure of its own: pyplot would keep it for the life of the process.
    figure = Figure(
        figsize=(4.8 * panels, 4.5), layout=ConstrainedLayoutEngine(w_pad=0.12, wspace=0.04)
    )
    over_time, over_traffic, *fleet = figure.subplots(1, panels)
    _curves(over_time, runs, lambda point: point.time, "simulated time [s]")
    _curves(over_traffic, runs, lambda point: (point.down + point.up) / 1e6, "traffic [MB]")
    over_time.set_ylabel("accuracy")
    figure.legend(
        *over_time.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(len(runs), 4),
        frameon=False,
    )
    for axes in fleet:
        _fleet(axes, world)
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=130)
    return file


def band(runs: Sequence[Sequence[Point]], x: Callable[[Point], float]) -> Band:
    """Joins the runs of several seeds, evaluation by evaluation, as far as all of them go."""
    judged = [evaluated(points) for points in runs]
    rows = list(zip(*judged, strict=False))
    if not rows:
        return Band(*(np.zeros(0),) * 3)
    heights = np.array([[point.accuracy for point in row] for row in rows])
    places = np.array([[x(point) for point in row] for row in rows])
    spare = heights.std(axis=1, ddof=1) if len(runs) > 1 else np.zeros(len(rows))
    return Band(places.mean(axis=1), heights.mean(axis=1), spare)


def _curves(axes: "Axes", runs: Runs, x: Callable[[Point], float], label: str) -> None:
    ends: list[float] = []
    for position, (name, group) in enumerate(runs.items()):
        curve, colour = band(group, x), COLOURS[position % len(COLOURS)]
        axes.plot(curve.x, curve.mean, color=colour, marker="o", markersize=3, label=name)
        under, over = curve.mean - curve.deviation, curve.mean + curve.deviation
        axes.fill_between(curve.x, under, over, color=colour, alpha=0.2, linewidth=0)
        ends.extend(curve.x[-1:])
    low, high = _FAR_APART
    if ends and low * min(ends) < max(ends) < high * min(ends):
        # 1, 2, 5 of every decade: matplotlib's own labels run into each other on short ranges.
        axes.set_xscale("log", subs=[])
        limits = axes.get_xlim()
        axes.set_xticks([m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5)])
        axes.set_xlim(limits)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        label = f"{label}, logarithmic"
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _fleet(axes: "Axes", world: World | None) -> None:
    if world is None:
        return
    everybody = np.arange(len(world))
    speed = world.conditions(everybody, When(0.0, 0), active=1).speed
    order = np.argsort(-speed, kind="stable")
    axes.bar(everybody, speed[order] / 1e9, color="#777777")
    axes.set_xlabel(f"the {len(order)} devices, fastest first")
    axes.set_ylabel("speed [GFLOP/s]")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
