"""Slices and masks as bytes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.index_sets import pack_slice, unpack_slice
from anyfleet.core.message_size import uncompressed_bits
from anyfleet.core.planning import load_models
from anyfleet.core.slots import Norm
from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import BadMessage
from anyfleet.measure import Fisher
from anyfleet.methods import fedavg
from anyfleet.parts.aggregate import Diagnosed
from anyfleet.parts.norm import BatchStatistics, OnDevice, PerWidth, Tracked
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.changed import with_slices

BLUEPRINT = small.task().blueprint
FREE = [name for name, axis in BLUEPRINT.axes.items() if axis.kind == "channels"]


@st.composite
def slices(draw: st.DrawFn, blueprint: Blueprint = BLUEPRINT) -> Slice:
    keep = {}
    for axis in draw(st.sets(st.sampled_from(FREE))):
        size = blueprint.axes[axis].size
        indices = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
        keep[axis] = indices
    first = draw(st.integers(0, len(blueprint.layers) - 1))
    return Slice.of(keep, blueprint, first)


@given(slices())
def test_a_slice_survives_the_wire(slice_: Slice) -> None:
    assert unpack_slice(pack_slice(slice_, BLUEPRINT), BLUEPRINT) == slice_


def test_a_prefix_costs_a_few_bytes_per_axis_and_a_scattered_set_a_bit_per_channel() -> None:
    prefix = BLUEPRINT.prefix(0.5)
    assert len(pack_slice(prefix, BLUEPRINT)) == 4 + len(prefix.keep) * 11
    scattered = Slice.of({FREE[-1]: (0, 2, 5, 15)}, BLUEPRINT)
    assert len(pack_slice(scattered, BLUEPRINT)) == 4 + 3 + 2


@given(slices(), st.data())
def test_bytes_that_are_cut_or_changed_never_escape_as_another_error(
    slice_: Slice, data: st.DataObject
) -> None:
    packed = bytearray(pack_slice(slice_, BLUEPRINT))
    if packed:
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(packed)))
    try:
        found = unpack_slice(bytes(packed[:end]), BLUEPRINT)
    except BadMessage:
        return
    assert isinstance(found, Slice)


def test_a_count_beyond_the_axis_is_refused_before_memory_is_taken() -> None:
    packed = bytearray(pack_slice(BLUEPRINT.prefix(0.5), BLUEPRINT))
    packed[7:15] = b"\x00\x00\x00\x00\xff\xff\xff\xff"
    with pytest.raises(BadMessage, match="indices on an axis"):
        unpack_slice(bytes(packed), BLUEPRINT)


@pytest.mark.parametrize("norm", [BatchStatistics(), Tracked(), OnDevice(), PerWidth()], ids=str)
@given(slices())
@settings(max_examples=10)
def test_announced_traffic_is_what_a_run_is_charged(norm: Norm, slice_: Slice) -> None:
    task = small.task()
    sent = with_slices(orders(replace(fedavg(), norm=norm), task, [0]), slice_)
    method = replace(fedavg(), norm=norm)
    sent = load_models(sent, method=method, task=task, params=task.params, buffers=task.buffers)
    update = work(sent, (DeviceState(),), task).replies
    assert uncompressed_bits(slice_, norm, task.blueprint) == (sent.bits[0], update.bits[0])


def test_announced_traffic_has_what_is_reported() -> None:
    task = small.task()
    method = replace(
        fedavg(), aggregate=Diagnosed(reported=("norm", "channels"), measures=(Fisher(),))
    )
    for slice_ in (
        Slice(),
        task.blueprint.prefix(0.5),
        Slice(first_trained_layer=2),
        Slice(first_trained_layer=3),
    ):
        sent = with_slices(orders(method, task, [0]), slice_)
        sent = load_models(sent, method=method, task=task, params=task.params, buffers=task.buffers)
        update = work(sent, (DeviceState(),), task).replies
        job = method.job()
        _, up = uncompressed_bits(slice_, job.norm, task.blueprint, job.report, job.measures)
        assert up == update.bits[0]
