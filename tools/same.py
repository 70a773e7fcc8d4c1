"""Write what every recipe computes, and compare two trees of the source by it.

    python -m tools.same OUT [RECIPE ...]
    python -m tools.same A B

The first form plays recipes (those named, or all that are run files) for three rounds in double
precision with the sequential engine, and writes parameters, statistics, ledgers and records into
the folder OUT, one file each. The second compares two such folders, made with two versions of the
source. All numbers must be the same, but for parameters and statistics, whose vectors may be 1e-10
apart, relative to their length, and what devices measure of them: the order of sums may change. The
exit code is 1 if anything differs.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from anyfleet.evidence.library import Library
from anyfleet.experiment import RoundResult, build, load, play
from anyfleet.runtime import Sequential
from anyfleet.tasks import Task

ROUNDS, TOLERANCE = 3, 1e-10
TREES = ("params", "buffers")
# Columns that are computed from tensors.
MEASURED = ("loss", "distortion", "norm", "utility", "fisher")

Found = Mapping[str, NDArray[Any]]  # by round, what it is of, and name: "0 ledger joules"


def played(recipe: Path) -> Found:
    """Return all that the rounds of a recipe compute."""
    experiment = replace(
        load(recipe, [f"rounds={ROUNDS}"]), engine=Sequential(), evaluate_every=ROUNDS + 1
    )
    task = build(experiment)
    assert isinstance(task, Task)  # all recipes have one of ours
    found: dict[str, NDArray[Any]] = {}
    for result in play(experiment, task.to(torch.float64)):
        found |= {f"{result.round.index} {name}": value for name, value in _values(result)}
    return found


def _values(result: RoundResult) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a round with their names."""
    for tree in TREES:
        for name, value in getattr(result.round, tree).items():
            yield f"{tree} {name}", value.cpu().numpy()
    ledger = result.round.ledger
    for each in fields(ledger):
        yield f"ledger {each.name}", np.array(getattr(ledger, each.name))
    for name, value in asdict(result.record).items():
        if isinstance(value, int | float):
            yield f"record {name}", np.array(value)


def differences(one: Found, two: Found) -> list[str]:
    """Return in what two plays of a recipe differ."""
    both = one.keys() & two.keys()
    alone = sorted({" ".join(name.split()[1:]) for name in one.keys() ^ two.keys()})
    inexact = {name for name in both if name.split()[1] in TREES}
    told = [f"only one has {name}" for name in alone]
    told += [
        name
        for name in sorted(both)
        if name not in inexact and not _equal(one[name], two[name], name.split()[-1] in MEASURED)
    ]
    for which in sorted({" ".join(name.split()[:2]) for name in inexact}):
        names = sorted(name for name in inexact if name.startswith(f"{which} "))
        first, second = (np.concatenate([tree[n].ravel() for n in names]) for tree in (one, two))
        same = first.shape == second.shape
        apart = float(np.linalg.norm(first - second)) if same else np.inf
        if not apart <= TOLERANCE * float(np.linalg.norm(first)):
            told.append(f"{which}: {apart:.1e} apart")
    return told


def _equal(one: NDArray[Any], two: NDArray[Any], measured: bool) -> bool:
    numbers = one.dtype.kind == two.dtype.kind == "f"
    if measured and numbers and one.shape == two.shape:
        return np.allclose(one, two, rtol=TOLERANCE, atol=0.0, equal_nan=True)
    return np.array_equal(one, two, equal_nan=numbers)


def write(out: Path, recipes: Sequence[Path]) -> None:
    """Write what recipes compute, one file each."""
    out.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        name = "_".join(recipe.with_suffix("").parts[-2:])  # with its folder: two may share a name
        np.savez(out / name, **dict[str, Any](played(recipe)))
        _say(f"{recipe}: written")


def run_files() -> list[Path]:
    """Return all recipes but those of items, which are studies of many runs on real data."""
    items = {Path("recipes", f"{name}.toml") for name in Library().names()}
    return sorted(set(Path("recipes").rglob("*.toml")) - items)


def compare(one: Path, two: Path) -> bool:
    """Print in what two folders differ; return whether they hold the same, and anything at all."""
    files = [{each.name for each in folder.glob("*.npz")} for folder in (one, two)]
    told = {name: ["only one folder has it"] for name in files[0] ^ files[1]}
    told |= {n: differences(np.load(one / n), np.load(two / n)) for n in files[0] & files[1]}
    for name in sorted(told):
        _say(f"{name}: {'; '.join(told[name][:8]) or 'the same'}")
    return bool(told) and not any(told.values())


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def main(arguments: Sequence[str]) -> int:
    """Write, or compare if two folders that exist are given; return the exit code."""
    paths = [Path(each) for each in arguments]
    if not paths or any(each.startswith("-") for each in arguments):
        _say(__doc__ or "")
        return 2
    if len(paths) == 2 and all(path.is_dir() for path in paths):
        return 0 if compare(*paths) else 1
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    write(paths[0], paths[1:] or run_files())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
