"""`anyfleet fleet profile`: this machine as a row of a fleet file."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from anyfleet.cli.screen import console, grid
from anyfleet.core.objectives import Task
from anyfleet.elastic import Slice
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import build, load
from anyfleet.hardware.probes import Peak, Sample, measure, standard, weigh
from anyfleet.hardware.profile import Profile, as_toml, conclude, slices


def profile_machine(
    out: Path | None,
    *,
    file: Path | None = None,
    allow: Sequence[str] = (),
    batch: int = 16,
    name: str = "this machine",
) -> None:
    """Measures some slices, shows how well one row explains them, and appends it to a file.

    The slices are those of the model in a run file, or of three networks of specification §C. Nothing is
    measured before the file to append to is known to be TOML that can take a row.
    """
    screen = console()
    if out is not None:
        _extended(out, "[[fleet.groups]]\n")
    tasks = standard(batch) if file is None else {file.stem: build(load(file, (), allow))}
    samples, peaks = _measured(tasks, batch, screen)
    found = conclude(samples, peaks)
    screen.print(_table(found, screen.width))
    errors = [abs(found.fitted.error(sample)) for sample in samples]
    screen.print(f"\nMedian error {median(errors):.0%}, largest {max(errors):.0%}.")
    for peak in peaks:
        screen.print(
            f"{peak.net}: training takes {peak.measured / 1e6:,.1f} MB at its peak; "
            f"planners count {peak.predicted / 1e6:,.1f} MB.",
            markup=False,
        )
    row = as_toml(found, name)
    screen.print(f"\n{row}", markup=False)
    if out is not None:
        out.write_text(_extended(out, row), encoding="utf-8")
        screen.print(f"Written to {out}.", markup=False, soft_wrap=True)


def _measured(
    tasks: Mapping[str, Task], batch: int, screen: Console
) -> tuple[list[Sample], list[Peak]]:
    wanted = [(net, slice_) for net, task in tasks.items() for slice_ in slices(task)]
    samples = [measure(net, tasks[net], each, batch) for net, each in _shown(wanted, screen)]
    return samples, [weigh(net, task, batch) for net, task in tasks.items()]


def _shown(wanted: Sequence[tuple[str, Slice]], screen: Console) -> Iterator[tuple[str, Slice]]:
    """What to measure, one by one, with a bar on a terminal and a line for each net elsewhere."""
    if screen.is_terminal:
        yield from track(wanted, "measuring", console=screen)
        return
    said = ""
    for net, slice_ in wanted:
        if net != said:
            screen.print(f"measuring {net}", markup=False)
        said = net
        yield net, slice_


def _extended(file: Path, row: str) -> str:
    """A file with one more row, if that can be read again."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    text = f"{before.rstrip()}\n\n{row}" if before.strip() else row
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = Problem(str(file), f"no [[fleet.groups]] can be added at its end: {error}")
        raise ConfigError([problem]) from error
    return text


def _table(found: Profile, width: int) -> Table:
    """A row for each slice: milliseconds of one local step."""
    rows = {}
    for sample in found.samples:
        depth = f" from layer {sample.first_trained_layer}" if sample.first_trained_layer else ""
        measured = 1e3 * sample.seconds / sample.local_steps
        fitted = 1e3 * found.fitted.seconds(sample) / sample.local_steps
        cells = (f"{measured:,.2f}", f"{fitted:,.2f}", f"{found.fitted.error(sample):+.0%}")
        rows[f"{sample.net} width {sample.width:.3g}{depth}"] = cells
    return grid(("measured ms", "fitted ms", "error"), rows, width)
