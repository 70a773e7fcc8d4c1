"""`anyfleet compare`: several run files, several seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import typer

from anyfleet import config
from anyfleet.cli.record import built, picture, prepare, record, subfolder
from anyfleet.cli.screen import console, table
from anyfleet.errors import ConfigError, Problem
from anyfleet.study import Experiment, Point, common_accuracy, from_source, summarise


@dataclass(frozen=True)
class Entry:
    """A run file as read."""

    experiment: Experiment
    allow: tuple[str, ...]


def compare_files(
    words: Sequence[str], *, seeds: int, allow: Sequence[str], out: Path | None, threads: int
) -> None:
    """Every file with every seed; seeds count up from the file's own."""
    files, overrides = split(words)
    entries, screen = read_all(files, overrides, allow), console()
    folder = prepare(out, "compare", threads)
    screen.print(f"Folder: {folder}", markup=False, soft_wrap=True)
    runs: dict[str, list[Sequence[Point]]] = {name: [] for name in entries}
    for name, experiment, task in built(_schedule(entries, seeds)):
        label = f"{name}/seed-{experiment.seed}"
        inner, packages = subfolder(folder, label), entries[name].allow
        points = record(experiment, task, inner, screen=screen, name=label, allow=packages)
        runs[name].append(points)
    target = common_accuracy(points for group in runs.values() for points in group)
    screen.print()
    screen.print(table(runs, target, screen.width))
    results = {name: [summarise(points) for points in group] for name, group in runs.items()}
    text = msgspec.json.format(msgspec.json.encode(results), indent=2)
    (folder / "results.json").write_bytes(text + b"\n")
    picture(folder / "comparison.png", runs, screen=screen)


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
            entries[_free(file, entries)] = Entry(from_source(source), source.allow)
        except ConfigError as error:
            problems += [Problem(f"{file}: {p.path}", p.message) for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return entries


def _free(file: Path, taken: Mapping[str, Entry]) -> str:
    """The file's name without ending; numbered when another file has the same."""
    names = (file.stem if n == 1 else f"{file.stem}-{n}" for n in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def _schedule(entries: Mapping[str, Entry], seeds: int) -> Iterator[tuple[str, Experiment]]:
    """Seed by seed, so that files with the same task can share it."""
    for extra in range(seeds):
        for name, entry in entries.items():
            yield name, replace(entry.experiment, seed=entry.experiment.seed + extra)
