"""Draw the pictures of the method pages: python docs/methods/draw.py [--out FOLDER] [--form png].

The curves come from `anyfleet.formulas`, so that a picture cannot tell another story than the code;
those of runs come from `drawing/measured.json`, which `measure.py` has written.
The same version of matplotlib gives the same bytes.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from drawing import (
    budgets,
    compression,
    contribution,
    descent,
    prefixes,
    scheduling,
    sub_models,
)
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
PICTURES: Mapping[str, Callable[[], Figure]] = MappingProxyType(
    {
        "fedavg": descent.fedavg,
        "fedprox": descent.fedprox,
        "heterofl": sub_models.heterofl,
        "fedpmt": sub_models.fedpmt,
        "feddrop": sub_models.feddrop,
        "fedrolex": sub_models.fedrolex,
        "fjord": prefixes.fjord,
        "fedslim": prefixes.fedslim,
        "fedrescue": prefixes.fedrescue,
        "fedseq": prefixes.fedseq,
        "fedrush": prefixes.fedrush,
        "whale": scheduling.whale,
        "bn2": scheduling.bn2,
        "fedadp": contribution.fedadp,
        "optimal_aggregation": contribution.optimal_aggregation,
        "fedpns": contribution.fedpns,
        "anycost": budgets.anycost,
        "anycost_runs": budgets.anycost_runs,
        "stc": compression.stc,
        "qsgd": compression.qsgd,
        "uveqfed": compression.uveqfed,
        "fedhq": compression.fedhq,
    }
)
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "anyfleet",  # the same names of parts in every run
    "svg.fonttype": "path",  # looks alike wherever it is shown
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.linewidth": 0.8,
}
_NUMBER = re.compile(r"-?\d+\.\d+")


def draw(name: str, folder: Path, form: str = "svg") -> Path:
    """Write one picture, and return its file."""
    file = folder / f"{name}.{form}"
    with mpl.rc_context(STYLE):
        stamp = {"Date": None} if form == "svg" else {}
        PICTURES[name]().savefig(file, format=form, dpi=110, metadata=stamp)
    if form == "svg":
        file.write_text(shortened(file.read_text(encoding="utf-8")), encoding="utf-8")
    return file


def shortened(text: str) -> str:
    """Return the same picture in fewer bytes: tenths of a point, short names."""
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("DejaVuSans-", "g")
    text = re.sub(r'<use xlink:href="#g3"[^>]*>', "", text)  # spaces
    # Only places: a factor of a scale has to stay as it is.
    places = re.compile(r'(?<= )(?:d|x|y|width|height)="[^"]*"|translate\([^)]*\)')
    text = places.sub(lambda place: _NUMBER.sub(_rounded, place[0]), text)
    text = re.sub(r"(?<=[\n\"][MLQC]) ", "", text)
    text = "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"
    while (opened := re.sub(r"<g>\n((?:(?!</?g[ >]).*\n)*?)</g>\n", r"\1", text)) != text:
        text = opened  # groups that say nothing
    return text


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="which; all unless told")
    parser.add_argument("--out", type=Path, default=HERE / "pictures")
    parser.add_argument("--form", choices=("svg", "png"), default="svg")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or PICTURES:
        draw(name, chosen.out, chosen.form)


if __name__ == "__main__":
    main()
