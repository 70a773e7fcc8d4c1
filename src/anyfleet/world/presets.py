"""Fleets of the papers, ready to use; and the simplest one, a list of speeds."""

from anyfleet.world.fleet import Fleet
from anyfleet.world.group import Group
from anyfleet.world.radio import Steady


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


def _for_each(name: str, given: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    if isinstance(given, int | float):
        return (given,) * count
    if len(given) != count:
        raise ValueError(
            f"levels.{name} needs one number, or one for each of the {count} speeds; "
            f"got {len(given)}."
        )
    return given
