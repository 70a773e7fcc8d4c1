"""What FedPMT's depths save in real seconds, beside what they save on paper.

    python benchmarks/depth.py                           # about two minutes
    python benchmarks/depth.py --nets C.3 --batches 64 --repeats 5

Trains the last layers of a network, from one layer to all, with the code that a device runs: an
order of 25 local steps, as a local epoch of the paper is. Seconds are those of the processor on one
thread, the quickest of several repetitions, which take turns so that other work of the machine hits
all depths alike. Their share of the time of the whole model is held against two counted shares: of
floating-point operations, by which simulated devices are timed, and of FedPMT's own operations with
convolutions charged per sample (`per_batch`, specification §2).
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anyfleet import rng
from anyfleet.elastic import Slice
from anyfleet.elastic.cost.operations import operations
from anyfleet.hardware.probes import measure
from anyfleet.names import Factory
from anyfleet.parts.plan.trained_layers import first_trained_layers
from anyfleet.tasks import Data, Split, Task, zoo
from anyfleet.tasks.data_loading import fresh_model

STEPS = 25  # 300 samples in batches of 12, or 500 in batches of 20
GOAL = 1.15


@dataclass(frozen=True)
class Net:
    """A network of the paper, and the batch it is trained with there."""

    make: Factory
    shape: tuple[int, ...]
    batch: int


NETS: Mapping[str, Net] = {
    "C.1": Net(Factory.of(zoo.perceptron), (1, 28, 28), 12),
    "C.2": Net(Factory.of(zoo.cnn_mnist), (1, 28, 28), 12),
    "C.3": Net(Factory.of(zoo.cnn_cifar), (3, 32, 32), 20),
}


@dataclass(frozen=True)
class Row:
    """One depth of one network."""

    layers: int  # that are trained
    milliseconds: float  # for a local step
    share: float  # of the time of the whole model
    flops: float  # of its floating-point operations
    counted: float  # of its operations, by FedPMT's rule

    @property
    def over_flops(self) -> float:
        """The share of the time over that of the floating-point operations."""
        return self.share / self.flops

    @property
    def over_counted(self) -> float:
        """The share of the time over that of FedPMT's operations."""
        return self.share / self.counted


def task_of(net: Net, samples: int) -> Task:
    """Return a task of one device with random images."""
    size = samples * nn.Flatten()(torch.empty(1, *net.shape)).shape[1]
    images = rng.normal(rng.root(0, "images"), size).float().view(samples, *net.shape)
    data = Data(images, torch.arange(samples) % 10)
    return Task.of(fresh_model(net.make, 0), data, data, split=Split(devices=1, test_share=0.0))


def measured(name: str, batch: int, *, steps: int = STEPS, repeats: int = 3) -> list[Row]:
    """Measure all depths of a network; return a row for each, fewest trained layers first."""
    task = task_of(NETS[name], steps * batch)
    blueprint = task.blueprint
    slices = [
        Slice(first_trained_layer=first) for first in reversed(first_trained_layers(blueprint))
    ]
    rounds = [
        [measure(name, task, each, batch, steps=steps) for each in slices] for _ in range(repeats)
    ]
    seconds = [min(sample.seconds for sample in turns) for turns in zip(*rounds, strict=True)]
    flops = [sample.flops for sample in rounds[0]]
    counted = [operations(blueprint, each, batch, "per_batch") for each in slices]
    return [
        Row(number + 1, 1e3 * took / steps, took / seconds[-1], work / flops[-1], ops / counted[-1])
        for number, (took, work, ops) in enumerate(zip(seconds, flops, counted, strict=True))
    ]


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        f"  {'layers':>6} {'ms a step':>10} {'seconds':>8} {'FLOP':>6} {'ratio':>6}   "
        f"{'per_batch':>9} {'ratio':>6}"
    )
    for row in rows:
        flops, counted = (
            f"{ratio:6.2f}{' ' if ratio <= GOAL else '!'}"
            for ratio in (row.over_flops, row.over_counted)
        )
        yield (
            f"  {row.layers:>6} {row.milliseconds:>10.2f} {row.share:>8.3f} {row.flops:>6.3f} "
            f"{flops}  {row.counted:>9.3f} {counted}"
        )


def summary(rows: Sequence[Row]) -> str:
    """Return how many depths reach the goal."""
    partial = [row for row in rows if row.share != 1]
    flops = sum(row.over_flops <= GOAL for row in partial)
    counted = sum(row.over_counted <= GOAL for row in partial)
    return (
        f"goal: at most {GOAL} times the counted share. Of {len(partial)} depths that do not train "
        f"everything, {flops} meet it by FLOP and {counted} by FedPMT's rule (! misses it)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the named nets with every batch, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--batches", type=int, nargs="*", default=[32], help="besides the paper's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args(arguments)
    everything: list[Row] = []
    for name in given.nets:
        for batch in dict.fromkeys((NETS[name].batch, *given.batches)):
            rows = measured(name, batch, steps=given.steps, repeats=given.repeats)
            print(f"\n{name}, batch {batch}", flush=True)
            print("\n".join(shown(rows)), flush=True)
            everything += rows
    print(f"\n{summary(everything)}")


if __name__ == "__main__":
    main()
