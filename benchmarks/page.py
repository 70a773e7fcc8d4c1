"""The tables and pictures of docs/performance.md, made of what benchmarks wrote.

    python -m benchmarks.page                                      # fill the page from the results
    python -m benchmarks.page --take h200=results/speed.json       # and take new results in before
    python -m benchmarks.page --take cpu=a/speed.json --checks checks.txt

`benchmarks/results` holds a JSON file for each machine (`h200`, `cpu`), one of an earlier run where
the last one has not measured all tables again (`h200_earlier`), one of a later run that measured
two of them again (`h200_again`), and one of each from before the cohort became the unit of the core
(`before_h200`, `before_cpu`). On the page a table stands between `<!-- table MACHINE NAME -->` and
`<!-- end -->`; the name "measured" stands for the lines that say who measured what. `--checks`
takes what `make gpu` printed.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, Cell, Table, heading, read_tables
from benchmarks.overhead import target

RESULTS = ROOT / "benchmarks" / "results"
PAGE, PICTURES = ROOT / "docs" / "performance.md", ROOT / "docs" / "pictures"
MARKED = re.compile(r"<!-- table (\w+) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
PICTURE = re.compile(r"<!-- picture (\w+\.svg) -->\n(!\[.*?\n)?")
CAPTIONS = {
    "speed_peers.svg": "Milliseconds of a round of P: peers grey, the product before and now",
    "speed_overhead.svg": "Milliseconds of the host by the size of the cohort, before and now",
    "speed_methods.svg": "Milliseconds of a round of every method, and the host's part of them",
    "speed_cohort.svg": "Milliseconds of a round by the size of the cohort",
}
GPU, CPU = ("h200", "h200_earlier"), ("cpu",)  # runs, the last ones first
NOTHING = "*Not measured yet.*\n"
Results = Mapping[str, tuple[dict[str, str], dict[str, Table]]]


def read(folder: Path = RESULTS) -> Results:
    """Return the results of every machine, by the name of its file."""
    return {file.stem: read_tables(file) for file in sorted(folder.glob("*.json"))}


def filled(text: str, results: Results, checks: str = "") -> str:
    """Return the page with its tables as the results say."""

    def table(found: re.Match[str]) -> str:
        machine, name = found.group(1), found.group(2)
        if name == "checks":
            made = f"```console\n{checks.strip()}\n```\n" if checks.strip() else NOTHING
        elif machine not in results:
            made = NOTHING
        elif name == "measured":
            made = heading(results[machine][0]) + "\n"
        else:
            each = results[machine][1].get(name)
            made = each.markdown() if each else NOTHING
        return f"<!-- table {machine} {name} -->\n\n{made}\n<!-- end -->"

    return MARKED.sub(table, text)


def illustrated(text: str, folder: Path = PICTURES) -> str:
    """Return the page with the pictures that are there."""

    def picture(found: re.Match[str]) -> str:
        name = found.group(1)
        shown = f"![{CAPTIONS[name]}](pictures/{name})\n" if (folder / name).exists() else ""
        return f"<!-- picture {name} -->\n{shown}"

    return PICTURE.sub(picture, text)


# -- pictures


def column(table: Table, name: str) -> list[Cell]:
    """Return the values of a column."""
    number = table.head.index(name)
    return [row[number] for row in table.rows]


def records(results: Results, machine: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table as dictionaries, without those that were not measured."""
    if machine not in results or name not in results[machine][1]:
        return []
    table = results[machine][1][name]
    found = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    return [each for each in found if isinstance(each.get("ms a round"), int | float)]


def last(results: Results, runs: Sequence[str], name: str) -> list[dict[str, Any]]:
    """Return the rows of a table as dictionaries, of the first of these runs that has them."""
    return next(filter(None, (records(results, run, name) for run in runs)), [])


def draw_peers(axes: Any, results: Results) -> bool:
    """Draw how long a round of P takes: peers, the product before, and the product now."""
    now = [each for each in records(results, "h200", "peers") if each["work"] == "P"]
    before = [
        each
        for each in records(results, "before_h200", "peers")
        if each["work"] == "P" and each["who"].startswith("product")
    ]
    bars = [(f"{each['who']}, {each['precision']}", each["ms a round"], "C0") for each in now]
    bars = [(who, ms, "C0" if who.startswith("product") else "C7") for who, ms, _ in bars]
    bars += [(f"{e['who']}, {e['precision']}, before", e["ms a round"], "C1") for e in before]
    bars.sort(key=lambda bar: -bar[1])
    axes.barh([who for who, _, _ in bars], [ms for _, ms, _ in bars], color=[c for *_, c in bars])
    for place, (_, ms, _) in enumerate(bars):
        axes.text(ms * 1.05, place, f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}", va="center")
    axes.set_xscale("log")
    axes.set_xlim(1.0, 2.5 * max((ms for _, ms, _ in bars), default=1.0))
    axes.set_xlabel("ms a round of P, cohorts of 50")
    axes.tick_params(axis="y", labelsize=8)
    return bool(now)


def draw_overhead(axes: Any, results: Results) -> bool:
    """Draw the host's milliseconds of a round by the size of the cohort, before and now."""
    drawn = False
    for name, colour in (("fedavg", "C0"), ("heterofl", "C2"), ("stc", "C3")):
        for machines, style in ((("before_cpu",), ":"), (CPU, "-")):
            rows = last(results, machines, "overhead")
            kept = [e for e in rows if e["method"] == name and e["world"] == "steady"]
            kept.sort(key=lambda each: each["cohort"])
            if kept:
                label = f"{name}, before" if machines != CPU else name
                # The processor's time, which other programs on the machine do not lengthen.
                xs = [e["cohort"] for e in kept]
                ys = [e.get("processor, ms", e["ms a round"]) for e in kept]
                axes.plot(xs, ys, style, marker="o", markersize=3, color=colour, label=label)
                drawn = drawn or machines == CPU
    cohorts = (10, 100, 1_000, 10_000)
    aims = [target(cohort, 1, "steady") for cohort in cohorts]
    axes.plot(cohorts, aims, "--", color="black", linewidth=1, label="target, one shape")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("orders of a round")
    axes.set_ylabel("processor, ms a round")
    axes.legend(fontsize=7)
    return drawn


def draw_methods(axes: Any, results: Results) -> bool:
    """Draw every method's milliseconds a round, and how many of them are the host's."""
    rows = last(results, (*GPU, *CPU), "methods")
    rows.sort(key=lambda each: -each["ms a round"])
    names = [each["method"] for each in rows]
    axes.barh(names, [each["ms a round"] for each in rows], color="C0", label="whole round")
    axes.barh(names, [each["host, ms"] for each in rows], color="C1", height=0.4, label="host")
    if rows:
        axes.legend(fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    axes.set_xlabel("ms a round, cohorts of 50")
    axes.tick_params(axis="y", labelsize=8)
    return bool(rows)


def draw_cohort(axes: Any, results: Results) -> bool:
    """Draw milliseconds a round by the size of the cohort, with training."""
    drawn = False
    for name, machines, colour in (("h200", GPU, "C0"), ("cpu", CPU, "C1")):
        rows = last(results, machines, "cohort")
        if rows:
            xs, ys = [each["cohort"] for each in rows], [each["ms a round"] for each in rows]
            axes.plot(xs, ys, "-", marker="o", markersize=3, color=colour, label=name)
            # What a round would take if it were linear in the cohort from its largest one down.
            axes.plot(xs, [ys[-1] * x / xs[-1] for x in xs], ":", color=colour, linewidth=1)
            drawn = True
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("devices of a cohort (dotted: linear)")
    axes.set_ylabel("ms a round")
    if drawn:
        axes.legend(fontsize=8)
    return drawn


DRAWN: Mapping[str, tuple[tuple[float, float], Callable[[Any, Results], bool]]] = {
    "speed_peers.svg": ((7.0, 3.6), draw_peers),
    "speed_overhead.svg": ((5.0, 3.4), draw_overhead),
    "speed_methods.svg": ((6.0, 4.6), draw_methods),
    "speed_cohort.svg": ((5.0, 3.4), draw_cohort),
}


def draw(results: Results, folder: Path, ending: str = ".svg") -> list[Path]:
    """Draw the pictures for which there are results; return their files."""
    import matplotlib as mpl  # an extra, and not needed to measure

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "anyfleet"  # the same bytes every time
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, (size, drawing) in DRAWN.items():
        figure, axes = plt.subplots(figsize=size)
        if drawing(axes, results):
            figure.tight_layout()
            file = (folder / name).with_suffix(ending)
            figure.savefig(file, metadata={"Date": None} if ending == ".svg" else None)
            made.append(file)
        plt.close(figure)
    return made


def take(given: str, folder: Path) -> None:
    """Copy a file of results to its place; "h200=FILE" or "cpu=FILE"."""
    machine, _, file = given.partition("=")
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{machine}.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the page and draw its pictures."""
    reader = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    reader.add_argument("--take", nargs="+", default=[], help="h200=FILE, cpu=FILE")
    reader.add_argument("--checks", type=Path, help="what `make gpu` printed")
    given = reader.parse_args(arguments)
    for each in given.take:
        take(each, RESULTS)
    checks = RESULTS / "checks.txt"
    if given.checks:
        checks.write_text(given.checks.read_text(encoding="utf-8"), encoding="utf-8")
    said = checks.read_text(encoding="utf-8") if checks.exists() else ""
    results = read()
    for file in draw(results, PICTURES):
        print(file.relative_to(ROOT))
    text = filled(PAGE.read_text(encoding="utf-8"), results, said)
    PAGE.write_text(illustrated(text), encoding="utf-8")


if __name__ == "__main__":
    main()
