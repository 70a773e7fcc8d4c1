"""What tf32 and bf16 do to results: accuracy after some rounds, beside 32 bits.

    python -m benchmarks.precisions --device cuda

The network of `anyfleet demo` trains on the embedded images with FedAvg, from the same weights and
with the same draws. "Difference" is that of all parameters after the first round, relative to
their change in it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from benchmarks.measuring import (
    Cell,
    Options,
    Precision,
    Table,
    attempted,
    given_options,
    parser,
    play_rounds,
    report,
)
from torch import Tensor

from anyfleet import methods
from anyfleet.core.evaluation import score, to_test
from anyfleet.methods.fedavg import Training
from anyfleet.tasks import Dirichlet, Embedded
from anyfleet.world import levels

# The demo's task, training and fleet. (Its module needs a terminal's libraries.)
TASK = Embedded(devices=20, limit=6000, partition=Dirichlet(0.5))
SGD: Training = {"lr": 0.05, "momentum": 0.9}
FLEET = levels(speeds=(2e9, 1e9, 5e8, 2.5e8))
ROUNDS = 20
HEAD = ("precision", "loss", "accuracy, %", "difference after a round")


def flat(params: object) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([each.double().flatten().cpu() for each in dict(params).values()])  # type: ignore[call-overload]


def row(options: Options, rounds: int, first: list[Tensor]) -> tuple[Cell, ...]:
    """Return what a run scores; `first` has the first round of the run in 32 bits."""
    task = TASK.build(0).to(torch.device(options.device))
    method = methods.fedavg(**SGD)
    start = flat(task.params)
    for number, (_, result) in enumerate(play_rounds(method, task, options, FLEET)):
        if number == 0:
            first.append(flat(result.round.params))
        if number + 1 == rounds:
            break
    model = to_test(task, result.round.params, result.round.buffers, norm=method.norm)
    found = score(task, model)
    change = torch.linalg.vector_norm(first[0] - start)
    difference = float(torch.linalg.vector_norm(first[-1] - first[0]) / change)
    return found["loss"], 100 * found["accuracy"], f"{difference:.1e}"


def tables(options: Options, rounds: int = ROUNDS) -> list[Table]:
    """Run the demo's FedAvg in every precision that the device has."""
    kinds: tuple[Precision, ...] = ("float32", "tf32", "bf16") if options.cuda else ("float32",)
    first: list[Tensor] = []
    found = []
    for precision in kinds:
        own = replace(options, precision=precision)
        run = lambda: row(own, rounds, first)  # noqa: B023, E731 - called at once
        found.append(attempted(run, len(HEAD), precision))
    title = f"Precision and results (FedAvg of the demo, {rounds} rounds)"
    return [Table("precisions", title, HEAD, tuple(found))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    given = parser(__doc__).parse_args(arguments)
    options = given_options(given)
    report("precisions", tables(options), options, given.out)


if __name__ == "__main__":
    main()
