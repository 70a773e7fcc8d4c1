"""Remarks below the tables of a run: which orders failed, what went wrong, what to change."""

from collections.abc import Iterator, Mapping, Sequence

from anyfleet.analysis.diagnosis import (
    exploded,
    first_visits,
    measuring,
    nothing_counted,
    seconds_needed,
    unfit_threshold,
)
from anyfleet.cli.tables import failed_orders
from anyfleet.core.evaluation import evaluate
from anyfleet.core.ledger import Ledger
from anyfleet.core.objectives import Task
from anyfleet.experiment import Experiment, RoundRecord, populate


def remarks(
    experiment: Experiment, task: Task, records: Sequence[RoundRecord], ledger: Ledger
) -> list[str]:
    """Return the lines below the table of a single run."""
    told = (failed_orders(ledger), measuring(experiment.method, task))
    return [*filter(None, told), *warnings(experiment, task, records, ledger)]


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


def over_seeds(found: Mapping[str, Sequence[Sequence[str]]]) -> Iterator[str]:
    """Yield the warnings of several runs, given by name as one list for each seed.

    The first seed with a warning stands for all that have one.
    """
    for name, group in found.items():
        some = [each for each in group if each]
        seeds = f" ({len(some)} of {len(group)} runs)" if len(group) > 1 else ""
        yield from (f"{name}{seeds}: {text}" for text in (some[0] if some else ()))
