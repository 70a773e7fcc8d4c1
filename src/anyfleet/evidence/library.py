"""The library of items: where recipes and result files lie in a copy of the project."""

from dataclasses import dataclass
from pathlib import Path

from anyfleet.errors import ConfigError, Problem
from anyfleet.evidence.items import Item, read_item
from anyfleet.evidence.measured import Cells
from anyfleet.evidence.results import CellResult, Results, read_results
from anyfleet.names import near

DOCUMENTS = ("fedpmt", "whale", "fedrescue", "anycost", "thesis", "comparison")


@dataclass(frozen=True)
class Library:
    """The items and result files below a folder, the root of a copy of the project."""

    root: Path = Path()

    def names(self) -> tuple[str, ...]:
        """Return the names of all items, document by document."""
        return tuple(
            f"{document}/{file.stem}"
            for document in DOCUMENTS
            for file in sorted((self.root / "recipes" / document).glob("*.toml"))
        )

    def item(self, name: str) -> Item:
        """Return an item; raise ConfigError if there is none, or if it is wrong."""
        file = self.root / "recipes" / f"{name}.toml"
        if name not in self.names():
            told = "there are no items here: run this in a copy of the project (recipes/)."
            if known := self.names():
                meant = near(name, known) or "."
                told = f"is no item here{meant} `anyfleet reproduce --list` shows all."
            raise ConfigError([Problem(name, told)])
        return read_item(file)

    def items(self) -> tuple[Item, ...]:
        """Return all items; raise ConfigError with the problems of all."""
        found: list[Item] = []
        problems: list[Problem] = []
        for name in self.names():
            try:
                found.append(self.item(name))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return tuple(found)

    def result_file(self, name: str) -> Path:
        """Return where the result file of an item lies."""
        return self.root / "evidence" / f"{name}.json.gz"

    def cells(self) -> Cells:
        """Return the results of all items by digest: of equal experiments the one of most seeds."""
        found: dict[str, tuple[str, CellResult]] = {}
        for name in self.names():
            results = self.results(name)
            for digest, cell in results.cells.items() if results is not None else ():
                if digest not in found or len(found[digest][1].runs) < len(cell.runs):
                    found[digest] = name, cell
        return found

    def results(self, name: str) -> Results | None:
        """Return the results of an item, None if it was never run."""
        return read_results(self.result_file(name))
