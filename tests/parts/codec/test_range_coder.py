"""Without the library of the range coder: what still works, and what is said of the rest."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet import methods
from anyfleet.errors import AnyfleetError
from anyfleet.parts.codec import ErrorFeedback, Nothing, Qsgd, Raw, Stc, TopK, range_coder
from anyfleet.runtime import Limits, Sequential, Threads
from anyfleet.wire import misfits
from tests.helpers import small
from tests.helpers.hidden import without_range_coder


def test_codecs_say_what_they_lack() -> None:
    entropy_coded = (Stc(), Qsgd(), TopK(), ErrorFeedback(Qsgd()))
    assert {each.unavailable for each in (*entropy_coded, Raw(), Nothing())} == {""}
    with without_range_coder():
        assert range_coder.missing()
        for each in entropy_coded:
            assert "constriction" in each.unavailable
            assert "codec.Raw" in each.unavailable  # what works all the same
        assert Raw().unavailable == Nothing().unavailable == ""
        assert ErrorFeedback(Raw()).unavailable == ""
        with pytest.raises(AnyfleetError, match=r"docs/devices\.md"):
            range_coder.encoder()
    assert range_coder.missing() == ""


def test_a_simulated_run_needs_no_bytes() -> None:
    method, task = methods.stc(count=2, lr=0.1), small.task()
    with without_range_coder():
        alone = small.steps(method, task, 1)
    both = small.steps(method, task, 1)
    assert small.identical(alone[0].params, both[0].params)
    np.testing.assert_array_equal(alone[0].ledger.bits_up, both[0].ledger.bits_up)


def test_a_run_with_bytes_is_refused_before_it_begins() -> None:
    job = methods.stc().job()
    with without_range_coder():
        ((path, why),) = misfits(job, (), Limits()).items()
        assert path == "uplink"
        assert "constriction" in why
        assert Threads().misfits(job, Limits())
        assert not Sequential().misfits(job, Limits())
        assert not misfits(replace(job, uplink=Raw()), (), Limits())
    assert not misfits(job, (), Limits())
