"""A device with a bundle and its own samples replies as a simulated one does, bit for bit."""

from dataclasses import dataclass, field, fields
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from anyfleet.core.check_in import Choices
from anyfleet.core.choosing import decide
from anyfleet.core.client import work
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.loop import run
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.device.bundle import Bundle, read_bundle, write_bundle
from anyfleet.device.device_task import DeviceTask
from anyfleet.device.memory import Memory, Past
from anyfleet.methods import anycost, fedavg, fedpmt, fedrescue, heterofl, stc, whale
from anyfleet.runtime import Simulated
from anyfleet.runtime.simulated.engines import Assignment, Executed
from anyfleet.tasks import Embedded, Task
from anyfleet.wire import (
    decode_choice,
    decode_order,
    encode_choice,
    encode_offer,
    encode_order,
    encode_reply,
)
from anyfleet.world import Fleet, Group
from tests.helpers import small
from tests.helpers.engines import Changed

ROUNDS = 2


@cache
def task() -> Task:
    return Embedded(devices=4, limit=200, server=20).build(0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("fleet") / "bundle"
    write_bundle(task(), folder)
    return read_bundle(folder)


def own_task(bundle: Bundle, device: int) -> DeviceTask:
    return DeviceTask(bundle, device, task().data(device), task().own_test(device))


@dataclass(frozen=True)
class Doubled(Changed):
    """Every order is carried out a second time, by a device with a bundle, over the wire."""

    bundle: Bundle | None = None
    home: Path = Path()
    compared: list[str] = field(default_factory=list, hash=False)

    def done(self, given: Assignment, states: DeviceStates, executed: Executed) -> Executed:
        assert self.bundle is not None
        for order, reply in zip(given.orders.rows(), executed.replies.rows(), strict=True):
            device, number = int(order.device[0]), int(order.id[0])
            own, memory = own_task(self.bundle, device), Memory(self.home / f"{device}")
            received = decode_order(encode_order(order, task()), own)
            done = work(received, (memory.before(number).state,), own)
            memory.keep(number, Past(done.states[0]))
            data = encode_reply(done.replies, received, own)
            assert data == encode_reply(reply, order, task()), f"order {number}, {order.kind}"
            self.compared.append(str(order.kind))
        return executed


class Choosing(Simulated):
    """A fleet whose devices choose a second time, by their bundle and over the wire."""

    chosen = 0
    bundle: Bundle

    def offer(self, orders: Cohort) -> None:
        own = self._true_conditions(orders.device, self._active(orders.device))
        super().offer(orders)
        assert self._choices is not None
        for row, order in enumerate(orders.rows()):
            device = int(order.device[0])
            offer = decode_order(encode_offer(order, task()), own_task(self.bundle, device))
            states = self._states.choosers(order.device)
            found = decide(offer, own.take(np.array([row])), states, own_task(self.bundle, device))
            told = decode_choice(encode_choice(found, offer), order).choices
            made = self._choices.choices.take(self._choices.order == order.id[0])
            assert same(told, made)
            self.chosen += 1


def same(one: Choices, two: Choices) -> bool:
    pairs = [(one.entry, two.entry), (one.utility, two.utility)]
    for each in fields(one.hyperparameters):
        values = (getattr(choices.hyperparameters, each.name) for choices in (one, two))
        pairs.append(tuple(values))
    equal = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
    return equal and one.declined == two.declined


METHODS = {
    "FedAvg": fedavg(lr=0.1, count=4),
    "HeteroFL": heterofl(widths=(1.0, 0.5), lr=0.1, count=4),
    "FedPMT": fedpmt(lr=0.1, count=4),
    "WHALE-FL": whale(widths=(1.0, 0.5, 0.25), lr=0.1),
    "AnycostFL": anycost(lr=0.1, count=4),
    "FedResCuE": fedrescue(lr=0.1, count=4),
    "STC": stc(lr=0.1, count=4),
}


@pytest.mark.parametrize("name", METHODS)
def test_replies_and_choices_are_those_of_the_simulator(
    name: str, bundle: Bundle, tmp_path: Path
) -> None:
    method: Method = METHODS[name]
    groups = (Group(count=2, speed=5e9), Group(count=2, speed=1e9))
    world, engine = small.world(task(), Fleet(groups)), Doubled(bundle=bundle, home=tmp_path)
    runtime = Choosing(task(), world, engine=engine)
    runtime.bundle = bundle
    for _ in islice(run(method, task(), runtime, 0), ROUNDS):
        pass
    assert engine.compared.count("train") >= ROUNDS
    if name in ("WHALE-FL", "AnycostFL"):
        assert runtime.chosen >= ROUNDS


def test_a_device_knows_of_nobody_else(bundle: Bundle) -> None:
    own, whole = own_task(bundle, 2), task()
    assert own.devices == 3
    assert [own.size(device) for device in range(3)] == [0, 0, whole.size(2)]
    assert torch.equal(own.data(2).x, whole.data(2).x)
    assert torch.equal(own.own_test(2).y, whole.own_test(2).y)
    assert torch.equal(own.labels(2), whole.labels(2))
    assert not own.labels(1).any()
    assert [len(each) for each in (own.test, own.server, own.data(0), own.own_test(1))] == [0] * 4
    with pytest.raises(ValueError, match="number"):
        own_task(bundle, 2).__class__(bundle, -1, own.train, own.own)
