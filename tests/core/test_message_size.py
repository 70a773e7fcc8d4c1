"""What messages are expected to take, before there are any."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.core.message_size import (
    expected_bits,
    heavy_update,
    mask_bits,
    mask_variation,
    stacked_mask_bits,
    uncompressed_bits,
)
from anyfleet.core.method import Job
from anyfleet.core.slots import Codec
from anyfleet.elastic import WHOLE
from anyfleet.methods import fedavg, heterofl
from anyfleet.names import Factory
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Nothing, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.plan import SentFractionByLevel
from anyfleet.tasks import Embedded
from anyfleet.tasks.zoo import cnn_mnist
from tests.helpers import small

BLUEPRINT = small.task().blueprint
HALF = BLUEPRINT.prefix(0.5)
JOB = replace(fedavg(), uplink=Raw()).job()


def test_raw_messages_are_expected_as_they_are() -> None:
    for slice_ in (WHOLE, HALF):
        found = expected_bits(slice_, JOB, BLUEPRINT)
        assert (found.down, found.up) == uncompressed_bits(slice_, JOB.norm, BLUEPRINT)
        assert (found.sent_fraction, found.least_fraction, found.most_fraction, found.follows) == (
            1.0,
            1.0,
            1.0,
            False,
        )


def test_a_shorter_format_takes_half_both_ways() -> None:
    short = replace(JOB, uplink=Raw("fp16"), downlink=Raw("bf16"))
    found, plain = expected_bits(HALF, short, BLUEPRINT), expected_bits(HALF, JOB, BLUEPRINT)
    assert found.up == plain.up / 2
    assert plain.down / 2 < found.down < 0.51 * plain.down  # to say which slice takes as much
    assert expected_bits(HALF, replace(JOB, uplink=Nothing()), BLUEPRINT).up == 0


@pytest.mark.parametrize("codec", [Stc(), Qsgd(), TopK(0.15, Qsgd()), ErrorFeedback(Stc(0.1))])
def test_a_codec_with_one_rate_is_expected_to_have_it(codec: Codec) -> None:
    found = expected_bits(WHOLE, replace(JOB, uplink=codec), BLUEPRINT, 0.01)
    assert (
        found.sent_fraction
        == found.least_fraction
        == found.most_fraction
        == expected_bits(WHOLE, job(codec), BLUEPRINT).sent_fraction
    )
    assert 0 < found.sent_fraction < 0.3
    assert found.up == pytest.approx(found.sent_fraction * found.update + found.aside)


def job(codec: Codec) -> Job:
    return replace(JOB, uplink=codec)


@pytest.mark.parametrize("codec", [Fgc(), Hq(), Uveq(), TopK(0.15, Uveq())])
def test_a_codec_that_adapts_follows_within_what_it_can(codec: Codec) -> None:
    def asked(rate: float) -> float:
        return expected_bits(WHOLE, job(codec), BLUEPRINT, rate).sent_fraction

    found = expected_bits(WHOLE, job(codec), BLUEPRINT)
    least, most = found.least_fraction, found.most_fraction
    assert 0 < least < most < 1
    between = (least + most) / 2
    assert asked(between) == between
    assert asked(least / 2) == least
    assert asked(1.0) == most
    assert least < found.sent_fraction <= most * (1 + 1e-9)  # without a target, by itself


CODECS: list[Codec] = [
    Raw(),
    Stc(0.15),
    Stc(0.01),
    Stc(0.001),
    Qsgd(),
    TopK(0.15, Qsgd()),
    TopK(0.15),
    ErrorFeedback(Stc()),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_sent_is_about_what_was_expected_and_seldom_more(codec: Codec) -> None:
    """On networks whose messages are mostly headers, and on others."""
    problem = Embedded(devices=4, limit=600, server=20, model=Factory.of(cnn_mnist)).build(0)
    for task in (small.task(dropout=0.0), problem):
        for share in (1.0, 0.5):
            method = replace(
                heterofl(widths=(share,), label_rows=False, lr=0.05, count=4), uplink=codec
            )
            (step,) = small.steps(method, task, 1)
            slice_ = task.blueprint.prefix(share)
            found = expected_bits(slice_, method.job(), task.blueprint).up
            assert (step.ledger.bits_up <= found * (1 + 1e-9)).all()
            assert (step.ledger.bits_up >= 0.85 * found).all()


@pytest.mark.parametrize("codec", [Fgc(), Hq(), Uveq(), TopK(0.15, Uveq())])
def test_the_least_is_really_the_least(codec: Codec) -> None:
    """A message of almost nothing is no longer than what is planned for."""
    task = small.task(dropout=0.0)
    method = replace(fedavg(lr=0.05, count=8), uplink=codec, plan=SentFractionByLevel((1e-6,)))
    (step,) = small.steps(method, task, 1)
    found = expected_bits(WHOLE, method.job(), task.blueprint, 1e-6)
    assert found.sent_fraction == found.least_fraction
    assert (step.ledger.bits_up <= 1.1 * found.up).all()
    assert (step.ledger.bits_up >= 0.5 * found.up).all()


def test_look_ups_begin_with_an_update_whose_biases_move_furthest() -> None:
    """The gradient of a bias is a sum over all places, that of a weight over few of them."""
    laid, _ = heavy_update()
    usual = {name: float(rows.abs().median()) for name, rows in laid.items()}
    assert usual["linear"] == pytest.approx(usual["convolution"], rel=0.1)
    assert usual["bias"] == pytest.approx(10 * usual["linear"], rel=0.3)


@pytest.mark.parametrize("codec", [Fgc(), Hq(), Uveq(), Uveq(dimension=1), TopK(0.15, Uveq())])
def test_more_bits_are_never_for_worse(codec: Codec) -> None:
    rows, layout = heavy_update()
    rates = [0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0]
    errors = [
        float(codec.compress(rows, torch.tensor([rate]).double(), layout, {}).distortion)
        for rate in rates
    ]
    # What is drawn at random varies a little.
    assert all(after <= 1.05 * before for before, after in pairwise(errors))
    assert errors[-1] < errors[0] / 2


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_masks_of_a_stack_are_as_long_as_each_is_packed(
    shape: list[int], constant: list[list[bool]], seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    masks = []
    for flags in constant:
        # Some dimensions are constant.
        short = [1 if flag else size for size, flag in zip(shape, flags, strict=False)]
        masks.append((torch.rand(short, generator=drawn) < 0.5).float().expand(shape))
    rows = (torch.rand(len(masks), 3, 1, generator=drawn) < 0.5).float().expand(-1, 3, 4)
    # Some of the stacks are views: of one device, or of one entry along the last dimension.
    alike = {"shared": masks[0].expand(len(masks), *masks[0].shape)}
    for stack in ({"whole": torch.stack(masks), "rows": rows, **alike}, alike):
        bits = stacked_mask_bits(stack, mask_variation(stack).numpy())
        each = [{name: value[row] for name, value in stack.items()} for row in range(len(masks))]
        assert bits.tolist() == [mask_bits(own) for own in each]
