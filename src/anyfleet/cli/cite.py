"""`anyfleet cite`: BibTeX for what a run used."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import typer

import anyfleet
from anyfleet.cli.methods import known_methods
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import load
from anyfleet.names import near
from anyfleet.papers import Paper, papers_of

ANYFLEET = Paper(
    "anyfleet",
    ("The Anyfleet authors",),
    "Anyfleet: federated learning on unequal devices",
    f"Software, version {anyfleet.__version__}",
    kind="misc",
)


def cite_all(words: Sequence[str], *, allow: Sequence[str]) -> None:
    """Print the bibliography and nothing else, so that it can be written to a file."""
    used = [entry for word in words for entry in _entries(word, allow)]
    typer.echo("\n\n".join(dict.fromkeys([*used, ANYFLEET.bibtex()])))


def _entries(word: str, allow: Sequence[str]) -> list[str]:
    """Return the BibTeX entries of a method, of the run in a folder, or of a run file."""
    stored = Path(word) / "papers.bib"
    if word not in known_methods() and stored.is_file():
        text = stored.read_text(encoding="utf-8").strip()
        return text.split("\n\n") if text else []
    return [paper.bibtex() for paper in _papers(word, allow)]


def _papers(word: str, allow: Sequence[str]) -> Iterator[Paper]:
    methods = known_methods()
    if word in methods:
        known = methods[word]
        if known.paper:
            yield known.paper
        yield from papers_of(known.make())
    else:
        yield from papers_of(load(_file(word, methods), allow=allow).method)


def _file(word: str, methods: Collection[str]) -> Path:
    path = Path(word)
    if path.is_dir():  # without a papers.bib
        path /= "config.toml"
        if not path.is_file():
            message = "has no config.toml; name the folder of a single run."
            raise ConfigError([Problem(word, message)])
    elif not path.exists() and not word.endswith(".toml"):
        message = f"is neither a run folder, nor a run file, nor a method ({', '.join(methods)})"
        raise ConfigError([Problem(word, message + (near(word, methods) or "."))])
    return path
