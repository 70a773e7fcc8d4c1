from pathlib import Path

import pytest

from anyfleet.errors import ConfigError
from anyfleet.evidence.items import Item, read_item
from anyfleet.evidence.results import CellResult, Results, Series
from anyfleet.evidence.tuning import chosen, trials, trials_of, tuned, tuning_of

ITEM = """
title = "All methods"
where = "Everywhere"
paper = { rounds = 3, devices = 4, seeds = 2 }
seeds = 2
measures = ["score"]
baseline = "fedavg"

[tuning]
key = "method.lr"
values = [0.01, 0.1]
length = 0.7
seed = 100
budget = 0.5

[run]
rounds = 3
evaluate_every = 1
engine = { use = "Sequential" }
device = "cpu"
task = { use = "Embedded", devices = 4, limit = 120, server = 20, model = { use = "logistic" } }
fleet = { use = "levels", speeds = [2e9, 1e9] }

[cases."even"]

[cases."lost"]
run = { fleet = { error = 0.2 } }

[methods.fedavg]
method = { use = "fedavg", send = "weights", cache = true }

[methods.stc]
method = { use = "stc" }
cases = ["even"]
"""


def made(folder: Path, text: str = ITEM) -> Item:
    file = folder / "recipes" / "comparison" / "comparison.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return read_item(file)


def series(*scores: float | None, joules: float = 2.0) -> Series:
    """Return a run that spends a second, some joules and 3 bytes a round."""
    rounds = tuple(range(1, len(scores) + 1))
    seconds, energy, sent, flops = (
        tuple(each * n for n in rounds) for each in (1.0, joules, 3.0, 4.0)
    )
    return Series(rounds, {"": scores}, seconds, energy, sent, flops)


def cell(case: str, method: str, runs: dict[int, Series], key: str = "") -> CellResult:
    name = key or f"{case}, {method}"
    return CellResult(name, case, method, 3, 4, "here", "today", "abc", 0.5, runs)


def tried(*cells: CellResult) -> Results:
    return Results("comparison/comparison", cells={each.digest: each for each in cells})


def test_every_method_has_as_many_trials_in_each_of_its_cases(tmp_path: Path) -> None:
    item = made(tmp_path)
    found = trials(item).experiments()
    assert set(found) == {
        ("even", "fedavg, lr=0.01 (trial)"),
        ("even", "fedavg, lr=0.1 (trial)"),
        ("even", "stc, lr=0.01 (trial)"),
        ("even", "stc, lr=0.1 (trial)"),
        ("lost", "fedavg, lr=0.01 (trial)"),
        ("lost", "fedavg, lr=0.1 (trial)"),
    }
    for (_, name), experiment in found.items():
        assert (experiment.rounds, experiment.seed) == (2, 100)
        assert f"lr={experiment.method.train.lr.start:g} " in name  # type: ignore[attr-defined]


def test_the_trial_that_ended_best_is_chosen_case_by_case(tmp_path: Path) -> None:
    item = made(tmp_path)
    results = tried(
        cell("even", "fedavg, lr=0.01 (trial)", {100: series(0.9, 0.2)}),  # best on its way only
        cell("even", "fedavg, lr=0.1 (trial)", {100: series(0.1, 0.3)}),
        cell("lost", "fedavg, lr=0.01 (trial)", {100: series(0.1, 0.1)}),
        cell("lost", "fedavg, lr=0.1 (trial)", {100: series(0.5, None)}),  # diverged
        cell("even", "stc, lr=0.01 (trial)", {100: series(0.4, 0.4)}),
    )
    values = chosen(item, results)
    assert values == {("even", "fedavg"): 0.1, ("lost", "fedavg"): 0.01}  # stc lacks a trial
    runs = tuned(item, values).experiments()
    assert set(runs) == {("even", "fedavg, lr=0.1"), ("lost", "fedavg, lr=0.01")}
    assert {experiment.rounds for experiment in runs.values()} == {3}
    equal = tried(
        cell("even", "stc, lr=0.01 (trial)", {100: series(0.4)}),
        cell("even", "stc, lr=0.1 (trial)", {100: series(0.4)}),
    )
    assert chosen(item, equal) == {("even", "stc"): 0.01}


def test_the_worst_of_several_trials_counts(tmp_path: Path) -> None:
    """A value with which one of two runs diverges is none to choose."""
    item = made(tmp_path, ITEM.replace("seed = 100", "seed = 100\ntrials = 2"))
    assert (trials(item).seeds, trials_of(item)) == (2, 4)
    results = tried(
        cell("even", "stc, lr=0.01 (trial)", {100: series(0.5), 101: series(0.4)}),
        cell("even", "stc, lr=0.1 (trial)", {100: series(0.9), 101: series(0.1)}),
    )
    assert chosen(item, results) == {("even", "stc"): 0.01}
    assert chosen(item, results, quick=True) == {("even", "stc"): 0.1}  # one trial of each
    fewer = tried(
        cell("even", "stc, lr=0.01 (trial)", {100: series(0.5), 101: series(0.4)}),
        cell("even", "stc, lr=0.1 (trial)", {100: series(0.9)}),
    )
    assert not chosen(item, fewer)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("values = [0.01, 0.1]", "values = [0.01]", "length >= 2"),
        ("seed = 100", "seed = 1", "1 is the seed of a run"),
        ("seed = 100", "seed = -1\ntrials = 2", "0 is the seed of a run"),
        ("seed = 100", "seed = 100\ntrials = 0", ">= 1"),
        ("length = 0.7", "length = 1.0", "< 1"),
        ("[run]\nrounds = 3", "[run]", "must be given"),
        ('baseline = "fedavg"', "", "must name a method"),
        ("budget = 0.5", "budget = 0", "> 0"),
        ("budget = 0.5", "budgets = 0.5", "budget"),
    ],
)
def test_tuning_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in ITEM
    with pytest.raises(ConfigError, match=told):
        tuning_of(made(tmp_path, ITEM.replace(old, new)))
