"""How much larger than usual an honest update gets: what `limits.growth` must leave room for.

    python benchmarks/sizes.py                                  # every recipe, as its file says
    python benchmarks/sizes.py heterofl fedpmt --seeds 2        # some of them, with two seeds

Runs recipes without the limit and prints, for each, the largest ratio of an update's size to the
median that `screening.UpdateSizes` would have compared it with: of changes of the model, and of
changes of normalisation statistics where these travel. Then, with the limit, how many replies are
refused.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch

from anyfleet import Experiment, load, play
from anyfleet.arrays import Floats, Ints
from anyfleet.core.screening import UpdateSizes, Verdict
from anyfleet.runtime import Limits

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@dataclass(frozen=True)
class Row:
    """What one run showed."""

    recipe: str
    seed: int
    updates: int
    ratio: float  # the largest, of a size to its median
    refused: int  # replies, with the limit in force


def measured(name: str, experiment: Experiment) -> Row:
    """Run an experiment twice: without the limit, looking at sizes, and with it."""
    ratios: list[float] = []
    compare = UpdateSizes.compare

    def watched(
        self: UpdateSizes, device: Ints, sizes: Floats, growth: float, most: float
    ) -> Verdict:
        verdict = compare(self, device, sizes, growth, most)
        ratios.extend((sizes / verdict.median).tolist())
        return verdict

    limits = experiment.limits
    with patch.object(UpdateSizes, "compare", watched):
        _refused(replace(experiment, limits=replace(limits, growth=math.inf)))
    refused = 0 if max(ratios, default=0.0) <= limits.growth else _refused(experiment)
    return Row(name, experiment.seed, len(ratios), max(ratios, default=0.0), refused)


def _refused(experiment: Experiment) -> int:
    """Run an experiment and count the replies that the server refused."""
    ledgers = (result.round.ledger for result in play(experiment))
    return sum(why.startswith(("refused", "held")) for each in ledgers for why in each.failure)


def rows(names: Sequence[str], seeds: int, overrides: Sequence[str]) -> Iterator[Row]:
    """Measure every recipe whose name has one of these words in it; all, without words."""
    for file in sorted(RECIPES.rglob("*.toml")):
        name = str(file.relative_to(RECIPES).with_suffix(""))
        if not names or any(word in name for word in names):
            for seed in range(seeds):
                yield measured(name, load(file, [*overrides, f"seed={seed}"]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each run, and the largest ratio of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="words of recipes' names; all by default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="overrides, as in anyfleet run")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    largest = 0.0
    print(f"{'recipe':<22} {'seed':>4} {'updates':>8} {'ratio':>8} {'refused':>8}")
    for row in rows(given.names, given.seeds, given.set):
        largest = max(largest, row.ratio)
        told = f"{row.updates:>8} {row.ratio:>8.2f} {row.refused:>8}"
        print(f"{row.recipe:<22} {row.seed:>4} {told}", flush=True)
    print(f"The largest ratio is {largest:.2f}; limits.growth is {Limits().growth:g}.")


if __name__ == "__main__":
    main()
