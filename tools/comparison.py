"""Write what follows from the comparison: its picture, the rows in the package, and its page.

    python -m tools.comparison

`python -m tools.pages` writes the page as well.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import Rectangle

from anyfleet.arrays import Floats
from anyfleet.evidence.comparison import BUDGETS, NAME, ROWS, Comparison, compare, encode
from anyfleet.evidence.comparison_page import NAMES, PICTURE, page
from anyfleet.evidence.library import Library

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "comparison.md"
DATA = ROOT / "src" / "anyfleet" / "evidence" / ROWS
_LEAST = 0.02  # of gain: the colours reach at least so far
_MUCH = 0.6  # of the colours' range: larger gains are written white
_BELOW = 0.18  # of the panel's height: where the names of groups stand


def draw(comparison: Comparison, file: Path) -> None:
    """Draw who wins where: methods by cases, one panel for each budget."""
    mpl.rcParams.update({"font.size": 8, "font.family": "DejaVu Sans"})
    cases, methods = [*comparison.cases], _ordered(comparison)
    gains = {budget: _gains(comparison, methods, cases, budget) for budget in BUDGETS}
    known = np.concatenate([each[np.isfinite(each)] for each in gains.values()])
    # A few methods that fail must not wash out the differences between all others.
    reach = max(_LEAST, float(np.quantile(np.abs(known), 0.9)))
    norm = TwoSlopeNorm(0.0, -reach, reach)
    figure, panels = plt.subplots(
        1,
        len(BUDGETS),
        sharey=True,
        figsize=(2.6 + 0.34 * len(cases) * len(BUDGETS), 1.9 + 0.22 * len(methods)),
        layout="constrained",
    )
    for axes, budget in zip(panels, BUDGETS, strict=True):
        drawn = axes.imshow(gains[budget], cmap="RdBu", norm=norm, aspect="auto")
        axes.set_title(f"equal {NAMES[budget]}", fontsize=10)
        _name_cases(axes, cases)
        axes.set_yticks(range(len(methods)), methods)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        _mark(axes, comparison, methods, cases, budget, gains[budget] / reach)
    bar = figure.colorbar(drawn, ax=panels, shrink=0.6, pad=0.01, extend="both")
    bar.set_label(f"gain over {comparison.reference}, points of accuracy")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f}")
    figure.suptitle(
        "Who wins where: all methods on one fleet, tuned alike, at equal budgets of "
        f"{comparison.rounds} rounds of {comparison.reference}\n"
        f"number: gain in points, mean of {comparison.seeds} seeds · bold: its paired 95 % "
        "interval excludes 0 · box: best of the case · ×: cannot run · –: no score yet",
        fontsize=10,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, metadata={"Software": None})
    plt.close(figure)


def _name_cases(axes: Axes, cases: list[str]) -> None:
    """Write the last part of each case below its column, and the rest below all that share it."""
    groups = [case.rpartition(", ")[0] for case in cases]
    axes.set_xticks(range(len(cases)), [c.rpartition(", ")[2] for c in cases], rotation=90)
    for group in dict.fromkeys(groups):
        own = [place for place, each in enumerate(groups) if each == group]
        middle, told = (own[0] + own[-1]) / 2, group.replace(", ", "\n")
        below = (middle, -_BELOW)
        axes.annotate(
            told, below, xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=7.5
        )
        axes.axvline(own[-1] + 0.5, color="white", lw=2.5)


def _ordered(comparison: Comparison) -> list[str]:
    """Return the methods, the best in the mean first; what cannot run in a case counts as 0."""
    cases = [*comparison.cases]
    mean = {
        method: float(
            np.nanmean([np.nan_to_num(_gains(comparison, [method], cases, b)) for b in BUDGETS])
        )
        for method in comparison.methods
    }
    return sorted(mean, key=lambda method: -mean[method])


def _gains(comparison: Comparison, methods: list[str], cases: list[str], budget: str) -> Floats:
    found = np.full((len(methods), len(cases)), np.nan)
    for column, case in enumerate(cases):
        rows = comparison.of(case)
        for line, method in enumerate(methods):
            gain = rows[method].gains.get(budget)
            if gain is not None and gain.mean is not None:
                found[line, column] = gain.mean
    return found


def _mark(
    axes: Axes,
    comparison: Comparison,
    methods: list[str],
    cases: list[str],
    budget: str,
    strength: Floats,
) -> None:
    """Write the gains into a panel, bold where they are sure, and box the best of each case."""
    for column, case in enumerate(cases):
        rows, best = comparison.of(case), comparison.best(case, budget)
        for line, method in enumerate(methods):
            row = rows[method]
            gain = row.gains.get(budget)
            if gain is None or gain.mean is None:
                sign = "×" if row.refused else "–"
                axes.text(column, line, sign, ha="center", va="center", color="0.6")
                continue
            sure = gain.low is not None and gain.high is not None and gain.low * gain.high > 0
            axes.text(
                column,
                line,
                f"{100 * gain.mean:+.0f}",
                ha="center",
                va="center",
                fontsize=6.5,
                weight="bold" if sure else "normal",
                color="white" if abs(strength[line, column]) > _MUCH else "black",
            )
            if best is not None and method == best.method:
                corner = (column - 0.5, line - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, lw=1.4, ec="black"))


def main() -> None:
    """Write the page, the picture and the rows."""
    library = Library(ROOT)
    item, results = library.item(NAME), library.results(NAME)
    if results is None:
        raise SystemExit(f"There are no results: run anyfleet reproduce {NAME} first.")
    found = compare(item, results)
    DATA.write_bytes(encode(found))
    PAGE.write_text(page(item, found), encoding="utf-8")
    draw(found, PAGE.parent / PICTURE)


if __name__ == "__main__":
    main()
