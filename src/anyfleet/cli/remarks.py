"""Remarks below the tables of a run: which orders failed, what went wrong, what to change."""

from collections.abc import Iterator, Mapping, Sequence

from anyfleet.analysis.diagnosis import measuring
from anyfleet.cli.tables import failed_orders
from anyfleet.core.ledger import Ledger
from anyfleet.core.objectives import Task
from anyfleet.experiment import Experiment, RoundRecord
from anyfleet.study.remarks import warnings


def remarks(
    experiment: Experiment, task: Task, records: Sequence[RoundRecord], ledger: Ledger
) -> list[str]:
    """Return the lines below the table of a single run."""
    told = (failed_orders(ledger), measuring(experiment.method, task))
    return [*filter(None, told), *warnings(experiment, task, records, ledger)]


def over_seeds(found: Mapping[str, Sequence[Sequence[str]]]) -> Iterator[str]:
    """Yield the warnings of several runs, given by name as one list for each seed.

    The first seed with a warning stands for all that have one.
    """
    for name, group in found.items():
        some = [each for each in group if each]
        seeds = f" ({len(some)} of {len(group)} runs)" if len(group) > 1 else ""
        yield from (f"{name}{seeds}: {text}" for text in (some[0] if some else ()))
