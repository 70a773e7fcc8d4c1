"""`anyfleet sweep`: run files with every combination of some settings, each with several seeds."""

from collections.abc import Sequence
from dataclasses import replace

import typer

from anyfleet.analysis.comparison import Goal
from anyfleet.cli.compare import show_study, split, study_folder
from anyfleet.cli.run import Means
from anyfleet.cli.study import Manner, opened, show_comparison
from anyfleet.study import Setting, Sources, Study, cells_of, settings_of

_SEEDS = 3  # unless somebody says how many, or which


def sweep_files(
    words: Sequence[str],
    *,
    seeds: int | None,
    means: Means,
    goal: Goal,
    manner: Manner,
    given: Sequence[str] = (),
) -> None:
    """Run every file with every combination of the values in `key=[…]`, and compare."""
    if (folder := study_folder(words)) is not None:
        show_study(folder, given=given, goal=goal, manner=manner)
        return
    files, changes = split(words)
    overrides, settings = settings_of(changes)
    named = _seeds(settings, seeds)
    rest = tuple(setting for setting in settings if setting.key != "seed")
    sources = Sources(tuple(files), tuple(means.overrides(overrides)), rest)
    sources = replace(sources, seeds=named, allow=manner.terms.allow)
    study = Study(cells_of(sources), "sweep", means.threads, goal)
    with opened(study, manner) as found:
        show_comparison(found)


def _seeds(settings: Sequence[Setting], count: int | None) -> int | tuple[int, ...]:
    """Return how many seeds there are, or which; raise BadParameter if both are said."""
    named = [setting.values for setting in settings if setting.key == "seed"]
    if not named:
        return _SEEDS if count is None else count
    if count is not None:
        told = "says how many seeds, and seed=[…] says which; keep one of them."
        raise typer.BadParameter(told, param_hint="--seeds")
    wrong = [value for value in named[0] if not value.lstrip("-").isdecimal()]
    if wrong:
        raise typer.BadParameter(f"seed=[…] takes whole numbers, got {', '.join(wrong)}.")
    return tuple(map(int, named[0]))
