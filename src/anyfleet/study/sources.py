"""What a study is made of: run files, seeds, and settings to try."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyfleet import config
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import from_source
from anyfleet.store.study_folders import numbered
from anyfleet.study.plan import Cell


@dataclass(frozen=True)
class Setting:
    """A key of run files, and the values that a study tries for it, as TOML."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """What the cells of a study are made of: run files, changes of all of them, and settings."""

    files: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    seeds: int | tuple[int, ...] = 3  # how many from each file's own on, or which
    allow: tuple[str, ...] = ()


def cells_of(sources: Sources) -> dict[str, Cell]:
    """Return every file with every combination of the settings, by name.

    Raise ConfigError with the problems of all at once.
    """
    found: dict[str, Cell] = {}
    problems: dict[str, Problem] = {}
    for stem, file in _named(sources.files).items():
        for label, changes in combinations(sources.settings):
            whole = ", ".join((stem, *label))
            name = next(each for each in numbered(whole) if each not in found)
            try:
                found[name] = _cell(file, changes, sources)
            except ConfigError as error:
                told = [_explained(each, sources.settings) for each in error.problems]
                for each in told:
                    named = each.path.partition(":")[0] == str(file)  # already
                    wrong = each if named else each.within(file)
                    problems[str(wrong)] = wrong
    if problems:
        raise ConfigError([*problems.values()])
    return found


def _cell(file: Path, changes: tuple[str, ...], sources: Sources) -> Cell:
    source = config.read(file, [*sources.overrides, *changes], sources.allow)
    experiment = from_source(source)
    given = sources.seeds
    first = experiment.seed
    seeds = tuple(range(first, first + given)) if isinstance(given, int) else given
    open_ = tuple(
        key
        for key, value in (("engine", experiment.engine), ("device", experiment.device))
        if value == "auto"
    )
    experiment = replace(experiment, seed=seeds[0])
    return Cell(experiment, seeds, source.allow, file.resolve().parent, open_)


def _explained(problem: Problem, settings: Collection[Setting]) -> Problem:
    """Return a problem of a value that a sweep tries, with how lists are read there."""
    if "expected a list" not in problem.message:
        return problem
    for setting in settings:
        if problem.path == setting.key or problem.path.startswith(f"{setting.key}."):
            told = (
                f"{problem.message} A sweep tries the entries of {setting.key}=[…] one by one; a "
                f"setting that is itself a list needs a list of lists: {setting.key}=[[…], […]]."
            )
            return Problem(problem.path, told)
    return problem


def _named(files: Sequence[Path]) -> dict[str, Path]:
    """Return files by name without the suffix, numbered if another file has the same."""
    found: dict[str, Path] = {}
    for file in files:
        found[next(each for each in numbered(file.stem) if each not in found)] = file
    return found


def combinations(
    settings: tuple[Setting, ...],
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return all combinations of values, each as labels ("lr=0.1") and as overrides."""
    short = short_keys([setting.key for setting in settings])
    found: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((), ())]
    for setting in settings:
        told = _labels(setting.values)
        found = [
            ((*labels, f"{short[setting.key]}={label}"), (*all_, f"{setting.key}={value}"))
            for labels, all_ in found
            for label, value in zip(told, setting.values, strict=True)
        ]
    return found


def _labels(values: Sequence[str]) -> Sequence[str]:
    """Return values of TOML as labels: texts lose their quotation marks if that is clear."""
    plain = [_plain(value) for value in values]
    return plain if len(set(plain)) == len(plain) else values


def _plain(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] == '"' and "\\" not in value
    return value[1:-1] if quoted else value


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Return the shortest ends of dotted keys that tell them apart: `lr` of `method.train.lr`."""
    found: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        others = [other for other in keys if other != key]
        found[key] = next(
            (end for end in ends if not any(f".{o}".endswith(f".{end}") for o in others)), key
        )
    return found


def settings_of(words: Collection[str]) -> tuple[list[str], list[Setting]]:
    """Return the changes of all runs among `key=value`, and what a sweep tries (`key=[…]`).

    Raise ConfigError for a list without values, or with one that stands twice, and for a setting
    that is given twice.
    """
    overrides: list[str] = []
    found: list[Setting] = []
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not text.strip().startswith("["):
            overrides.append(word)
            continue
        try:
            listed = config.override({}, [f"value={text}"])["value"]
            values = tuple(map(config.toml_value, listed))
        except ConfigError as error:
            problems += [Problem(key, each.message) for each in error.problems]
            continue
        except TypeError as error:  # a date, say
            problems.append(Problem(key, str(error)))
            continue
        if not values:
            problems.append(Problem(key, "the list has no values to try."))
        elif len({config.toml_value(_as_fraction(each)) for each in listed}) < len(values):
            problems.append(Problem(key, "the list has a value twice; keep one of them."))
        elif key in [setting.key for setting in found]:
            problems.append(Problem(key, "is given twice; keep one list."))
        else:
            found.append(Setting(key, values))
    tried = {setting.key for setting in found}
    for key in dict.fromkeys(word.partition("=")[0].strip() for word in overrides):
        if key in tried:
            problems.append(Problem(key, "is given as a list to try and as one value; keep one."))
    if problems:
        raise ConfigError(problems)
    return overrides, found


def _as_fraction(value: Any) -> Any:
    """Return plain data whose numbers are all fractions: 1 and 1.0 are one value to try."""
    if isinstance(value, list):
        return [_as_fraction(each) for each in value]
    if isinstance(value, dict):
        return {key: _as_fraction(each) for key, each in value.items()}
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
