"""Operator calls and bytes moved: by hand on small nets, and against what torch really runs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anyfleet.elastic import TRAIN, Slice, apply, cost, trace

FLOAT = 4


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that go into operators and come out of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            touched = tree_leaves((args, kwargs, out))
            self.nbytes += sum(t.nbytes for t in touched if isinstance(t, Tensor))
        return out


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5))


def test_every_operator_but_a_view_is_a_call() -> None:
    found = cost(trace(net(), torch.zeros(2, 6)))
    assert (found.forward_calls, found.backward_calls, found.calls) == (3, 3, 6)


def test_bytes_are_what_goes_in_and_what_comes_out() -> None:
    found = cost(trace(net(), torch.zeros(2, 6)), batch=7)
    first = 7 * 6 + 8 * 6 + 8 + 7 * 8
    relu = 2 * 7 * 8
    last = 7 * 8 + 5 * 8 + 5 + 7 * 5
    assert found.forward_moved == found.backward_moved == FLOAT * (first + relu + last)
    assert found.moved == 2 * found.forward_moved


def test_the_backward_pass_ends_at_the_first_trained_layer() -> None:
    whole, suffix = (cost(trace(net(), torch.zeros(2, 6)), Slice((), n), batch=7) for n in (0, 1))
    assert (suffix.forward_calls, suffix.backward_calls) == (3, 1)
    assert suffix.forward_moved == whole.forward_moved
    assert suffix.backward_moved == FLOAT * (7 * 8 + 5 * 8 + 5 + 7 * 5)


def test_a_narrow_slice_makes_as_many_calls_but_moves_less() -> None:
    blueprint = trace(net(), torch.zeros(2, 6))
    whole, narrow = (cost(blueprint, blueprint.prefix(share), 7) for share in (1.0, 0.5))
    assert narrow.calls == whole.calls
    assert narrow.moved < whole.moved


def test_a_lookup_reads_rows_and_not_the_table() -> None:
    module = nn.Sequential(nn.Embedding(1000, 4), nn.Flatten(), nn.Linear(12, 2))
    found = cost(trace(module, torch.zeros(2, 3, dtype=torch.int64)), batch=5)
    linear = 5 * 12 + 2 * 12 + 2 + 5 * 2
    assert found.forward_moved == FLOAT * (2 * 5 * 12 + linear)


def test_batch_norm_counts_as_often_as_it_goes_through_its_input() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    blueprint, x = trace(module, torch.zeros(2, 1, 16, 16)), torch.randn(4, 1, 16, 16)
    state = module.state_dict()
    params = {name: state[name] for name in blueprint.params}
    buffers = {name: state[name] for name in blueprint.buffers}
    with torch.no_grad(), Seen() as seen:
        apply(blueprint, params, buffers, x, TRAIN, valid=torch.ones(4, dtype=torch.bool))
    found = cost(blueprint, batch=4).forward_moved
    assert abs(found / seen.nbytes - 1) < 0.2
