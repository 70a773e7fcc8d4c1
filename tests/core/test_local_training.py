"""A device's result does not depend on who ran with it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import vmap

from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.local_training import Extent, as_tensors, extent, prepare, samples_of, train
from anyfleet.core.messages import EVERYTHING, Hyperparameters, Params
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import PlanningState, load_models, plan_cohort
from anyfleet.core.server import Server
from anyfleet.core.view import Request
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.norm import BatchStatistics, OnDevice, Tracked
from anyfleet.parts.train import AdamW, Decaying, Gradient
from anyfleet.runtime import Simulated
from anyfleet.tasks import Task
from tests.helpers import small
from tests.helpers.stacks import same_bits, stack


def orders(method: Method, task: Task, devices: list[int], column: float = 1.0) -> Cohort:
    """Orders for these devices, as the loop would issue them; over links with such columns."""
    server = Server(method, task, Simulated(task, small.world(task)), 0)
    state = PlanningState(0, 0, server.visits, server.acknowledged, server.states)
    planned = plan_cohort(
        Request(), np.array(devices), method=method, view=server.view(), state=state
    )
    asked = replace(planned.orders, column_width=np.full(len(planned.orders), column))
    return load_models(asked, method=method, task=task, params=task.params, buffers=task.buffers)


METHODS = {
    "batch norm": fedavg(lr=0.1, batch_size=8),
    "tracked": replace(fedavg(lr=0.1, batch_size=8, momentum=0.9), norm=Tracked()),
    "on device": replace(fedavg(lr=0.1, batch_size=8), norm=OnDevice()),
    "heterofl": heterofl(widths=(0.5,), lr=0.1, batch_size=8, epochs=2),
    "adamw": replace(fedavg(), train=Gradient(Decaying(0.01), AdamW()), norm=BatchStatistics()),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_stack_of_unequal_devices_equals_each_alone(name: str) -> None:
    task = small.task(equal=False, dtype=torch.float64)
    sizes = {len(task.data(device)) for device in range(task.devices)}
    assert len(sizes) > 3  # otherwise nothing is padded
    asked = orders(METHODS[name], task, list(range(task.devices)))
    nothing = tuple(DeviceState() for _ in range(task.devices))
    stacked = work(asked, nothing, task)
    for row in range(task.devices):
        alone = work(asked.take([row]), (DeviceState(),), task)
        for tree, values in alone.replies.trees_of(0).items():
            assert small.distance(values, stacked.replies.trees_of(row)[tree]) < 1e-10, (name, row)
        loss = alone.replies.report_of(0)["loss"]
        assert stacked.replies.report_of(row)["loss"] == pytest.approx(loss, rel=1e-10)
        assert alone.replies.bits[0] == stacked.replies.bits[row]


def test_batch_sizes_and_steps_may_differ_within_a_stack() -> None:
    task = small.task(equal=False, dtype=torch.float64)
    asked = orders(fedavg(lr=0.1), task, [0, 1, 2, 3])
    numbers = replace(
        asked.hyperparameters,
        batch_size=np.array([4, 8, 16, 5]),
        epochs=np.array([1, 2, 1, 3]),
        local_steps=np.array([-1, 3, -1, 2]),
        lr=np.array([0.1, 0.05, 0.2, 0.01]),
    )
    asked = replace(asked, hyperparameters=numbers)
    stacked = work(asked, (DeviceState(),) * 4, task)
    for row in range(4):
        alone = work(asked.take([row]), (DeviceState(),), task)
        both = alone.replies.trees_of(0)["delta"], stacked.replies.trees_of(row)["delta"]
        assert small.distance(*both) < 1e-10


@pytest.mark.parametrize(
    ("batch", "samples", "found"),
    [
        ((8, 8), (20, 9), Extent(local_steps=3, shared_steps=2, epochs=1, batch_size=8)),
        ((50, 4), (7, 3), Extent(local_steps=1, shared_steps=1, epochs=1, batch_size=7)),
        ((4, 2), (3, 30), Extent(local_steps=15, shared_steps=1, epochs=1, batch_size=4)),
        ((8,), (0,), Extent(local_steps=0, shared_steps=0, epochs=1, batch_size=1)),
    ],
)
def test_loop_bounds_are_those_of_the_largest_and_no_wider_than_its_data(
    batch: tuple[int, ...], samples: tuple[int, ...], found: Extent
) -> None:
    count = len(batch)
    numbers = Hyperparameters(
        lr=np.full(count, 0.1),
        epochs=np.ones(count, dtype=int),
        batch_size=np.array(batch),
        local_steps=np.full(count, EVERYTHING),
        sent_fraction=np.full(count, np.nan),
        frequency=np.full(count, np.nan),
        target_seconds=np.full(count, np.nan),
    )
    assert extent(numbers, samples) == found


def test_a_result_does_not_depend_on_company() -> None:
    task = small.task(equal=False, dtype=torch.float64)
    everybody = orders(fedavg(lr=0.1), task, [0, 1, 2, 3, 4, 5])
    for company in ([0, 1], [0, 5, 4], [0]):
        rows = join([everybody.take([row]) for row in company])
        some = work(rows, (DeviceState(),) * len(company), task)
        whole = work(everybody, (DeviceState(),) * 6, task)
        both = some.replies.trees_of(0)["delta"], whole.replies.trees_of(0)["delta"]
        assert small.distance(*both) < 1e-10


class Apart:
    """A task whose samples are not one table."""

    def __init__(self, task: Task) -> None:
        self.devices, self.data, self.size = task.devices, task.data, task.size
        self.params, self.labels = task.params, task.labels


def test_samples_are_taken_where_they_lie() -> None:
    task = small.task(equal=False)
    devices = [3, 0, 5]
    there = samples_of(task, devices)
    assert there.x is task.train.x
    apart = samples_of(Apart(task), devices)  # type: ignore[arg-type]
    for x, y, rows, valid in (there, apart):
        assert valid.sum(1).tolist() == [task.size(device) for device in devices]
        for row, device in enumerate(devices):
            own = rows[row][valid[row]]
            assert torch.equal(x[own], task.data(device).x)
            assert torch.equal(y[own], task.data(device).y)
            # Padding repeats the last of them.
            assert set(rows[row][~valid[row]].tolist()) <= {int(own[-1])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacks_that_are_prepared_together_have_what_each_needs(dtype: torch.dtype) -> None:
    task = small.task(equal=False, dtype=dtype)
    stacks = [[3, 0, 5], [1], [4, 2]]
    devices = np.concatenate(stacks)
    sizes = [[task.size(device) for device in some] for some in stacks]
    assert len(set(map(max, sizes))) == 3  # all are padded to other lengths
    drawn = np.random.default_rng(3)
    numbers = Hyperparameters.alike(6, lr=0.1, epochs=2, batch_size=8).changed(
        lr=drawn.random(6), batch_size=drawn.integers(2, 9, 6), sent_fraction=drawn.random(6)
    )
    keys = torch.from_numpy(drawn.integers(-(2**62), 2**62, (2, 6)))
    found = prepare(task, devices, (keys[0], keys[1]), numbers, [3, 1, 2])
    apart = prepare(Apart(task), devices, (keys[0], keys[1]), numbers, [3, 1, 2])  # type: ignore[arg-type]
    rows = np.split(np.arange(6), [3, 4])
    for row, some, count, each, own in zip(rows, stacks, sizes, found, apart, strict=True):
        given = numbers.take(row)
        assert each.samples is not None
        assert own.samples is None
        pairs = zip(each.samples, samples_of(task, some), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        for one in (each, own):
            due = as_tensors(given, count, next(iter(task.params.values())))
            assert same_trees(one.hyperparameters, due)
            assert one.sent_fraction.tolist() == given.sent_fraction.tolist()
            assert [one.key.tolist(), one.uplink_key.tolist()] == keys[:, row].tolist()
            assert one.bounds == extent(given, count)
            assert one.counts.tolist() == count
            assert torch.equal(one.seen, torch.stack([task.labels(device) for device in some]))


def same_trees(one: Params, two: Params) -> bool:
    same = (torch.equal(one[name], value) for name, value in two.items())
    return one.keys() == two.keys() and all(same)


def test_a_device_without_samples_has_a_row_of_padding() -> None:
    task = small.task()
    empty = replace(task, train_rows=(task.train_rows[0][:0], *task.train_rows[1:]))
    _, _, rows, valid = samples_of(empty, [0])
    assert rows.shape == (1, 1)
    assert not valid.any()


def test_resident_and_own_samples_train_alike() -> None:
    task, trainer = small.task(equal=False), Gradient(Decaying(0.1), batch_size=8)
    context, inputs, bounds = stack(task, trainer, [0, 1, 2])
    assert inputs.rows is not None
    own = inputs._replace(x=inputs.x[inputs.rows], y=inputs.y[inputs.rows], rows=None)
    both = [train(trainer, context, g, bounds, lift=vmap, cohort_key=0) for g in (inputs, own)]
    assert same_bits(*both)
