"""`anyfleet demo`: a comparison of methods that takes about a quarter of a minute."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from anyfleet import config, methods
from anyfleet.analysis.comparison import Goal
from anyfleet.analysis.metric import percent
from anyfleet.analysis.summaries import common_score, to_target
from anyfleet.cli.run import Means
from anyfleet.cli.screen import seconds, show
from anyfleet.cli.study import Manner, OpenStudy, conclude, opened, play, tell
from anyfleet.core.method import Method
from anyfleet.experiment import Experiment, RoundRecord, assemble
from anyfleet.measure import Fisher
from anyfleet.methods.fedavg import Training
from anyfleet.runtime.simulated.execution import Settings
from anyfleet.study import Cell, Study
from anyfleet.tasks import Dirichlet, Embedded, Pooled
from anyfleet.world import levels

WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8)
NARROW = WIDTHS[-1]
FLEET = levels(speeds=(2e9, 1e9, 5e8, 2.5e8))
EIGHTHS = tuple(count / 8 for count in range(8, 0, -1))
# About as long as a round of HeteroFL: some devices have no time for the whole model.
SECONDS = 0.45
# Half of the data, so that six methods take about a quarter of a minute.
TASK = Embedded(devices=20, limit=6000, partition=Dirichlet(0.5))
SGD: Training = {"lr": 0.05, "momentum": 0.9}
AUTOMATIC = Settings()
REFERENCES = (
    "local is measured differently: every device's own model on its own test data, which have the "
    "labels it was trained on. centralised has all data on the fastest device."
)


def compared() -> dict[str, Method]:
    """Return the methods by name, all with the same cohorts: ten random devices of twenty."""
    fedavg = methods.fedavg(**SGD)
    # Rarely and on a few samples: measured at every step it would cost as much as training.
    seldom = Fisher(every=8, samples=8)
    whole = {
        "FedAvg": fedavg,
        "HeteroFL": methods.heterofl(widths=WIDTHS, **SGD),
        "FedPMT": methods.fedpmt(depths=len(WIDTHS), **SGD),
        "WHALE-FL": methods.whale(widths=WIDTHS, fisher=seldom, **SGD),
        "FedResCuE": methods.fedrescue(widths=WIDTHS, samples=2, **SGD),
        "AnycostFL": methods.anycost(seconds=SECONDS, widths=EIGHTHS, **SGD),
    }
    return {name: replace(method, select=fedavg.select) for name, method in whole.items()}


def experiments(
    *, rounds: int, seed: int, references: bool, settings: Settings = AUTOMATIC
) -> Mapping[str, Experiment]:
    """Return an experiment for each method, with the same task, fleet, seed and cohorts."""
    base = Experiment(
        task=TASK,
        method=methods.fedavg(**SGD),
        fleet=FLEET,
        engine=settings.engine,
        device=settings.device,
        rounds=rounds,
        widths=(1.0, NARROW),
        seed=seed,
    )
    chosen = {name: replace(base, method=method) for name, method in compared().items()}
    if references:
        alone = replace(base, widths=(1.0,))
        chosen["local"] = replace(alone, method=methods.local(**SGD))
        pooled = replace(alone, task=Pooled(TASK))
        chosen["centralised"] = replace(pooled, method=methods.centralised(**SGD))
    return chosen


def demonstrate(*, rounds: int, seed: int, references: bool, means: Means, manner: Manner) -> None:
    """Run the methods, and show and explain what came out."""
    settings = config.load(config.override({}, means.overrides()), Settings)
    chosen = experiments(rounds=rounds, seed=seed, references=references, settings=settings)
    open_ = tuple(key for key in ("engine", "device") if getattr(settings, key) == "auto")
    cells = {name: Cell(each, (seed,), left_open=open_) for name, each in chosen.items()}
    with opened(Study(cells, "demo", means.threads), manner) as found:
        show_demo(found)


def show_demo(found: OpenStudy) -> None:
    """Play what is left of a demonstration, and show and explain what came out."""
    outcome, screen = play(found), found.screen
    first = next(iter(found.study.cells.values())).experiment
    _, world = next(iter(found.built.values()), None) or assemble(first)
    title = f"{len(world)} unequal devices, Fashion-MNIST subset, non-i.i.d."
    runs = {name: next(iter(group.values())) for name, group in outcome.runs.items() if group}
    named = {name: runs[name] for name in compared() if name in runs}
    # What is measured differently has no part in the target.
    goal = Goal(target=common_score(named.values()))
    tell(replace(found, study=replace(found.study, goal=goal)), outcome, world=world, title=title)
    if outcome.complete:
        show(screen, f"\n{explain(named)}")
        if len(runs) > len(compared()):
            show(screen, f"\n{REFERENCES}")
    conclude(found, outcome)


_IDEAS = (
    "All methods asked the same devices in every round. FedAvg gives each the whole model and "
    "waits for the slowest. HeteroFL gives a slower device a narrower sub-model; with WHALE-FL the "
    "device itself picks the width, by how much it still learns and how slow it is. With FedPMT "
    "slower devices train only the last layers. FedResCuE also trains narrower parts of each "
    f"sub-model, so that the model can be cut later. With AnycostFL all have {SECONDS:g} s: each "
    "device takes the sub-model of the strongest channels that teaches most in that time, runs as "
    "slowly as that allows, and uploads at most a fifteenth of its update."
)


def explain(runs: Mapping[str, Sequence[RoundRecord]]) -> str:
    """Return what the table shows, in words that follow its numbers."""
    target = common_score(runs.values())
    costs = {name: to_target(records, target).spent for name, records in runs.items()}
    reached = {name: spent for name, spent in costs.items() if spent is not None}
    if len(reached) < len(runs):
        return f"{_IDEAS}\nToo few rounds to compare."
    whole = reached["FedAvg"]
    told = [
        f"{name} {seconds(spent.time)} and {percent(spent.bytes / whole.bytes)} of FedAvg's traffic"
        for name, spent in reached.items()
        if name != "FedAvg"
    ]
    narrow = ", ".join(f"{name} {percent(runs[name][-1].at(NARROW))}" for name in runs)
    return (
        f"{_IDEAS}\nTo reach an accuracy of {percent(target)}, FedAvg took {seconds(whole.time)} "
        f"of simulated time; {'; '.join(told)}.\nAt a width of {NARROW:g}, the model at the end "
        f"has an accuracy of: {narrow}."
    )
