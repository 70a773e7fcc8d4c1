"""Pictures of runs and fleets. Needs matplotlib, which comes with the extra `report`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from anyfleet.columns import Floats
from anyfleet.equal import Resource, quantity, used
from anyfleet.portrait import HOURS, Portrait, varies
from anyfleet.queries import evaluated
from anyfleet.study import Point
from anyfleet.world import When, World

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable without colour vision (Okabe and Ito), strongest contrast first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# Runs whose lengths differ by such a factor are drawn over a logarithmic axis.
_FAR_APART = (5.0, 500.0)
_GREY = "#555555"
_ABREAST = 3  # panels in a row
_NAMES = 5  # in a row of a legend
_WIDE = 20.0  # numbers of devices that differ by such a factor, likewise

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


@dataclass(frozen=True)
class Scale:
    """An axis: how much of a resource is one, and its label."""

    unit: float
    label: str


_SCALES: Mapping[Resource, Scale] = MappingProxyType(
    {
        "time": Scale(1.0, "simulated time [s]"),
        "bytes": Scale(1e6, "traffic [MB]"),
        "energy": Scale(1.0, "energy [J]"),
        "flops": Scale(1e9, "calculation [GFLOP]"),
    }
)
_ALWAYS: tuple[Resource, ...] = ("time", "bytes")


def draw(
    file: Path,
    runs: Runs,
    *,
    world: World | None = None,
    title: str = "",
    equal: Mapping[Resource, float] | None = None,
) -> Path:
    """Accuracy over simulated time and over traffic; with a world, also who the devices are.

    What runs are compared at equal amounts of has its panel too, with a line at the amount.
    """
    amounts = equal or {}
    shown = dict.fromkeys((*_ALWAYS, *amounts))
    figure, places = _panels(len(shown) + (world is not None))
    for resource, axes in zip(shown, places, strict=False):
        _curves(axes, runs, resource, amounts.get(resource))
        place = axes.get_subplotspec()
        if place is not None and place.is_first_col():
            axes.set_ylabel("accuracy")
    figure.legend(
        *places[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=_grid(len(runs), _NAMES)[1],
        frameon=False,
    )
    if world is not None:
        _fleet(places[-1], world)
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=130)
    return file


def _panels(count: int) -> "tuple[Figure, list[Axes]]":
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise NoPictures from error
    rows, columns = _grid(count, _ABREAST)
    # A figure of its own: pyplot would keep it for the life of the process.
    figure = Figure(
        figsize=(4.8 * columns, 4.5 * rows),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04),
    )
    places = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for spare in places[count:]:
        spare.remove()
    return figure, places[:count]


def _grid(count: int, most: int) -> tuple[int, int]:
    """Rows and columns for so many, at most `most` in a row and rows as even as can be."""
    rows = max(1, -(-count // most))
    return rows, -(-count // rows)


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


def _curves(axes: "Axes", runs: Runs, resource: Resource, amount: float | None) -> None:
    scale = _SCALES[resource]
    ends: list[float] = []
    for position, (name, group) in enumerate(runs.items()):
        curve = band(group, lambda point: used(point, resource) / scale.unit)
        colour = COLOURS[position % len(COLOURS)]
        axes.plot(curve.x, curve.mean, color=colour, marker="o", markersize=3, label=name)
        under, over = curve.mean - curve.deviation, curve.mean + curve.deviation
        axes.fill_between(curve.x, under, over, color=colour, alpha=0.2, linewidth=0)
        ends.extend(curve.x[-1:])
    axes.set_xlabel(scale.label + (", logarithmic" if _stretched(axes, ends) else ""))
    if amount is not None:
        _line(axes, amount / scale.unit, quantity(amount, resource))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: "Axes", x: float, label: str) -> None:
    """Across the curves; none where it would squeeze them into a corner to be seen itself."""
    low, high = axes.get_xlim()
    if low <= x <= high:
        axes.axvline(x, color=_GREY, linestyle="--", linewidth=1)
        above = axes.get_xaxis_transform()
        axes.text(x, 1.0, label, transform=above, color=_GREY, ha="center", va="bottom")


def _stretched(axes: "Axes", ends: Sequence[float]) -> bool:
    """Makes the axis logarithmic, where the ends of the curves lie far apart."""
    low, high = _FAR_APART
    if not ends or not low * min(ends) < max(ends) < high * min(ends):
        return False
    # 1, 2, 5 of every decade: matplotlib's own labels run into each other on short ranges.
    axes.set_xscale("log", subs=[])
    limits = axes.get_xlim()
    axes.set_xticks([m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5)])
    axes.set_xlim(limits)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return True


def _fleet(axes: "Axes", world: World) -> None:
    everybody = np.arange(len(world))
    speed = world.conditions(everybody, When(0.0, 0), active=1).speed
    order = np.argsort(-speed, kind="stable")
    axes.bar(everybody, speed[order] / 1e9, color="#777777")
    axes.set_xlabel(f"the {len(order)} devices, fastest first")
    axes.set_ylabel("speed [GFLOP/s]")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)


# --- fleets -------------------------------------------------------------------------------------


def draw_fleet(file: Path, portrait: Portrait, *, title: str = "") -> Path:
    """Speed and rates of every device; energy, distance and availability where they differ."""
    shown = [_speeds, _rates]
    shown += [_energies] if varies(portrait.energy) else []
    shown += [_distances] if varies(portrait.distance) else []
    shown += [] if portrait.online.all() else [_availability]
    figure, places = _panels(len(shown))
    for panel, axes in zip(shown, places, strict=True):
        panel(axes, portrait)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for number, name in enumerate(portrait.names):
        places[0].plot([], [], "s", color=_colour(number), label=name)
    if len(portrait.names) > 1:
        handles = places[0].get_legend_handles_labels()
        _, columns = _grid(len(portrait.names), _NAMES)
        figure.legend(*handles, loc="outside lower center", ncols=columns, frameon=False)
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=130)
    return file


def _speeds(axes: "Axes", portrait: Portrait) -> None:
    _sorted_ranges(axes, portrait, {"o": portrait.speed / 1e9})
    axes.set_title("computing")
    axes.set_ylabel("speed [GFLOP/s]")


def _rates(axes: "Axes", portrait: Portrait) -> None:
    _sorted_ranges(axes, portrait, {"^": portrait.up / 1e6, "v": portrait.down / 1e6})
    axes.set_title("links: up ▲, down ▼")
    axes.set_ylabel("rate [Mbit/s]")


def _energies(axes: "Axes", portrait: Portrait) -> None:
    _sorted_ranges(axes, portrait, {"o": portrait.energy})
    axes.set_title("energy of computing")
    axes.set_ylabel("J for one GFLOP")


def _distances(axes: "Axes", portrait: Portrait) -> None:
    """A device that moves is a point at every hour."""
    for number in range(len(portrait.names)):
        members = portrait.group == number
        metres, rates = portrait.distance[:, members], portrait.up[:, members] / 1e6
        axes.plot(metres.ravel(), rates.ravel(), ".", color=_colour(number), alpha=0.3)
    if varies(portrait.up):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("places, at every hour of a day")
    axes.set_xlabel("metres from the station")
    axes.set_ylabel("rate up [Mbit/s]")


def _availability(axes: "Axes", portrait: Portrait) -> None:
    for number in np.unique(portrait.group):
        share = portrait.online[:, portrait.group == number].mean(axis=1)
        axes.plot(np.arange(HOURS), share, color=_colour(int(number)), marker="o", markersize=3)
    axes.set_ylim(0, 1.02)
    axes.set_title("who is there")
    axes.set_xlabel("hour of the day")
    axes.set_ylabel("share online")


def _sorted_ranges(axes: "Axes", portrait: Portrait, kinds: Mapping[str, Floats]) -> None:
    """Medians of each device as marks, largest first by the first kind; lines are its range."""
    first = np.median(next(iter(kinds.values())), axis=0)
    order = np.argsort(-first, kind="stable")
    colours = [_colour(int(number)) for number in portrait.group[order]]
    size = float(np.clip(400 / len(order), 2, 30))
    for place, (marker, values) in enumerate(kinds.items()):
        ordered = values[:, order]
        low, middle, high = ordered.min(0), np.median(ordered, 0), ordered.max(0)
        x = np.arange(len(order)) + 0.3 * (place - (len(kinds) - 1) / 2)
        axes.vlines(x, low, high, color=colours, alpha=0.4, linewidth=1)
        axes.scatter(x, middle, color=colours, marker=marker, s=size)
    values = np.concatenate(list(kinds.values()))
    if values.max() > _WIDE * values.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, 1.05 * float(values.max()))
    axes.set_xticks([])
    axes.set_xlabel(f"{len(order)} devices, largest first")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
