"""`anyfleet compare`: several run files, each with several seeds."""

from collections.abc import Sequence
from pathlib import Path

import typer

from anyfleet.analysis.comparison import Goal
from anyfleet.cli.run import Means
from anyfleet.cli.study import Manner, opened, reopened, show_comparison
from anyfleet.study import Sources, Study, cells_of
from anyfleet.study.state_file import holds_study


def compare_files(
    words: Sequence[str], *, seeds: int, means: Means, goal: Goal, manner: Manner
) -> None:
    """Run every file with every seed, and compare; seeds count up from the file's own.

    The folder of a study in place of files goes on with it, and compares by this goal.
    """
    if (folder := study_folder(words)) is not None:
        again = Manner(folder, manner.jobs, manner.json, manner.terms)
        with reopened(again, goal) as found:
            show_comparison(found)
        return
    files, overrides = split(words)
    changes = tuple(means.overrides(overrides))
    sources = Sources(tuple(files), changes, seeds=seeds, allow=manner.terms.allow)
    study = Study(cells_of(sources), "compare", means.threads, goal)
    with opened(study, manner) as found:
        show_comparison(found)


def study_folder(words: Sequence[str]) -> Path | None:
    """Return the folder of a study if that is the only word; None otherwise."""
    return Path(words[0]) if len(words) == 1 and holds_study(Path(words[0])) else None


def split(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return run files, and `key=value` overrides of all of them."""
    overrides = [word for word in words if "=" in word and not _there(word)]
    files = [Path(word) for word in words if word not in overrides]
    if not files:
        raise typer.BadParameter("no run file is given; name at least one.")
    return files, overrides


def _there(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):  # too long, or not a file name
        return False
