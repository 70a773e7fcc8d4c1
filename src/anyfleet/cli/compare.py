"""`anyfleet compare`: several run files, each with several seeds."""

from collections.abc import Sequence
from pathlib import Path

import typer

from anyfleet.analysis.comparison import Goal
from anyfleet.cli.run import Means
from anyfleet.cli.study import Manner, opened, reopened, show_comparison
from anyfleet.study import Sources, Study, cells_of
from anyfleet.study.state_file import holds_study

_OF_NEW_STUDIES = ("seeds", "out", "threads", "engine", "device")  # options


def compare_files(
    words: Sequence[str],
    *,
    seeds: int,
    means: Means,
    goal: Goal,
    manner: Manner,
    given: Sequence[str] = (),
) -> None:
    """Run every file with every seed, and compare; seeds count up from the file's own.

    The folder of a study in place of files goes on with it, and compares by this goal if it says
    anything. `given` names the options that somebody gave.
    """
    if (folder := study_folder(words)) is not None:
        show_study(folder, given=given, goal=goal, manner=manner)
        return
    files, overrides = split(words)
    changes = tuple(means.overrides(overrides))
    sources = Sources(tuple(files), changes, seeds=seeds, allow=manner.terms.allow)
    study = Study(cells_of(sources), "compare", means.threads, goal)
    with opened(study, manner) as found:
        show_comparison(found)


def show_study(folder: Path, *, given: Sequence[str], goal: Goal, manner: Manner) -> None:
    """Go on with the study in a folder, and compare by the goal that it has, or by another one."""
    wrong = [f"--{name}" for name in _OF_NEW_STUDIES if name in given]
    if wrong:
        told = f"is for a new study, but {folder} holds one, which has its own; leave it out."
        raise typer.BadParameter(told, param_hint=", ".join(wrong))
    again = Manner(folder, manner.jobs, manner.json, manner.terms)
    with reopened(again, None if goal == Goal() else goal) as found:
        show_comparison(found)


def study_folder(words: Sequence[str]) -> Path | None:
    """Return the folder of a study if there is one among the words; it must be the only one."""
    folders = [word for word in words if _there(word) and holds_study(Path(word))]
    if folders and len(words) > 1:
        raise typer.BadParameter(
            f"{folders[0]} holds a study, which takes no changes and no other files. Name it "
            "alone, or begin another study from run files."
        )
    return Path(folders[0]) if folders else None


def options_given(context: typer.Context) -> list[str]:
    """Return the names of the options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def split(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return run files, and `key=value` overrides of all of them."""
    _refuse_split_lists(words)
    overrides = [word for word in words if "=" in word and not _there(word)]
    files = [Path(word) for word in words if word not in overrides]
    if not files:
        raise typer.BadParameter("no run file is given; name at least one.")
    return files, overrides


def _refuse_split_lists(words: Sequence[str]) -> None:
    """Raise BadParameter for a list that the shell has split at its blanks."""
    for first, word in enumerate(words):
        if "=[" not in word.replace(" ", "") or word.count("[") <= word.count("]"):
            continue
        for last in range(first + 2, len(words) + 1):
            whole = " ".join(words[first:last])
            if whole.count("[") == whole.count("]"):
                raise typer.BadParameter(f"the shell has split a list; quote it: '{whole}'")


def _there(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):  # too long, or not a file name
        return False
