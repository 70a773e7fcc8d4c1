"""Order kinds, memory, and what travels."""

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import torch

from anyfleet.core.client import carry_out, work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import DeviceStates, Remembered
from anyfleet.core.evaluation import measure
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Kind
from anyfleet.core.method import Method
from anyfleet.core.orders import NOTHING, Download
from anyfleet.elastic import Slice
from anyfleet.errors import BadMessage
from anyfleet.methods import bn2, fedavg, local
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.codec import Nothing
from anyfleet.parts.schedule import HoldAndFetch, Surveyed, Synchronous
from anyfleet.parts.select import Largest
from anyfleet.runtime import Simulated
from anyfleet.tasks import Split, Task
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.changed import with_slices


@dataclass(frozen=True)
class WantsNorm(Mean):
    """A mean that asks devices for the length of their update."""

    reports = frozenset({"norm"})


TWO_PHASE = replace(fedavg(lr=0.1), select=Largest(6, 2), schedule=HoldAndFetch())


def test_two_phases_charge_all_who_train_and_upload_only_the_best() -> None:
    """specification §1.20: all compute, few upload, every device sends a scalar."""
    task = small.task()
    step = small.steps(TWO_PHASE, task, 1)[0]
    held = [row for row in small.rows(step) if row.kind == "hold"]
    fetched = [row for row in small.rows(step) if row.kind == "fetch"]
    assert len(held) == 6
    assert len(fetched) == 2
    assert all(row.flops > 0 and row.bits_up == 32 for row in held)
    whole = 32 * sum(value.numel() for value in task.params.values())
    assert all(row.flops == 0 and row.bits_up == whole for row in fetched)


def test_the_largest_norms_are_fetched() -> None:
    task = small.task()
    plain = replace(fedavg(count=6, lr=0.1), aggregate=WantsNorm())
    norms = lengths(plain, task)
    fetched = {
        r.device for r in small.rows(small.steps(TWO_PHASE, task, 1)[0]) if r.kind == "fetch"
    }
    assert fetched == set(sorted(norms, key=lambda d: -norms[d])[:2])


def lengths(method: Method, task: Task) -> dict[int, float]:
    """Norms of the same orders, measured on the updates themselves."""
    step = small.steps(method, task, 1)[0]
    devices = [row.device for row in small.rows(step)]
    asked = orders(method, task, devices)
    found = {}
    for row, device in enumerate(devices):
        delta = work(asked.take([row]), (DeviceState(),), task).replies.trees_of(0)["delta"]
        found[device] = sum(float(v.double().square().sum()) for v in delta.values()) ** 0.5
    return found


def test_a_selection_gets_what_it_ranks_by_and_nobody_asks_for_the_unmeasurable() -> None:
    assert TWO_PHASE.job().report == ("norm",)
    losses = replace(TWO_PHASE, select=Largest(3, 1, "loss"), schedule=Surveyed(HoldAndFetch()))
    assert losses.job().report == ("loss",)
    with pytest.raises(ValueError, match="no device measures"):
        replace(TWO_PHASE, select=Largest(3, 1, "mood"))


def test_a_fetched_result_is_the_one_that_was_trained() -> None:
    task = small.task()
    asked = orders(fedavg(lr=0.1), task, [3])
    now = work(asked, (DeviceState(),), task)
    held = work(replace(asked, kind=Kind.HOLD), (DeviceState(),), task)
    assert held.replies.trees_of(0) == {}
    assert held.states[0].held is not None
    fetch = replace(asked, id=asked.id + 1, held_order=asked.id, kind=Kind.FETCH)
    fetch = with_slices(fetch, Slice())
    done = work(fetch, held.states, task)
    assert small.identical(done.replies.trees_of(0)["delta"], now.replies.trees_of(0)["delta"])
    assert done.replies.order[0] == fetch.id[0]
    assert done.states[0].held is None
    again = work(fetch, done.states, task)
    assert again.replies.report_of(0) == {"missing": 1.0}


def test_a_held_result_holds_nothing_of_other_devices() -> None:
    task = small.task()
    asked = replace(orders(fedavg(lr=0.1), task, [3, 0, 5]), kind=Kind.HOLD)
    states = DeviceStates(task)
    stacks = [np.array([0, 2]), np.array([1])]
    done = carry_out(asked, states, task, stacks=stacks)
    states.commit(done.remembered)
    fetched = states.state(3)  # its neighbour in the stack is device 5
    states.commit(Remembered.of(asked.take([0]), fetched=True))
    assert states.state(3).held is None
    held = [each.held for each in (fetched, states.state(0), states.state(5))]
    for row, each in enumerate(held):
        alone = work(asked.take([row]), (DeviceState(),), task).states[0].held
        assert each is not None
        assert alone is not None
        assert each.device.tolist() == alone.device.tolist()
        (stack,) = each.stacks
        assert row == 0 or {len(value) for value in stack.trees["delta"].values()} == {1}
        assert each.bits == alone.bits
        both = each.trees_of(0)["delta"], alone.trees_of(0)["delta"]
        assert small.distance(*both) < 1e-5


@pytest.mark.parametrize("kind", [Kind.EVALUATE, Kind.REPORT])
def test_devices_measure_on_their_own_data(kind: Kind) -> None:
    task = small.task()
    asked = replace(orders(fedavg(), task, [2]), kind=kind)
    update = work(asked, (DeviceState(),), task).replies
    data = task.own_test(2) if kind == Kind.EVALUATE else task.data(2)
    mode = asked.job.norm.evaluation
    expected = measure(task, task.blueprint, task.params, task.buffers, data, mode)
    assert update.report_of(0) == expected
    assert update.samples[0] == len(data)
    assert update.trees_of(0) == {}


def test_devices_measure_statistics() -> None:
    task = small.task()
    asked = replace(orders(fedavg(), task, [2]), kind=Kind.STATISTICS)
    update = work(asked, (DeviceState(),), task).replies
    assert set(update.trees_of(0)["buffers"]) == {"1.running_mean", "1.running_var"}
    assert update.bits[0] == 32 * 12
    assert update.samples[0] == len(task.data(2))


@pytest.mark.parametrize("ask", [Kind.EVALUATE, Kind.STATISTICS, Kind.REPORT])
def test_a_survey_asks_every_idle_device_and_replies_come_with_the_step(ask: Kind) -> None:
    task = small.task()
    method = replace(fedavg(count=3, lr=0.1), schedule=Surveyed(Synchronous(), ask, every=2))
    first, second = small.steps(method, task, 2)
    assert [answer.device for answer in first.replies] == list(range(task.devices))
    assert all(answer.kind == ask for answer in first.replies)
    assert second.replies == ()
    plain = small.steps(fedavg(count=3, lr=0.1), task, 2)[-1]
    assert small.identical(second.params, plain.params)


def test_local_devices_share_nothing_and_learn_on_their_own() -> None:
    task = small.task(dropout=0.0)
    runtime = Simulated(task, small.world(task))
    steps = list(islice(run(local(lr=0.1, epochs=3, batch_size=8), task, runtime, 0), 6))
    assert small.identical(steps[-1].params, task.params)
    assert all(row.bits_up == 0 for row in small.rows(steps[-1]) if row.kind == "train")
    first, last = (mean_loss(step) for step in (steps[0], steps[-1]))
    assert last < 0.7 * first
    kept = [runtime.state(d).tensors["own"]["0.weight"] for d in (0, 1)]
    assert not torch.equal(kept[0], kept[1])


def mean_loss(step: Round) -> float:
    return float(np.mean([row.loss for row in small.rows(step) if row.kind == "train"]))


def test_a_cache_fills_what_did_not_come() -> None:
    task = small.task()
    method = replace(fedavg(lr=0.1), cache=True)
    first = orders(method, task, [0])
    done = work(first, (DeviceState(),), task)
    end = done.states[0].tensors["own"]
    # Nothing comes over the link: the device goes on where it stopped.
    nothing = replace(first.with_downloads(NOTHING), visit=first.visit + 1, key=first.key + 1)
    again = work(nothing, done.states, task)
    by_link = nothing.with_downloads(Download({"model": {n: end[n] for n in task.params}}))
    sent = work(by_link, (DeviceState(),), task)
    assert small.identical(again.replies.trees_of(0)["delta"], sent.replies.trees_of(0)["delta"])


def test_frozen_parameters_do_not_travel() -> None:
    module = small.net()
    for parameter in module[4].parameters():
        parameter.requires_grad_(False)
    split = Split(devices=3, test_share=0.1)
    task = Task.of(module, small.patterns(90, 1), small.patterns(30, 2), split=split)
    step = small.steps(fedavg(count=3, lr=0.1), task, 1)[0]
    moving = sum(v.numel() for n, v in task.params.items() if not n.startswith("4."))
    everything = sum(value.numel() for value in task.params.values())
    for row in small.rows(step):
        assert (row.parameters, row.bits_up) == (everything, 32 * moving)
    assert torch.equal(step.params["4.weight"], task.params["4.weight"])
    assert not torch.equal(step.params["0.weight"], task.params["0.weight"])


def test_weights_and_deltas_give_the_same_model() -> None:
    task = small.task(dtype=torch.float64)
    one = small.steps(fedavg(count=4, lr=0.1), task, 2)[-1].params
    two = small.steps(replace(fedavg(count=4, lr=0.1), send="weights"), task, 2)[-1].params
    assert small.distance(one, two) < 1e-12


def test_nothing_is_nothing() -> None:
    around = MessageLayout(
        {"a": TensorLayout((3,), (1, 3))}, torch.float32, torch.zeros(2, dtype=torch.int64)
    )
    squeezed = Nothing().compress({"a": torch.ones(2, 3)}, torch.ones(2), around, {})
    assert (squeezed.received, squeezed.kept, squeezed.state) == ({}, {}, {})
    assert torch.equal(squeezed.bits, torch.zeros(2, 2, dtype=torch.float64))
    assert torch.equal(squeezed.distortion, torch.ones(2))
    assert not any(Nothing().pack(squeezed.symbols.row(0), around))
    assert Nothing().restore(Nothing().unpack([b"", b""], around), around) == ({}, {})
    with pytest.raises(BadMessage, match="nothing is sent"):
        Nothing().unpack([b"", b"x"], around)


def test_a_norm_is_that_of_the_update_whatever_is_sent() -> None:
    norms = []
    for send in ("delta", "weights"):
        method = replace(bn2(draw=6, keep=3, lr=0.1), send=send)
        rows = small.rows(small.steps(method, small.task(dtype=torch.float64), 1)[0])
        norms.append({row.device: row.norm for row in rows if row.kind == "hold"})
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
