"""Pictures: what is drawn, and what happens where nothing can be drawn."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from anyfleet.analysis.equal_budgets import Resource
from anyfleet.analysis.fleet_portrait import portray
from anyfleet.analysis.plots import Look, NoPictures, NothingToDraw, band, draw, draw_fleet
from anyfleet.experiment import RoundRecord
from anyfleet.world import Disc, Diurnal, Fleet, Group, Uniform, wifi


def run(*accuracies: float, pace: float = 1.0) -> tuple[RoundRecord, ...]:
    return tuple(
        RoundRecord(
            round_index=step,
            time=pace * (step + 1),
            down=1e6 * (step + 1),
            up=1e6 * (step + 1),
            flops=0.0,
            joules=0.0,
            replies=1,
            failures=0,
            loss=math.nan,
            on_devices=accuracy,
        )
        for step, accuracy in enumerate(accuracies)
    )


def test_a_band_holds_every_seed_at_its_last_evaluation() -> None:
    """Evaluated after 1 and 3 seconds, and after 3, 9 and 12: nothing is interpolated."""
    runs = [run(0.2, math.nan, 0.6), run(0.4, math.nan, 0.6, 0.9, pace=3.0)]
    joined = band(runs, lambda point: point.time)
    assert joined.x.tolist() == [3.0, 9.0, 12.0]  # from where both were evaluated, to the last end
    assert joined.mean.tolist() == pytest.approx([0.5, 0.6, 0.75])
    margins = [12.7062 * 0.1, 0.0, 12.7062 * 0.15]  # t of one degree, times half of the distance
    assert (joined.high - joined.mean).tolist() == pytest.approx(margins, abs=1e-5)
    assert (joined.mean - joined.low).tolist() == pytest.approx(margins, abs=1e-5)


def test_places_that_several_evaluations_share_count_the_last() -> None:
    """A round in which nobody spent energy moves no step to the right."""
    assert band([run(0.2, 0.5)], lambda _: 4.0).mean.tolist() == [0.5]


def test_a_single_run_has_no_band() -> None:
    alone = band([run(0.2, 0.5)], lambda point: point.time)
    assert alone.mean.tolist() == [0.2, 0.5]
    assert np.isnan([alone.low, alone.high]).all()


def test_a_seed_that_was_never_evaluated_leaves_no_curve() -> None:
    assert not len(band([run(0.2), run(math.nan)], lambda point: point.time).x)
    assert not len(band([], lambda point: point.time).x)


def test_runs_of_one_colour_differ_in_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {Look.of(number) for number in range(28)}
    assert len({(look.colour, look.line) for look in looks}) == 28
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    draw(tmp_path / "p.png", {f"run {n}": {0: run(0.1, 0.2 + n / 100)} for n in range(9)})
    (figure,) = drawn
    for axes in figure.axes:
        lines = [(line.get_color(), line.get_linestyle()) for line in axes.get_lines()]
        assert len(set(lines)) == len(lines) == 9


@pytest.mark.parametrize("devices", [0, 5])
def test_a_picture_shows_something(tmp_path: Path, devices: int) -> None:
    world = Fleet().build(np.ones(devices, dtype=np.int64), 0) if devices else None
    runs = {"slow": {0: run(0.1, 0.5, pace=50.0)}, "never judged": {0: run(math.nan)}, "none": {}}
    runs["b"] = {0: run(0.2), 1: run(0.4, 0.9)}
    file = draw(tmp_path / "a.png", runs, world=world, title="a title")
    assert file.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    pixels = imread(file)
    panels = 3 if devices else 2
    assert pixels.shape[1] > 400 * panels
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50


def test_equal_amounts_have_a_panel_with_a_line_unless_it_is_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes
    from matplotlib.image import imread

    lines: list[tuple[str, float]] = []
    monkeypatch.setattr(Axes, "axvline", lambda axes, x, **_: lines.append((axes.get_xlabel(), x)))
    points = tuple(replace(each, joules=each.time, flops=1e9) for each in run(0.1, 0.5, 0.6))
    amounts: dict[Resource, float] = {"bytes": 3e6, "energy": 100.0, "flops": 1e9}
    file = draw(tmp_path / "a.png", {"a": {0: points}}, equal=amounts)
    assert lines == [("traffic [MB]", 3.0), ("calculation [GFLOP]", 1.0)]
    # Two rows of two panels: time and traffic as always, energy and calculation.
    assert imread(file).shape[:2] == (2 * 585, 2 * 624)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (5, 5), (6, 3), (7, 4), (11, 4)])
def test_the_rows_of_a_legend_are_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, columns: int
) -> None:
    from matplotlib.figure import Figure

    found: list[object] = []
    monkeypatch.setattr(Figure, "legend", lambda *_, ncols, **__: found.append(ncols))
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    names = [f"{number}" for number in range(count)]
    draw(tmp_path / "a.png", {name: {0: run(0.1, 0.5)} for name in names})
    groups = tuple(Group(name=f"group {name}") for name in names)
    world = Fleet(groups).build(np.ones(count, dtype=np.int64), 0)
    draw_fleet(tmp_path / "b.png", portray(world))
    assert found == [columns] * (1 + (count > 1))  # one group needs no name


@pytest.mark.parametrize(
    "form", ["a_file_of_a_name, lr=0.{}, batch_size=32", "base, lr=0.0{}, n=32"]
)
def test_a_legend_of_long_names_is_no_wider_than_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    names = [form.format(number) for number in range(9)]
    draw(tmp_path / "a.png", {name: {0: run(0.1, 0.5)} for name in names})
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width


FLEETS = {
    "equal": (Fleet((Group(),)), 2),
    "thirsty": (Fleet((Group(energy=Uniform(1e-27, 2e-27)),)), 3),
    "everything": (
        Fleet(
            (
                Group(name="phones", distance=Disc(100.0), energy=Uniform(1e-27, 2e-27)),
                Group(speed=1e12, availability=Diurnal(), link=wifi()),
            )
        ),
        5,
    ),
}


@pytest.mark.parametrize("name", FLEETS)
def test_a_picture_of_a_fleet_has_a_panel_for_what_differs(tmp_path: Path, name: str) -> None:
    fleet, panels = FLEETS[name]
    world = fleet.build(np.ones(12, dtype=np.int64), 0)
    file = draw_fleet(tmp_path / "a.png", portray(world), title="a title")
    from matplotlib.image import imread

    height, width = imread(file).shape[:2]
    rows = 1 if panels <= 3 else 2
    columns = -(-panels // rows)
    # A panel is 4.8 by 4.5 inches of 130 dots.
    assert (height, width) == (round(585 * rows), round(624 * columns))


def errors(*values: float) -> tuple[RoundRecord, ...]:
    """A run that is judged by an error, at two widths."""
    return tuple(
        replace(
            each,
            on_devices=math.nan,
            metric="rmse",
            scores={"rmse": v, "rmse@1": v, "rmse@0.5": 2 * v},
        )
        for each, v in zip(run(*values), values, strict=True)
    )


def test_panels_name_the_metric_and_have_the_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[tuple[str, str, list[list[float]]]] = []

    def look(figure: Figure, *_: object, **__: object) -> None:
        for axes in figure.axes:
            lines = [np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()]
            drawn.append((axes.get_xlabel(), axes.get_ylabel(), lines))

    monkeypatch.setattr(Figure, "savefig", look)
    draw(str(tmp_path / "a.png"), {"a": {0: errors(3.0, 2.0)}})
    assert drawn == [
        ("simulated time [s]", "rmse (less is better)", [[3.0, 2.0]]),
        ("traffic [MB]", "", [[3.0, 2.0]]),
        ("width of the model, at the end", "", [[4.0, 2.0]]),
    ]
    drawn.clear()
    draw(tmp_path / "a.png", {"a": {0: errors(3.0, 2.0)}}, over=("rounds", "bytes"))
    assert [label for label, _, _ in drawn] == [
        "rounds",
        "traffic [MB]",
        "width of the model, at the end",
    ]
    # Other metrics have other panels; what nobody spent has none.
    drawn.clear()
    still = tuple(replace(each, down=0.0, up=0.0) for each in run(0.5, 0.6))
    draw(
        tmp_path / "a.png",
        {"a": {0: errors(3.0, math.inf)}, "b": {0: still}},
        equal={"energy": 1.0},
    )
    assert [label for label, _, _ in drawn] == [
        "simulated time [s]",
        "traffic [MB]",
        "width of the model, at the end",
        "simulated time [s]",
    ]
    assert drawn[-1][1:] == ("accuracy", [[0.5, 0.6]])
    assert drawn[0][2][0] == pytest.approx([3.0, math.nan], nan_ok=True)


def test_bands_of_shares_stay_between_0_and_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    filled: list[tuple[list[float], list[float]]] = []
    monkeypatch.setattr(
        Axes, "fill_between", lambda _, x, low, high, **__: filled.append(([*low], [*high]))
    )
    draw(tmp_path / "a.png", {"a": {0: run(0.4), 1: run(0.8)}}, over=("rounds",))
    assert filled == [([0.0], [1.0])]
    filled.clear()
    draw(tmp_path / "a.png", {"a": {0: errors(2.0), 1: errors(3.0)}}, over=("rounds",))
    ((low, high),) = filled
    assert low[0] < 0
    assert high[0] > 3


def test_there_is_no_empty_picture(tmp_path: Path) -> None:
    with pytest.raises(NothingToDraw, match="no run was evaluated"):
        draw(tmp_path / "a.png", {"a": {0: run(math.nan, math.nan)}})
    with pytest.raises(NothingToDraw, match="no evaluation gave a finite number"):
        draw(tmp_path / "a.png", {"a": {0: errors(math.nan, math.inf)}})
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NoPictures, match=r"pip install 'anyfleet\[report\]'"):
        draw(tmp_path / "a.png", {"a": {0: run(0.1)}})
    assert not list(tmp_path.iterdir())
