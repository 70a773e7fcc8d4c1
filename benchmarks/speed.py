"""All tables of speed by one command, in the order of what matters most.

    python -m benchmarks.speed --out results                        # on a GPU about 10 minutes
    python -m benchmarks.speed --out results --vendor DIR           # peers as unpacked packages
    python -m benchmarks.speed --device cpu --out results           # on a CPU about half an hour

Every section is a benchmark of its own in a process of its own: one that crashes costs only its
tables. After each section the folder holds `speed.json` and `speed.md` with all tables so far; a
section that has used up its minutes begins no new row, and says so in those that are missing.
`--compile` lets the product compile where one shape is trained for long: P is measured both ways.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    ROOT,
    Options,
    Table,
    about,
    given_options,
    heading,
    parser,
    read_tables,
)


@dataclass(frozen=True)
class Section:
    """One benchmark with its arguments, and the minutes after which it begins no new row."""

    name: str
    module: str
    arguments: tuple[str, ...]
    minutes: float
    compiled: bool = False  # passes `--compile` on, where it is asked for


def _on_gpu() -> tuple[Section, ...]:
    tf32 = ("--precision", "tf32")
    # By then stacks of every size that chance brings have been captured.
    met = ("--warm", "15")
    p = ("--works", "P", "--compile")
    seeds = ("--works", "C.2, 10", "C.2, 32", "--meetings", "4")
    # What a target is about comes first. Two processes of pfl are slower than three.
    peers = ("--peers", "pfl", "plain", "--processes")
    return (
        Section("P in tf32", "peers", (*p, "--precisions", "tf32", *peers, "1", "3"), 1.7),
        Section("P in bf16", "peers", (*p, "--precisions", "bf16", *peers, "1"), 0.7),
        # Not compiled: that takes half a minute for each of the widths.
        Section("widths", "hetero", ("--tables", "widths", *tf32), 0.9),
        Section("roofline", "roofline", tf32, 0.6, compiled=True),
        Section("seeds together", "together", (*seeds, *tf32), 1.1),
        Section("methods", "hetero", ("--tables", "methods", *tf32, *met), 2.4),
        Section("ratios", "scale", ("--tables", "ratios", *tf32, *met), 0.8),
        Section("cohort and model", "scale", ("--tables", "cohort", "model", *tf32), 0.6),
        Section("kernels", "kernels", (*tf32, "--work", "P"), 0.4, compiled=True),
        Section("precision", "precisions", (), 0.4),
        Section("depths", "hetero", ("--tables", "depths", *tf32), 0.4),
        Section("overhead", "overhead", ("--seconds", "0.5", "--cohorts", *_COHORTS), 0.9),
        Section("fleet", "scale", ("--tables", "fleet"), 0.5),
    )


_COHORTS = ("10", "100", "1000", "10000")
_ENGINES = ("--engines", "auto", "sequential", "workers", "stacked")


def _on_cpu() -> tuple[Section, ...]:
    works = ("--works", "C.1", "C.2", "C.3", "C.4")
    # By then the local steps of small networks have been recorded.
    met = ("--warm", "14")
    return (
        Section("C.1 to C.4", "peers", (*works, *_ENGINES, "--processes", "1", "2", *met), 15),
        Section("overhead", "overhead", ("--threads", "1", "--cohorts", *_COHORTS), 6),
        Section("way", "way", (), 1),
        Section("widths", "hetero", ("--tables", "widths", "--clients", "50"), 3),
        Section("methods", "hetero", ("--tables", "methods", "--work", "C.2"), 5),
        Section("scale", "scale", ("--tables", "cohort", "fleet", "model", "threads"), 6),
    )


def run_section(section: Section, common: Sequence[str], minutes: float) -> tuple[list[Any], str]:
    """Run one section; return its results, and what went wrong or ""."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"benchmarks.{section.module}", *common]
        command += [*section.arguments, "--minutes", f"{minutes:.2f}", "--out", folder]
        try:
            # Twice its time, and a minute to start: a row that was begun may end.
            done = subprocess.run(
                command, cwd=ROOT, check=False, timeout=60 * (2 * minutes + 1), stdout=sys.stderr
            )
            problem = f"ended with status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"was stopped after {2 * minutes + 1:.1f} minutes"
        return [read_tables(file) for file in sorted(Path(folder).glob("*.json"))], problem


def written(out: Path, facts: dict[str, str], results: Sequence[dict[str, Any]]) -> str:
    """Write all tables so far as JSON and Markdown; return the latter."""
    out.mkdir(parents=True, exist_ok=True)
    text = [heading(facts), ""]
    tables: list[Table] = []
    for result in results:
        text += [f"## {result['section']}", ""]
        if result["problem"]:
            text += [f"This section {result['problem']}.", ""]
        for own, found in result["tables"]:
            text += [f"`{own['command']}`", ""]
            text += [table.markdown() for table in found.values()]
            tables += [_with_command(table, own["command"]) for table in found.values()]
    content = {
        "benchmark": "speed",
        "about": facts,
        "problems": {r["section"]: r["problem"] for r in results if r["problem"]},
        "tables": [asdict(table) for table in merged(tables)],
    }
    (out / "speed.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = "\n".join(text)
    (out / "speed.md").write_text(page, encoding="utf-8")
    return page


def _with_command(table: Table, command: str) -> Table:
    return Table(table.name, table.title, table.head, table.rows, table.notes, command)


def merged(tables: Sequence[Table]) -> list[Table]:
    """Return the tables, those of the same name and columns joined into one."""
    found: dict[str, Table] = {}
    for table in tables:
        before = found.get(table.name)
        if before is None or before.head != table.head:
            found[table.name] = table
        else:
            notes = dict.fromkeys((*before.notes, *table.notes))
            commands = dict.fromkeys((*before.command.splitlines(), table.command))
            found[table.name] = Table(
                table.name,
                before.title,
                table.head,
                (*before.rows, *table.rows),
                tuple(notes),
                "\n".join(commands),
            )
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections one after the other."""
    read = parser(__doc__)
    read.add_argument("--only", nargs="+", help="names of sections, or words in them")
    given = read.parse_args(arguments)
    options: Options = given_options(given)
    sections = _on_gpu() if options.cuda else _on_cpu()
    if given.only:
        sections = tuple(s for s in sections if any(word in s.name for word in given.only))
    limit = given.minutes if given.minutes < math.inf else (10.0 if options.cuda else 40.0)
    common = ["--device", options.device, "--rounds", str(given.rounds), "--warm", str(given.warm)]
    common += ["--vendor", given.vendor] if given.vendor else []
    common += ["--chunk", str(given.chunk)] if given.chunk else []
    out, facts, began = given.out or Path("speed"), about(options), time.monotonic()
    results: list[dict[str, Any]] = []
    page = ""
    for section in sections:
        left = limit - (time.monotonic() - began) / 60
        print(f"-- {section.name}, {left:.1f} minutes left", file=sys.stderr, flush=True)
        tables: list[Any] = []
        problem = "was not begun: the time was used up"
        if left > 0.1:
            own = [*common, "--compile"] if given.compile and section.compiled else common
            tables, problem = run_section(section, own, min(section.minutes, left))
        results.append({"section": section.name, "tables": tables, "problem": problem})
        page = written(out, facts, results)
    print(page)


if __name__ == "__main__":
    main()
