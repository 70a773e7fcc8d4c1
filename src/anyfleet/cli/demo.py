"""`anyfleet demo`: one comparison that fits into half a minute."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from anyfleet import methods
from anyfleet.cli.record import built, picture, prepare, record, subfolder
from anyfleet.cli.screen import console, seconds, table
from anyfleet.queries import common_accuracy, percent, summarise, to_target
from anyfleet.study import Experiment, Point, populate
from anyfleet.tasks import Dirichlet, Embedded, Pooled
from anyfleet.world import levels

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8)
FLEET = levels(speeds=(2e9, 1e9, 5e8, 2.5e8))
TASK = Embedded(devices=20, partition=Dirichlet(0.5))
LR, MOMENTUM = 0.05, 0.9
REFERENCES = (
    "local is judged otherwise than the rest: every device's own model on its own test data, "
    "which have the labels it was trained on. centralised has all data on the fastest device."
)


def experiments(*, rounds: int, seed: int, references: bool) -> Mapping[str, Experiment]:
    """The same task, fleet, seed and cohorts for every method."""
    base = Experiment(
        task=TASK,
        method=methods.fedavg(lr=LR, momentum=MOMENTUM),
        fleet=FLEET,
        rounds=rounds,
        seed=seed,
    )
    heterofl = methods.heterofl(shares=SHARES, lr=LR, momentum=MOMENTUM)
    chosen = {"FedAvg": base, "HeteroFL": replace(base, method=heterofl)}
    if references:
        local = methods.local(lr=LR, momentum=MOMENTUM)
        centralised = methods.centralised(lr=LR, momentum=MOMENTUM)
        chosen["local"] = replace(base, method=local)
        chosen["centralised"] = replace(base, task=Pooled(TASK), method=centralised)
    return chosen


def demonstrate(
    *, rounds: int, seed: int, references: bool, out: Path | None, threads: int
) -> None:
    """Runs, shows and explains."""
    folder, screen = prepare(out, "demo", threads), console()
    chosen = experiments(rounds=rounds, seed=seed, references=references)
    runs: dict[str, list[Sequence[Point]]] = {}
    for name, experiment, task in built(chosen.items()):
        inner = subfolder(folder, name)
        runs[name] = [record(experiment, task, inner, screen=screen, name=name)]
        if name == "FedAvg":
            world = populate(experiment, task)
    fedavg, heterofl = runs["FedAvg"][0], runs["HeteroFL"][0]
    screen.print()
    screen.print(table(runs, common_accuracy([fedavg, heterofl]), screen.width))
    screen.print(f"\n{explain(fedavg, heterofl)}\n", markup=False, soft_wrap=True)
    if references:
        screen.print(f"{REFERENCES}\n", markup=False, soft_wrap=True)
    title = f"{len(world)} unequal devices, Fashion-MNIST subset, non-i.i.d."
    picture(folder / "demo.png", runs, screen=screen, world=world, title=title)


def explain(fedavg: Sequence[Point], heterofl: Sequence[Point]) -> str:
    """What a newcomer sees in the table; the verdict follows the numbers."""
    target = common_accuracy([fedavg, heterofl])
    slow, quick = (to_target(points, target).spent for points in (fedavg, heterofl))
    if slow is None or quick is None:
        return "Too few rounds to compare."
    ends = [summarise(points).accuracy for points in (fedavg, heterofl)]
    share = quick.bytes / slow.bytes
    return (
        "Both methods asked the same devices in every round. FedAvg gives each of them the whole "
        "network and waits for the slowest; HeteroFL gives a slower device a narrower slice. "
        f"To reach {percent(target)}, HeteroFL took {seconds(quick.time)} of simulated time where "
        f"FedAvg took {seconds(slow.time)}, and {percent(share)} of its traffic; "
        f"after {len(fedavg)} rounds FedAvg stands at {percent(ends[0])}, HeteroFL at "
        f"{percent(ends[1])}."
    )
