"""The closing lines of a run: what was lost, what went wrong, and what to change."""

from collections.abc import Iterator, Mapping, Sequence

from anyfleet.analysis.diagnosis import (
    exploded,
    first_visits,
    measuring,
    nothing_counted,
    seconds_needed,
    unfit_threshold,
)
from anyfleet.cli.screen import lost_orders
from anyfleet.core.evaluation import evaluate
from anyfleet.core.ledger import Ledger
from anyfleet.core.objectives import Task
from anyfleet.experiment import Experiment, RoundRecord, populate


def closing(
    experiment: Experiment, task: Task, points: Sequence[RoundRecord], ledger: Ledger
) -> list[str]:
    """Return all that is to be said below the table of a single run."""
    told = (lost_orders(ledger), measuring(experiment.method, task))
    return [*filter(None, told), *warnings(experiment, task, points, ledger)]


def warnings(
    experiment: Experiment, task: Task, points: Sequence[RoundRecord], ledger: Ledger
) -> list[str]:
    """Return what went wrong in a run, each with its likely cause and what to change."""
    method = experiment.method
    if any(lost.startswith("too late") for lost in ledger.failure) and not ledger.counted.any():
        needed = seconds_needed(ledger, method, task, populate(experiment, task))
        nothing = nothing_counted(ledger, needed)
    else:
        nothing = nothing_counted(ledger)
    grown = "" if nothing else exploded(points, ledger, _start(experiment, task))
    return [*filter(None, (nothing, grown, first_visits(ledger, method), unfit_threshold(ledger)))]


def _start(experiment: Experiment, task: Task) -> float:
    """The test loss of the initial model, at the width that the run's loss is of."""
    slice_, norm = task.blueprint.prefix(experiment.widths[0]), experiment.method.norm
    return evaluate(task, task.params, task.buffers, norm=norm, slice_=slice_)["loss"]


def over_seeds(found: Mapping[str, Sequence[Sequence[str]]]) -> Iterator[str]:
    """Yield the warnings of several runs, by name one list for each seed; alike ones once.

    Of runs with several seeds the first that has a warning stands for all that have one.
    """
    for name, group in found.items():
        some = [each for each in group if each]
        seeds = f" ({len(some)} of {len(group)} runs)" if len(group) > 1 else ""
        yield from (f"{name}{seeds}: {text}" for text in (some[0] if some else ()))
