"""How far a large round is from what the machine can do: 1,000 clients of C.3 beside the roofline.

    python -m benchmarks.roofline --precision tf32
    python -m benchmarks.roofline --clients 50 --work C.2

The roofline is max(F / R, Q / BW). F are the FLOP of all clients' training: six for each
multiply-add of a forward pass and each sample, two forward and four backward. Q are bytes: every
local step of every client reads and writes its parameters four times in all, in 32 bits. R, the
rate of a large matrix product, and BW, bytes read and written by a large copy, are measured in the
same run and precision.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from benchmarks.measuring import (
    WORKLOADS,
    Cell,
    Options,
    Precision,
    Table,
    Workload,
    attempted,
    built,
    given_options,
    new_net,
    parser,
    report,
    tf32,
    timed,
    verdict,
    wait_for,
)
from torch import Tensor, nn

GOAL = 5.0
CLIENTS = (1000,)


def multiply_adds(work: Workload) -> int:
    """Return the multiply-adds of one sample's forward pass: of convolutions and linear layers."""
    net, total = new_net(work).eval(), 0

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight
            total += weight[0].numel() * output.numel()

    for module in net.modules():
        module.register_forward_hook(count)
    net(torch.zeros(1, *work.shape))
    return total


def parameters(work: Workload) -> int:
    """Return the number of parameters of the network."""
    return sum(each.numel() for each in new_net(work).parameters())


def fastest(run: Callable[[], object], options: Options, repeats: int = 12) -> float:
    """Return the seconds of the fastest of some runs, after three that warm up."""
    took = []
    for number in range(repeats + 3):
        wait_for(options)
        began = time.perf_counter()
        run()
        wait_for(options)
        if number >= 3:
            took.append(time.perf_counter() - began)
    return min(took)


def rate(options: Options) -> float:
    """Return the FLOP per second of a large matrix product in the precision of the options."""
    size = 8192 if options.cuda else 1536
    kind = torch.bfloat16 if options.precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=options.device, dtype=kind) for _ in range(2))
    with tf32(options.precision == "tf32"):
        return 2 * size**3 / fastest(lambda: a @ b, options)


def bandwidth(options: Options) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.randn(2**28 if options.cuda else 2**25, device=options.device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / fastest(lambda: target.copy_(source), options)


HEAD = ("clients", "precision", "ms a round", "lowest", "highest", "first, s", "F/R, ms")
HEAD_ALL = (*HEAD, "Q/BW, ms", "× roofline", "target")


def row(work: Workload, options: Options) -> tuple[Cell, ...]:
    """Return the times of a round beside those of the roofline."""
    from anyfleet.methods import fedavg

    flop = 6 * multiply_adds(work) * work.cohort * work.samples
    moved = work.local_steps * work.cohort * 4 * 4 * parameters(work)
    compute, move = 1e3 * flop / rate(options), 1e3 * moved / bandwidth(options)
    if options.cuda:
        torch.cuda.empty_cache()
    method = fedavg(count=work.cohort, lr=work.lr, batch_size=work.batch, epochs=1)
    task = built(work, options.device)
    each = timed(method, task, options, seconds=40.0, replies=work.cohort)
    ratio = each.ms / max(compute, move)
    times = (each.ms, each.low, each.high, each.first)
    return (*times, compute, move, ratio, verdict(ratio, GOAL))


def tables(
    options: Options,
    clients: Sequence[int] = CLIENTS,
    precisions: Sequence[Precision] = (),
    work_name: str = "C.3",
) -> list[Table]:
    """Measure rounds of so many clients in every precision."""
    work = WORKLOADS[work_name]
    found = []
    for count in clients:
        own = replace(work, cohort=count, users=max(count, work.users))
        for precision in precisions or (options.precision,):
            asked = replace(options, precision=precision)
            run = lambda: row(own, asked)  # noqa: B023, E731 - called at once
            found.append(attempted(run, len(HEAD_ALL), count, precision))
    note = (
        f"{multiply_adds(work):,} multiply-adds a sample, {parameters(work):,} parameters, "
        f"{work.samples} samples and {work.local_steps} local steps of each client."
    )
    return [Table("roofline", f"The roofline ({work.name})", HEAD_ALL, tuple(found), (note,))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    read = parser(__doc__)
    read.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    read.add_argument("--work", choices=WORKLOADS, default="C.3")
    given = read.parse_args(arguments)
    options = given_options(given)
    report("roofline", tables(options, given.clients, (), given.work), options, given.out)


if __name__ == "__main__":
    main()
