"""How much of anything a message may bring."""

import pytest

from anyfleet.errors import Refusal
from anyfleet.runtime import Limits
from tests import small

BLUEPRINT = small.task().blueprint


def test_limits_that_nothing_meets_are_refused_all_at_once() -> None:
    with pytest.raises(Refusal) as caught:
        Limits(message=0, job=-1, norm=0.0)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "Limits.job",
        "Limits.message",
        "Limits.norm",
    ]


def test_what_is_not_given_follows_from_the_model() -> None:
    most, half = Limits().most(BLUEPRINT), BLUEPRINT.local(BLUEPRINT.prefix(0.5))
    assert Limits().most(half).message < most.message
    assert Limits().most(half).header < most.header
    assert most.message > most.header + 4 * BLUEPRINT.numel()
    assert most.report > 6 + 8 + 16  # a number for every channel
    given = Limits(message=9, header=8, report=7).most(BLUEPRINT)
    assert (given.message, given.header, given.report) == (9, 8, 7)
