"""Failing links: what reaches the other side, what it costs, and what is made of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from anyfleet.arrays import join
from anyfleet.core.client import begin, work
from anyfleet.core.delivery import columns_of
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import OWN, DeviceStates
from anyfleet.core.layout import dense
from anyfleet.core.messages import Params, no_charges
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort, IssuedOrders, grid, uplink
from anyfleet.core.replies import IncomingReplies, RepliedOrders
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Slice, narrowed, within
from anyfleet.errors import BadMessage
from anyfleet.measure import Fisher
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.aggregate import Diagnosed
from anyfleet.parts.codec import Nothing, Raw
from anyfleet.parts.norm import OnDevice, PerWidth, Tracked
from anyfleet.tasks import Data, Dirichlet, Split, Task
from anyfleet.wire import cut_message, decode_order, decode_reply, encode_order, encode_reply
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.changed import with_contents
from tests.helpers.engines import cut_order, cut_reply
from tests.helpers.messages import charged

METHODS: dict[str, Method] = {
    "fedavg": fedavg(lr=0.1, batch_size=8),
    "label masks": heterofl(widths=(0.5,), lr=0.1, batch_size=8),
    "tracked": replace(fedavg(lr=0.1, batch_size=8), norm=Tracked()),
    "on device": replace(fedavg(lr=0.1, batch_size=8), norm=OnDevice()),
    "per width": replace(heterofl(widths=(0.7,), lr=0.1, batch_size=8), norm=PerWidth()),
    "weights": replace(fedavg(lr=0.1, batch_size=8), send="weights", cache=True),
    "sends nothing": replace(fedavg(lr=0.1, batch_size=8), uplink=Nothing()),
}
TASK = small.task(partition=Dirichlet(0.2))  # devices lack labels
COLUMN = 0.125
WIDTHS = pytest.mark.parametrize("width", [0.0, 0.125, 0.375, 0.5, 0.875, 1.0])


def asked(name: str, *, padded: bool = False) -> Cohort:
    method = small.padded(METHODS[name]) if padded else METHODS[name]
    return orders(method, TASK, [3], column=COLUMN)


def answered(order: Cohort) -> Replies:
    return work(order, (DeviceState(),), TASK).replies


def crossed(data: bytes, order: Cohort, width: float) -> bytes:
    """What a link leaves of a message: it fails somewhere within the first column it loses."""
    (came,) = columns_of(order, np.array([width]))
    return data if came == grid(order)[0] else cut_message(data, int(came), order.key[0])


def expected(order: Cohort, width: float) -> float:
    """A slice may be narrower than what came."""
    return width if columns_of(order, np.array([width]))[0] < grid(order)[0] else 1.0


def started(order: Cohort, state: DeviceState) -> tuple[Params, Params]:
    """Return the parameters and buffers with which a device in this state begins."""
    memories = DeviceStates(TASK)
    memories.adopt(int(order.device[0]), state)
    params, buffers = begin(order, memories, TASK)
    return {n: v[0] for n, v in params.items()}, {n: v[0] for n, v in buffers.items()}


# --- the worked example -----------------------------------------------------------------------


def four_columns() -> Task:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    data = Data(torch.randn(12, 3), torch.arange(12) % 2)
    return Task.of(net, data, data, split=Split(devices=3, test_share=0.0))


def constant(task: Task, order: Cohort, value: float) -> Replies:
    """What a device would send whose weights are all the same number."""
    update = work(order, (DeviceState(),), task).replies
    tree = {
        name: torch.full_like(old, value) for name, old in update.trees_of(0)["weights"].items()
    }
    around = uplink(order, task.blueprint, tuple(tree), torch.float32)
    rows = {name: row.unsqueeze(0) for name, row in tree.items()}
    squeezed = Raw().compress(around.flattened(rows), torch.ones(1), around, {})
    return with_contents(update, trees={"weights": tree}, symbols=squeezed.symbols)


def test_1_8_the_worked_example_through_the_servers_aggregation() -> None:
    """Widths .5, .75 and 1 with values 1, 2 and 4: columns (7/3, 7/3, 3, 4)."""
    task = four_columns()
    method = replace(fedavg(count=3), send="weights", aggregate=heterofl().aggregate)
    asked, rows = [], []
    for device, (width, value) in enumerate([(0.5, 1.0), (0.75, 2.0), (1.0, 4.0)]):
        order = orders(method, task, [device], column=0.25)
        came = cut_reply(constant(task, order, value), order, width, task.blueprint)
        asked.append(IssuedOrders.of(order))
        rows.append(came)
    issued = join(asked)
    job, nothing = method.job(), no_charges(issued.order, 0.0)
    replied = RepliedOrders.of(
        issued, join(rows), nothing, np.ones(3), job=job, blueprint=task.blueprint
    )
    updates = IncomingReplies(job, task, 0).trained(replied, task.params)
    change = updates.mean(np.ones(3))
    model = {name: task.params[name] + change[name] for name in task.params}
    expected = torch.tensor([7 / 3, 7 / 3, 3, 4])
    assert torch.allclose(model["0.bias"], expected)
    assert torch.allclose(model["0.weight"], expected[:, None].expand(4, 3))
    assert torch.allclose(model["2.weight"], expected.expand(2, 4))
    # No column of its own: it comes with the first.
    assert torch.allclose(model["2.bias"], torch.full((2,), 7 / 3))


# --- downwards --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@WIDTHS
def test_the_bits_of_a_cut_order_are_the_bytes_of_its_message(name: str, width: float) -> None:
    order = asked(name, padded=True)
    came = crossed(encode_order(order, TASK), order, width)
    assert cut_order(order, width, TASK.blueprint).bits[0] == 8 * charged(came)


@pytest.mark.parametrize("name", METHODS)
@WIDTHS
def test_a_cut_order_survives_the_wire(name: str, width: float) -> None:
    whole = asked(name, padded=True)
    order = cut_order(whole, width, TASK.blueprint)
    received = decode_order(crossed(encode_order(whole, TASK), whole, width), TASK)
    assert received.delivered_width[0] == order.delivered_width[0] == expected(whole, width)
    assert received.slices == whole.slices  # what is asked stays what it was
    assert received.bits[0] == order.bits[0]
    assert received.trees_of(0).keys() == order.trees_of(0).keys()
    for tree, values in order.trees_of(0).items():
        assert small.identical(values, received.trees_of(0)[tree])
    # A device makes the same of both.
    one, two = (started(each, DeviceState()) for each in (order, received))
    assert small.identical(one[0], two[0])
    assert small.identical(one[1], two[1])


def test_a_whole_delivery_changes_nothing_at_all() -> None:
    order = asked("tracked")
    assert cut_order(order, 1.0, TASK.blueprint) is order
    update = answered(order)
    assert cut_reply(update, order, 1.0, TASK.blueprint) is update


@pytest.mark.parametrize("width", [0.125, 0.5, 0.875])
def test_1_8_received_columns_overwrite_and_missing_ones_come_from_the_cache(width: float) -> None:
    """By hand, coordinate by coordinate."""
    method = replace(heterofl(widths=(0.7,), lr=0.1), cache=True, norm=Tracked())
    order = orders(method, TASK, [3], column=COLUMN)
    slice_, blueprint = order.slice_of(0), TASK.blueprint
    cache = {n: torch.full_like(v, -7.0) for n, v in {**TASK.params, **TASK.buffers}.items()}
    kept = DeviceState(tensors={OWN: cache})
    params, buffers = started(cut_order(order, width, blueprint), kept)
    arrived = narrowed(slice_, width, blueprint)
    whole = {**order.trees_of(0)["model"], **order.trees_of(0)["buffers"]}
    for name, value in {**params, **buffers}.items():
        if name not in whole:
            assert (value == -7.0).all()  # a counter: it never travels
            continue
        part = tuple(slice(size) for size in blueprint.local(arrived).shape(name))
        expected = torch.full_like(value, -7.0)
        expected[part] = whole[name][part]
        assert torch.equal(value, expected)
        assert (expected == -7.0).any() or value.shape == expected[part].shape


def test_1_8_without_a_single_column_the_device_goes_on_with_its_own_model() -> None:
    method = replace(fedavg(lr=0.1), cache=True)
    order = orders(method, TASK, [3], column=COLUMN)
    nothing = cut_order(order, 0.0, TASK.blueprint)
    assert nothing.bits[0] == 0  # the whole model needs no index set
    first = started(nothing, DeviceState())
    assert small.identical(first[0], TASK.params)  # the model that all were installed with
    kept = work(order, (DeviceState(),), TASK).states[0]
    again, _ = started(nothing, kept)
    assert small.identical(again, {n: kept.tensors[OWN][n] for n in again})
    assert not small.identical(again, TASK.params)


# --- upwards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@WIDTHS
def test_the_bits_of_a_cut_reply_are_the_bytes_of_its_message(name: str, width: float) -> None:
    order = asked(name)
    update = answered(order)
    came = crossed(encode_reply(update, order, TASK), order, width)
    assert cut_reply(update, order, width, TASK.blueprint).bits[0] == 8 * charged(came)


@pytest.mark.parametrize("name", METHODS)
@WIDTHS
def test_a_cut_reply_survives_the_wire(name: str, width: float) -> None:
    order = asked(name)
    update = answered(order)
    came = cut_reply(update, order, width, TASK.blueprint)
    received = decode_reply(crossed(encode_reply(update, order, TASK), order, width), order, TASK)
    assert received.delivered_width[0] == came.delivered_width[0] == expected(order, width)
    assert received.bits[0] == came.bits[0]
    assert small.identical(received.kept_of(0), came.kept_of(0))
    assert received.trees_of(0).keys() == came.trees_of(0).keys()
    for tree, values in came.trees_of(0).items():
        assert small.identical(values, received.trees_of(0)[tree])
    assert received.masks_of(0).keys() == came.masks_of(0).keys()
    for tensor, mask in came.masks_of(0).items():
        assert torch.equal(received.masks_of(0)[tensor], mask.to(torch.float32))


def test_mask_and_model_are_cut_together() -> None:
    order = asked("label masks")
    whole = answered(order)
    assert any((mask == 0).any() for mask in whole.masks_of(0).values())  # or nothing is tested
    came = cut_reply(whole, order, 0.25, TASK.blueprint)
    assert came.masks_of(0).keys() == whole.masks_of(0).keys()
    for name, mask in came.masks_of(0).items():
        assert mask.shape == came.trees_of(0)["delta"][name].shape
        part = tuple(slice(size) for size in mask.shape)
        assert torch.equal(mask, whole.masks_of(0)[name][part])
    assert came.bits[0] < whole.bits[0]


def test_nothing_has_neither_bits_nor_coordinates() -> None:
    order = asked("label masks")
    came = cut_reply(answered(order), order, 0.0, TASK.blueprint)
    assert (came.bits[0], came.delivered_width[0]) == (0, 0)
    assert (came.trees_of(0), came.masks_of(0)) == ({}, {})
    assert came.report_of(0) == answered(order).report_of(0)


def test_statistics_are_cut_with_the_model() -> None:
    order = asked("tracked")
    once = cut_reply(answered(order), order, 0.5, TASK.blueprint)
    local = TASK.blueprint.local(narrowed(Slice(), 0.5, TASK.blueprint))
    for tree in ("delta", "buffers"):
        for name, value in once.trees_of(0)[tree].items():
            assert value.shape == local.shape(name)
    down = cut_order(order, 0.5, TASK.blueprint)
    for name, value in down.trees_of(0)["buffers"].items():
        assert value.shape == local.shape(name)


def test_what_a_link_leaves_is_what_the_codec_packs() -> None:
    """The numbers, and the symbols that become bytes, are cut alike."""
    order = asked("fedavg")
    came = cut_reply(answered(order), order, 0.375, TASK.blueprint)
    around = uplink(order, TASK.blueprint, tuple(came.trees_of(0)["delta"]), torch.float32)
    symbols = came.symbols_of(0)
    assert symbols is not None
    columns = Raw().pack(symbols, around)
    assert len(columns) == 3
    whole, kept = map(around.unflattened, Raw().restore(Raw().unpack(columns, around), around))
    part = within(order.slice_of(0), 0.375, TASK.blueprint)
    values, flags = (
        dense({n: v[0] for n, v in tree.items()}, part, TASK.blueprint) for tree in (whole, kept)
    )
    assert small.identical(values, came.trees_of(0)["delta"])
    assert all((flag == 1).all() for flag in flags.values())
    assert all(kept[n].sum() == flags[n].numel() for n in kept)  # and nothing besides


def test_1_8_a_device_that_cannot_pad_refuses_what_is_left_of_an_order() -> None:
    order = asked("fedavg")
    data = encode_order(order, TASK)
    assert decode_order(data, TASK).delivered_width[0] == 1
    with pytest.raises(BadMessage, match="3 of 8 columns") as caught:
        decode_order(crossed(data, order, 0.375), TASK)
    assert caught.value.reason == "cut"


@pytest.mark.parametrize("width", [0.375, 0.5, 1.0])
def test_what_a_reply_reports_is_charged_also_when_a_link_cuts_it(width: float) -> None:
    base = replace(fedavg(lr=0.1, batch_size=8), send="weights", cache=True)
    told = replace(base, aggregate=Diagnosed(reported=("norm", "channels"), measures=(Fisher(),)))
    bits = []
    for method in (base, told):
        order = orders(method, TASK, [3], column=COLUMN)
        update = work(order, (DeviceState(),), TASK).replies
        bits.append(float(cut_reply(update, order, width, TASK.blueprint).bits[0]))
    assert bits[1] - bits[0] == 32 * (1 + 6 + 8 + 16)
