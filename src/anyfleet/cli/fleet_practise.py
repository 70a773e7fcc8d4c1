"""`anyfleet fleet practise`: a real fleet on this machine, compared with the simulator."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from anyfleet import config
from anyfleet.cli.screen import console, show
from anyfleet.deployment.practice import Practice, compare, devices_override, practise
from anyfleet.experiment import from_source, prepare
from anyfleet.runtime import Sequential
from anyfleet.store import claim

_STAND_IN = '{ use = "levels" }'  # a fleet of any size, for one that has another


def practise_file(
    file: Path,
    overrides: Sequence[str],
    *,
    devices: int | None,
    identical: bool,
    allow: Sequence[str],
    out: Path | None,
) -> int:
    """Practise a run file, and return the exit code: 1 if it should be identical and is not."""
    screen, changes = console(), devices_override(overrides, devices)
    torch.set_num_threads(1)
    source = config.read(file, changes, allow)
    experiment = from_source(source)
    if devices is not None and experiment.fleet.size not in (None, devices):
        show(
            screen, f"The fleet of {file} has {experiment.fleet.size} devices: {_STAND_IN} is used."
        )
        changes.append(f"fleet={_STAND_IN}")
        source = config.read(file, changes, allow)
        experiment = from_source(source)
    prepared = prepare(replace(experiment, engine=Sequential(), device="cpu"))
    with ExitStack() as stack:
        if out is None:
            made = tempfile.TemporaryDirectory(prefix="anyfleet-practice-")
            folder = Path(stack.enter_context(made))
        else:
            folder = claim(out)
        practice = Practice(file, tuple(changes), tuple(source.allow), folder, identical)
        for line in practise(practice, prepared):
            show(screen, line)
        found = compare(practice, prepared)
    beside = "a replay of its arrivals" if found.replayed else "the simulator"
    if not found.differing:
        show(screen, f"Bit-identical with {beside}: all {found.parameters:,} numbers of the model.")
        return 0
    show(
        screen,
        f"Compared with {beside}: {found.differing:,} of {found.parameters:,} numbers of the model "
        f"differ, at most by {found.largest:.3g}.",
    )
    return 1 if identical else 0
