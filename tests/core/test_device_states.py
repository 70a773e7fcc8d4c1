"""What a stack of devices reads and writes of its states is what each device would alone."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import join
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import OWN, SENT, DeviceStates, Keepsakes, Remembered
from anyfleet.core.messages import Params
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import Slice, cut, paste
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.codec import ErrorFeedback, Stc
from anyfleet.parts.norm import PerWidth
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.changed import with_slices

TASK = small.task(dtype=torch.float64)
CODEC = ErrorFeedback(Stc(0.1))
SLOT = CODEC.state_name
METHOD = replace(heterofl(widths=(1.0,)), norm=PerWidth(), uplink=CODEC)
SLICES = (
    Slice(),
    TASK.blueprint.prefix(0.5),
    TASK.blueprint.prefix(0.5, first_trained_layer=1),
    TASK.blueprint.prefix(0.25),
)


# --- a single device, as plainly as it can be said ------------------------------------------------


def owed(state: DeviceState, acknowledged: int) -> dict[str, Tensor]:
    left = dict(state.tensors.get(SLOT, {}))
    if state.last_sent_order == acknowledged:
        return left
    unsent = state.tensors.get(SENT, {})
    both = {n: left[n] + value for n, value in unsent.items() if n in left}
    return {**unsent, **left, **both}


def after(state: DeviceState, left: Params, sent: Params, order: Cohort) -> DeviceState:
    before, own = owed(state, int(order.acknowledged[0])), names_of(order)
    zeros = {n: torch.zeros_like(TASK.params[n]) for n in left}
    slice_, blueprint = order.slice_of(0), TASK.blueprint
    onto = {n: before.get(own.get(n, n), zero) for n, zero in zeros.items()}
    tensors: Mapping[str, Params] = {
        SLOT: {**before, **renamed(paste(left, onto, slice_, blueprint), own)},
        SENT: renamed(paste(sent, zeros, slice_, blueprint), own),
    }
    return replace(state, tensors=tensors, last_sent_order=int(order.id[0]))


def renamed(tree: Params, own: Mapping[str, str]) -> dict[str, Tensor]:
    return {own.get(name, name): value for name, value in tree.items()}


def names_of(order: Cohort) -> dict[str, str]:
    return order.job.norm.own_names(TASK.blueprint, order.slice_of(0))


# --- many at once -------------------------------------------------------------------------------


def asked(draw: np.random.Generator, number: int) -> Cohort:
    """Orders for some devices with one shape of slice; some know that their last one counted."""
    devices = draw.permutation(8)[: draw.integers(1, 6)]
    found = orders(METHOD, TASK, sorted(devices.tolist()))
    numbers = 100 * number + np.arange(len(found))
    slice_ = SLICES[int(draw.integers(len(SLICES)))]
    return with_slices(replace(found, id=numbers), *[slice_] * len(found))


def drawn(order: Cohort, seed: int) -> dict[str, Tensor]:
    """Numbers for every device in the shapes of the sub-model that is trained."""
    local, names = TASK.blueprint.local(order.slice_of(0)), order.slice_of(0).sent(TASK.blueprint)
    found = {}
    for name in names:
        shape = (len(order), *local.shape(name))
        count = int(np.prod(shape))
        found[name] = rng.normal(rng.root(seed, name), count).reshape(shape)
    return found


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["in files", "in memory"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stack_owes_what_each_device_would_alone(seed: int, limit: int) -> None:
    draw, memories = np.random.default_rng(seed), DeviceStates(TASK, limit=limit)
    states: dict[int, DeviceState] = {}
    unsure = 0
    for number in range(1, 13):
        cohort = asked(draw, number)
        devices = cohort.device.tolist()
        last = np.array([states.get(d, DeviceState()).last_sent_order for d in devices])
        known = np.where(draw.random(len(cohort)) < 0.5, last, -1)
        cohort = replace(cohort, acknowledged=known)
        unsure += int((known != last).sum())
        names = tuple(drawn(cohort, 0))
        residual = memories.residual(cohort, names)
        left, sent = drawn(cohort, 2 * number), drawn(cohort, 2 * number + 1)
        stack = Keepsakes(METHOD.norm, {}, SLOT, left, sent)
        remembered = Remembered.of(cohort, stack=stack)
        # Some are cancelled before they have finished: they keep nothing of it.
        done = draw.permutation(len(cohort))[: draw.integers(1, len(cohort) + 1)]
        memories.commit(remembered.take(done))
        for row, device in enumerate(devices):
            order, before = cohort.take([row]), states.get(device, DeviceState())
            mine, own = owed(before, int(known[row])), names_of(order)
            whole = {n: mine[own.get(n, n)] for n in names if own.get(n, n) in mine}
            for name, value in cut(whole, order.slice_of(0), TASK.blueprint).items():
                assert torch.equal(residual[name][row], value)
            for name in set(residual) - set(whole):
                assert not residual[name][row].any()
            if row in done:
                mine_left, mine_sent = (
                    {n: v[row] for n, v in tree.items()} for tree in (left, sent)
                )
                states[device] = after(before, mine_left, mine_sent, order)
    assert unsure > 5
    for device, state in states.items():
        found = memories.state(device)
        assert found.last_sent_order == state.last_sent_order
        for purpose, tensors in state.tensors.items():
            assert small.identical(found.tensors[purpose], tensors)


def test_rows_beyond_the_limit_are_in_files_and_the_rest_stays_where_it_is() -> None:
    cohort = orders(METHOD, TASK, [0, 1])
    tree = drawn(cohort, 1)
    size = sum(value.nbytes for value in tree.values())
    memories = DeviceStates(TASK, limit=size - 1)
    stack = Keepsakes(METHOD.norm, own=tree)
    memories.commit(Remembered.of(cohort, stack=stack))
    assert memories.bytes == size
    more = replace(cohort, device=cohort.device + 2)
    memories.commit(Remembered.of(more, stack=stack))
    assert memories.bytes == 2 * size
    for name, value in tree.items():
        # The name of the file outlives it: nobody else can open it.
        files = [block.untyped_storage().filename for block in blocks(memories, OWN, name)]
        assert [file is None for file in files] == [True, False]
        assert not Path(str(files[1])).exists()
        rows = memories.own([name], np.array([3, 0]))[name]
        assert torch.equal(rows, torch.stack([value[1], value[0]]))


def blocks(memories: DeviceStates, purpose: str, name: str) -> tuple[Tensor, ...]:
    return memories.save().tables[purpose][name].blocks


def test_a_stack_that_is_kept_as_it_is_is_not_copied_but_a_part_of_one_is() -> None:
    cohort = orders(METHOD, TASK, [0, 1, 2])
    tree = drawn(cohort, 1)
    stack = Keepsakes(METHOD.norm, own={**tree, "0.bias": tree["0.bias"][:1].expand(3, -1)})
    memories, other = DeviceStates(TASK), DeviceStates(TASK)
    remembered = Remembered.of(cohort, stack=stack)
    memories.commit(remembered)
    other.commit(remembered.take([0, 2]))
    for name, value in tree.items():
        (whole,), (part,) = (blocks(each, OWN, name) for each in (memories, other))
        assert (whole.data_ptr() == value.data_ptr()) == (name != "0.bias")
        # A view would keep all of the stack in memory.
        assert part.untyped_storage().nbytes() == part.nbytes == whole.nbytes * 2 // 3


def test_what_is_remembered_is_nothing_if_all_stays_as_it_was() -> None:
    cohort = orders(METHOD, TASK, [0, 1])
    assert Remembered.of(cohort).nothing
    stack = Keepsakes(METHOD.norm, own=drawn(cohort, 1))
    assert not Remembered.of(cohort, stack=stack).nothing
    assert not Remembered.of(cohort, chooser=[None, {"seen": (1.0,)}]).nothing
    assert not Remembered.of(cohort, fetched=True).nothing


def test_devices_trained_one_by_one_are_one_block() -> None:
    cohort = orders(METHOD, TASK, [5, 2, 7])
    tree, memories = drawn(cohort, 1), DeviceStates(TASK)
    alone = [
        Remembered.of(order, stack=Keepsakes(METHOD.norm, {n: v[[row]] for n, v in tree.items()}))
        for row, order in enumerate(cohort.rows())
    ]
    memories.commit(join(alone))
    assert all(len(blocks(memories, OWN, name)) == 1 for name in tree)
    for name, rows in memories.own(tree, cohort.device).items():
        assert torch.equal(rows, tree[name])


def test_until_a_device_has_trained_its_own_is_the_initial_model() -> None:
    cohort = orders(METHOD, TASK, [1])
    memories = DeviceStates(TASK)
    assert memories.own(["0.bias"], np.array([0, 1])) == {}
    stack = Keepsakes(METHOD.norm, own=drawn(cohort, 1))
    memories.commit(Remembered.of(cohort, stack=stack))
    rows = memories.own(["0.bias"], np.array([0, 1]))["0.bias"]
    assert torch.equal(rows[0], TASK.params["0.bias"])
    assert torch.equal(rows[1], stack.own["0.bias"][0])


def test_what_was_saved_stays_and_can_be_gone_back_to() -> None:
    cohort = orders(METHOD, TASK, [0, 1])
    memories = DeviceStates(TASK)
    first, second = (Keepsakes(METHOD.norm, own=drawn(cohort, seed)) for seed in (1, 2))
    memories.commit(Remembered.of(cohort, stack=first, chooser=[{"a": (1.0,)}, None]))
    saved, before = memories.save(), memories.state(0)
    memories.commit(Remembered.of(cohort, stack=second, chooser=[{"a": (2.0,)}, {"b": ()}]))
    assert memories.state(0).chooser == {"a": (2.0,)}
    assert not small.identical(memories.state(0).tensors[OWN], before.tensors[OWN])
    again = DeviceStates(TASK)
    again.restore(saved)
    memories.commit(Remembered.of(cohort, stack=first))
    assert small.identical(again.state(0).tensors[OWN], before.tensors[OWN])
    assert again.state(0).chooser == {"a": (1.0,)}
    assert again.state(1).chooser == {}


def test_a_held_result_waits_until_it_is_fetched() -> None:
    cohort = orders(fedavg(), TASK, [4, 5])
    held = Replies.of_one(Stack(), order=7, device=4, samples=3, bits=8.0)
    memories = DeviceStates(TASK)
    memories.commit(Remembered.of(cohort.take([0]), held=held))
    memories.commit(Remembered.of(cohort))  # orders that neither hold nor fetch leave it there
    for asked, there in (([7, 7], [True, False]), ([8, 7], [False, False])):
        found, results = memories.held(replace(cohort, held_order=np.array(asked)))
        assert found.tolist() == there
        assert results.stacks[:1] == held.stacks
        assert results.device.tolist() == [4] * sum(there)
    memories.commit(Remembered.of(cohort, fetched=True))
    assert memories.state(4).held is None


def test_the_state_of_a_device_can_be_taken_out_and_put_in() -> None:
    cohort = orders(METHOD, TASK, [3])
    tree = drawn(cohort, 1)
    memories, other = DeviceStates(TASK), DeviceStates(TASK)
    memories.commit(
        Remembered.of(
            cohort,
            stack=Keepsakes(METHOD.norm, tree, SLOT, tree, tree),
            chooser=[{"a": (1.0,)}],
        )
    )
    other.adopt(6, memories.state(3))
    mine, theirs = memories.state(3), other.state(6)
    assert mine.tensors.keys() == theirs.tensors.keys() == {OWN, SLOT, SENT}
    assert all(small.identical(mine.tensors[p], theirs.tensors[p]) for p in mine.tensors)
    assert (theirs.chooser, theirs.last_sent_order) == ({"a": (1.0,)}, int(cohort.id[0]))
