"""Plots of runs and fleets. They need matplotlib, which comes with the extra `report`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from anyfleet.analysis.comparison import Axis
from anyfleet.analysis.equal_budgets import UNITS, Resource, used
from anyfleet.analysis.fleet_portrait import HOURS, Portrait, varies
from anyfleet.analysis.intervals import estimate
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import Runs, at_widths, evaluated, metric_of
from anyfleet.analysis.units import common_unit, quantity
from anyfleet.arrays import Floats
from anyfleet.experiment import RoundRecord
from anyfleet.store.disk import write
from anyfleet.world import When, World

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

# Distinguishable without colour vision (Okabe and Ito), the strongest contrast first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# Of the runs beyond as many as there are colours, and again beyond those.
LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # with marks
# If the lengths of runs differ by a factor between these, the axis is logarithmic.
_FAR_APART = (5.0, 500.0)
_GREY = "#555555"
_ABREAST = 3  # panels in a row
_NAMES = 5  # in a row of a legend
_SIGN, _LETTER = 0.65, 0.085  # inches of a legend's line with its gaps, and of a letter, about
_TICKS = 6  # of an axis, at most: numbers of small amounts are long
_WIDE = 20.0  # if the numbers of devices differ by such a factor, the axis is logarithmic
_MARKED = 30  # places of a curve, at most, that have a dot each


class NoPictures(ImportError):
    """An error: matplotlib is not installed; the message says how to get it."""

    def __init__(self) -> None:
        super().__init__("no picture: install matplotlib with pip install 'anyfleet[report]'")


@dataclass(frozen=True)
class Band:
    """A curve over several seeds: the means, and the ends of their 95 % intervals, or NaN."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Look:
    """How the curve of a run looks: its colour, and the kind of its line and of its marks."""

    colour: str
    line: str
    mark: str

    @classmethod
    def of(cls, number: int) -> "Look":
        """Return the look of the run with a number; the first 28 are all different."""
        return cls(_colour(number), *LINES[number // len(COLOURS) % len(LINES)])

    def drawn(self, *, marked: bool) -> dict[str, Any]:
        """Return the look as matplotlib's keywords of a line."""
        marker = self.mark if marked else ""
        return {"color": self.colour, "linestyle": self.line, "marker": marker, "markersize": 3}


_LABELS: Mapping[Axis, str] = MappingProxyType(
    {
        "rounds": "rounds",
        "time": "time [{}]",
        "bytes": "traffic [{}]",
        "energy": "energy [{}]",
        "flops": "calculation [{}]",
    }
)
_USUAL: tuple[Axis, ...] = ("time", "bytes")


class NothingToDraw(ValueError):
    """An error: the plot would be empty; the message says why."""


@dataclass(frozen=True)
class Panel:
    """One panel of curves: runs with one metric, over rounds, a resource or the model's width."""

    metric: Metric
    runs: Runs
    axis: Axis | None  # None: the width
    amount: float | None = None  # of the resource, at which there is a line

    @property
    def label(self) -> str:
        """The label of the vertical axis."""
        return f"{self.metric.name} (less is better)" if self.metric.less else self.metric.name


def draw(
    file: str | Path,
    runs: Runs,
    *,
    world: World | None = None,
    title: str = "",
    equal: Mapping[Resource, float] | None = None,
    over: Sequence[Axis] = (),
    clock: str = "simulated",
) -> Path:
    """Draw the metric of runs over time and over traffic; with a world, its devices too.

    `clock` says which time it is: "simulated" or "real". `over` names other axes. A resource of
    `equal` has its panel too, with a line at the amount, and so have the widths if more than one
    was evaluated; a resource that no run spent has none. Runs with different metrics have panels of
    their own. Curves are means over seeds, bands their 95 % intervals; `band` says how seeds are
    joined. Raise NothingToDraw if no run has a number to show, and NoPictures without matplotlib.
    """
    runs = {name: group for name, group in runs.items() if group}
    file, panels = Path(file), _planned(runs, equal or {}, over or _USUAL)
    looks = {name: Look.of(number) for number, name in enumerate(runs)}
    figure, places = _panels(len(panels) + (world is not None))
    for panel, axes in zip(panels, places, strict=False):
        if panel.axis is None:
            _over_widths(axes, panel, looks)
        else:
            _curves(axes, panel, looks, panel.axis)
            if panel.axis == "time":
                axes.set_xlabel(f"{clock} {axes.get_xlabel()}")
        place = axes.get_subplotspec()
        if (place is not None and place.is_first_col()) or panel.metric != panels[0].metric:
            axes.set_ylabel(panel.label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle
        for axes in places[: len(panels)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if any(len(group) > 1 for group in runs.values()):
        handles["95 % interval over seeds"] = _shade()
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=_legend_columns(list(handles), figure.get_figwidth()),
        frameon=False,
    )
    if world is not None:
        _fleet(places[-1], world)
    if title:
        figure.suptitle(title)
    return _saved(figure, file)


def _legend_columns(names: Sequence[str], width: float) -> int:
    """Return how many columns of a legend fit into a picture of so many inches, about."""
    for columns in range(_grid(len(names), _NAMES)[1], 1, -1):
        longest = [max(some) for some in np.array_split([len(name) for name in names], columns)]
        if sum(_SIGN + _LETTER * letters for letters in longest) <= width:
            return columns
    return 1


def _shade() -> "Patch":
    """Return the sign of a band in a legend."""
    from matplotlib.patches import Patch

    return Patch(color=_GREY, alpha=0.2, linewidth=0)


def _planned(runs: Runs, amounts: Mapping[Resource, float], over: Sequence[Axis]) -> list[Panel]:
    """Return the panels of a picture, metric by metric."""
    every = [
        record
        for group in runs.values()
        for records in group.values()
        for record in evaluated(records)
    ]
    if not every:
        raise NothingToDraw("no picture: no run was evaluated")
    if not np.isfinite([record.score for record in every]).any():
        raise NothingToDraw("no picture: no evaluation gave a finite number")
    metrics = {name: metric_of(next(iter(group.values()))) for name, group in runs.items()}
    panels = []
    for metric in dict.fromkeys(metrics.values()):
        own = {name: group for name, group in runs.items() if metrics[name] == metric}
        records = [each for group in own.values() for run in group.values() for each in run]
        lines: dict[Axis, float] = dict(amounts.items())
        shown = dict.fromkeys((*over, *lines))
        spent = [axis for axis in shown if any(_place(record, axis) for record in records)]
        panels += [Panel(metric, own, axis, lines.get(axis)) for axis in spent or _USUAL[:1]]
        if any(len(record.widths) > 1 for record in records):
            panels.append(Panel(metric, own, None))
    return panels


def _place(record: RoundRecord, axis: Axis) -> float:
    """Return where a record lies on an axis: rounds done, or what the run had used by then."""
    return record.round_index + 1 if axis == "rounds" else used(record, axis)


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


def _saved(figure: "Figure", file: Path) -> Path:
    """Write a picture as files of run folders: as a whole, and never through a link."""
    content = BytesIO()
    figure.savefig(content, dpi=130, format=file.suffix.removeprefix(".") or "png")
    write(file, content.getvalue())
    return file


def _grid(count: int, most: int) -> tuple[int, int]:
    """Return rows and columns for `count` items, at most `most` in a row, rows of even length."""
    rows = max(1, -(-count // most))
    return rows, -(-count // rows)


def band(runs: Collection[Sequence[RoundRecord]], x: Callable[[RoundRecord], float]) -> Band:
    """Return the mean over seeds as a curve of steps, with its 95 % interval.

    Seeds are evaluated at different places. At each of these places, every seed counts as at its
    last evaluation by then, and one that has ended counts as it ended: nothing is interpolated. The
    curve begins where all seeds have been evaluated; it is empty if one never was.
    """
    measured = [evaluated(records) for records in runs]
    if not measured or not all(measured):
        return Band(*(np.zeros(0),) * 4)
    places = [np.array([x(record) for record in rows], dtype=np.float64) for rows in measured]
    heights = [np.array([record.score for record in rows]) for rows in measured]
    common = np.unique(np.concatenate(places))
    common = common[common >= max(own[0] for own in places)]
    levels = np.array(
        [
            own[np.searchsorted(at, common, side="right") - 1]
            for at, own in zip(places, heights, strict=True)
        ]
    )
    return _joined(common, levels)


def _joined(x: Floats, levels: Floats) -> Band:
    """Return the curve of levels [seeds, places]."""
    found = [estimate(column) for column in levels.T.tolist()]
    low, high = np.array([each.low for each in found]), np.array([each.high for each in found])
    return Band(x, _finite(np.array([each.mean for each in found])), low, high)


def _curves(axes: "Axes", panel: Panel, looks: Mapping[str, Look], axis: Axis) -> None:
    curves = {
        name: band(group.values(), lambda record: _place(record, axis))
        for name, group in panel.runs.items()
    }
    ends = [float(end) for curve in curves.values() for end in curve.x[-1:]]
    size, label = 1.0, _LABELS[axis]
    if axis != "rounds":
        unit = common_unit([max(ends, default=0.0)], UNITS[axis])
        size, label = unit.size, label.format(unit.name)
    for name, curve in curves.items():
        _steps(axes, _clipped(curve, panel.metric), size, look=looks[name], name=name)
    stretched = _stretched(axes, [end / size for end in ends])
    axes.set_xlabel(label + (", logarithmic" if stretched else ""))
    if not stretched:
        axes.locator_params(axis="x", nbins=_TICKS)
    if panel.amount is not None and axis != "rounds":
        _line(axes, panel.amount / size, quantity(panel.amount, UNITS[axis]))


def _steps(axes: "Axes", curve: Band, size: float, *, look: Look, name: str) -> None:
    """Draw a curve of steps: a score holds until the next evaluation."""
    x = curve.x / size
    drawn = look.drawn(marked=len(x) <= _MARKED)
    axes.step(x, curve.mean, where="post", label=name, **drawn)
    if not np.isnan(curve.low).all():
        axes.fill_between(
            x, curve.low, curve.high, step="post", color=look.colour, alpha=0.2, linewidth=0
        )


def _clipped(curve: Band, metric: Metric) -> Band:
    """Return a curve of shares without what its band says below 0 and above 1."""
    if not metric.share:
        return curve
    low, high = np.clip((curve.low, curve.high), 0.0, 1.0)
    return Band(curve.x, curve.mean, low, high)


def _over_widths(axes: "Axes", panel: Panel, looks: Mapping[str, Look]) -> None:
    """Draw the score of the shared models at the end, as means over the seeds with intervals."""
    for name, group in panel.runs.items():
        ends = [at_widths(records) for records in group.values()]
        widths = sorted(set.intersection(*(set(end) for end in ends)))
        if len(widths) > 1:
            levels = np.array([[end[width] for width in widths] for end in ends])
            curve = _clipped(_joined(np.array(widths), levels), panel.metric)
            look = looks[name]
            axes.plot(widths, curve.mean, label=name, **look.drawn(marked=True))
            axes.vlines(widths, curve.low, curve.high, color=look.colour, alpha=0.4)
    axes.set_xlabel("width of the model, at the end")


def _finite(values: Floats) -> Floats:
    """Return values with NaN, which is a gap, for those that are not finite."""
    return np.where(np.isfinite(values), values, np.nan)


def _line(axes: "Axes", x: float, label: str) -> None:
    """Draw a vertical line, unless it lies outside the curves."""
    low, high = axes.get_xlim()
    if low <= x <= high:
        axes.axvline(x, color=_GREY, linestyle="--", linewidth=1)
        above = axes.get_xaxis_transform()
        axes.text(x, 1.0, label, transform=above, color=_GREY, ha="center", va="bottom")


def _stretched(axes: "Axes", ends: Sequence[float]) -> bool:
    """Make the axis logarithmic if the ends of the curves lie far apart; return whether."""
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


def draw_fleet(file: str | Path, portrait: Portrait, *, title: str = "") -> Path:
    """Draw speed and bit rates of all devices; energy, distance, availability if they differ."""
    shown = [_speeds, _bit_rates]
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
        columns = _legend_columns(portrait.names, figure.get_figwidth())
        figure.legend(*handles, loc="outside lower center", ncols=columns, frameon=False)
    if title:
        figure.suptitle(title)
    return _saved(figure, Path(file))


def _speeds(axes: "Axes", portrait: Portrait) -> None:
    _sorted_ranges(axes, portrait, {"o": portrait.speed / 1e9})
    axes.set_title("computing")
    axes.set_ylabel("speed [GFLOP/s]")


def _bit_rates(axes: "Axes", portrait: Portrait) -> None:
    _sorted_ranges(
        axes, portrait, {"^": portrait.bit_rate_up / 1e6, "v": portrait.bit_rate_down / 1e6}
    )
    axes.set_title("links: up ▲, down ▼")
    axes.set_ylabel("bit rate [Mbit/s]")


def _energies(axes: "Axes", portrait: Portrait) -> None:
    _sorted_ranges(axes, portrait, {"o": portrait.energy})
    axes.set_title("energy of computing")
    axes.set_ylabel("J for one GFLOP")


def _distances(axes: "Axes", portrait: Portrait) -> None:
    """Draw bit rates over distance; a device that moves has a mark for every hour."""
    for number in range(len(portrait.names)):
        members = portrait.group == number
        metres, bit_rates = portrait.distance[:, members], portrait.bit_rate_up[:, members] / 1e6
        axes.plot(metres.ravel(), bit_rates.ravel(), ".", color=_colour(number), alpha=0.3)
    if varies(portrait.bit_rate_up):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("distances, at every hour of a day")
    axes.set_xlabel("metres from the station")
    axes.set_ylabel("bit rate up [Mbit/s]")


def _availability(axes: "Axes", portrait: Portrait) -> None:
    for number in np.unique(portrait.group):
        share = portrait.online[:, portrait.group == number].mean(axis=1)
        axes.plot(np.arange(HOURS), share, color=_colour(int(number)), marker="o", markersize=3)
    axes.set_ylim(0, 1.02)
    axes.set_title("availability")
    axes.set_xlabel("hour of the day")
    axes.set_ylabel("share online")


def _sorted_ranges(axes: "Axes", portrait: Portrait, kinds: Mapping[str, Floats]) -> None:
    """Draw the median of each device as a mark, largest first, and its range as a line."""
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
