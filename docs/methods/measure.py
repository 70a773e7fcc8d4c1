"""Run what the pages tell of runs, and keep it: python docs/methods/measure.py [STUDY ...].

Writes `drawing/measured.json`, which `draw.py` reads: what was used and learned after every round,
as means over seeds, and what the devices of a cell chose. `--rows` measures only these rows of the
studies and keeps the others. All of it takes about a quarter of an hour.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from anyfleet import Experiment, Sequential, methods, play
from anyfleet.core.method import Method
from anyfleet.experiment import load, populate
from anyfleet.parts.choose import MostGain
from anyfleet.parts.codec import Qsgd, TopK
from anyfleet.parts.plan import JustInTime, WidthMenu
from anyfleet.parts.select import Everyone
from anyfleet.world import When

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parents[1] / "recipes"
MEASURED = HERE / "drawing/measured.json"
SEEDS = (0, 1, 2)
SECONDS = 0.25  # for an order, as in the recipe
Study = Mapping[str, Experiment]


def codecs() -> Study:
    """Return the recipes of codecs and FedAvg's own, by name: the same task and cohorts."""
    names = ("fedavg", "stc", "qsgd", "uveqfed", "fedhq")
    return {name: load(RECIPES / f"{name}.toml") for name in names}


def three_times_as_long() -> Study:
    """Return runs that show what error feedback makes, in time, of too small a fraction."""
    longer = ["rounds=36", "evaluate_every=1"]
    return {
        "fedavg": load(RECIPES / "fedavg.toml", longer),
        "stc": load(RECIPES / "stc.toml", longer),
        "stc, a fortieth": load(RECIPES / "stc.toml", [*longer, "method.keep=0.025"]),
    }


def in_the_cell(loss: float) -> Study:
    """Return AnycostFL's recipe and those beside it, at a path loss in decibels at one metre."""
    base = load(RECIPES / "anycost.toml", [f"fleet.link.ref_loss_db={loss:g}", "widths=[1.0]"])
    sgd: Any = {"count": 15, "lr": 0.05, "momentum": 0.9}
    half = methods.heterofl(widths=(1.0,), **sgd)
    others = {
        "STC": planned(methods.stc(**sgd)),
        "QSGD": planned(methods.qsgd(**sgd)),
        "UVeQFed": planned(methods.uveqfed(**sgd)),
        "FedHQ": planned(methods.fedhq(**sgd)),
        # As the paper compares with it: four sizes of 1/4 to 1, and uploads by QSGD.
        "HeteroFL": replace(
            planned(half, (1.0, 0.866, 0.707, 0.5)), uplink=TopK(0.15, Qsgd(quantisation_levels=16))
        ),
        "STC just in time": replace(methods.stc(**sgd), plan=JustInTime(SECONDS)),
        "STC at full speed": methods.stc(**sgd),
    }
    return {"AnycostFL": base} | {n: replace(base, method=method) for n, method in others.items()}


def planned(method: Method, widths: tuple[float, ...] = (1.0,)) -> Method:
    """Return a method whose devices set their frequency as AnycostFL's do, or decline."""
    return replace(method, plan=WidthMenu(widths), choose=MostGain(SECONDS))


STUDIES: Mapping[str, Callable[[], Study]] = MappingProxyType(
    {
        "codecs": codecs,
        "longer": three_times_as_long,
        "cell at 40 dB": lambda: in_the_cell(40.0),
        "cell at 0 dB": lambda: in_the_cell(0.0),
    }
)


def curves(experiment: Experiment) -> dict[str, Any]:
    """Return accuracy and all that was used until then, round by round, as means over seeds."""
    runs = [_rows(replace(experiment, seed=seed)) for seed in SEEDS]
    means = np.mean(runs, axis=0)
    ends = np.array([run[-1][0] for run in runs])
    names = ("accuracy", "seconds", "joules", "up", "down", "declined")
    fields = dict(zip(names, means.T, strict=True))
    return {
        **{name: _short(values) for name, values in fields.items()},
        "deviation": round(float(ends.std(ddof=1)), 4),  # of the last accuracies
    }


def _rows(experiment: Experiment) -> Sequence[tuple[float, ...]]:
    declined, rows = 0, []
    for result in play(_pinned(experiment)):
        record = result.record
        declined += sum(reason.startswith("over budget") for reason in result.round.ledger.failure)
        spent = record.time, record.joules, record.up, record.down
        rows.append((record.accuracy, *spent, float(declined)))
    return rows


def _pinned(experiment: Experiment) -> Experiment:
    """Return the experiment with the engine that gives the same numbers on every machine."""
    return replace(experiment, engine=Sequential(), device="cpu")


def choices(loss: float) -> dict[str, Any]:
    """Return what all sixty devices of the cell choose in the first round, and their links."""
    base = load(RECIPES / "anycost.toml", [f"fleet.link.ref_loss_db={loss:g}", "rounds=1"])
    everyone = replace(base, method=replace(base.method, select=Everyone()))
    task = everyone.task.build(everyone.seed)
    world = populate(everyone, task)
    links = world.conditions(np.arange(len(world)), When(0.0, 0), active=len(world)).bit_rate_up
    (ledger,) = (result.round.ledger for result in play(_pinned(everyone)))
    told = ledger.take(np.flatnonzero(ledger.counted))
    return {
        "link": _short(links[told.device]),
        "width": _short(told.width),
        "sent_fraction": _short(told.sent_fraction),
        "frequency": _short(told.frequency),
    }


def _short(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in np.asarray(values).tolist()]


def main() -> None:
    """Measure what is named, all unless told, and keep the rest as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", choices=(*STUDIES, "choices", []))
    parser.add_argument("--rows", nargs="+", help="of these studies; all unless told")
    told = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    for study in told.studies or (*STUDIES, "choices"):
        if study == "choices":
            found[study] = {f"{loss:g} dB": choices(loss) for loss in (40.0, 0.0)}
        else:
            rows = STUDIES[study]()
            kept = found.get(study, {}) if told.rows else {}
            found[study] = kept | {n: curves(rows[n]) for n in told.rows or rows}
        MEASURED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
