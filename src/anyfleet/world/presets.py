"""Fleets of the papers, ready to use; and the simplest one, a list of speeds."""

from collections.abc import Iterable

from anyfleet.world.fleet import Fleet
from anyfleet.world.group import Group
from anyfleet.world.laws import Disc, LogNormal, Normal, Uniform
from anyfleet.world.loss import Columns
from anyfleet.world.processes import Redrawn
from anyfleet.world.quantities import Law, Number
from anyfleet.world.radio import Shannon, Steady, bluetooth, lte, wifi

# AnycostFL's study of unequal devices keeps these means and varies the deviation (METHODS §A.2).
MEAN_COEFFICIENT = 7.5e-27  # joules for a cycle, divided by the frequency squared
MEAN_DISTANCE = 400.0  # metres

_ANYWHERE = Redrawn(Disc(550.0))
_COEFFICIENTS = Uniform(5e-27, 1e-26)
_JOULES = Uniform(3.0, 9.0)
_CELL_LINK = Shannon()
_ERRORS = (Uniform(0.1, 0.2),)


def levels(
    *,
    speeds: tuple[float, ...] = (2e9, 1e9, 2e9 / 3, 5e8, 4e8),
    up: float | tuple[float, ...] = 1e7,
    down: float | tuple[float, ...] = 4e7,
    memory: float = 4e9,
    mortality: float = 0.0,
) -> Fleet:
    """Evenly many devices of each speed, strongest first; links for all or one for each level.

    The speeds are FedPMT's: 1, 1/2, 1/3, 1/4 and 1/5 of the fastest (METHODS §A.1; one third, not
    0.33, or the third level misses its deadline).
    """
    ups, downs = (_for_each(name, n, len(speeds)) for name, n in (("up", up), ("down", down)))
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
    (METHODS §A.1, open): close to published timings of such boards. `speed` is the laptop's.
    """
    return _boards([speed * part for part in (1, 0.2, 0.18, 0.17, 0.16)])


def steep(*, speed: float = 5e10) -> Fleet:
    """The testbed with speeds that differ more: twentyfold between first and last."""
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

    Each has 1 MHz to itself, 0.1 to 3 GHz, and so many joules for a round. FLOP per cycle are
    those that make the paper's workloads fit its energies: 171 for CIFAR-10, 16 for Fashion-MNIST
    (METHODS §3). Compare at `link.ref_loss_db` 40 (default) and 0. For the study of unequal
    devices give `coefficient = unequal_coefficient(d)` or `distance = unequal_distance(d)`.
    """
    slowest, fastest = 1e8, 3e9
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
    """FedResCuE's links: a model crosses in columns, and the first loss ends it (METHODS §1.9).

    One group for each error (a constant, or a law drawn anew for every column) and capability
    level, evenly many devices of each: `errors = [0.05, 0.05, 0.05, 0.3, 0.3]` are DigitsFive's
    domains. Methods need `send = "weights"` and `cache = true`.
    """
    if levels < 1:
        raise ValueError(f"lossy.levels must be at least 1, got {levels}.")
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
    # The paper's law is in the width; FLOP go with its square. The laptop saves less.
    exponents = (1.0 / 2, *(1.7 / 2,) * 4)
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


def _for_each(name: str, given: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    if isinstance(given, int | float):
        return (given,) * count
    if len(given) != count:
        raise ValueError(
            f"levels.{name} needs one number, or one for each of the {count} speeds; "
            f"got {len(given)}."
        )
    return given
