"""Fleets that are ready to use: those of the papers, and one given by a list of speeds."""

import math
from collections.abc import Iterable, Iterator, Mapping

from anyfleet.arguments import checked
from anyfleet.errors import refuse
from anyfleet.world.column_loss import ColumnLoss, column_width_faults, probability_faults
from anyfleet.world.distributions import Disc, LogNormal, Normal, Uniform
from anyfleet.world.fleet import SPEEDS, Fleet
from anyfleet.world.group import Group, range_faults
from anyfleet.world.links import Shannon, Steady, bit_rate_faults, bluetooth, lte, wifi
from anyfleet.world.processes import Redrawn
from anyfleet.world.quantities import Distribution, Number

# AnycostFL's study of unequal devices keeps these means and varies the deviation
# (specification §A.2).
MEAN_COEFFICIENT = 7.5e-27  # joules for a cycle, divided by the frequency squared
MEAN_DISTANCE = 400.0  # metres

_ANYWHERE = Redrawn(Disc(550.0))
_COEFFICIENTS = Uniform(5e-27, 1e-26)
_JOULES = Redrawn(Uniform(3.0, 9.0))
_CELL_LINK = Shannon()
_ERRORS = (Uniform(0.1, 0.2),)


@checked
def levels(
    *,
    speeds: tuple[float, ...] = SPEEDS,  # FLOP per second of each level
    bit_rate_up: float | tuple[float, ...] = 1e7,  # bits per second
    bit_rate_down: float | tuple[float, ...] = 4e7,  # bits per second
    memory: float = 4e9,  # bytes free for training
    mortality: float = 0.0,  # share of orders during which a device dies
    error: float = 0.0,  # probability that a link loses a column
    budget: float = math.inf,  # joules that one order may cost, for planners
) -> Fleet:
    """Return a fleet with one level for each speed, strongest first, and as many devices of each.

    A bit rate is one number for all levels, or one for each. The default speeds are FedPMT's: 1,
    1/2, 1/3, 1/4 and 1/5 of the fastest (specification §A.1).
    """
    ups, downs = (_for_each(rate, len(speeds)) for rate in (bit_rate_up, bit_rate_down))
    refuse(
        (
            "" if speeds else "levels.speeds must have at least one speed.",
            *range_faults("levels.speeds", "speed", *speeds),
            *_bit_rates_faults(
                {"levels.bit_rate_up": ups, "levels.bit_rate_down": downs}, len(speeds)
            ),
            *range_faults("levels.memory", "memory", memory),
            *range_faults("levels.mortality", "mortality", mortality),
            *probability_faults("levels.error", error),
            *range_faults("levels.budget", "budget", budget),
        )
    )
    return Fleet(
        groups=tuple(
            Group(
                name=f"level {i}",
                speed=speed,
                link=Steady(bit_rate_up=ups[i], bit_rate_down=downs[i]),
                memory=memory,
                mortality=mortality,
                column_loss=ColumnLoss(error=error),
                budget=budget,
            )
            for i, speed in enumerate(speeds)
        )
    )


@checked
def testbed(*, speed: float = 5e10) -> Fleet:
    """Return WHALE-FL's twenty devices: five kinds of boards, and three links dealt independently.

    The relative speeds, the share of the time that no slice saves, and how the rest shrinks are
    our assumptions (specification §A.1), close to published timings of such boards. `speed` is the
    laptop's, in FLOP per second.
    """
    refuse(range_faults("testbed.speed", "speed", speed))
    return _boards([speed * part for part in (1, 0.2, 0.18, 0.17, 0.16)])


@checked
def steep(*, speed: float = 5e10) -> Fleet:
    """Return the testbed with speeds that differ more: the first is twenty times the last."""
    refuse(range_faults("steep.speed", "speed", speed))
    return _boards([speed * part for part in (1, 0.8, 0.4, 0.15, 0.05)])


@checked
def cell(
    *,
    devices: int = 60,  # in the cell
    distance: Number = _ANYWHERE,  # metres from the station
    coefficient: Number = _COEFFICIENTS,  # joules for a cycle, divided by the frequency squared
    budget: Number = _JOULES,  # joules that one order may cost
    flops_per_cycle: float = 171.0,  # of every device
    link: Shannon = _CELL_LINK,
) -> Fleet:
    """Return AnycostFL's cell: devices within 550 m of a station, at a new place in every round.

    Each device has a band of 1 MHz, a frequency from 0.1 to 3 GHz, and a `budget` of joules for
    one order that is drawn anew in every round. The FLOP per cycle make the paper's workloads fit
    its energies: 171 for CIFAR-10, 16 for Fashion-MNIST (specification §3). Compare results at
    `link.ref_loss_db` 40 (default) and 0. For the study of unequal devices give
    `coefficient = unequal_coefficient(d)` or `distance = unequal_distance(d)`.
    """
    slowest, fastest = 1e8, 3e9
    refuse(
        (
            "" if devices >= 1 else f"cell.devices must be at least 1, got {devices}.",
            *range_faults("cell.distance", "distance", distance),
            *range_faults("cell.coefficient", "energy", coefficient),
            *range_faults("cell.budget", "budget", budget),
            *range_faults("cell.flops_per_cycle", "speed", flops_per_cycle),
        )
    )
    return Fleet(
        groups=(
            Group(
                name="cell",
                count=devices,
                speed=fastest * flops_per_cycle,
                frequency=(slowest, fastest),
                energy=coefficient,
                distance=distance,
                budget=budget,
                link=link,
            ),
        )
    )


@checked
def unequal_coefficient(deviation: float) -> Normal:
    """Return energy coefficients with AnycostFL's mean and any deviation."""
    return Normal(MEAN_COEFFICIENT, deviation, low=1e-30, high=2 * MEAN_COEFFICIENT)


@checked
def unequal_distance(deviation: float) -> Redrawn:
    """Return distances with AnycostFL's mean and any deviation, drawn anew in every round.

    They are symmetric about the mean so that it stays; they reach 799 m, beyond the cell's 550 m.
    """
    return Redrawn(Normal(MEAN_DISTANCE, deviation, low=1.0, high=2 * MEAN_DISTANCE - 1.0))


@checked
def lossy(
    *,
    errors: tuple[float | Distribution, ...] = _ERRORS,
    levels: int = 1,  # capability levels
    column_width: float = 0.125,  # of the model's width
    speed: float = 1e9,  # FLOP per second
) -> Fleet:
    """Return FedResCuE's fleet: models cross in columns, and the first loss ends a transmission.

    There is one group for each error and level, with evenly many devices. An error is a
    probability, or a distribution drawn anew for every column (specification §1.9).
    `errors = [0.05, 0.05, 0.05, 0.3, 0.3]` are DigitsFive's domains. Methods need
    `send = "weights"` and `cache = true`.
    """
    refuse(
        (
            "" if errors else "lossy.errors must have at least one error.",
            *probability_faults("lossy.errors", *errors),
            "" if levels >= 1 else f"lossy.levels must be at least 1, got {levels}.",
            *column_width_faults("lossy.column_width", column_width),
            *range_faults("lossy.speed", "speed", speed),
        )
    )
    return Fleet(
        groups=tuple(
            Group(
                name=f"error {_text(error)}" + (f", level {level}" if levels > 1 else ""),
                level=level,
                speed=speed,
                column_loss=ColumnLoss(column_width=column_width, error=error),
            )
            for error in errors
            for level in range(levels)
        )
    )


def _boards(speeds: Iterable[float]) -> Fleet:
    """Return four devices of each board; levels 0, 1 and 2 may train widths 1, 1/2 and 1/4."""
    names = ("MacBook Pro 2018", "Jetson Xavier", "Jetson TX2", "Jetson Nano", "Raspberry Pi 4")
    board_levels = (0, 0, 1, 2, 2)
    # Time = T_full × (.05 + .95 × width^exponent): the laptop saves less.
    exponents = (1.0, *(1.7,) * 4)
    busy = Redrawn(LogNormal(median=1.0, sigma=0.2, low=0.2, high=5.0))
    return Fleet(
        groups=tuple(
            Group(
                name=name,
                count=4,
                level=level,
                speed=speed,
                fixed=0.05,
                exponent=exponent,
                load=busy,
            )
            for name, level, speed, exponent in zip(
                names, board_levels, speeds, exponents, strict=True
            )
        ),
        links=(wifi(), lte(), bluetooth()),
    )


def _text(error: float | Distribution) -> str:
    return f"{error:g}" if isinstance(error, int | float) else str(error)


def _for_each(given: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    return (given,) * count if isinstance(given, int | float) else given


def _bit_rates_faults(given: Mapping[str, tuple[float, ...]], count: int) -> Iterator[str]:
    for name, rates in given.items():
        yield from bit_rate_faults(name, *rates)
        if len(rates) != count:
            yield (
                f"{name} needs one number, or one for each of the {count} in levels.speeds; "
                f"got {len(rates)}."
            )
