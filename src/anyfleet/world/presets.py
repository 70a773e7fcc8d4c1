"""Fleets of the papers, ready to use; and the simplest one, a list of speeds."""

from collections.abc import Iterable, Iterator, Mapping

from anyfleet.errors import refuse
from anyfleet.world.column_loss import Columns, no_probability, no_width
from anyfleet.world.distributions import Disc, LogNormal, Normal, Uniform
from anyfleet.world.fleet import SPEEDS, Fleet
from anyfleet.world.group import Group, out_of_range
from anyfleet.world.links import Shannon, Steady, bluetooth, lte, no_rate, wifi
from anyfleet.world.processes import Redrawn
from anyfleet.world.quantities import Law, Number

# AnycostFL's study of unequal devices keeps these means and varies the deviation (specification §A.2).
MEAN_COEFFICIENT = 7.5e-27  # joules for a cycle, divided by the frequency squared
MEAN_DISTANCE = 400.0  # metres

_ANYWHERE = Redrawn(Disc(550.0))
_COEFFICIENTS = Uniform(5e-27, 1e-26)
_JOULES = Redrawn(Uniform(3.0, 9.0))
_CELL_LINK = Shannon()
_ERRORS = (Uniform(0.1, 0.2),)


def levels(
    *,
    speeds: tuple[float, ...] = SPEEDS,
    up: float | tuple[float, ...] = 1e7,
    down: float | tuple[float, ...] = 4e7,
    memory: float = 4e9,
    mortality: float = 0.0,
) -> Fleet:
    """Evenly many devices of each speed, strongest first; links for all or one for each level.

    The speeds are FedPMT's: 1, 1/2, 1/3, 1/4 and 1/5 of the fastest (specification §A.1).
    """
    ups, downs = (_for_each(rate, len(speeds)) for rate in (up, down))
    refuse(
        (
            "" if speeds else "levels.speeds must have at least one speed.",
            *out_of_range("levels.speeds", "speed", *speeds),
            *_no_rates({"levels.up": ups, "levels.down": downs}, len(speeds)),
            *out_of_range("levels.memory", "memory", memory),
            *out_of_range("levels.mortality", "mortality", mortality),
        )
    )
    return Fleet(
        groups=tuple(
            Group(
                name=f"level {i}",
                speed=speed,
                link=Steady(up=ups[i], down=downs[i]),
                memory=memory,
                mortality=mortality,
            )
            for i, speed in enumerate(speeds)
        )
    )


def testbed(*, speed: float = 5e10) -> Fleet:
    """WHALE-FL's twenty devices: five kinds of boards, and three radios dealt independently.

    Relative speeds, the part of the time that no slice saves, and how the rest shrinks are ours
    (specification §A.1, open): close to published timings of such boards. `speed` is the laptop's.
    """
    refuse(out_of_range("testbed.speed", "speed", speed))
    return _boards([speed * part for part in (1, 0.2, 0.18, 0.17, 0.16)])


def steep(*, speed: float = 5e10) -> Fleet:
    """The testbed with speeds that differ more: twentyfold between first and last."""
    refuse(out_of_range("steep.speed", "speed", speed))
    return _boards([speed * part for part in (1, 0.8, 0.4, 0.15, 0.05)])


def cell(
    *,
    devices: int = 60,
    distance: Number = _ANYWHERE,
    coefficient: Number = _COEFFICIENTS,
    budget: Number = _JOULES,
    flops_per_cycle: float = 171.0,
    link: Shannon = _CELL_LINK,
) -> Fleet:
    """AnycostFL's cell: devices within 550 m of a station, elsewhere in every round.

    Each has 1 MHz to itself, 0.1 to 3 GHz, and so many joules for a round, drawn anew. FLOP per
    cycle are those that make the paper's workloads fit its energies: 171 for CIFAR-10, 16 for
    Fashion-MNIST (specification §3). Compare at `link.ref_loss_db` 40 (default) and 0. For the study of
    unequal devices give `coefficient = unequal_coefficient(d)` or `distance = unequal_distance(d)`.
    """
    slowest, fastest = 1e8, 3e9
    refuse(
        (
            "" if devices >= 1 else f"cell.devices must be at least 1, got {devices}.",
            *out_of_range("cell.distance", "distance", distance),
            *out_of_range("cell.coefficient", "energy", coefficient),
            *out_of_range("cell.budget", "budget", budget),
            *out_of_range("cell.flops_per_cycle", "speed", flops_per_cycle),
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


def unequal_coefficient(deviation: float) -> Normal:
    """Energy coefficients with AnycostFL's mean and any deviation."""
    return Normal(MEAN_COEFFICIENT, deviation, low=1e-30, high=2 * MEAN_COEFFICIENT)


def unequal_distance(deviation: float) -> Redrawn:
    """Distances with AnycostFL's mean and any deviation, new in every round.

    Symmetric about the mean, so that it stays: up to 799 m, which is beyond the cell's 550 m.
    """
    return Redrawn(Normal(MEAN_DISTANCE, deviation, low=1.0, high=2 * MEAN_DISTANCE - 1.0))


def lossy(
    *,
    errors: tuple[float | Law, ...] = _ERRORS,
    levels: int = 1,
    width: float = 0.125,
    speed: float = 1e9,
) -> Fleet:
    """FedResCuE's links: a model crosses in columns, and the first loss ends it (specification §1.9).

    One group for each error (a constant, or a law drawn anew for every column) and capability
    level, evenly many devices of each: `errors = [0.05, 0.05, 0.05, 0.3, 0.3]` are DigitsFive's
    domains. Methods need `send = "weights"` and `cache = true`.
    """
    refuse(
        (
            "" if errors else "lossy.errors must have at least one error.",
            *no_probability("lossy.errors", *errors),
            "" if levels >= 1 else f"lossy.levels must be at least 1, got {levels}.",
            *no_width("lossy.width", width),
            *out_of_range("lossy.speed", "speed", speed),
        )
    )
    return Fleet(
        groups=tuple(
            Group(
                name=f"error {_text(error)}" + (f", level {level}" if levels > 1 else ""),
                level=level,
                speed=speed,
                loss=Columns(width=width, error=error),
            )
            for error in errors
            for level in range(levels)
        )
    )


def _boards(speeds: Iterable[float]) -> Fleet:
    """Four of each board. The level is the largest model it may train: 1, 1, 1/2, 1/4, 1/4."""
    names = ("MacBook Pro 2018", "Jetson Xavier", "Jetson TX2", "Jetson Nano", "Raspberry Pi 4")
    caps = (0, 0, 1, 2, 2)
    # T_full × (.05 + .95 × width^e): the laptop saves less.
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
            for name, level, speed, exponent in zip(names, caps, speeds, exponents, strict=True)
        ),
        links=(wifi(), lte(), bluetooth()),
    )


def _text(error: float | Law) -> str:
    return f"{error:g}" if isinstance(error, int | float) else str(error)


def _for_each(given: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    return (given,) * count if isinstance(given, int | float) else given


def _no_rates(given: Mapping[str, tuple[float, ...]], count: int) -> Iterator[str]:
    for name, rates in given.items():
        yield from no_rate(name, *rates)
        if len(rates) != count:
            yield (
                f"{name} needs one number, or one for each of the {count} in levels.speeds; "
                f"got {len(rates)}."
            )
