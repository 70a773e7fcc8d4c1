"""`anyfleet resume`: a run that was stopped goes on in its folder."""

from pathlib import Path

from anyfleet.cli.run import Run, perform, show
from anyfleet.cli.screen import console
from anyfleet.store import Origin, Recording, Terms, finished, reopen


def resume_folder(folder: Path, terms: Terms, *, every: int | None) -> None:
    """Goes on from the last good checkpoint; does nothing when the run has all of its steps."""
    screen = console()
    if finished(folder, terms):
        show(screen, f"{folder} has all of its steps. For more, say how many: --rounds N")
        return
    run = reopen(folder, terms)
    for remark in run.remarks:
        show(screen, remark)
    done, rounds = run.past.progress.step, run.experiment.rounds
    show(screen, f"Run folder: {folder} (goes on after {done} of {rounds} steps)")
    every = run.every if every is None else every
    recording = Recording(
        folder,
        run.experiment,
        terms.allow,
        origin=Origin(run.task),
        past=run.past,
        every=every,
    )
    name = folder.resolve().name
    going_on = Run(run.experiment, run.task, recording, name, run.past.state, terms.allow)
    perform(going_on, screen)
