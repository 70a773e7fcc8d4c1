"""Mix every two parts of different slots, run two rounds, and write down what came of it.

    python -m tools.mixing [--sample N] [--seed S] [--jobs J]

A mixture runs when it completes two rounds of a tiny task with unequal devices: everything finite,
the model moved, replies counted, costs charged. Or it is refused when it is composed, by an error
that names a page of docs/. Anything else is a failure. Exits with 1 when there is one, or when
fewer than 85 % run. A whole run writes `docs/mixing.md`; a sample only judges. POSIX only.
"""

import argparse
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from tools.mixing_page import PAGE, page
from tools.mixing_parts import missing
from tools.mixing_trial import FAILED, REFUSED, RUNS, Outcome, Pair, pairs, trial

LEAST = 0.85  # share of pairs that must run
SHOWN = 20  # failures that are told in full


def prepare() -> None:
    """Prepare a process: one thread, warnings of numpy are errors, Ctrl-C is for its parent."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def tried(some: Sequence[Pair], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes as they come."""
    # New processes, not forks: torch may have threads already.
    with get_context("spawn").Pool(jobs, prepare) as pool:
        yield from pool.imap_unordered(trial, some, chunksize=4)


def watched(some: Sequence[Pair], jobs: int, console: Console) -> list[Outcome]:
    """Return all outcomes, in the order of the pairs; show how far it is on the screen."""
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[Pair, Outcome] = {}
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("mixing", total=len(some))
        for outcome in tried(some, jobs):
            found[outcome.pair] = outcome
            failed = sum(each.result == FAILED for each in found.values())
            told = f"mixing, {failed} failed" if failed else "mixing"
            progress.update(bar, advance=1, description=told)
    return [found[pair] for pair in some]


def verdict(outcomes: Sequence[Outcome], console: Console) -> int:
    """Show the results; return the exit code, 1 if a pair failed or too few run."""
    counts = Counter(outcome.result for outcome in outcomes)
    table = Table("result", "pairs", box=None, pad_edge=False)
    for result in (RUNS, REFUSED, FAILED):
        table.add_row(result, str(counts[result]))
    console.print(table)
    failures = [outcome for outcome in outcomes if outcome.result == FAILED]
    for outcome in failures[:SHOWN]:
        console.print(f"\n{outcome.pair}\n{outcome.said}", markup=False, soft_wrap=True)
    for outcome in failures[SHOWN:]:
        console.print(f"also {outcome.pair}", markup=False, soft_wrap=True)
    share = counts[RUNS] / len(outcomes)
    console.print(f"{share:.1%} of {len(outcomes)} pairs run; at least {LEAST:.0%} must.")
    return 1 if failures or share < LEAST else 0


def main(arguments: Sequence[str]) -> int:
    """Mix all pairs, or a sample of them; return the exit code."""
    parser = argparse.ArgumentParser(description="Mix every two parts, and run them.")
    parser.add_argument("--sample", type=int, help="so many pairs, drawn; writes no page")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if forgotten := missing():
        told = ", ".join(forgotten)
        console.print(f"tools/mixing_parts.py has no row for {told}; add one.", markup=False)
        return 1
    some = pairs()
    if given.sample is not None:
        draw = random.Random(given.seed)  # noqa: S311 - no secret
        some = draw.sample(some, min(given.sample, len(some)))
    try:
        outcomes = watched(some, given.jobs, console)
    except KeyboardInterrupt:
        console.print("Interrupted; nothing was written.")
        return 130
    code = verdict(outcomes, console)
    if not code and given.sample is None:
        PAGE.write_text(page(outcomes), encoding="utf-8")
        console.print(f"Wrote {PAGE.relative_to(PAGE.parents[1])}.")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
