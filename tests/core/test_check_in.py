"""Check-ins: what devices choose from, together as arrays and one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pytest

from anyfleet.core.check_in import CheckIn, CheckIns, Choices, MenuEntry, MessageBits
from anyfleet.core.messages import Conditions
from anyfleet.core.slots import Choose
from anyfleet.core.time_and_energy import Counts, Demand, effort_of
from anyfleet.parts.choose import First, LargestInTime
from anyfleet.parts.train import Gradient


def entry(flops: float, width: float = 1.0, *, down: float = 10.0, up: float = 4.0) -> MenuEntry:
    effort = effort_of(Counts(flops, flops, flops), width, local_steps=0, calls=0, moved=0)
    return MenuEntry(
        Demand(effort, np.array([width * 1e6])),
        MessageBits(down, up),
        first_trained_layer=2,
        menu_bits=2.0,
        choice_bits=1.0,
    )


LARGE, MIDDLE, SMALL = entry(100.0), entry(50.0, 0.5), entry(10.0, 0.25)


def device(number: int, menu: Sequence[MenuEntry], **known: float) -> CheckIn:
    plain = {each.name: 0.0 for each in fields(Conditions)} | {
        "speed": 1.0,
        "load": 1.0,
        "bandwidth": np.inf,
        "exponent": np.nan,
        "slowest": 1.0,
        "fastest": 1.0,
        "bit_rate_up": 1.0,
        "bit_rate_down": 2.0,
    }
    own = Conditions(**{name: np.array([value]) for name, value in (plain | known).items()})
    given = Gradient().hyperparameters(0, np.array([20 + number]))
    return CheckIn(number, tuple(menu), own, 20 + number, given, {"seen": (float(number),)})


ALONE = [
    device(4, [LARGE, MIDDLE, SMALL]),
    device(2, [MIDDLE, SMALL], speed=10.0),
    device(9, [SMALL], bit_rate_up=0.0),
]
TOGETHER = CheckIns.of(ALONE)


def test_arrays_have_a_column_for_every_device() -> None:
    assert TOGETHER.offered.T.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert TOGETHER.entries == (LARGE, MIDDLE, SMALL)  # each different one once
    assert TOGETHER.width.T.tolist() == [[1.0, 0.5, 0.25], [0.5, 0.25, 0.0], [0.25, 0.0, 0.0]]
    assert TOGETHER.flops[:, 1].tolist() == [50.0, 10.0, np.inf]
    assert TOGETHER.memory[:, 2].tolist() == [0.25e6, np.inf, np.inf]
    assert TOGETHER.bits_down[:, 0].tolist() == [12.0] * 3
    assert TOGETHER.bits_up[:, 0].tolist() == [5.0] * 3
    assert TOGETHER.first_trained_layer[:, 2].tolist() == [2, -1, -1]
    assert TOGETHER.channel_share[:, 1].tolist() == [1.0, 1.0, 0.0]
    assert TOGETHER.trained_share[:, 2].tolist() == [1.0, 0.0, 0.0]
    assert TOGETHER.samples.tolist() == [24, 22, 29]


def test_seconds_are_those_of_each_device_by_itself() -> None:
    for column, alone in enumerate(ALONE):
        found = [alone.seconds(each) for each in alone.menu]
        missing = [np.inf] * (3 - len(found))
        assert TOGETHER.seconds[:, column].tolist() == [*found, *missing]
    assert TOGETHER.seconds[0, :].tolist() == [100 + 6 + 5, 5 + 6 + 5, np.inf]
    assert TOGETHER.download_seconds[0, 0] == 6.0
    assert TOGETHER.compute_seconds[0, 1] == 5.0
    assert TOGETHER.upload_seconds[0, 2] == np.inf


def test_one_by_one_they_are_what_they_were() -> None:
    for before, after in zip(ALONE, TOGETHER, strict=True):
        assert (after.device, after.menu, after.samples) == (
            before.device,
            before.menu,
            before.samples,
        )
        assert after.state == before.state
        assert after.conditions.speed.tolist() == before.conditions.speed.tolist()


def test_choices_take_what_is_not_said_from_the_order() -> None:
    found = TOGETHER.choices([0, 1, 0])
    assert found.entry.tolist() == [0, 1, 0]
    assert np.isnan(found.utility).all()
    assert found.declined == ("", "", "")
    assert found.hyperparameters.batch_size.tolist() == [32] * 3
    other = TOGETHER.choices(
        [0, 1, 0], utility=[0.1, 0.2, 0.3], declined=["", "", "no link"], local_steps=3
    )
    assert other.utility.tolist() == [0.1, 0.2, 0.3]
    assert other.declined[2] == "no link"
    assert other.hyperparameters.local_steps.tolist() == [3] * 3


@dataclass(frozen=True)
class LastInTime(Choose):
    """A chooser that looks at one device at a time."""

    seconds: float

    def __call__(self, check_ins: CheckIns) -> Choices:
        return check_ins.choices([self.choose(check_in) for check_in in check_ins])

    def choose(self, check_in: CheckIn) -> int:
        fits = [check_in.seconds(each) <= self.seconds for each in check_in.menu]
        return fits.index(True) if any(fits) else len(fits) - 1


@pytest.mark.parametrize("seconds", [5.0, 15.5, 16.0, 30.0, 70.0, 1e9])
def test_arrays_and_single_devices_choose_the_same(seconds: float) -> None:
    one, two = LastInTime(seconds)(TOGETHER), LargestInTime(seconds)(TOGETHER)
    assert one.entry.tolist() == two.entry.tolist()
    assert First()(TOGETHER).entry.tolist() == [0, 0, 0]
