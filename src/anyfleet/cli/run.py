"""`anyfleet run`: a run file becomes a run folder."""

from collections.abc import Sequence
from pathlib import Path

import typer

from anyfleet import config
from anyfleet.cli.app import INTERRUPTED
from anyfleet.cli.details import apart
from anyfleet.cli.record import picture, prepare, record
from anyfleet.cli.screen import console, lost_orders, table
from anyfleet.diagnosis import measuring, unfit_threshold
from anyfleet.queries import best, taken_apart
from anyfleet.store import read_ledger, read_points
from anyfleet.study import build, from_source


def run_file(
    file: Path, overrides: Sequence[str], *, allow: Sequence[str], out: Path | None, threads: int
) -> None:
    """Everything is checked and built before a folder is made."""
    screen = console()
    source = config.read(file, overrides, allow)
    experiment = from_source(source)
    task = build(experiment)
    folder = prepare(out, file.stem, threads)
    screen.print(f"Run folder: {folder}", markup=False, soft_wrap=True)
    try:
        points = record(experiment, task, folder, screen=screen, name=file.stem, allow=source.allow)
    except KeyboardInterrupt as stop:
        done = len(read_points(folder))
        screen.print(
            f"Stopped after {done} of {experiment.rounds} steps. Everything so far is in {folder}.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from stop
    runs = {file.stem: [points]}
    screen.print(table(runs, best(points), screen.width))
    details = taken_apart(points)
    if details:
        screen.print(
            "\nAccuracy at the end in %, of groups and devices on their own test data:",
            markup=False,
        )
        screen.print(apart(details, screen.width))
        screen.print()
    ledger = read_ledger(folder)
    remarks = lost_orders(ledger), measuring(experiment.method, task), unfit_threshold(ledger)
    for remark in filter(None, remarks):
        screen.print(remark, markup=False, soft_wrap=True)
    picture(folder / "curves.png", runs, screen=screen)
