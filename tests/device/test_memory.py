"""What a device keeps: the same after a restart, bounded, and never silently damaged."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Kind
from anyfleet.device import memory as module
from anyfleet.device.memory import KeptAnswer, KeptOrder, Memory, Past
from anyfleet.errors import StoreError
from anyfleet.methods import stc
from tests.core.test_local_training import orders
from tests.helpers import small

TASK = small.task()


def past(number: float) -> Past:
    own = {"x": torch.full((20,), number)}
    return Past(DeviceState({"own": own}, chooser={"seen": (number,)}, last_sent_order=7), number)


def test_a_state_is_the_same_in_another_process(tmp_path: Path) -> None:
    order = orders(stc(lr=0.1), TASK, [3])
    held = replace(order, kind=Kind.HOLD)
    for asked in (order, held):
        state = work(asked, (DeviceState(),), TASK).states[0]
        Memory(tmp_path / "state").keep(0, Past(state, 2.5))
        found = Memory(tmp_path / "state").before(1)
        assert found.loss == 2.5
        assert found.state.last_sent_order == state.last_sent_order
        assert found.state.tensors.keys() == state.tensors.keys()
        for purpose, tensors in state.tensors.items():
            assert small.identical(found.state.tensors[purpose], tensors)
        assert (found.state.held is None) == (state.held is None)
        if state.held is not None and found.state.held is not None:
            assert found.state.held.order.tolist() == state.held.order.tolist()
            ours, theirs = (each.held.trees_of(0) for each in (found.state, state) if each.held)
            assert all(small.identical(ours[tree], theirs[tree]) for tree in theirs)


def test_a_device_goes_back_to_what_it_had_before_an_order(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    assert memory.before(5).loss is None
    for number in (2, 5, 9):
        memory.keep(number, past(float(number)))
    assert [memory.before(n).loss for n in (2, 3, 5, 6, 9, 10)] == [None, 2.0, 2.0, 5.0, 5.0, 9.0]
    memory.keep(4, past(40.0))  # the server went back: what came after never happened
    assert memory.orders() == [2, 4]
    assert memory.last_loss() == 40.0
    assert memory.before(10).state.chooser == {"seen": (40.0,)}


def test_what_is_settled_is_forgotten(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    for number in range(6):
        memory.keep(number, past(float(number)))
    memory.settle(4)
    assert memory.orders() == [3, 4, 5]
    assert memory.before(4).loss == 3.0
    for number in range(6, 60):
        memory.keep(number, past(float(number)))
    assert len(memory.orders()) == module.MOST_STATES
    assert memory.before(60).loss == 59.0


def test_nothing_of_a_run_gets_into_another(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(3, past(3.0), "one")
    assert memory.before(9, "one").loss == 3.0
    assert memory.before(9, "two").loss is None
    assert memory.last_loss("two") is None
    assert memory.last_loss("one") == 3.0


def order(data: bytes, attempts: int = 0) -> KeptOrder:
    return KeptOrder("order", data, {"settled": 3, "run": "a"}, True, b"handle", attempts)


def test_the_order_under_way_and_the_last_answer_survive(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    assert memory.under_way() is None
    memory.begin(order(b"one", 2))
    memory.answer(KeptAnswer(order(b"one").digest, "reply", b"done", {"seconds": 1.5}))
    memory = Memory(tmp_path)
    assert memory.under_way() == order(b"one", 2)
    answer = memory.answer_to(order(b"one"))
    assert answer is not None
    assert (answer.data, answer.about) == (b"done", {"seconds": 1.5})
    assert memory.answer_to(order(b"two")) is None
    memory.delivered()
    assert memory.under_way() is None
    assert memory.answer_to(order(b"one")) is not None  # the server may send it again
    memory.forget()
    assert memory.answer_to(order(b"one")) is None


def test_damage_is_noticed_and_set_aside(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1, past(1.0))
    memory.keep(2, past(2.0))
    memory.begin(order(b"one"))
    for name, spoil in (("after-2.bin", 50), ("order.bin", -1)):
        content = bytearray((tmp_path / name).read_bytes())
        content[spoil] ^= 1
        (tmp_path / name).write_bytes(bytes(content))
    with pytest.raises(StoreError, match=r"after-2\.bin is damaged"):
        memory.before(3)
    with pytest.raises(StoreError, match=r"order\.bin is damaged"):
        memory.under_way()
    aside = memory.set_damaged_aside()
    assert [each.name for each in aside] == ["after-2.damaged", "order.damaged"]
    assert memory.before(3).loss == 1.0
    assert memory.under_way() is None


def test_a_state_cannot_bring_code(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1, past(1.0))
    root = b'{"code": "os:system"}'
    memory._write(
        tmp_path / "after-1.bin", module._Moment("", None, root, b"\x02" + bytes(7) + b"{}")
    )
    with pytest.raises(StoreError, match="is damaged"):
        memory.before(2)


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    Memory(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    (tmp_path / "other.bin").write_bytes(b"")
    (tmp_path / "state" / "order.bin").symlink_to(tmp_path / "other.bin")
    with pytest.raises(StoreError, match="symbolic link"):
        Memory(tmp_path / "state")


def test_what_was_done_for_a_server_that_is_gone_is_void(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.hear("run", "first", 0)
    for order in (3, 7, 9):
        memory.keep(order, Past(DeviceState(last_sent_order=order)), "run")
    memory.answer(KeptAnswer(b"digest", "reply", b"", {}))
    again = Memory(tmp_path)  # the device was started again, and so was the server
    again.hear("run", "first", 0)
    assert again.orders() == [3, 7, 9]
    again.hear("run", "second", 7)
    assert again.orders() == [3]
    assert again.before(12, "run").state.last_sent_order == 3
    assert not (tmp_path / "answer.bin").exists()


def test_another_run_makes_nothing_void(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.hear("run", "first", 0)
    memory.keep(3, Past(), "run")
    memory.hear("another", "second", 0)
    assert memory.orders() == [3]
