"""The simulated clock against a real one: predicted and measured seconds on this machine.

    python benchmarks/clock.py

Profiles the machine on 18 slices, as `anyfleet fleet profile` does; then lets it train C.3, C.8 and
C.11 (specification §C) at five widths and from every layer on (FedPMT), 175 slices measured anew,
and compares. Seconds are those of the processor on one thread, for one local step of 16 samples,
with the code that a device runs. Takes about six minutes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles

from anyfleet.core.objectives import Task
from anyfleet.elastic import Slice
from anyfleet.hardware.probes import Sample, measure, standard
from anyfleet.hardware.profile import FittedSpeed, as_toml, profile, slices

BATCH = 16
WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
GOAL = 0.20


def every_slice(task: Task) -> Iterator[Slice]:
    """Yield the slices that are measured: every width, from every layer on."""
    for width in WIDTHS:
        for first in range(len(task.blueprint.layers)):
            yield replace(task.blueprint.prefix(width), first_trained_layer=first)


def compared(tasks: Mapping[str, Task], fitted: FittedSpeed) -> Iterator[tuple[Sample, bool]]:
    """Yield every slice as measured, and whether the profile had seen it."""
    print("net    width first  measured ms predicted ms  error")
    for net, task in tasks.items():
        seen = set(slices(task))
        for slice_ in every_slice(task):
            sample = measure(net, task, slice_, BATCH)
            measured, predicted = (
                1e3 * each / sample.local_steps for each in (sample.seconds, fitted.seconds(sample))
            )
            print(
                f"{net:5} {sample.width:6.3f} {sample.first_trained_layer:5d} "
                f"{measured:12.2f} {predicted:12.2f} "
                f"{fitted.error(sample):+6.0%}{' *' if slice_ in seen else ''}",
                flush=True,
            )
            yield sample, slice_ in seen


def summary(name: str, errors: Sequence[float]) -> str:
    """Return a line about the relative errors of some slices."""
    sizes = [abs(error) for error in errors]
    tenth = quantiles(sizes, n=10)[-1]
    return (
        f"{name:22} {len(sizes):4d} slices: median error {median(sizes):4.0%}, "
        f"nine in ten within {tenth:4.0%}, largest {max(sizes):4.0%}, "
        f"median signed {median(errors):+4.0%}"
    )


def main() -> None:
    """Profile this machine, measure every slice anew, and print how far the profile is off."""
    tasks = standard(BATCH)
    found = profile(tasks, BATCH)
    print(as_toml(found))
    for peak in found.peaks:
        print(
            f"{peak.net}: peak memory {peak.measured / 1e6:.1f} MB measured, "
            f"{peak.predicted / 1e6:.1f} MB counted by planners"
        )
    print("\n* was in the profile too, and is measured again\n")
    rows = list(compared(tasks, found.fitted))
    fitted = found.fitted
    print()
    for net in tasks:
        print(summary(net, [fitted.error(s) for s, _ in rows if s.net == net]))
    for width in WIDTHS:
        near = [s for s, _ in rows if min(WIDTHS, key=lambda each: abs(each - s.width)) == width]
        print(summary(f"width {width:g}", [fitted.error(s) for s in near]))
    print(summary("not in the profile", [fitted.error(s) for s, seen in rows if not seen]))
    everything = [fitted.error(s) for s, _ in rows]
    print(summary("all", everything))
    reached = median(map(abs, everything)) <= GOAL
    print(f"goal: median at most {GOAL:.0%}: {'reached' if reached else 'NOT reached'}")


if __name__ == "__main__":
    main()
