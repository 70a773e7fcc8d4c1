"""Every foreign network is right in all ways that a device can run it, or is known to be refused.

The comparison here is written without the self-check, so that one cannot hide a fault of the other.
"""

import copy
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import (
    EVALUATE,
    Blueprint,
    Mode,
    Slice,
    TraceError,
    apply,
    cut,
    mixed_rows,
    paste,
    require_faithful,
    trace,
    verify,
)
from anyfleet.elastic.verification.verify import statistical_axes
from anyfleet.elastic.verification.witnesses import WithoutDropout
from tests.helpers.foreign_nets import FOREIGN, HARMLESS, MIXED, REFUSED, WHOLE

MOVING = Mode(dropout=False, statistics="batch", update="module")
Tree = dict[str, Tensor]


class PaddingRefusedError(Exception):
    """The program says that it takes no padding."""


def disturbed(module: nn.Module) -> nn.Module:
    """The module in float64 with weights and statistics that are neither zero nor one."""
    twin = copy.deepcopy(module).double()
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.mul_(1 + 0.3 * torch.rand_like(tensor)).add_(0.02)
        for name, buffer in twin.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.3 * torch.rand_like(buffer))
    return twin


def run(module: nn.Module, x: Tensor, *, training: bool) -> tuple[Tensor, Tree, Tree]:
    """Output, gradients of the sum of its squares, and buffers of a copy."""
    twin = copy.deepcopy(module).train(training)
    with WithoutDropout():
        out = twin(x)
    out.square().sum().backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()
    }
    return out.detach(), gradients, dict(twin.named_buffers())


def interpreted(
    blueprint: Blueprint, params: Tree, buffers: Tree, x: Tensor, *, training: bool, rows: int
) -> tuple[Tensor, Tree, Tree]:
    """The same by the program, of which only the first rows count."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    valid = None if rows == len(x) else torch.arange(len(x)) < rows
    mode = MOVING if training else EVALUATE
    try:
        out, moved = apply(blueprint, leaves, buffers, x, mode, valid=valid)
    except ValueError as error:
        if "see each other" in str(error):
            raise PaddingRefusedError from error
        raise
    grads = torch.autograd.grad(
        out[:rows].square().sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return out[:rows].detach(), dict(zip(leaves, grads, strict=True)), moved


def compare(
    got: tuple[Tensor, Tree, Tree], want: tuple[Tensor, Tree, Tree], *, training: bool
) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-8)
    for name, gradient in got[1].items():
        torch.testing.assert_close(gradient, want[1][name], rtol=1e-6, atol=1e-8, msg=name)
    for name, buffer in got[2].items() if training else ():
        torch.testing.assert_close(buffer, want[2][name], rtol=1e-6, atol=1e-8, msg=name)


def slices(blueprint: Blueprint) -> list[Slice]:
    """Every axis alone at width 1, all at width 1, and half of all in another order."""
    whole = statistical_axes(blueprint)
    free = {n: a.size for n, a in blueprint.axes.items() if a.free and n not in whole}
    sets: list[Mapping[str, list[int]]] = [{n: [size // 2]} for n, size in free.items()]
    sets.append({n: [size - 1] for n, size in free.items()})
    sets.append({n: list(range(size))[::-2] for n, size in free.items()})
    return [Slice.of(kept, blueprint) for kept in sets]


def check_right(module: nn.Module, x: Tensor, blueprint: Blueprint) -> None:
    """The blueprint is the module, padded or not, whole or cut."""
    twin = disturbed(module)
    x = x.double() if x.is_floating_point() else x
    more = torch.cat([x, x.flip(0)[:2] * 2 if x.is_floating_point() else x.flip(0)[:2]])
    params = {n: p.detach() for n, p in twin.named_parameters()}
    state = twin.state_dict()
    buffers = {n: state[n].clone() for n in blueprint.buffers}
    for training in (False, True):
        for rows in (len(x), len(x) - 2):
            want = run(twin, x[:rows], training=training)
            got = interpreted(blueprint, params, buffers, x[:rows], training=training, rows=rows)
            compare(got, want, training=training)
        want = run(twin, x, training=training)
        # A network whose rows meet may say so, and then takes no padding at all.
        with suppress(PaddingRefusedError):
            got = interpreted(blueprint, params, buffers, more, training=training, rows=len(x))
            compare(got, want, training=training)
        for kept in slices(blueprint):
            small = cut(params, kept, blueprint)
            zeros = {n: torch.zeros_like(p) for n, p in params.items()}
            masked = disturbed(module)
            masked.load_state_dict({**state, **paste(small, zeros, kept, blueprint)})
            want = run(masked, x, training=training)
            wanted = {n: want[2][n] for n in blueprint.buffers}
            got = interpreted(
                blueprint.local(kept),
                small,
                cut(buffers, kept, blueprint),
                x,
                training=training,
                rows=len(x),
            )
            cutting = (cut(want[1], kept, blueprint), cut(wanted, kept, blueprint))
            compare(got, (want[0], *cutting), training=training)


@pytest.mark.parametrize("name", [name for name in FOREIGN if name not in REFUSED])
def test_a_foreign_net_is_right(name: str) -> None:
    make, example = FOREIGN[name]
    torch.manual_seed(1)
    module, x = make(), example()
    blueprint = trace(module, x)
    require_faithful(module, (x[:2],), blueprint)
    check_right(module, x, blueprint)
    fixed = not any(axis.free for axis in blueprint.axes.values())
    assert fixed == (name in WHOLE), blueprint.remarks
    assert WHOLE.get(name, "") in " ".join(blueprint.remarks)
    modes = {"training": False, "evaluation": True}
    mixing = [m for m, evaluating in modes.items() if mixed_rows(blueprint, evaluating=evaluating)]
    assert mixing == list(MIXED.get(name, ()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_say_is_refused(name: str) -> None:
    make, example = FOREIGN[name]
    torch.manual_seed(1)
    random.seed(0)  # which branch it takes first decides which of two reasons is told
    with pytest.raises(TraceError, match=re.escape(REFUSED[name])):
        trace(make(), example())


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_strange_gives_no_false_alarm(name: str) -> None:
    make, example = HARMLESS[name]
    torch.manual_seed(1)
    module, x = make(), example()
    assert verify(module, x).problems == ()


@pytest.mark.parametrize("name", [name for name in HARMLESS if "checkpoint" not in name])
def test_and_a_wrong_one_among_them_is_still_found(name: str) -> None:
    """The coarser tolerance of a float32 step does not let another function pass."""
    make, example = HARMLESS[name]
    torch.manual_seed(1)
    module, x = make(), example()
    blueprint = trace(module, x)
    nodes = list(blueprint.program.nodes)
    at = max(i for i, node in enumerate(nodes) if node.op.startswith("aten.linear"))
    nodes[at] = replace(nodes[at], args=nodes[at].args[:2])  # forgets the last bias
    wrong = replace(blueprint, program=replace(blueprint.program, nodes=tuple(nodes)))
    assert not verify(module, x, wrong).ok


def test_weights_standardised_over_cut_inputs_are_no_masked_large_ones() -> None:
    """Their axis enters the statistics, so that the check reorders it instead of masking it."""
    make, example = FOREIGN["weight standardisation"]
    torch.manual_seed(1)
    module, x = make(), example()
    blueprint = trace(module, x)
    assert blueprint.axes["c1"].free
    assert "c1" in statistical_axes(blueprint)
    assert verify(module, x, blueprint, trials=1).problems == ()
