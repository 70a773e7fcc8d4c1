"""Result files: what came of the runs of an item, with where and how each was run.

A result file is compressed JSON. It holds a cell for every experiment of the item that was run, by
the digest of its configuration: a cell whose digest no longer fits the recipe is stale, and is kept
until the item is run again.
"""

import gzip
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from anyfleet.analysis.metric import Metric
from anyfleet.core.ledger import Ledger
from anyfleet.errors import StoreError
from anyfleet.experiment import RoundRecord
from anyfleet.store.disk import write

FORMAT = 1
_DIGITS = 6  # significant ones of every number
LOSS = "loss"  # the mean training loss that the devices of a round reported
TEST_LOSS = "test_loss"  # of the global model
# What a ledger has of each device in each round, by its name among the diagnostics of an item.
BY_DEVICE = MappingProxyType({"widths": "width", "utilities": "utility", "fisher": "fisher"})


class Series(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run at its evaluations: the round after which each took place, scores, and what was spent.

    Amounts count from the start of the run. `scores` are by width ("1", "0.5"), and "" is the score
    by which the run is measured. `diagnostics` are those that the item asks for, by round: of the
    parts of its method, its losses, and what the ledger has of each device (`BY_DEVICE`).
    """

    rounds: tuple[int, ...]
    scores: dict[str, tuple[float | None, ...]]
    seconds: tuple[float, ...]
    joules: tuple[float, ...]
    bytes: tuple[float, ...]
    flops: tuple[float, ...]
    metric: str = "accuracy"
    length: float = 0.0  # simulated seconds of the whole run
    diagnostics: dict[str, tuple[Any, ...]] = {}

    def values(self, width: str = "") -> tuple[float, ...]:
        """Return the scores at a width, NaN where there is none."""
        return tuple(float("nan") if each is None else each for each in self.scores[width])


class CellResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one experiment: a series for each seed, and where it was run.

    `also` are further cases and methods of the item that are the same experiment.
    """

    digest: str
    case: str
    method: str
    rounds: int
    devices: int
    machine: str
    date: str
    commit: str
    minutes: float  # of wall time, of all of its runs together, wherever they ran side by side
    runs: dict[int, Series]
    command: str = ""
    also: tuple[tuple[str, str], ...] = ()

    def places(self) -> tuple[tuple[str, str], ...]:
        """Return every case with the method that this is the result of."""
        return ((self.case, self.method), *self.also)

    def whole(self, run: Series) -> bool:
        """Return whether a run has all of its rounds, and did not end at its target before."""
        return bool(run.rounds) and run.rounds[-1] >= self.rounds

    def at(self, places: Sequence[tuple[str, str]]) -> "CellResult":
        """Return this result as that of these cases and methods alone."""
        (case, method), *also = places
        return msgspec.structs.replace(self, case=case, method=method, also=tuple(also))

    def joined(self, later: "CellResult") -> "CellResult":
        """Return this result with later runs of the same experiment.

        A command that is repeated brings runs that are known, perhaps with more diagnostics: where
        they come from does not change then. One that goes on brings them with new ones. Runs that
        differ replace those with their seeds.
        """
        # A command may name some cases only: those of earlier ones are still this experiment.
        _, *also = dict.fromkeys((*self.places(), *later.places()))
        same = [seed for seed, run in later.runs.items() if _equal(self.runs.get(seed), run)]
        if len(same) == len(later.runs):
            runs = {**self.runs, **later.runs}
            return msgspec.structs.replace(self, also=tuple(also), runs=runs)
        kept = {seed: run for seed, run in self.runs.items() if seed not in later.runs}
        before = self if kept or same else later
        return msgspec.structs.replace(
            later,
            case=self.case,
            method=self.method,
            also=tuple(also),
            machine=_both(before.machine, later.machine),
            date=_both(before.date, later.date),
            commit=_both(before.commit, later.commit),
            command=_both(before.command, later.command),
            minutes=round(self.minutes * len(kept) / len(self.runs) + later.minutes, 2),
            runs=dict(sorted({**kept, **later.runs}.items())),
        )


def _equal(before: Series | None, later: Series) -> bool:
    """Return whether two series are of the same run, whatever diagnostics were kept of it."""
    bare = msgspec.structs.replace(later, diagnostics={})
    return before is not None and msgspec.structs.replace(before, diagnostics={}) == bare


def _both(before: str, later: str) -> str:
    """Return two words about runs as one, each once."""
    return "; ".join(dict.fromkeys((*filter(None, before.split("; ")), later)))


class Results(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a result file."""

    item: str
    format: int = FORMAT
    cells: dict[str, CellResult] = {}  # by digest
    values: dict[str, dict[str, dict[str, float]]] = {}  # calculated: measure, case, method

    def joined(self, later: "Results") -> "Results":
        """Return these results with later ones of the same item.

        Cells of equal experiments are joined; a later one takes its cases and methods from those
        that have them with another configuration, of which one without any is left out.
        """
        new = {key for cell in later.cells.values() for key in cell.places()}
        kept: dict[str, CellResult] = {}
        for digest, cell in self.cells.items():
            left = [key for key in cell.places() if key not in new]
            if digest in later.cells:
                kept[digest] = cell.joined(later.cells[digest])
            elif left:
                kept[digest] = cell.at(left)
        # In the order in which they came, so that the same runs once more change nothing.
        return msgspec.structs.replace(later, cells={**kept, **_unlike(later.cells, kept)})


def _unlike(
    cells: Mapping[str, CellResult], known: Mapping[str, CellResult]
) -> dict[str, CellResult]:
    """Return the cells that are not known."""
    return {digest: cell for digest, cell in cells.items() if digest not in known}


def series(
    records: Sequence[RoundRecord], diagnostics: Sequence[str] = (), ledger: Ledger | None = None
) -> Series:
    """Return a run at its evaluations; `ledger` is needed for diagnostics of `BY_DEVICE`."""
    told = [record for record in records if record.evaluated()]
    widths = dict.fromkeys(f"{width:g}" for record in told for width in record.widths)
    scores = {"": tuple(_rounded(record.score) for record in told)}
    for width in widths:
        scores[width] = tuple(_rounded(record.at(float(width))) for record in told)
    return Series(
        rounds=tuple(record.round_index + 1 for record in told),
        scores=scores,
        seconds=tuple(_short(record.time) for record in told),
        joules=tuple(_short(record.joules) for record in told),
        bytes=tuple(_short(record.down + record.up) for record in told),
        flops=tuple(_short(record.flops) for record in told),
        metric=records[-1].metric if records else Metric().name,
        length=_short(records[-1].time) if records else 0.0,
        diagnostics={name: tuple(_diagnostic(name, records, ledger)) for name in diagnostics},
    )


def _diagnostic(name: str, records: Sequence[RoundRecord], ledger: Ledger | None) -> Iterator[Any]:
    """Yield a diagnostic of each round as plain data."""
    for record in records:
        if name == LOSS:
            yield _rounded(record.loss)
        elif name == TEST_LOSS:
            yield _rounded(record.scores.get("loss", math.nan))
        elif name in BY_DEVICE and ledger is not None:
            yield _by_device(ledger, BY_DEVICE[name], record.round_index)
        else:
            yield _plain(record.diagnostics.get(name))


def _by_device(ledger: Ledger, field: str, round_index: int) -> dict[str, float | None]:
    """Return a number of each device that trained in a round and whose reply counted."""
    trained = np.array([kind == "train" for kind in ledger.kind], dtype=bool) & ledger.counted
    rows = np.flatnonzero(trained & (ledger.round_index == round_index))
    values = getattr(ledger, field)
    return {str(int(ledger.device[row])): _rounded(float(values[row])) for row in rows}


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else _short(value)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _plain(value: Any) -> Any:
    """Return a diagnostic as plain data with short numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return _rounded(value)
    return value if isinstance(value, str | int | bool) or value is None else str(value)


# --- files ----------------------------------------------------------------------------------------


def read_results(file: Path) -> Results | None:
    """Return the results in a file, None if there is no file; raise StoreError if it is damaged."""
    try:
        data = gzip.decompress(file.read_bytes())
        found = msgspec.json.decode(data, type=Results)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, msgspec.DecodeError, ValueError) as error:
        raise StoreError(
            f"{file} is damaged: {error}. Restore it, or run the item again."
        ) from error
    if found.format != FORMAT:
        raise StoreError(
            f"{file} has format {found.format}, but this version reads only {FORMAT}. Use the "
            "version of Anyfleet that wrote it."
        )
    return found


def write_results(file: Path, results: Results) -> None:
    """Write results into a file as a whole; equal results give equal bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, gzip.compress(msgspec.json.encode(results), 9, mtime=0))
