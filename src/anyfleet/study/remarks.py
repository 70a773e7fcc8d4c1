"""What went wrong in a run of a study, kept in its folder: it is told below the tables."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from anyfleet.analysis.diagnosis import (
    exploded,
    first_visits,
    nothing_counted,
    seconds_needed,
    unfit_threshold,
)
from anyfleet.core.evaluation import evaluate
from anyfleet.core.ledger import Ledger
from anyfleet.core.objectives import Task
from anyfleet.experiment import Experiment, RoundRecord, populate
from anyfleet.store.disk import write

FILE = "remarks.json"


def warnings(
    experiment: Experiment, task: Task, records: Sequence[RoundRecord], ledger: Ledger
) -> list[str]:
    """Return what went wrong in a run, with the likely cause and what to change."""
    method = experiment.method
    if (
        any(failure.startswith("too late") for failure in ledger.failure)
        and not ledger.counted.any()
    ):
        needed = seconds_needed(ledger, method, task, populate(experiment, task))
        nothing = nothing_counted(ledger, needed)
    else:
        nothing = nothing_counted(ledger)
    grown = "" if nothing else exploded(records, ledger, _initial_loss(experiment, task))
    return [*filter(None, (nothing, grown, first_visits(ledger, method), unfit_threshold(ledger)))]


def _initial_loss(experiment: Experiment, task: Task) -> float:
    """Return the test loss of the initial model, at the first width of the run."""
    slice_, norm = task.blueprint.prefix(experiment.widths[0]), experiment.method.norm
    return evaluate(task, task.params, task.buffers, norm=norm, slice_=slice_)["loss"]


def keep(folder: Path, remarks: Sequence[str]) -> None:
    """Write the warnings of a run into its folder: a study that goes on tells them again."""
    write(folder / FILE, msgspec.json.encode(list(remarks)) + b"\n")


def kept(folder: Path) -> list[str] | None:
    """Return the warnings in the folder of a run; None if they are not there."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=list[str])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
