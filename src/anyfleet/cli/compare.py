"""`anyfleet compare`: several run files, several seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from anyfleet import config
from anyfleet.cli.record import built, picture, prepare, record, subfolder
from anyfleet.cli.screen import console, table, targets
from anyfleet.errors import ConfigError, Problem
from anyfleet.queries import common_accuracy, percent, summarise, to_target
from anyfleet.report import Runs
from anyfleet.store import Origin, Recording
from anyfleet.store.disk import write
from anyfleet.study import Experiment, Point, build, from_source


@dataclass(frozen=True)
class Entry:
    """A run file as read."""

    experiment: Experiment
    allow: tuple[str, ...]
    home: Path  # the folder of the file


@dataclass(frozen=True)
class Goal:
    """What runs are compared by: an accuracy, and at which width; or the best that all reach."""

    target: float | None = None
    width: float | None = None


def compare_files(
    words: Sequence[str],
    *,
    seeds: int,
    allow: Sequence[str],
    out: Path | None,
    threads: int,
    goal: Goal,
) -> None:
    """Every file with every seed; seeds count up from the file's own."""
    files, overrides = split(words)
    entries, screen = read_all(files, overrides, allow), console()
    _need_width(entries, goal)
    need_agreement(entries)
    folder = prepare(out, "compare", threads)
    screen.print(f"Folder: {folder}", markup=False, soft_wrap=True)
    runs: dict[str, list[Sequence[Point]]] = {name: [] for name in entries}
    for name, experiment, task in built(_schedule(entries, seeds)):
        label = f"{name}/seed-{experiment.seed}"
        inner, packages = subfolder(folder, label), entries[name].allow
        recording = Recording(inner, experiment, packages, origin=Origin(task, entries[name].home))
        points = record(experiment, task, recording, screen=screen, name=label)
        runs[name].append(points)
    screen.print()
    _conclude(runs, goal, folder, screen)
    picture(folder / "comparison.png", runs, screen=screen)


def _conclude(runs: Runs, goal: Goal, folder: Path, screen: Console) -> None:
    """Tables, and the same as a file."""
    everybody = [points for group in runs.values() for points in group]
    common = common_accuracy(everybody, goal.width)
    target = common if goal.target is None else goal.target
    screen.print(table(runs, common_accuracy(everybody), screen.width))
    costs = {
        name: [to_target(points, target, goal.width) for points in group]
        for name, group in runs.items()
    }
    where = "" if goal.width is None else f" at width {goal.width:g}"
    screen.print(f"\nTo reach {percent(target)}{where}:", markup=False)
    screen.print(targets(costs, screen.width))
    results = {
        name: [
            {**asdict(summarise(points)), "to_target": cost}
            for points, cost in zip(group, costs[name], strict=True)
        ]
        for name, group in runs.items()
    }
    text = msgspec.json.format(msgspec.json.encode(results), indent=2)
    write(folder / "results.json", text + b"\n")


def _need_width(entries: Mapping[str, Entry], goal: Goal) -> None:
    message = f"--width {goal.width} was asked for, which is not evaluated; add it to widths."
    missing = [
        Problem(f"{name}: widths", message)
        for name, entry in entries.items()
        if goal.width is not None and goal.width not in entry.experiment.widths
    ]
    if missing:
        raise ConfigError(missing)


def split(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files, and `key=value` overrides of all of them."""
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    files = [Path(word) for word in words if word not in overrides]
    if not files:
        raise typer.BadParameter("name at least one run file.")
    return files, overrides


def read_all(
    files: Sequence[Path], overrides: Sequence[str], allow: Sequence[str]
) -> Mapping[str, Entry]:
    """The problems of all files at once, each with the name of its file."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            source = config.read(file, overrides, allow)
            entries[_free(file, entries)] = Entry(
                from_source(source), source.allow, file.resolve().parent
            )
        except ConfigError as error:
            problems += [Problem(f"{file}: {p.path}", p.message) for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return entries


def need_agreement(entries: Mapping[str, Entry]) -> None:
    """Refuses files whose task, fleet and details disagree, before the first of them runs."""
    problems: list[Problem] = []
    for name, entry in entries.items():
        try:
            build(entry.experiment)
        except ConfigError as error:
            problems += [Problem(f"{name}: {p.path}", p.message) for p in error.problems]
    if problems:
        raise ConfigError(problems)


def _free(file: Path, taken: Mapping[str, Entry]) -> str:
    """The file's name without ending; numbered when another file has the same."""
    names = (file.stem if n == 1 else f"{file.stem}-{n}" for n in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def _schedule(entries: Mapping[str, Entry], seeds: int) -> Iterator[tuple[str, Experiment]]:
    """Seed by seed, so that files with the same task can share it."""
    for extra in range(seeds):
        for name, entry in entries.items():
            yield name, replace(entry.experiment, seed=entry.experiment.seed + extra)
