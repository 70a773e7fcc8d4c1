"""How long AnycostFL's plans take: all at once, one at a time, and how far brute force is off.

    python benchmarks/planner.py                         # about a minute
    python benchmarks/planner.py --cohorts 1 100 --grid 100 200

Devices are those of AnycostFL's cell (specification §A.2 and §3, CIFAR-10): anywhere in a disc of
550 m, with 40 dB lost at one metre, 3 to 9 joules, 10 seconds, and the coefficients of their
processors drawn. Half of them may send up to a fifteenth of the update, the others all of it, and
some have processors with narrow bounds.

A simulated cohort of 100 decides with nine widths of the package's own task (`Runtime.check_in`:
what each of them costs each device, and the choice), after a first round in which all is priced.

"at once" is `anycost_plans`, "one by one" the reference `anycost_plan`, which searches. Brute force
is the best of a grid of sizes and frequencies, in equal steps and in equal ratios: by how much its
gain is below the plan's. Milliseconds are those of the processor, the quickest of some repetitions.
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from anyfleet import rng
from anyfleet import world as worlds
from anyfleet.arrays import Floats
from anyfleet.core.planning import PlanningState, plan_cohort
from anyfleet.core.server import Server
from anyfleet.core.view import Request
from anyfleet.formulas import AnycostBudgets, anycost_best_sending
from anyfleet.formulas.reference import AnycostBounds, AnycostDevice, anycost_plan, anycost_plans
from anyfleet.methods import anycost
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Simulated
from anyfleet.tasks import Dirichlet, Embedded
from anyfleet.world import Shannon

COHORTS = (1, 100, 10_000)
GRID = (300, 600)  # sizes and frequencies
GOAL = 20.0  # milliseconds for a cohort of 100
ALPHA_MIN = 0.25
DECIDING = 100


@dataclass(frozen=True, eq=False)
class Cell:
    """Devices of a round, a row each."""

    budgets: AnycostBudgets
    beta_max: Floats

    def rows(self) -> Iterator[tuple[AnycostDevice, AnycostBounds]]:
        """Yield the devices one by one, for the reference, which plans one at a time."""
        columns = (getattr(self.budgets, field.name) for field in fields(AnycostBudgets))
        table = np.stack(np.broadcast_arrays(*columns), axis=1)
        for (*own, slowest, fastest), cap in zip(table.tolist(), self.beta_max, strict=True):
            bounds = AnycostBounds(ALPHA_MIN, beta_max=cap, slowest=slowest, fastest=fastest)
            yield AnycostDevice(*own), bounds

    def gains(self) -> Floats:
        """Return the gains of the plans, made all at once."""
        return anycost_plans(self.budgets, alpha_min=ALPHA_MIN, beta_max=self.beta_max).gain


@dataclass(frozen=True)
class Row:
    """A cohort of some size; milliseconds for all of it."""

    devices: int
    at_once: float
    one_by_one: float


@dataclass(frozen=True)
class Missed:
    """By which shares of the gain the reference and brute force are below the plans made at once.

    Negative where they are above them.
    """

    planned: int  # devices with a plan; all three must agree who has none
    reference: list[float]
    grid: list[float]


def cell(devices: int) -> Cell:
    """Return so many devices of the cell, drawn."""

    def drawn(name: str, low: float, high: float) -> Floats:
        part: Floats = rng.uniform(rng.root(0, name), devices).numpy()
        return low + (high - low) * part

    link = Shannon()
    distance = np.maximum(1.0, 550 * np.sqrt(drawn("distance", 0, 1)))
    loss = 10 ** (-link.ref_loss_db / 10) * distance**-link.exponent
    noise = 10 ** (link.noise_dbm_per_mhz / 10 - 3)
    narrow = drawn("narrow", 0, 1) < 0.2
    budgets = AnycostBudgets(
        energy=drawn("energy", 3, 9),
        seconds=10.0,
        power=link.send_power,
        bit_rate=link.band * np.log2(1 + loss * link.send_power / noise),
        bits=111.7e6,
        epsilon=drawn("epsilon", 5e-27, 1e-26),
        cycles=833 * 5.7e6,
        slowest=np.where(narrow, drawn("slowest", 2e8, 5e8), 1e8),
        fastest=np.where(narrow, drawn("fastest", 5e8, 6e8), 3e9),
    )
    return Cell(budgets, np.where(drawn("cap", 0, 1) < 0.5, 1 / 15, 1.0))


def milliseconds(task: Callable[[], object], repeats: int) -> float:
    """Return the quickest of some repetitions, each of a twentieth of a second or more."""
    timer = timeit.Timer(task, timer=time.process_time)
    count = 1 + int(0.05 / max(timer.timeit(1), 1e-5))
    return 1e3 * min(timer.repeat(repeats, count)) / count


def measured(devices: int, repeats: int) -> Row:
    """Measure the plans of a cohort, made at once and one by one."""
    cohort = cell(devices)
    alone = list(cohort.rows())

    def one_by_one() -> None:
        for device, bounds in alone:
            anycost_plan(device, bounds)

    return Row(devices, milliseconds(cohort.gains, repeats), milliseconds(one_by_one, repeats))


def row_of_sizes(repeats: int) -> float:
    """Return the milliseconds of the best of nine given sub-model sizes, for one device."""
    sizes = np.linspace(0.2, 1.0, 9)[np.newaxis]
    budgets = AnycostBudgets(6.0, 10.0, 0.1, 1e6, 111.7e6 * sizes, 7.5e-27, 4.7e9 * sizes, 1e8, 3e9)
    return milliseconds(lambda: anycost_best_sending(budgets), repeats)


def deciding(devices: int, repeats: int) -> float:
    """Return the milliseconds of the choices of a simulated cohort, nine widths each."""
    task = Embedded(devices=devices, partition=Dirichlet(0.5)).build(0)
    samples = np.array([task.size(device) for device in range(devices)])
    world = worlds.cell(devices=devices, flops_per_cycle=4.0).build(samples, 0)
    runtime = Simulated(task, world)
    method = replace(anycost(seconds=0.25), select=Everyone())
    server = Server(method, task, runtime, 0)
    state = PlanningState(0, 0, server.visits, server.acknowledged, server.states)
    everybody = np.arange(devices)
    planned = plan_cohort(
        Request(), everybody, method=server.method, view=server.view(), state=state
    )
    runtime.offer(planned.orders)
    return milliseconds(lambda: runtime.offer(planned.orders), repeats)


def brute_force(device: AnycostDevice, bounds: AnycostBounds, grid: tuple[int, int]) -> float:
    """Return the best gain of a grid of sizes and frequencies, or 0 if nothing fits."""
    alpha = np.linspace(bounds.alpha_min, 1, grid[0])[:, np.newaxis]
    frequency = np.geomspace(bounds.slowest, bounds.fastest, grid[1])
    work = alpha * device.cycles
    paid = (device.energy - device.epsilon * frequency**2 * work) / device.power
    sending = np.minimum(device.seconds - work / frequency, paid)
    beta = np.minimum(bounds.beta_max, device.bit_rate * sending / (alpha * device.bits))
    return float(np.max(np.where(beta > 0, alpha**4 * beta, 0.0)))


def missed(devices: int, grid: tuple[int, int]) -> Missed:
    """Compare the plans of a cohort with the reference and with brute force."""
    cohort = cell(devices)
    found = Missed(int(np.isfinite(cohort.gains()).sum()), [], [])
    for gain, row in zip(cohort.gains(), cohort.rows(), strict=True):
        alone, best = anycost_plan(*row), brute_force(*row, grid)
        if np.isnan(gain) != (alone is None) or (best > 0 and alone is None):
            raise AssertionError(f"Disagreement about whether there is a plan: {row}")
        if alone is not None:
            found.reference.append(1 - alone.gain / gain)
            found.grid.append(1 - best / gain)
    return found


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'devices':>8} {'at once, ms':>12} {'one by one, ms':>15} {'times':>7}"
    for row in rows:
        times = row.one_by_one / row.at_once
        late = "!" if row.devices == 100 and row.at_once > GOAL else " "
        yield (
            f"{row.devices:>8,} {row.at_once:>12.3f}{late}{row.one_by_one:>15.3f} {times:>7,.2f}"
        )


def compared(found: Missed, devices: int) -> Iterator[str]:
    """Yield how far the reference and brute force are off."""
    yield f"{found.planned} of {devices} devices have a plan"
    for name, shares in (("one by one", found.reference), ("brute force", found.grid)):
        yield (
            f"{name}: gain below that of the plans by {statistics.median(shares):.1e} (median), "
            f"{max(shares):.1e} (most); above it by {max(0.0, -min(shares)):.1e} (most)"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the plans, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cohorts", type=int, nargs="+", default=list(COHORTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compared", type=int, default=400, help="devices, with brute force")
    parser.add_argument("--grid", type=int, nargs=2, default=GRID, metavar=("SIZES", "FREQUENCIES"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("\n".join(shown([measured(size, given.repeats) for size in given.cohorts])), flush=True)
    print(f"a row of nine given sizes: {row_of_sizes(given.repeats):.3f} ms", flush=True)
    decided = deciding(DECIDING, given.repeats)
    print(f"the choices of {DECIDING} simulated devices: {decided:.1f} ms", flush=True)
    print("\n".join(compared(missed(given.compared, tuple(given.grid)), given.compared)))


if __name__ == "__main__":
    main()
