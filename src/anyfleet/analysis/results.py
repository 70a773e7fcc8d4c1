"""Results from disk: the runs of a folder as values (`read_runs`), or as a DataFrame of pandas."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyfleet.analysis.summaries import Runs
from anyfleet.errors import StoreError
from anyfleet.experiment import RoundRecord
from anyfleet.store import Terms, finished, read_rounds
from anyfleet.store.environment import FILE
from anyfleet.store.study_folders import STUDY, study_folders

if TYPE_CHECKING:
    from pandas import DataFrame

_SEED = re.compile(r"seed--?\d+")


class NoPandas(ImportError):
    """An error: pandas is not installed; the message says how to get it."""

    def __init__(self) -> None:
        super().__init__("read_results needs pandas: pip install 'anyfleet[report]'")


@dataclass(frozen=True)
class _Found:
    """The folder of a run, with its name in a study."""

    name: str
    seed: int
    folder: Path


def read_runs(folder: str | Path) -> Runs:
    """Return the finished runs in a folder by name and seed, as `compare` takes them.

    The folder is that of one run, of a study, or any other that holds such folders. Runs of a study
    have their names and order there; another run has the name of its folder, without `seed-0` at
    its end. Raise StoreError if there is no run.
    """
    runs: dict[str, dict[int, tuple[RoundRecord, ...]]] = {}
    for each in _runs(folder):
        if finished(each.folder, Terms()):
            runs.setdefault(each.name, {})[each.seed] = read_rounds(each.folder)
    return runs


def read_results(folder: str | Path) -> "DataFrame":
    """Return every round of every run in a folder as a DataFrame of pandas, one row for each.

    Runs that are not finished are there as far as they are; the column `finished` tells. The other
    columns are `run`, `seed`, the numbers of a RoundRecord, its `score`, and each metric on the
    test set as `test_accuracy`, `test_loss`, `test_accuracy@0.5`. Raise NoPandas without pandas,
    and StoreError if there is no run.
    """
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise NoPandas from error
    return DataFrame(result_rows(folder))


def result_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of `read_results` as plain data, for those who have no pandas."""
    return [
        {
            "run": each.name,
            "seed": each.seed,
            "finished": done,
            "round_index": record.round_index,
            "metric": record.metric,
            "score": record.score,
            "time": record.time,
            "joules": record.joules,
            "down": record.down,
            "up": record.up,
            "flops": record.flops,
            "replies": record.replies,
            "failures": record.failures,
            "unmeasured": record.unmeasured,
            "loss": record.loss,
            "on_devices": record.on_devices,
            **{f"test_{name}": value for name, value in record.scores.items()},
        }
        for each in _runs(folder)
        for done in [finished(each.folder, Terms())]
        for record in read_rounds(each.folder)
    ]


def _runs(folder: str | Path) -> Iterator[_Found]:
    """Yield the runs in a folder: in the order of its study, or sorted by name, and by seed."""
    top = Path(folder)
    marks = [top / FILE] if (top / FILE).is_file() else [*top.rglob(FILE)]
    if not marks:
        why = "holds no run" if top.is_dir() else "is not a folder"
        raise StoreError(f"{top} {why}. Name the folder of a run, or of a comparison.")
    known = _study_names(top)
    places = {folder: place for place, folder in enumerate(known)}
    by_folder = [(_name(mark.parent, top), mark.parent) for mark in marks]
    by_folder.sort(key=lambda each: (places.get(each[0], len(places)), each[0], _seed(each[1])))
    for name, run in by_folder:
        yield _Found(known.get(name, name), _seed(run), run)


def _study_names(top: Path) -> dict[str, str]:
    """Return the names of a study's runs by folder, in its order; {} if the folder holds none."""
    file = top / STUDY
    if not file.is_file():
        return {}
    cells = _read(file).get("cells")
    names = list(cells) if isinstance(cells, dict) else []
    return {folder: name for name, folder in study_folders(names).items()}


def _name(run: Path, top: Path) -> str:
    parts = run.relative_to(top).parts
    if parts and _SEED.fullmatch(parts[-1]):
        parts = parts[:-1]
    return "/".join(parts) or top.resolve().name


def _seed(run: Path) -> int:
    file = run / "config.toml"
    seed = _read(file).get("seed")
    if not isinstance(seed, int):
        raise StoreError(f"{file} has no seed. Name the folder of a run that Anyfleet wrote.")
    return seed


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{file} cannot be read: {error}.") from error
