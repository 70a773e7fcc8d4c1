"""`anyfleet validate`: what a run file would do, without doing it."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from rich.table import Table

from anyfleet.analysis.diagnosis import measuring
from anyfleet.cli.screen import console
from anyfleet.cli.tables import grid
from anyfleet.core.slots import nested
from anyfleet.elastic import Blueprint, cost
from anyfleet.experiment import Experiment, assemble, load


def validate_file(file: Path, overrides: Sequence[str], *, allow: Sequence[str]) -> None:
    """Build everything that a run needs, the data too; raise ConfigError if something is wrong."""
    screen = console()
    experiment = load(file, overrides, allow)
    task, world = assemble(experiment)
    sizes = [task.size(device) for device in range(task.devices)]
    screen.print(f"{file} is valid.\n", markup=False, soft_wrap=True)
    screen.print(
        f"{task.devices} devices with {min(sizes)} to {max(sizes)} samples each, "
        f"{len(task.test)} test samples, {len(task.server)} on the server.",
        soft_wrap=True,
    )
    for what, how in (("Data", task.assignment), ("Fleet", world.assignment)):
        screen.print(f"{what}: {how}", markup=False, soft_wrap=True)
    screen.print()
    screen.print(f"{experiment.method}\n", markup=False, soft_wrap=True)
    if cost_of_measuring := measuring(experiment.method, task):
        screen.print(f"{cost_of_measuring}\n", markup=False, soft_wrap=True)
    screen.print(_sizes(task.blueprint, used_widths(experiment), screen.width))
    for note in task.blueprint.remarks:
        screen.print(f"note: {note}", markup=False, soft_wrap=True)


def used_widths(experiment: Experiment) -> list[float]:
    """Return the widths of a run, widest first: all that is planned or evaluated, and the whole."""
    plans = (getattr(part, "widths", ()) for part in nested(experiment.method.plan))
    # A plan of somebody else may call something different its widths.
    planned = (each for each in chain(*plans) if isinstance(each, int | float) and 0 < each < 1)
    return sorted({1.0, *experiment.widths, *planned}, reverse=True)


def _sizes(blueprint: Blueprint, widths: Iterable[float], width: int) -> Table:
    """Return sizes and FLOP per sample of the model and of its narrower sub-models."""
    heads = ("parameters", "kB", "FLOP forward", "FLOP backward", "activations kB")
    rows = {}
    for each in widths:
        found = cost(blueprint, blueprint.prefix(each))
        amounts = (found.params, found.nbytes / 1000, found.forward_flops, found.backward_flops)
        cells = [f"{amount:,.0f}" for amount in (*amounts, found.activation_bytes / 1000)]
        rows[f"width {each:g}"] = cells
    return grid(heads, rows, width)
