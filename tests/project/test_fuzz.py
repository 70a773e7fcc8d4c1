"""Some thousands of spoilt messages, as `make fuzz` makes them by the million."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from tools import fuzz as tool
from tools.fuzz import ACCEPTED, ESCAPED, Case, fuzz, messages
from tools.mangling import mangled

from anyfleet.core.check_in import OrderChoices
from anyfleet.core.messages import Kind
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.parts import codec as codecs
from anyfleet.wire import CheckInReport
from tests.helpers.messages import taken_apart


@cache
def cases() -> Sequence[Case]:
    """Made when a test asks, and not in every process that collects the tests."""
    return messages()


def test_there_are_messages_of_every_codec_and_kind_both_ways() -> None:
    uplinks = {type(case.order.job.uplink).__name__ for case in cases() if case.up}
    assert uplinks == set(codecs.__all__) - {"Quantiser"}
    assert {case.order.kind for case in cases()} == set(Kind)
    assert {case.up for case in cases()} == {True, False}
    assert {float(case.order.column_width[0]) for case in cases()} == {0.25, 1.0}
    nested = {case.order.job.uplink for case in cases() if case.up}
    assert {codecs.TopK(0.15, codecs.Uveq()), codecs.ErrorFeedback(codecs.Fgc())} <= nested
    assert {1, 4} <= {len(taken_apart(case.data)[1]) for case in cases()}
    for case in cases():
        kinds = {b"o": Cohort, b"r": Replies, b"i": CheckInReport, b"c": OrderChoices}
        assert isinstance(case.read(case.data), kinds[case.data[2:3]])
    assert {case.data[2:3] for case in cases()} == {b"o", b"r", b"i", b"c"}


def test_spoilt_messages_are_refused_for_many_reasons_and_nothing_else_escapes() -> None:
    tally = fuzz(3000, 1, cases())
    assert tally.count == 3000
    assert not tally.escaped, tally.escaped[0][0]
    assert ESCAPED not in tally.reasons
    reached = {"checksum", "cut", "header", "content", "job", "numbers", "tensors", "magic"}
    assert reached | {ACCEPTED, "replayed", "trailing", "too large"} <= set(tally.reasons)
    assert tally.reasons["checksum"] + tally.reasons["cut"] < 1500  # most get past the frames
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_the_same_seed_spoils_in_the_same_way() -> None:
    data = [case.data for case in cases()]
    one, two, other = (
        [mangled(data[0], data, np.random.default_rng(seed)) for _ in range(20)]
        for seed in (3, 3, 4)
    )
    assert one == two != other


@dataclass(frozen=True, eq=False)
class Broken(Case):
    """A receiver with a mistake in it."""

    def read(self, data: bytes) -> Cohort | Replies:
        raise KeyError(len(data))


@dataclass(frozen=True, eq=False)
class Slow(Case):
    """A receiver that a message keeps busy."""

    def read(self, data: bytes) -> Cohort | Replies:
        time.sleep(60)
        raise AssertionError


@pytest.mark.parametrize("sort", [Broken, Slow])
def test_what_escapes_or_takes_too_long_is_told(
    sort: type[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "SECONDS", 0.05)
    case = cases()[0]
    tally = fuzz(2, 0, [sort(case.data, case.order, case.task, up=case.up)])
    assert tally.reasons == {ESCAPED: 2}
    assert len(tally.escaped) == 2
    assert ("KeyError" if sort is Broken else "TooSlow") in tally.escaped[0][0]
