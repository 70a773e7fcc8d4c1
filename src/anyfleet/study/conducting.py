"""Conducting a study: what is finished stays, what is not is played, here or in processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anyfleet.analysis.summaries import Runs
from anyfleet.experiment import RoundRecord
from anyfleet.runtime.simulated.engines import cores
from anyfleet.store import Terms, read_rounds
from anyfleet.study import remarks
from anyfleet.study.plan import PlannedRun, Study
from anyfleet.study.playing import Built, Events, Player, complete, grouped
from anyfleet.study.workers import Crew, play_parallel


@dataclass(frozen=True)
class Standing:
    """Which runs of a study are finished, and which are left, in the order of their playing."""

    finished: tuple[PlannedRun, ...]
    left: tuple[PlannedRun, ...]


def standing(folder: Path, study: Study) -> Standing:
    """Return how far the study in a folder has come; change nothing."""
    runs = study.runs()
    done = {run for run in runs if complete(folder, run)}
    return Standing(
        tuple(run for run in runs if run in done), tuple(run for run in runs if run not in done)
    )


def processes(threads: int) -> int:
    """Return how many runs this machine can play at once, if each has so many threads."""
    return max(1, cores() // threads)


@dataclass(frozen=True)
class Means:
    """The means of a study: how many processes, and on which terms runs are resumed."""

    jobs: int = 1
    terms: Terms = field(default_factory=Terms)


def conduct(
    folder: Path,
    study: Study,
    means: Means,
    built: Mapping[PlannedRun, Built] | None = None,
    crew: Crew | None = None,
) -> Events:
    """Play all runs of a study that are not finished; yield what happens.

    Runs on an accelerator are played in this process, those of equal shape together; runs on a CPU
    in `jobs` processes, which import the main module again as all spawned processes do. Results
    depend on none of that. `built` is what there is of some runs, and the `crew` what
    there is of processes.
    """
    left = standing(folder, study).left
    here = [run for run in left if study.cells[run.name].experiment.device.startswith("cuda")]
    others = [run for run in left if run not in here]
    player = Player(folder, study, means.terms, built)
    for group in grouped(study, here):
        yield from player.play(group)
    jobs = min(means.jobs, len(others))
    if jobs > 1:
        yield from play_parallel(folder, others, jobs=jobs, terms=means.terms, crew=crew)
    else:
        for run in others:
            yield from player.play([run])


def results(folder: Path, study: Study) -> tuple[Runs, dict[str, list[list[str]]]]:
    """Return the records of all finished runs by name and seed, and their warnings by name.

    A name without a finished run has no seed.
    """
    done = {(run.name, run.seed): run for run in standing(folder, study).finished}
    runs: dict[str, dict[int, tuple[RoundRecord, ...]]] = {}
    wrong: dict[str, list[list[str]]] = {}
    for name, cell in study.cells.items():
        homes = {
            seed: folder / done[name, seed].folder for seed in cell.seeds if (name, seed) in done
        }
        runs[name] = {seed: read_rounds(home) for seed, home in homes.items()}
        wrong[name] = [remarks.kept(home) or [] for home in homes.values()]
    return runs, wrong
