"""`anyfleet resume`: a run, on real devices too, or a study goes on from where it stands."""

from pathlib import Path

import typer

from anyfleet.cli.demo import show_demo
from anyfleet.cli.run import resume_run
from anyfleet.cli.study import Manner, reopened, show_comparison
from anyfleet.study.state_file import holds_study


def resume_folder(folder: Path, manner: Manner, *, every: int | None) -> None:
    """Resume the run or the study in a folder."""
    if (folder / "fleet.json").is_file():
        from anyfleet.cli.fleet_serve import resume_fleet

        resume_fleet(folder, manner.terms)
        return
    if not holds_study(folder):
        resume_run(folder, manner.terms, every=every, json=manner.json)
        return
    if manner.terms.rounds is not None or every is not None:
        option = "--rounds" if manner.terms.rounds is not None else "--checkpoint-every"
        told = f"is for a single run, but {folder} holds a study."
        raise typer.BadParameter(told, param_hint=option)
    with reopened(manner) as found:
        (show_demo if found.study.kind == "demo" else show_comparison)(found)
