"""What messages are expected to take, before there are any."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from anyfleet.codec import ErrorFeedback, Fgc, Hq, Nothing, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.elastic import WHOLE
from anyfleet.lengths import expected, expected_rate, rates_of, typical_update
from anyfleet.method import Codec
from anyfleet.methods import fedavg
from anyfleet.packing import traffic
from anyfleet.types import UNCUT
from tests import small

BLUEPRINT = small.task().blueprint
HALF = BLUEPRINT.prefix(0.5)
JOB = replace(fedavg(), uplink=Raw()).job()


def test_raw_messages_are_expected_as_they_are() -> None:
    for slice_ in (WHOLE, HALF):
        found = expected(slice_, JOB, BLUEPRINT)
        assert (found.down, found.up) == traffic(slice_, JOB.norm, BLUEPRINT)
        assert (found.rate, found.least, found.most, found.adapts) == (1.0, 1.0, 1.0, False)


def test_a_shorter_format_takes_half_both_ways() -> None:
    short = replace(JOB, uplink=Raw("fp16"), downlink=Raw("bf16"))
    found, plain = expected(HALF, short, BLUEPRINT), expected(HALF, JOB, BLUEPRINT)
    assert found.up == plain.up / 2
    assert plain.down / 2 < found.down < 0.51 * plain.down  # to say which slice takes as much
    assert expected(HALF, replace(JOB, uplink=Nothing()), BLUEPRINT).up == 0


@pytest.mark.parametrize("codec", [Stc(), Qsgd(), TopK(0.15, Qsgd()), ErrorFeedback(Stc(0.1))])
def test_a_codec_with_one_rate_is_expected_to_have_it(codec: Codec) -> None:
    found = expected(WHOLE, replace(JOB, uplink=codec), BLUEPRINT, 0.01)
    assert found.rate == expected_rate(codec) == found.least == found.most
    assert 0 < found.rate < 0.1
    assert found.up == pytest.approx(found.rate * found.update + found.aside)


@pytest.mark.parametrize("codec", [Fgc(), Hq(), Uveq(), TopK(0.15, Uveq())])
def test_a_codec_that_adapts_follows_within_what_it_can(codec: Codec) -> None:
    least, most = rates_of(codec)
    assert 0 < least < most < 1
    between = (least + most) / 2
    assert expected_rate(codec, between) == between
    assert expected_rate(codec, least / 2) == least
    assert expected_rate(codec, UNCUT) == most
    # Without a target, by itself.
    assert least < expected_rate(codec, 1.0) <= most * (1 + 1e-9)


@pytest.mark.parametrize("codec", [Fgc(), Hq(), Uveq(), Uveq(dimension=1), TopK(0.15, Uveq())])
def test_more_bits_are_never_for_worse(codec: Codec) -> None:
    laid, envelope = typical_update()
    tree = envelope.shaped(laid)
    rates = [0.02, 0.05, 0.1, 0.2, 0.5, 0.8, UNCUT]
    errors = [
        float(codec.squeeze(tree, {}, torch.tensor([rate]).double(), envelope).distortion)
        for rate in rates
    ]
    # What is drawn at random varies a little.
    assert all(after <= 1.05 * before for before, after in pairwise(errors))
    assert errors[-1] < errors[0] / 2
