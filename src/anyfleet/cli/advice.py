"""`anyfleet methods --advise`: methods to try for a described fleet, with the rows that say so."""

from pathlib import Path

from anyfleet import config
from anyfleet.cli.screen import PlainTable, console, show
from anyfleet.evidence.advice import FAR, Advice, advise
from anyfleet.evidence.comparison import Comparison, Interval, known_rows
from anyfleet.evidence.comparison_page import NAMES
from anyfleet.evidence.fleet_facts import facts_of


def show_advice(file: Path, allow: tuple[str, ...] = ()) -> None:
    """Print two or three methods for the fleet in a file, and the rows from which this follows."""
    comparison = known_rows()
    found = advise(facts_of(config.read(file, (), allow), str(file)), comparison)
    screen = console()
    show(screen, f"The fleet of {file}:")
    for line in found.facts.told():
        show(screen, f"  {line}")
    show(screen, "Cases of the comparison most like it:")
    for case in found.cases:
        show(screen, f"  {case}")
    if found.away > FAR:
        show(screen, "None of them is much like this fleet: take the answer for a first guess.")
    if not found.candidates:
        show(screen, "No method that this fleet can run was compared there.")
        return
    show(screen, "Methods to try, the best first:")
    for candidate in found.candidates:
        gain = f"{100 * candidate.gain:+.1f} points over {comparison.reference}"
        show(screen, f"  {candidate.method}: {gain} in the mean of the rows below")
    screen.print()
    screen.print(_rows(found, comparison))
    brackets = f"in brackets the gain over {comparison.reference} in points"
    show(screen, f"\nScores in per cent; {brackets} with its 95 % interval.")
    show(screen, "All rows: docs/comparison.md")


def _rows(found: Advice, comparison: Comparison) -> PlainTable:
    """Return the rows of the comparison that speak for the candidates."""
    table = PlainTable()
    table.add_column("method", no_wrap=True)
    table.add_column("case", ratio=2)
    for budget in found.budgets:
        table.add_column(f"equal {NAMES[budget]}", ratio=2)
    table.add_column(comparison.tuning.key.rpartition(".")[2])
    for candidate in found.candidates:
        for row in candidate.rows:
            told = [_told(row.scores.get(b), row.gains.get(b)) for b in found.budgets]
            table.add_row(row.method, row.case, *told, f"{row.value:g}")
    return table


def _told(score: Interval | None, gain: Interval | None) -> str:
    if score is None or score.mean is None or gain is None or gain.mean is None:
        return "–"
    told = f"{100 * score.mean:.1f} ({100 * gain.mean:+.1f}"
    if gain.low is None or gain.high is None:
        return f"{told})"
    return f"{told}; {100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
