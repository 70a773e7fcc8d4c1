"""The folders of the runs of a study: one rule for those who write them and those who read them."""

import re
from collections.abc import Collection, Iterator

STUDY = "study.toml"  # what the study is, by name of its experiments
_BRACKETS = re.compile(r"[][{}\"]")
_UNSAFE = re.compile(r"[^\w.=+-]+")  # in the name of a folder
_LONGEST = 80  # name of a folder
_TAKEN = frozenset(
    {
        "comparison.png",
        "lock",
        "results.csv",
        "results.json",
        "results.tex",
        STUDY,
    }
)


def study_folders(names: Collection[str]) -> dict[str, str]:
    """Return the name of a folder for each name, all different, also where case does not count."""
    found: dict[str, str] = {}
    taken = set(_TAKEN)
    for name in names:
        words = _BRACKETS.sub("", name.lower()).replace(", ", "_")
        plain = _UNSAFE.sub("-", words).strip(".-")[:_LONGEST] or "run"
        free = next(each for each in numbered(plain) if each not in taken)
        taken.add(free)
        found[name] = free
    return found


def numbered(name: str) -> Iterator[str]:
    """Yield a name, then name-2, name-3, …."""
    number = 1
    while True:
        yield name if number == 1 else f"{name}-{number}"
        number += 1
