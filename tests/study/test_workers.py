"""Which run a process of a study plays next."""

from pathlib import Path

from anyfleet.study.plan import PlannedRun
from anyfleet.study.workers import next_run


def run(name: str, task: str, seconds: float, seed: int = 0) -> PlannedRun:
    """A planned run that is expected to take so long."""
    return PlannedRun(name, seed, 6, Path(name) / f"seed-{seed}", task, seconds)


def test_the_longest_run_of_the_task_that_is_built_comes_first() -> None:
    left = [run("short", "a", 1.0), run("long", "a", 5.0), run("longest", "b", 9.0)]
    assert next_run(left, "a", {}).name == "long"
    assert next_run(left, "b", {}).name == "longest"


def test_what_a_run_of_the_experiment_took_counts_more_than_what_is_expected() -> None:
    left = [run("slow", "a", 1.0), run("quick", "a", 5.0), run("unknown", "a", 3.0)]
    assert next_run(left, "a", {"slow": 4.0, "quick": 2.0}).name == "slow"
    assert next_run(left, "a", {"quick": 2.0}).name == "unknown"


def test_a_new_process_builds_the_task_of_most_runs() -> None:
    left = [run("alone", "b", 9.0), run("one", "a", 1.0), run("two", "a", 2.0)]
    assert next_run(left, "", {}).name == "two"
    assert next_run(left, "finished", {}).name == "two"


def test_runs_of_equal_length_keep_the_order_of_the_study() -> None:
    left = [run("one", "a", 2.0), run("two", "a", 2.0), run("one", "a", 2.0, seed=1)]
    assert next_run(left, "a", {}) is left[0]
