"""What limits us next: the kernels of a round on a GPU, and where the host is meanwhile.

python -m benchmarks.kernels --precision tf32 --work P
"""

from collections.abc import Sequence

import torch
from benchmarks.measuring import (
    WORKLOADS,
    NotRun,
    Options,
    Rounds,
    Table,
    built,
    given_options,
    parser,
    play_rounds,
    report,
    times_of,
)
from benchmarks.overhead import shares

from anyfleet import methods


def busy(rounds: Rounds) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of one more round in which a kernel runs, and those of each."""
    from torch.profiler import ProfilerActivity, profile

    # Of the next round everything up to its training is in it, of this one what comes after.
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        next(rounds)
    kernels: dict[str, float] = {}
    spans = []
    for event in seen.events() or ():
        if str(event.device_type).endswith("CUDA"):
            spans.append((event.time_range.start, event.time_range.end))
            length = (event.time_range.end - event.time_range.start) / 1e3
            kernels[event.name] = kernels.get(event.name, 0.0) + length
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    if not spans:
        raise NotRun("the profiler saw no kernel")
    return total / 1e3, kernels


def profiled(options: Options, work_name: str = "P") -> list[Table]:
    """Return where a round's time goes: kernels (on a GPU), and stages of the host."""
    work = WORKLOADS[work_name]
    task = built(work, options.device)
    method = methods.fedavg(count=work.cohort, lr=work.lr, batch_size=work.batch, epochs=1)
    rounds = play_rounds(method, task, options)
    each = times_of(rounds, options, seconds=60.0)
    found: list[Table] = []
    if options.cuda:
        covered, kernels = busy(rounds)
        largest = sorted(kernels.items(), key=lambda item: -item[1])[:12]
        made = tuple((name[:80], ms, 100 * ms / each.ms) for name, ms in largest)
        note = f"A round takes {each.ms:.2f} ms; in {covered:.2f} ms of it a kernel runs."
        head = ("kernel", "ms a round", "% of the round")
        found.append(Table("kernels", f"Kernels of a round ({work.name})", head, made, (note,)))
    split = shares(rounds, 3.0)
    rows = tuple(
        (name, share * each.ms, 100 * share) for name, share in sorted(split.items(), key=_second)
    )
    title = f"Where the host is during a round ({work.name})"
    note = "Waiting for the accelerator counts for the stage that waits."
    found.append(Table("stages", title, ("stage", "ms a round", "%"), rows, (note,)))
    return found


def _second(item: tuple[str, float]) -> float:
    return -item[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    read = parser(__doc__)
    read.add_argument("--work", choices=WORKLOADS, default="P")
    given = read.parse_args(arguments)
    options = given_options(given)
    report("kernels", profiled(options, given.work), options, given.out)


if __name__ == "__main__":
    main()
